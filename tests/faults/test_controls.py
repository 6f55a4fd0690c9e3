"""Late copies and early commits: harmless with the protections, and wrong bytes as soon as one is taken out.

The second half of each pair is the negative control: it shows that the harness would see the fault.
"""

import pytest

from tools.harness import failpoints
from tools.harness.cluster import Cluster
from tools.harness.engines import EngineProcess, state_of
from tools.harness.points import CLIENT, TRANSFER
from tools.harness.strike import STORE, lose_scheduler, struck
from tools.harness.wait import LONG_S, until

COPY = TRANSFER + "cpu:CpuEngine._copy"
OTHERS = range(100, 164, 4)
"""Documents without a common beginning; ten chunks of each fill the arena more than twice."""


def fill(engine: EngineProcess) -> None:
    for document in OTHERS:
        engine.tell(document=document, chunks=10)
    assert engine.answer()["stored"] == 10


def read_all(engine: EngineProcess) -> int:
    """Load whatever is cached of the documents; how many chunks."""
    before = engine.counts["hit_chunks"]
    for document in OTHERS:
        engine.tell(document=document, chunks=10, look=True)
    engine.answer()
    return engine.counts["hit_chunks"] - before


@pytest.mark.parametrize("protected", [True, False], ids=["protected", "control"])
def test_a_load_that_is_late_because_the_server_was_killed_is_not_believed(
    instance: str, protected: bool
) -> None:
    """Its pins died with the server; another engine has filled the slots with other chunks since."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        late, other = cluster.add_engines({"trusting": not protected}, {})
        assert late.ask(document=1, chunks=6)["stored"] == 6
        late.ask(arm=failpoints.spec(COPY, "before", 1, "stop"), rank=0)
        late.tell(document=1, chunks=6, look=True)
        until(lambda: struck(cluster, COPY), "a load stopped before its copy", LONG_S)
        cluster.kill_server()
        cluster.start_server()
        assert other.ask(wait_up=20.0)["up"]
        fill(other)
        cluster.wake(cluster.struck()[0]["pid"])
        counts = late.answer()["counts"]

        assert counts["hits"] == 1
        if protected:
            assert counts["wrong"] == 0
            assert counts["loads_generation"] >= 1
            cluster.prove()
        else:
            assert counts["wrong"] > 0


@pytest.mark.parametrize("protected", [True, False], ids=["protected", "control"])
def test_a_store_that_is_late_because_its_scheduler_was_killed_lands_in_quarantine(
    instance: str, protected: bool
) -> None:
    """The worker is stopped in the middle of its copy and finishes it when others have filled the arena."""
    sabotage = {} if protected else {"SABOTAGE": "no-quarantine"}
    with Cluster(instance, "--quarantine-grace-s", "0.2", **sabotage) as cluster:
        cluster.start_server()
        killed, other = cluster.add_engines({}, {})
        pid = lose_scheduler(cluster, killed, document=1)
        if protected:
            until(lambda: cluster.slots()["quarantined"] == 10, "quarantine", LONG_S)
            status = cluster.status()
            assert status is not None
            client = next(
                c for c in status["clients"] if c["engine_id"] == killed.options["engine_id"]
            )
            assert client["quarantined"] == 10
            assert pid in [worker["pid"] for worker in client["workers"]]
        else:
            until(lambda: cluster.slots()["reserved"] == 0, "given away", LONG_S)
        fill(other)
        assert read_all(other) > 40
        assert other.counts["wrong"] == 0
        cluster.wake(pid)
        until(lambda: state_of(pid) == "", "the worker ends after its copy", LONG_S)
        assert read_all(other) > 40

        if protected:
            assert other.counts["wrong"] == 0
            until(lambda: cluster.slots()["quarantined"] == 0, "quarantine drains", LONG_S)
            assert other.ask(document=1, chunks=5, look=True)["hit"] == 0  # it was never committed
            cluster.attend()  # another engine comes in its place
            cluster.prove()
        else:
            assert other.counts["wrong"] > 0


@pytest.mark.parametrize("protected", [True, False], ids=["protected", "control"])
def test_nothing_is_found_before_the_last_rank_has_written(instance: str, protected: bool) -> None:
    """One of four ranks is stopped before its copy; the other engine looks for the chunks meanwhile."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        writer, reader = cluster.add_engines({"hasty": not protected, "world": 4}, {"world": 4})
        writer.ask(arm=failpoints.spec(COPY, "before", 1, "stop"), rank=3)
        writer.tell(document=1, chunks=6)
        until(lambda: struck(cluster, COPY), "a rank stopped before its copy", LONG_S)
        reader.ask(document=1, chunks=6)

        if protected:
            assert reader.reply["hit"] == 0
            assert reader.reply["stored"] == 0  # and nobody else writes them meanwhile
        else:
            assert reader.reply["hit"] == 6
            assert reader.counts["wrong"] > 0
        cluster.wake(cluster.struck()[0]["pid"])
        writer.answer()
        if protected:
            assert reader.ask(document=1, chunks=6, look=True)["hit"] == 6
            cluster.prove()


def test_chunks_whose_writer_died_between_copy_and_commit_are_never_served(instance: str) -> None:
    with Cluster(instance) as cluster:
        cluster.start_server()
        killed, other = cluster.add_engines({}, {})
        on_board = CLIENT + "in_flight:InFlightStores._reported"
        killed.ask(arm=failpoints.spec(on_board, "after", 2, "kill"))
        killed.ask(document=1, chunks=6)
        assert struck(cluster, on_board)
        until(
            lambda: cluster.slots()["reserved"] == 0, "the dead writer's reservations end", LONG_S
        )

        assert other.ask(document=1, chunks=6, look=True)["hit"] == 0
        until(cluster.drained, "quarantine drains when its workers have ended", LONG_S)
        assert other.ask(document=1, chunks=6)["stored"] == 6
        assert other.ask(document=1, chunks=6, look=True)["hit"] == 6
        assert other.counts["wrong"] == 0


def test_a_chunk_is_not_served_when_one_rank_failed(instance: str) -> None:
    """One of two workers dies in the middle of its copy: the engine lives on and gives the slots back."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        writer, reader = cluster.add_engines({}, {})
        writer.ask(arm=failpoints.spec(STORE, "before", 3, "kill"), rank=1)
        assert writer.ask(document=1, chunks=6)["stored"] == 0
        assert writer.counts["workers_restarted"] == 1
        assert reader.ask(document=1, chunks=6, look=True)["hit"] == 0
        cluster.prove()
        assert len(cluster.engines) == 2
