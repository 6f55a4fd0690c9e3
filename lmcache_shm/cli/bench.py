"""``lmcache-shm bench``: this machine's limits, and the cache against them, in one run."""

import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lmcache_shm import __version__
from lmcache_shm.cli.app import CommandError
from lmcache_shm.cli.bench_shapes import SHAPES, Shape, page_sweep
from lmcache_shm.cli.bench_tables import show

if TYPE_CHECKING:
    from collections.abc import Iterator

Result = dict[str, Any]


class What(StrEnum):
    """Parts of the benchmark."""

    TRANSFER = "transfer"
    CONTROL = "control"
    INDEX = "index"
    ALL = "all"


class DeviceKind(StrEnum):
    """Where the KV cache lies."""

    CPU = "cpu"
    CUDA = "cuda"


def bench(
    what: Annotated[What, typer.Argument(help="What to measure.")] = What.ALL,
    model_shape: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Copy a model's pages: {', '.join(SHAPES)}. May be given several times."
        ),
    ] = None,
    device: Annotated[DeviceKind, typer.Option(help="Where the KV cache lies.")] = DeviceKind.CPU,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Rounds of each measurement; more are steadier.")
    ] = 9,
    as_json: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--json", help="Print one JSON object.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the copies into this PNG.")] = None,
) -> None:
    """Measure memcpy and a socket echo as this machine's limits, then the cache against them.

    Each copy is timed next to a memcpy of the same bytes; ratios are medians over rounds, so a busy
    machine changes them less than the figures. Nothing is left behind.
    """
    shapes = _shapes(model_shape)
    console = Console(stderr=as_json)
    parts: list[What] = [part for part in What if part != What.ALL and what in {part, What.ALL}]
    result: Result = {"machine": machine()}
    with _progress(console, _count(parts, shapes, device)) as step:
        for part in parts:
            result[part.value] = _measure(part, shapes, device, rounds, step)
    if plot is not None:
        console.print(_plot(result, plot))
    if as_json:
        print(json.dumps(result))
    else:
        show(result, console)


def machine() -> Result:
    """What the figures depend on."""
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


def _shapes(names: list[str] | None) -> list[Shape]:
    for name in names or ():
        if name not in SHAPES:
            raise CommandError(f"no model shape {name!r}; there are {', '.join(SHAPES)}", 2)
    return [SHAPES[name] for name in names] if names else [*page_sweep(), SHAPES["llama-8b"]]


def _count(parts: Sequence[What], shapes: list[Shape], device: DeviceKind) -> int:
    """Labels that the parts will announce."""
    copies = sum(len(shape.groups) for shape in shapes) if device == DeviceKind.CPU else 8
    return sum({What.TRANSFER: copies, What.CONTROL: 6, What.INDEX: 4}[part] for part in parts)


def _measure(
    part: What, shapes: list[Shape], device: DeviceKind, rounds: int, step: Callable[[str], None]
) -> Any:
    # Each part is imported when it is measured: `bench transfer` needs no server code, `--help` nothing.
    if part == What.CONTROL:
        from lmcache_shm.cli import bench_control  # noqa: PLC0415

        return bench_control.run(rounds, step)
    if part == What.INDEX:
        from lmcache_shm.cli import bench_index  # noqa: PLC0415

        return bench_index.run(rounds, step)
    if device == DeviceKind.CPU:
        from lmcache_shm.cli import bench_transfer  # noqa: PLC0415

        return bench_transfer.run(shapes, rounds, step)
    from lmcache_shm.cli import bench_device  # noqa: PLC0415

    try:
        bed = bench_device.CudaBed()
    except (ImportError, RuntimeError) as error:
        raise CommandError(f"no usable GPU: {error}") from None
    return bench_device.run(bed, rounds, step)


@contextmanager
def _progress(console: Console, total: int) -> "Iterator[Callable[[str], None]]":
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


def _plot(result: Result, path: Path) -> str:
    """Draw GB/s of the copies; one line that says what became of it."""
    rows = result.get("transfer")
    if not isinstance(rows, list):
        return "no plot: it shows CPU copies, which were not measured"
    if util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed"
    from lmcache_shm.cli import bench_plot  # noqa: PLC0415 - half a second

    bench_plot.draw([row for row in rows if row["threads"] == 1], path)
    return f"plot written to {path}"
