"""Timing of repeated calls, the rows that come of it, and the tables in which they are shown."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]


@contextmanager
def quiet() -> Iterator[None]:
    """Without garbage collection."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def samples(action: Callable[[], object], times: int) -> list[float]:
    """Seconds of each call, garbage collection held back."""
    found = []
    with quiet():
        for _ in range(times):
            start = time.perf_counter()
            action()
            found.append(time.perf_counter() - start)
    return found


def quantiles(seconds: list[float], unit: float) -> tuple[float, float]:
    """p50 and p99 in units of ``unit`` seconds."""
    ordered = sorted(seconds)
    last = min(len(ordered) - 1, round(0.99 * len(ordered)))
    return statistics.median(ordered) / unit, ordered[last] / unit


def row(
    name: str,
    value: float,
    unit: str,
    bar: float | None = None,
    p99: float | None = None,
    p99_bar: float | None = None,
    *,
    least: bool = False,
) -> Row:
    """One line of the table. ``bar`` is the most that is good enough (or the least)."""
    met = None
    if bar is not None:
        met = value >= bar if least else value <= bar
        if p99 is not None and p99_bar is not None:
            met = met and p99 <= p99_bar
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "p99": p99,
        "bar": bar,
        "p99_bar": p99_bar,
        "met": met,
    }


# -------------------------------------------------------------------------------------------- tables
LARGE_PAGE_KIB, LARGE_BAR, SMALL_BAR, THREADS_BAR = 32, 0.90, 0.70, 1.5


def show(result: dict[str, Any], console: Console) -> None:
    """All that was measured."""
    about = result["machine"]
    console.print(
        f"{about['cpu']}, {about['cores']} cores (load {about['load_1min']}), Linux {about['linux']}, "
        f"Python {about['python']}, numpy {about['numpy']}, lmcache-shm {about['lmcache_shm']}",
        soft_wrap=True,
    )
    transfer = result.get("transfer")
    if isinstance(transfer, list):
        show_copies(transfer, console)
    elif transfer is not None:
        show_device(transfer, console)
    for part, title in (("control", "control socket"), ("index", "index")):
        if part in result:
            show_rows(title, result[part], console)


def copy_bar(row: dict[str, Any]) -> float:
    """The ratio to memcpy that is good enough for a row of one thread."""
    return LARGE_BAR if row["lane_kib"] >= LARGE_PAGE_KIB else SMALL_BAR


def show_copies(rows: list[dict[str, Any]], console: Console) -> None:
    """CPU copies: one line per case and thread count."""
    table = _table(
        f"copies: GB/s (ratio to a memcpy of the same bytes in the same round; bar {LARGE_BAR:.2f} "
        f"from {LARGE_PAGE_KIB} KiB on, {SMALL_BAR:.2f} below; first: a new process's first store)"
    )
    table.add_column("case", no_wrap=True)
    for name in ("KiB", "thr", "memcpy", "store", "load", "first"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        bar = copy_bar(row)
        single = row["threads"] == 1
        first = "first_store_gbs" in row
        table.add_row(
            row["case"],
            f"{row['lane_kib']:.0f}",
            str(row["threads"]),
            f"{row['memcpy_gbs']:.1f}",
            _ratio(row["store_gbs"], row["store_ratio"], bar if single else None),
            _ratio(row["load_gbs"], row["load_ratio"], bar if single else None),
            _ratio(row["first_store_gbs"], row["first_store_ratio"], bar) if first else "",
        )
    console.print(table)
    for line in _thread_lines(rows):
        console.print(line)


def _thread_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Speed-up of two threads, judged where memcpy itself speeds up."""
    lines = []
    for row in rows:
        if row["threads"] != 2:
            continue
        gain = {k: row[f"{k}_gain"] for k in ("memcpy", "store", "load")}
        if gain["memcpy"] < THREADS_BAR:
            verdict = "not judged: memcpy does not scale so here"
        else:
            met = min(gain["store"], gain["load"]) >= THREADS_BAR
            verdict = f"bar {THREADS_BAR}x: {'met' if met else 'not met'}"
        lines.append(
            f"two threads, {row['case']}: memcpy {gain['memcpy']:.2f}x, store {gain['store']:.2f}x, "
            f"load {gain['load']:.2f}x ({verdict})"
        )
    return lines


def show_device(speed: dict[str, Any], console: Console) -> None:
    """Copies to and from a GPU."""
    limit = speed["peak_gbs"]
    console.print(
        f"\n{speed['device']}: one plain pinned copy stores {limit['store']:.1f}, loads "
        f"{limit['load']:.1f}, both together {limit['both']:.1f} GB/s"
    )
    table = _table("copies (GB/s; in brackets: ratio to the plain copy)")
    table.add_column("page", justify="right")
    table.add_column("back end")
    for name in ("store", "load", "both at once"):
        table.add_column(name, justify="right")
    for row in speed["rows"]:
        kinds = ("store", "load", "both")
        cells = [_ratio(row[f"{k}_gbs"], row[f"{k}_ratio"], None) for k in kinds]
        table.add_row(f"{row['page_kib']:.0f} KiB", row["backend"], *cells)
    console.print(table)
    below = speed["kernel_below_bytes"]
    console.print(
        f"the kernel beats batched copies for pages below {below['store']} bytes (store), "
        f"{below['load']} bytes (load)"
    )


def show_rows(title: str, rows: list[dict[str, Any]], console: Console) -> None:
    """Named values with their goals."""
    table = _table(title)
    table.add_column("what", min_width=24)
    for name in ("p50", "p99", "bar"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        bar = "" if row["bar"] is None else _number(row["bar"], row["unit"])
        if row.get("p99_bar") is not None:
            bar += f" / {_number(row['p99_bar'], row['unit'])}"
        p99 = "" if row.get("p99") is None else _number(row["p99"], row["unit"])
        table.add_row(row["name"], _number(row["value"], row["unit"]), p99, bar, _met(row["met"]))
    console.print(table)


def _table(title: str) -> Table:
    return Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False)


def _number(value: float, unit: str) -> str:
    digits = 0 if value >= 1000 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:,.{digits}f} {unit}"


def _ratio(gbs: float, ratio: float, bar: float | None) -> Text:
    style = "" if bar is None else "green" if ratio >= bar else "red"
    return Text(f"{gbs:.1f} ({ratio:.2f})", style=style)


def _met(met: bool | None) -> Text:  # noqa: FBT001 - a value to show, no switch
    return Text("") if met is None else Text("yes", "green") if met else Text("no", "red")
