"""SIGKILL and SIGSTOP at every step of the protocol: it may cost time, never a byte, a leak or a stuck request.

Each step is struck here in one or two of the four ways (before or after it, killed or stopped);
`python -m tools.soak --all-points` goes through all of them.
"""

import os
from collections.abc import Iterator

import pytest

from tools.harness import leftovers
from tools.harness.cluster import Cluster
from tools.harness.points import POINTS, Point
from tools.harness.strike import strike

WAYS = [("before", "kill"), ("after", "stop"), ("after", "kill"), ("before", "stop")]
CASES = [(point, *WAYS[i % 4]) for i, point in enumerate(POINTS)]


class Shared:
    """One cluster for many cases; a case that fails takes it along."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self._number = 0

    def get(self) -> Cluster:
        if self.cluster is None:
            self._number += 1
            self.cluster = Cluster(f"test-{os.getpid()}-shared{self._number}").__enter__()
            try:
                self.cluster.start_server()
                self.cluster.add_engines({}, {})
            except BaseException:
                self.end()
                raise
            self.know()
        return self.cluster

    def know(self) -> None:
        """Its processes change while it lives; they are not what a test left behind."""
        leftovers.shared_processes.update(leftovers.processes_of(leftovers.mark()))

    def end(self) -> None:
        if self.cluster is not None:
            self.cluster.__exit__(None, None, None)
            self.cluster = None


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    made = Shared()
    made.get()
    yield made
    made.end()


@pytest.mark.parametrize(
    ("point", "when", "do"), CASES, ids=[f"{p.name}-{when}-{do}" for p, when, do in CASES]
)
def test_struck(shared: Shared, point: Point, when: str, do: str) -> None:
    cluster = shared.get()
    restarts = len(cluster.kept)
    memory = cluster.memory()
    try:
        strike(cluster, point, when, do)
        cluster.prove()
        for before, adopted in cluster.kept[restarts:]:
            assert adopted >= 0.99 * before
        assert cluster.memory() == memory
        shared.know()
    except BaseException:
        shared.end()
        raise
