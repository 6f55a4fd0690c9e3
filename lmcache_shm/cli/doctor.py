"""``lmcache-shm doctor``: why the cache does nothing, and how to fix it."""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from lmcache_shm.arena.owner import runtime_path
from lmcache_shm.cli import doctor_engine as engine
from lmcache_shm.cli import doctor_host as host
from lmcache_shm.cli import doctor_server as server
from lmcache_shm.cli.command import flags
from lmcache_shm.cli.doctor_host import Finding, problem
from lmcache_shm.client.connection import ControlError
from lmcache_shm.config import Config, ConfigError, server_config

MARKS = {"ok": ("✓", "green"), "note": ("•", "yellow"), "problem": ("✗", "bold red")}
PLAIN = {"✓": "ok", "•": "--", "✗": "!!"}
ARROW = "→"


@flags(["instance", "runtime_dir", "l1_size_gb"])
def doctor(
    *,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Check what is meant for `vllm serve --kv-transfer-config`."
        ),
    ] = None,
    problems_only: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show only problems.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array of findings.")] = False,
    **given: Any,
) -> None:
    """Examine this host, its server and its engines; each problem with its fix.

    Exit status: 0 all is well, 1 there is a problem, 2 this command was called wrongly.
    """
    findings = list(examine(given, kv_transfer_config))
    if as_json:
        print(json.dumps([finding.as_json() for finding in findings], ensure_ascii=False, indent=2))
    else:
        show(findings, Console(highlight=False), problems_only=problems_only)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


def examine(given: dict[str, Any], transfer_config: str | None = None) -> Iterator[Finding]:
    """All findings, in the order in which they should be read."""
    yield from engine.versions()
    try:
        config = server_config(given)
    except ConfigError as error:
        if any(value is not None for value in given.values()):
            raise  # a bad flag is an error as in any other command
        yield problem(
            "environment", str(error), "unset it, or correct its name (lmcache-shm config)"
        )
        config = server_config(given, {})
    wanted_by_engine = None
    if transfer_config is not None:
        found, wanted_by_engine = engine.transfer_config(transfer_config)
        yield from found
    config = _met(config, wanted_by_engine)
    # Not by socket_path(): that would repair or refuse the directory, which is examined as it is.
    folder = Path(config.runtime_dir) if config.runtime_dir else runtime_path()
    path = folder / f"{config.instance}.sock"
    owner = host.owner(config.instance, path.parent)
    has_arena = host.has_arena(config.instance, path.parent)
    yield from host.examine_host(int(config.l1_size_gb * 2**30), has_arena=has_arena)
    directory = list(host.runtime_directory(path.parent, config.instance))
    yield from directory
    yield from host.examine_leftovers(path.parent)
    if all(finding.level != "problem" for finding in directory):
        yield from _server(config, wanted_by_engine, path, owner)
    yield from engine.engines(engine.running_engines())


def _met(config: Config, wanted: Config | None) -> Config:
    """Look at the instance that the engine will look for."""
    if wanted is None or config.origins["instance"] != "default":
        return config
    return Config(
        instance=wanted.instance,
        runtime_dir=wanted.runtime_dir or config.runtime_dir,
        l1_size_gb=wanted.autostart_gb or config.l1_size_gb,
        origins=config.origins,
    )


def _server(config: Config, wanted: Config | None, path: Path, owner: int) -> Iterator[Finding]:
    try:
        hello, snapshot, broken = server.greet(path)
    except ControlError as error:
        if wanted is not None and wanted.autostart_gb and not owner:
            yield Finding(
                "server", "ok", "none is running; the engine will start one (autostart_gb)"
            )
        else:
            yield from server.no_answer(path, config.instance, owner, error)
        return
    yield from server.health(hello, snapshot, broken)


# ------------------------------------------------------------------------------------------- output
def show(findings: list[Finding], console: Console, *, problems_only: bool = False) -> None:
    """By area, problems standing out, fixes indented below."""
    plain = not console.encoding.lower().startswith("utf")
    shown = [f for f in findings if f.level == "problem" or not problems_only]
    for area, of_area in groupby(shown, key=lambda finding: finding.area):
        console.print(Text(area, "bold"))
        for finding in of_area:
            mark, style = MARKS[finding.level]
            mark = PLAIN[mark] if plain else mark
            text = Text.assemble((f"{mark} ", style), finding.text)
            if console.is_terminal:
                console.print(Padding(text, (0, 0, 0, 2)))
            else:
                console.print(Text("  ").append_text(text), soft_wrap=True)
            if finding.fix:
                # Not wrapped, so that it can be pasted.
                arrow = "->" if plain else ARROW
                console.print(Text(f"    {arrow} {finding.fix}", "cyan"), soft_wrap=True)
    count = sum(1 for finding in findings if finding.level == "problem")
    if count:
        console.print(Text(f"\n{count} problem{'' if count == 1 else 's'}", "bold red"))
    elif not problems_only:
        console.print(Text("\nNo problem found.", "bold green"))
