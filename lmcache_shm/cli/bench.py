"""``lmcache-shm bench``: this machine's limits, and the cache against them, in one run."""

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lmcache_shm import __version__
from lmcache_shm.cli import bench_transfer
from lmcache_shm.cli.app import CommandError
from lmcache_shm.cli.bench_results import show
from lmcache_shm.cli.bench_transfer import SHAPES, Shape

Result = dict[str, Any]


class What(StrEnum):
    """Parts of the benchmark."""

    TRANSFER = "transfer"
    CONTROL = "control"
    ALL = "all"


class DeviceKind(StrEnum):
    """Where the KV cache lies."""

    CPU = "cpu"
    CUDA = "cuda"


ModelShape = Annotated[
    list[str] | None,
    typer.Option(help=f"Copy a model's pages: {', '.join(SHAPES)}. May be given several times."),
]
Device = Annotated[DeviceKind, typer.Option(help="Where the KV cache lies.")]
Rounds = Annotated[
    int, typer.Option(min=1, max=1000, help="Rounds of each measurement; more are steadier.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def bench(
    what: Annotated[What, typer.Argument(help="What to measure.")] = What.ALL,
    model_shape: ModelShape = None,
    device: Device = DeviceKind.CPU,
    rounds: Rounds = 9,
    *,
    as_json: Json = False,
) -> None:
    """Measure memcpy and a socket echo as this machine's limits, then the cache against them.

    Each copy is timed next to a memcpy of the same bytes; ratios are medians over rounds, so a busy
    machine changes them less than the absolute values. Nothing is left behind.
    """
    shapes = shapes_of(model_shape) or list(SHAPES.values())
    console = Console(stderr=as_json)
    parts = [part for part in What if part != What.ALL and what in {part, What.ALL}]
    total = sum(
        CONTROL_LABELS if part == What.CONTROL else labels(shapes, device) for part in parts
    )
    result: Result = {"machine": machine()}
    with progress(console, total) as step:
        for part in parts:
            if part == What.TRANSFER:
                result[part.value] = copies(shapes, device, rounds, step)
            else:
                from lmcache_shm.cli import bench_control  # noqa: PLC0415 - `bench transfer` needs no client

                result[part.value] = bench_control.run(rounds, step)
    if as_json:
        print(json.dumps(result))
    else:
        show(result, console)


CONTROL_LABELS = 6
"""Parts that the control benchmark announces."""


def labels(shapes: Sequence[Shape], device: DeviceKind) -> int:
    """Parts that `copies` announces."""
    return sum(len(shape.groups) for shape in shapes) if device == DeviceKind.CPU else 8


def copies(
    shapes: Sequence[Shape], device: DeviceKind, rounds: int, step: Callable[[str], None]
) -> Any:
    """Rows of CPU copies, or the table of a GPU's. Raises CommandError without a usable GPU."""
    if device == DeviceKind.CPU:
        return bench_transfer.run(shapes, rounds, step)
    from lmcache_shm.cli import bench_device  # noqa: PLC0415

    try:
        fixture = bench_device.CudaFixture()
    except (ImportError, RuntimeError) as error:
        raise CommandError(f"no usable GPU: {error}") from None
    return bench_device.run(fixture, rounds, step)


def shapes_of(names: Sequence[str] | None) -> list[Shape]:
    """Shapes by name. Raises CommandError for an unknown one."""
    for name in names or ():
        if name not in SHAPES:
            raise CommandError(f"no model shape {name!r}; there are {', '.join(SHAPES)}", 2)
    return [SHAPES[name] for name in names or ()]


def machine() -> Result:
    """The facts about this machine on which the results depend."""
    load = os.getloadavg()[0]
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(load, 2),
        "linux": platform.release(),
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "lmcache_shm": __version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of `total` parts; yields the function that is called with each part's label."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        started = False

        def step(label: str) -> None:
            nonlocal started
            bar.update(task, description=label, advance=1 if started else 0)
            started = True

        yield step
