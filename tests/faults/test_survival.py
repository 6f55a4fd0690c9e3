"""Restarts, pressure and odd shapes, with real bytes: what was acknowledged is there, and right."""

import os
import signal
import time

import pytest

from lmcache_shm.arena.check import check
from lmcache_shm.arena.layout import SlotState
from tools.harness import failpoints
from tools.harness.cluster import Cluster
from tools.harness.points import TRANSFER
from tools.harness.strike import struck
from tools.harness.wait import LONG_S, until

COPY = TRANSFER + "cpu:CpuEngine._copy"


def test_twenty_kills_leave_memory_hit_rate_and_bytes_as_they_were(instance: str) -> None:
    """kill -9 and restart, twenty times: every committed chunk is found again, and is what it was."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        (engine,) = cluster.add_engines({"world": 1})
        documents = range(0, 32, 4)  # of different families
        for document in documents:
            engine.tell(document=document, chunks=5)
        engine.answer()
        memory, committed = cluster.memory(), cluster.committed()
        assert committed == 2 * 5 * len(documents)
        for _ in range(20):
            assert cluster.kill_server() == committed
            cluster.start_server()
        status = cluster.status()
        assert status is not None
        assert status["server"]["adopted"]["slots"] == committed
        assert cluster.memory() == memory
        assert engine.ask(wait_up=20.0)["up"]
        before = engine.counts["hit_chunks"]
        for document in documents:
            engine.tell(document=document, chunks=5, look=True)
        engine.answer()

        assert engine.counts["hit_chunks"] - before == 5 * len(documents)
        assert engine.counts["wrong"] == 0
        cluster.prove()
        assert cluster.memory() == memory
    assert cluster.memory() == {}


def test_a_stopped_server_costs_no_request_more_than_the_deadline(instance: str) -> None:
    """Stopped and woken three times under load; `late` counts requests that waited longer than a second."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        cluster.add_engines({}, {})
        cluster.settle()
        assert cluster.server is not None
        for _ in range(3):
            goal = [(engine, engine.counts["unreachable"] + 20) for engine in cluster.engines]
            cluster.stop(cluster.server.pid, 3600)
            cluster.drive(
                lambda goal=goal: all(engine.counts["unreachable"] > n for engine, n in goal),
                "both engines go on, with misses",
            )
            cluster.wake(cluster.server.pid)
            cluster.drive(
                lambda: all(e.reply["up"] for e in cluster.engines), "both are connected again"
            )
        total = cluster.prove()
        assert total["late"] == 0


def test_a_burst_of_eight_times_the_capacity_keeps_the_newest(instance: str) -> None:
    """What was acknowledged last is there; nothing is acknowledged and lost; what left is counted."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        one, other = cluster.add_engines({}, {"seed": 9})
        capacity = 0
        for document in range(0, 4 * 48, 4):  # 48 families of ten chunks: eight times 60
            one.tell(document=document, chunks=10)
        one.answer()
        stored = cluster.status()
        assert stored is not None
        assert one.counts["stored"] == 960
        assert stored["counters"]["commits"] == 960
        assert stored["counters"]["stores_skipped_full"] == one.counts["full"] == 0
        committed = cluster.committed()
        assert stored["counters"]["evictions"] == 960 - committed
        for document in reversed(range(0, 4 * 48, 4)):  # the newest: whole, and by another client
            found = other.ask(document=document, chunks=10, look=True)["hit"]
            if found < 10:
                break
            capacity += found

        assert capacity >= 50
        assert other.counts["wrong"] == 0
        cluster.prove()


def test_a_committed_store_is_visible_to_the_very_next_look_up_of_another(instance: str) -> None:
    with Cluster(instance) as cluster:
        cluster.start_server()
        one, other = cluster.add_engines({}, {})
        for document in range(0, 80, 4):
            assert one.ask(document=document, chunks=2)["stored"] == 2
            assert other.ask(document=document, chunks=2, look=True)["hit"] == 2
        assert other.counts["wrong"] == 0


def test_slots_that_are_being_loaded_are_not_evicted(instance: str) -> None:
    """A load is stopped before its copy while another engine stores twice the capacity."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        one, other = cluster.add_engines({}, {})
        one.ask(document=1, chunks=6)
        one.ask(arm=failpoints.spec(COPY, "before", 1, "stop"), rank=1)
        one.tell(document=1, chunks=6, look=True)
        until(lambda: struck(cluster, COPY), "a load stopped before its copy", LONG_S)
        for document in range(100, 148, 4):
            other.tell(document=document, chunks=10)
        other.answer()
        assert other.counts["stored"] >= 200
        cluster.wake(cluster.struck()[0]["pid"])
        one.answer()

        assert one.counts["loads_ok"] == 2
        assert one.counts["wrong"] == 0
        cluster.prove()


def test_replicas_store_one_copy_and_all_ranks_load_it(instance: str) -> None:
    """Two engines of four ranks that hold the same bytes: slots are a quarter as large."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        one, other = cluster.add_engines(*[{"world": 4, "replicas": 4}] * 2)
        assert one.ask(document=1, chunks=10)["stored"] == 10
        assert other.ask(document=1, chunks=10, look=True)["hit"] == 10
        assert other.counts["loads_ok"] == 4
        assert other.counts["wrong"] == 0
        with cluster.arena() as arena:
            rows = arena.hot["state"] == SlotState.COMMITTED
            assert arena.cold["slot_bytes"][rows & (arena.hot["group"] == 0)].max() < 250_000
        cluster.prove()


def test_a_request_longer_than_the_arena_harms_nobody(instance: str) -> None:
    """Forty chunks of eight ranks, four at a time; the arena has room for about fifteen.

    What fits of it is found, in both groups; what does not is counted as not stored; and the next request has
    all the room it needs.
    """
    with Cluster(instance) as cluster:
        cluster.start_server()
        (engine,) = cluster.add_engines({"world": 8})
        for chunks in range(4, 44, 4):
            engine.tell(document=1, chunks=chunks)
        engine.answer()
        assert engine.counts["full"] > 0
        assert 15 <= engine.ask(document=1, chunks=40, look=True)["hit"] < 40
        assert engine.ask(document=5, chunks=4)["stored"] == 4
        assert engine.ask(document=5, chunks=4, look=True)["hit"] == 4
        assert engine.counts["wrong"] == 0
        cluster.prove()


def test_engines_of_many_models_come_and_go(instance: str) -> None:
    """Engines of six models, one after the other, on one arena: each finds its own and nobody else's."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        (steady,) = cluster.add_engines({})
        steady.ask(document=1, chunks=3)
        for number in range(6):
            (guest,) = cluster.add_engines({"space": f"model {number}", "world": 1})
            assert guest.ask(document=1, chunks=3)["hit"] == 0
            assert guest.ask(document=1, chunks=3)["hit"] == 3
            assert guest.counts["wrong"] == 0
            cluster.dismiss(guest)
        assert steady.ask(document=1, chunks=3)["hit"] == 3
        cluster.prove()


def test_an_idle_engine_stays_registered(instance: str) -> None:
    """Nothing is sent for a few seconds; the very next look-up is a hit on the same connection."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        (engine,) = cluster.add_engines({})
        engine.ask(document=1, chunks=3)
        before = cluster.status()
        time.sleep(3.0)  # many ticks of the server, which is what would reap it
        after = cluster.status()
        assert before is not None
        assert after is not None
        assert after["clients"][0]["engine_id"] == before["clients"][0]["engine_id"]
        assert engine.ask(document=1, chunks=3, look=True)["hit"] == 3
        assert engine.counts["unreachable"] == 0


@pytest.mark.parametrize("what", ["header", "slabs", "rows"])
def test_what_is_damaged_while_no_server_runs_is_never_served(instance: str, what: str) -> None:
    """The next server starts empty (header, slab table) or drops exactly the damaged rows, and says so."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        (engine,) = cluster.add_engines({"world": 1})
        for document in range(0, 20, 4):
            engine.tell(document=document, chunks=5)
        engine.answer()
        committed = cluster.kill_server()
        damage(instance, what)
        cluster.start_server()
        status = cluster.status()
        assert status is not None
        log = cluster.server.errors
        if what == "rows":
            adopted = status["server"]["adopted"]
            assert adopted["damaged"] == 10
            assert adopted["slots"] == committed - 10
        else:
            assert status["server"]["adopted"]["slots"] == 0
            assert "not adopted" in log
        assert engine.ask(wait_up=20.0)["up"]
        for document in range(0, 20, 4):
            engine.tell(document=document, chunks=5)
        assert engine.answer()["hit"] < 5 or what == "rows"
        total = cluster.prove()
        assert total["not_confirmed"] == 0


def damage(instance: str, what: str) -> None:
    """Change the slot table's segment as only a fault would."""
    from lmcache_shm.arena.segment import attach, segment_names, shm_path

    path = shm_path(segment_names(instance)[1])
    arena = attach(instance, writable_data=False)
    regions = arena.regions
    committed = [int(row) for row in (arena.hot["state"] == SlotState.COMMITTED).nonzero()[0]]
    width = arena.cold.dtype.itemsize
    arena.close()
    with path.open("r+b") as file:
        if what == "header":
            file.seek(64)
            file.write(b"\xff" * 64)
        elif what == "slabs":
            file.seek(regions.slabs)
            file.write(b"\xff" * 256)
        else:
            for row in committed[:10]:
                file.seek(regions.cold + row * width + 3)  # within the key
                file.write(b"\xa5")


def test_the_table_is_sound_while_all_of_it_is_in_use(instance: str) -> None:
    """`check` from another process beside a busy server, again and again: no false alarm."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        cluster.add_engines({}, {})
        goal = 60
        with cluster.arena() as arena:

            def sound() -> bool:
                assert check(arena, live=True) == []
                return cluster.total()["operations"] > goal

            cluster.drive(sound, "sixty operations")
        cluster.prove()


def test_an_engine_that_is_killed_leaves_nothing_and_the_next_one_hits(instance: str) -> None:
    """SIGKILL of the scheduler and of all workers at once, in the middle of work, three times."""
    with Cluster(instance) as cluster:
        cluster.start_server()
        cluster.add_engines({})
        memory = cluster.memory()
        for _ in range(3):
            seen = cluster.total()["hits"]
            cluster.drive(lambda seen=seen: cluster.total()["hits"] > seen, "hits")
            (engine,) = cluster.engines
            engine.tell(run=1000, seconds=30.0)
            for pid in (engine.process.pid, *engine.workers):
                os.kill(pid, signal.SIGKILL)
            engine.process.wait()
            until(cluster.drained, "its leases end with it", LONG_S)
        cluster.prove()
        assert cluster.memory() == memory
