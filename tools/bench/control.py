"""The control benchmark with what an engineer also asks: many clients, and how steady the machine was meanwhile."""

import time
from collections.abc import Callable

from lmcache_shm.cli import bench_control
from lmcache_shm.cli.bench_results import Row, row
from tools.bench import many_clients

LABELS = 2
"""Parts that it announces beyond those of `lmcache-shm bench control`."""
PACES = 5
"""How often the machine's pace is taken before each part."""


def longest_pause(seconds: float = 1.0) -> float:
    """Milliseconds in which this process could not run at all: what no p99 below can be better than."""
    end = (last := time.perf_counter()) + seconds
    longest = 0.0
    while last < end:
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    return longest / 1e-3


def run(rounds: int, step: Callable[[str], None]) -> list[Row]:
    """All rows; `step` is called with a label before each part."""
    paces: list[float] = []

    def begin(label: str) -> None:
        step(label)
        if label != bench_control.PREFAULTING:  # then the server is busy on the same cores
            paces.extend(pace() for _ in range(PACES))

    longest = longest_pause()
    rows = bench_control.run(rounds, begin, [many_clients.run])
    slowest = max(paces) / min(paces)
    rows[1:1] = [
        row("longest pause of a loop that does nothing, in one second", longest, "ms"),
        row("pace of this machine meanwhile, slowest / fastest", slowest, "x"),
    ]
    return rows


def pace() -> float:
    """Milliseconds that a fixed piece of Python takes; a busy or throttled machine shows here first."""
    start = time.perf_counter()
    total = 0
    for i in range(200_000):
        total += i
    return (time.perf_counter() - start) / 1e-3
