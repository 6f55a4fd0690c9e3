"""Connections that end: pins go at once, reservations when nobody can be writing any more."""

import contextlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from lmcache_shm.client.connection import Connection, Refused
from lmcache_shm.protocol.messages import PROTOCOL, Clear, Done, Hello, Registered, Step, Stepped
from tests.protocol.harness import (
    REGION,
    WAIT_S,
    Engine,
    Prefix,
    ServerProcess,
    WorkerProcess,
    engine,
    registration,
    rows_of,
)
from tools.harness.wait import until


def slots(server: ServerProcess) -> dict[str, int]:
    return server.status()["arena"]["slots"]


def places(server: ServerProcess) -> list[str]:
    return [client["engine_id"] for client in server.status()["clients"]]


def packed(rows: list[int]) -> bytes:
    return np.array(rows, "<i4").tobytes()


@pytest.fixture
def worker(lasting):
    made = WorkerProcess(lasting, "split")
    yield made
    made.end()


def scheduler(server: ServerProcess) -> Connection:
    """The scheduler side of the engine "split", registered; its worker is another process."""
    connection = Connection.open(server.path, Hello(PROTOCOL, "scheduler", "split"), WAIT_S)
    try:
        answer = connection.call(registration("split"), Registered)
        assert answer.ready
    except BaseException:
        connection.close()
        raise
    return connection


@pytest.fixture
def reserved(lasting, worker):
    """(connection, rows) of an engine that is about to be lost while its worker lives on."""
    connection = scheduler(lasting)
    rows = rows_of(connection.call(Step(Prefix(1, 3).reserve()), Stepped).rows)
    yield connection, rows
    connection.close()


def test_a_lost_connection_gives_back_its_pins_at_once(lasting):
    with engine(lasting) as one:
        prefix = Prefix(1, 4)
        one.store(prefix)
        one.acquire(prefix)
        one.acquire(prefix)
        assert slots(lasting)["pinned"] > 0
    until(lambda: slots(lasting)["pinned"] == 0, "pins given back")
    with contextlib.closing(lasting.tool()) as tool:
        tool.call(Clear(), Done)


def test_reservations_stay_in_quarantine_while_a_worker_lives(lasting, worker, reserved):
    worker.process.send_signal(signal.SIGSTOP)  # so that no grace time runs
    reserved[0].close()

    until(lambda: slots(lasting)["quarantined"] == 6, "quarantine")
    assert slots(lasting)["reserved"] == 0
    clients = {client["engine_id"]: client for client in lasting.status()["clients"]}
    client = clients["split"]
    assert client["quarantined"] == 6
    assert [w["pid"] for w in client["workers"]] == [worker.process.pid]
    worker.end()
    until(lambda: slots(lasting)["quarantined"] == 0, "freed after the worker's end", 1.0)


def test_a_stopped_worker_keeps_its_slots_in_quarantine_beyond_the_grace_time(
    lasting, worker, reserved
):
    worker.process.send_signal(signal.SIGSTOP)
    reserved[0].close()
    until(lambda: slots(lasting)["quarantined"] == 6, "quarantine")
    # The grace time of this server is 0.5 s of *running* workers.
    with pytest.raises(AssertionError):
        until(lambda: slots(lasting)["quarantined"] == 0, "", 1.5)
    worker.process.send_signal(signal.SIGCONT)

    until(lambda: slots(lasting)["quarantined"] == 0, "grace time", 3.0)


def test_a_running_worker_s_slots_are_free_after_the_grace_time(lasting, worker, reserved):
    reserved[0].close()
    until(lambda: slots(lasting)["quarantined"] == 6, "quarantine")

    until(lambda: slots(lasting)["quarantined"] == 0, "grace time", 3.0)


def test_a_worker_that_lost_its_connection_but_lives_counts(lasting, worker, reserved):
    worker.drop_connection()
    worker.process.send_signal(signal.SIGSTOP)
    reserved[0].close()

    until(lambda: slots(lasting)["quarantined"] == 6, "quarantine")
    worker.end()
    until(lambda: slots(lasting)["quarantined"] == 0, "freed after the worker's end", 1.0)


def test_the_scheduler_s_process_counts_too(lasting, worker, reserved):
    """It writes token ids into what it has reserved; here it is this process, which lives on."""
    worker.end()
    reserved[0].close()

    until(lambda: slots(lasting)["quarantined"] == 6, "quarantine")
    until(lambda: slots(lasting)["quarantined"] == 0, "grace time", 3.0)


def test_reservations_of_an_engine_that_is_all_dead_are_free_at_once(lasting):
    program = """
import sys
from tests.protocol.harness import *
class Server: path = sys.argv[1]
one = Engine(Server, "mortal")
one.step(Prefix(1, 3).reserve())
print("reserved", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, lasting.path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "reserved\n"
    assert slots(lasting)["reserved"] == 6
    process.kill()
    process.communicate()
    until(lambda: slots(lasting)["reserved"] + slots(lasting)["quarantined"] == 0, "freed", 1.0)


def test_who_comes_back_frees_all_but_what_it_is_still_writing(lasting, worker, reserved):
    worker.process.send_signal(signal.SIGSTOP)  # no grace
    connection, rows = reserved
    connection.close()
    again = Connection.open(lasting.path, Hello(PROTOCOL, "scheduler", "split"), WAIT_S)
    with contextlib.closing(again):
        again.call(registration("split", busy_rows=packed(rows[:2])), Registered)
        assert slots(lasting)["quarantined"] == 2
        with pytest.raises(Refused):
            again.call(Step(commit=packed(rows[:1])), Stepped)
        with pytest.raises(Refused):
            again.call(Step(abort=packed(rows[2:3])), Stepped)
        again.call(Step(abort=packed(rows[:2])), Stepped)
        assert slots(lasting)["quarantined"] == 0


def test_nobody_comes_back_for_another_s_rows(lasting, worker, reserved):
    worker.process.send_signal(signal.SIGSTOP)
    connection, rows = reserved
    connection.close()
    until(lambda: slots(lasting)["quarantined"] == 6, "quarantine")
    with engine(lasting, "thief", busy_rows=packed(rows)) as thief:
        assert slots(lasting)["quarantined"] == 6
        with pytest.raises(Refused):
            thief.step(abort=packed(rows[:1]))
    assert slots(lasting)["quarantined"] == 6


def test_slots_in_quarantine_are_not_given_to_anyone(lasting, worker, reserved):
    worker.process.send_signal(signal.SIGSTOP)
    connection, rows = reserved
    connection.close()
    until(lambda: slots(lasting)["quarantined"] == 6, "quarantine")
    with engine(lasting, "another") as another:
        for number in range(10, 14):
            stored = another.store(Prefix(number, 1500))
            assert set(stored).isdisjoint(rows)
        # The same key can be written again, elsewhere.
        again = another.store(Prefix(1, 3))
        assert set(again).isdisjoint(rows)
        assert min(again) >= 0
        another.scheduler.call(Clear(), Done)


def test_a_scheduler_that_returns_before_its_end_was_seen_takes_over(lasting):
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(engine(lasting))
        prefix = Prefix(2, 2)
        one.store(prefix)
        one.acquire(prefix)
        one.step(Prefix(3, 2).reserve())
        second = Connection.open(lasting.path, Hello(PROTOCOL, "scheduler", "engine"), WAIT_S)
        stack.callback(second.close)
        answer = second.call(registration("engine"), Registered)

        assert answer.ready
        assert answer.client == one.registered.client
        found = slots(lasting)
        assert (found["pinned"], found["reserved"], found["quarantined"]) == (0, 0, 0)
        with pytest.raises(Refused, match="has not registered"):
            one.step()
        second.call(Clear(), Done)


def test_a_worker_that_returns_takes_its_place(lasting):
    with engine(lasting) as one, contextlib.ExitStack() as stack:
        from lmcache_shm.protocol.messages import Attached, AttachWorker

        second = Connection.open(lasting.path, Hello(PROTOCOL, "worker", "engine"), WAIT_S)
        stack.callback(second.close)
        with pytest.raises(Refused, match="when the engine registered"):
            second.call(AttachWorker("engine", 0, 1, 1, [9, 9]), Attached)
        answer = second.call(AttachWorker("engine", 0, 1, 1, [REGION] * 2), Attached)

        assert answer.client == one.attached.client


def test_the_place_of_an_engine_is_free_when_all_of_it_is_gone(lasting):
    """At once when its workers have ended; after the grace time when a process lives on (as this one does)."""
    for i in range(40):
        with engine(lasting, f"engine-{i}"):
            pass
    ended = WorkerProcess(lasting, "ended")
    ended.end()
    until(lambda: "ended" not in places(lasting), "place of the ended given back", 0.4)

    until(lambda: places(lasting) == [], "places given back", 3.0)


def test_boards_are_wiped_for_a_new_engine_but_not_for_one_that_returns(lasting):
    from lmcache_shm.arena.segment import attach

    arena = attach(lasting.instance, writable_data=True)
    boards = arena.boards
    try:
        with engine(lasting, "old") as one:
            boards[one.attached.client, 0, 7] = 99
            again = Connection.open(lasting.path, Hello(PROTOCOL, "scheduler", "old"), WAIT_S)
            with contextlib.closing(again):
                again.call(registration("old"), Registered)
            assert boards[one.attached.client, 0, 7] == 99
        until(lambda: places(lasting) == [], "engine gone", 3.0)
        with engine(lasting, "new") as one:
            assert boards[one.attached.client, 0, 7] == 0
    finally:
        del boards
        arena.close()


def test_many_lost_engines_leave_nothing(lasting):
    before = slots(lasting)
    for i in range(150):
        one = Engine(lasting, f"lost-{i % 20}")
        one.step(Prefix(i, 2).reserve())
        one.close()
    until(lambda: slots(lasting)["reserved"] + slots(lasting)["quarantined"] == 0, "all free")

    assert slots(lasting)["used"] == before["used"]
