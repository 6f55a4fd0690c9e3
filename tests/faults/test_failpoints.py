"""SIGKILL and SIGSTOP at every step of the protocol: it may cost time, never a byte, a leak or a stuck request."""

import pytest

from tests.faults import failpoints
from tests.faults.cluster import Cluster

CATALOG = "lmcache_shm.catalog.catalog:Catalog."
SERVER_STEPS = [
    CATALOG + "register",
    CATALOG + "acquire",
    CATALOG + "release",
    CATALOG + "reserve",
    CATALOG + "commit",
    CATALOG + "clear",
    "lmcache_shm.catalog.slots:Slots.evict",
    "lmcache_shm.catalog.room:Room._take_over",
    "lmcache_shm.control.engines:Engines.attach",
]
CLIENT = "lmcache_shm.control.client:CacheClient."
ENGINE_STEPS = [CLIENT + "acquire", CLIENT + "step", CLIENT + "_greet", "tests.faults.engine:Engine._order"]
ENGINE = "lmcache_shm.transfer.cpu:CpuEngine."
WORKER_STEPS = [
    "lmcache_shm.control.client:WorkerClient._greet",
    ENGINE + "submit",
    ENGINE + "_copy",
    "lmcache_shm.transfer.guard:SlotGuard.changed_hands",
]
# Early calls belong to set-up, so the count is one that a run of the workload surely reaches.
NTH = {"register": 2, "attach": 3, "_greet": 1, "evict": 3, "_take_over": 1, "clear": 1}


def nth(step: str) -> int:
    return NTH.get(step.rpartition(".")[2], 7)


def struck(cluster: Cluster) -> None:
    """The proof, and that the failpoint was reached at all: a test of nothing must not pass."""
    total = cluster.prove()
    assert cluster.strikes or total["workers_restarted"], "the failpoint was never reached"


@pytest.mark.parametrize("do", ["kill", "stop"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", SERVER_STEPS)
def test_server_struck(instance: str, step: str, when: str, do: str) -> None:
    """The server is struck at one step while two engines work."""
    with Cluster(instance) as cluster:
        cluster.start_server(failpoints.spec(step, when, nth(step), do))
        cluster.add_engine("a", 1)
        cluster.add_engine("b", 2)
        cluster.run(40, 10)
        struck(cluster)


@pytest.mark.parametrize("do", ["kill", "stop"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ENGINE_STEPS)
def test_scheduler_side_struck(instance: str, step: str, when: str, do: str) -> None:
    """The scheduler side of one engine is struck at one step; the other goes on."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        cluster.add_engine("a", 1, failpoints.spec(step, when, nth(step), do))
        cluster.add_engine("b", 2)
        cluster.run(40, 10)
        struck(cluster)


@pytest.mark.parametrize("do", ["kill", "stop"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", WORKER_STEPS)
def test_worker_struck(instance: str, step: str, when: str, do: str) -> None:
    """One of the two workers of an engine is struck at one step."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        cluster.add_engine("a", 1, worker_faults=failpoints.spec(step, when, nth(step), do))
        cluster.add_engine("b", 2)
        cluster.run(40, 10)
        struck(cluster)
