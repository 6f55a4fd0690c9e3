"""Flags of a command, made from the table of options."""

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from lmcache_shm.config import OPTIONS, Option, switch


def flags(options: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function the flags of these options, as keyword arguments that are None when not typed.

    The values arrive as typed: `config` checks them, so that a bad one is told the same way wherever
    it was set.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        made = [_parameter(OPTIONS[name]) for name in options]
        function.__signature__ = own.replace(parameters=[*kept, *made])  # type: ignore[attr-defined]
        function.__annotations__.pop("given", None)
        function.__annotations__.update({p.name: p.annotation for p in made})
        return function

    return decorate


def _parameter(option: Option) -> inspect.Parameter:
    unit = f" {option.unit}" if option.unit else ""
    tail = f"[{option.shown}{unit}; ${option.env}]"
    if option.check is switch:
        names = (f"{option.flag}/--no-{option.flag[2:]}",)
        info = typer.Option(*names, help=f"{option.help} {tail}", show_default=False)
        kind: Any = bool | None
    else:
        metavar = (option.unit or option.name.rpartition("_")[2]).upper()
        info = typer.Option(
            option.flag, help=f"{option.help} {tail}", show_default=False, metavar=metavar
        )
        kind = str | None
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
    )
