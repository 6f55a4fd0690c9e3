"""Laps, and the rows of the table that come of them."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


def laps(action: Callable[[], object], times: int) -> list[float]:
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


def pace() -> float:
    """Milliseconds that a fixed piece of Python takes; a busy or throttled machine shows here first."""
    start = time.perf_counter()
    total = 0
    for i in range(200_000):
        total += i
    return (time.perf_counter() - start) / 1e-3
