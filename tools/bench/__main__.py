"""``python -m tools.bench [transfer|control|index|all]``: the benches of `lmcache-shm bench`, and those for engineers.

``transfer`` also sweeps page sizes and memory orders (unless --model-shape names models), ``control`` also
loads the server with many clients, ``index`` grows the catalog to a million slots; --plot draws the copies.
"""

import json
import sys
from enum import StrEnum
from importlib import util
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lmcache_shm.cli.app import CommandError
from lmcache_shm.cli.bench import (
    CONTROL_LABELS,
    Device,
    DeviceKind,
    Json,
    ModelShape,
    Rounds,
    copies,
    labels,
    machine,
    progress,
    shapes_of,
)
from lmcache_shm.cli.bench_results import show
from lmcache_shm.cli.bench_transfer import SHAPES
from tools.bench import control, index, plot
from tools.bench.page_sweep import page_sweep


class What(StrEnum):
    """Parts of the benchmark."""

    TRANSFER = "transfer"
    CONTROL = "control"
    INDEX = "index"
    ALL = "all"


def bench(
    what: Annotated[What, typer.Argument(help="What to measure.")] = What.ALL,
    model_shape: ModelShape = None,
    device: Device = DeviceKind.CPU,
    rounds: Rounds = 9,
    *,
    as_json: Json = False,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the copies into this PNG.")
    ] = None,
) -> None:
    """Measure this machine's limits, the cache against them, and how the catalog grows."""
    try:
        shapes = shapes_of(model_shape) or [*page_sweep(), SHAPES["llama-8b"]]
        console = Console(stderr=as_json)
        parts = [part for part in What if part != What.ALL and what in {part, What.ALL}]
        announced = {
            What.TRANSFER: labels(shapes, device),
            What.CONTROL: CONTROL_LABELS + control.LABELS,
            What.INDEX: index.LABELS,
        }
        result: dict[str, Any] = {"machine": machine()}
        with progress(console, sum(announced[part] for part in parts)) as step:
            for part in parts:
                if part == What.TRANSFER:
                    result[part.value] = copies(shapes, device, rounds, step)
                else:
                    run = control.run if part == What.CONTROL else index.run
                    result[part.value] = run(rounds, step)
    except CommandError as error:
        print(f"tools.bench: {error}", file=sys.stderr)
        raise typer.Exit(error.status) from None
    if picture is not None:
        console.print(_plot(result, picture))
    if as_json:
        print(json.dumps(result))
    else:
        show(result, console)


def _plot(result: dict[str, Any], path: Path) -> str:
    """Draw GB/s of the copies; one line about the outcome."""
    rows = result.get("transfer")
    if not isinstance(rows, list):
        return "no plot: it shows CPU copies, which were not measured"
    if util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed"
    plot.draw([row for row in rows if row["threads"] == 1], path)
    return f"plot written to {path}"


if __name__ == "__main__":
    typer.run(bench)
