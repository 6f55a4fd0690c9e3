"""What commands share: flags from the table of options, a connection to the server, a question before harm."""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_shm.cli.app import CommandError
from lmcache_shm.config import OPTIONS, Config, Option, switch

if TYPE_CHECKING:
    from pathlib import Path

    from lmcache_shm.client.connection import Connection

ANSWER_S = 5.0
INSTANCE = ("instance", "runtime_dir")
"""The options by which a command finds its server."""
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


# --------------------------------------------------------------------------------------------- flags
def flags(options: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function the flags of these options, as keyword arguments that are None when not typed.

    The values arrive as typed: `config` checks them, so that a bad one causes the same error wherever
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


# ---------------------------------------------------------------------------------------- connection
# The client is imported when a command really connects: --help and `server` do without it.
def connect(path: "Path", command: str, deadline_s: float = ANSWER_S) -> "Connection":
    """A connection of a command to the server at `path`. Raises ControlError."""
    from lmcache_shm.client.connection import Connection  # noqa: PLC0415
    from lmcache_shm.protocol.messages import PROTOCOL, Hello  # noqa: PLC0415

    hello = Hello(PROTOCOL, "tool", "", os.getpid(), {"command": command})
    return Connection.open(str(path), hello, deadline_s)


@contextmanager
def server_of(config: Config, command: str) -> "Iterator[Connection]":
    """A connection to the instance's server. Every failure on it becomes a CommandError of one line."""
    from lmcache_shm.client.connection import ControlError, DeadlineExceeded, Unavailable  # noqa: PLC0415
    from lmcache_shm.client.reconnect import socket_path  # noqa: PLC0415

    path = socket_path(config)
    try:
        connection = connect(path, command)
        try:
            yield connection
        finally:
            connection.close()
    except Unavailable:
        name = "" if config.instance == "default" else f" --instance {config.instance}"
        raise CommandError(
            f"no server of instance {config.instance} answers at {path}; "
            f"start one with: lmcache-shm server{name}"
        ) from None
    except DeadlineExceeded:
        raise CommandError(
            f"the server at {path} is there but does not answer within {ANSWER_S:.0f} s (stopped?)"
        ) from None
    except ControlError as error:
        raise CommandError(str(error)) from None


def confirmed(question: str, *, yes: bool) -> bool:
    """Ask, unless `yes`. Raises CommandError without a terminal."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise CommandError(f"{question} Nobody can be asked here; add --yes", 2)
    return bool(typer.confirm(question))
