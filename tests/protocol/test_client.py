"""The engine's client: bounded in time, silent in trouble, back by itself."""

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from lmcache_shm.arena.job import CopyJob
from lmcache_shm.arena.layout import RING
from lmcache_shm.client.client import CacheClient, WorkerClient, pack_rows
from lmcache_shm.client.in_flight import InFlightStores
from lmcache_shm.client.plan import CachePlan, ObjectGroup
from lmcache_shm.client.registration import Registration
from lmcache_shm.config import ConfigError
from lmcache_shm.protocol.messages import Clear, Done
from lmcache_shm.protocol.rules import Full
from tests.protocol.harness import (
    CHUNK,
    GROUPS,
    REGION,
    Engine,
    Prefix,
    ServerProcess,
    registration,
    rows_of,
)
from tools.harness.wait import until

DEADLINE_MS = 250.0
PLAN = CachePlan(CHUNK, (ObjectGroup("full", Full(), ()),))


class Pair:
    """A CacheClient and a WorkerClient of one engine in this process."""

    def __init__(self, server: ServerProcess, **changes: object) -> None:
        config = server.config(deadline_ms=DEADLINE_MS, reconnect_max_s=0.1)
        self.changes = changes
        self.registered = []
        self.attached = []
        self.client = CacheClient(config, "engine", self._register, self._registered)
        self.stores = InFlightStores(self.client, lambda: self.latest)
        self.latest = None
        self.worker = WorkerClient(
            config, "engine", 0, 1, 1, [REGION] * len(GROUPS), self.attached.append
        )

    def _register(self, hello):
        busy = pack_rows(self.stores.busy(hello.arena_id))
        self.request = registration("engine", busy_rows=busy, **self.changes)
        return self.request

    def _registered(self, answer, hello):
        self.registered.append(answer)
        self.latest = Registration.of(answer, hello, self.client.arena, PLAN, self.request)

    def start(self) -> "Pair":
        self.worker.start()
        self.client.start()
        return self

    def close(self) -> None:
        self.stores.close()
        self.client.close()
        self.worker.close()

    def begin(self, prefix: Prefix, *sizes: int) -> list[CopyJob]:
        """Stores in flight of so many rows each."""
        registration = self.latest
        rows = rows_of(self.stores.flush(lambda _: prefix.reserve()).rows)
        assert len(rows) == sum(sizes)
        jobs = []
        for size in sizes:
            mine, rows = rows[:size], rows[size:]
            zeros = [0] * size
            job = CopyJob.of(
                self.stores.next_id, "store", registration.arena_id, mine, zeros, zeros, zeros, []
            )
            self.stores.add(registration, job, [], [])
            jobs.append(job)
        return jobs

    def report(self, job: CopyJob, *, ok: bool = True) -> None:
        """As the worker does; then whatever has ended is flushed."""
        boards = self.client.arena.boards
        boards[self.registered[0].client, 0, job.id % RING] = job.id << 1 | ok
        self.stores.flush()

    def store(self, prefix: Prefix) -> list[int]:
        answer = self.client.step(prefix.reserve())
        assert answer is not None
        rows = rows_of(answer.rows)
        assert self.client.step(commit=[row for row in rows if row >= 0]) is not None
        return rows

    def hit(self, prefix: Prefix) -> int:
        answer = self.client.acquire(prefix.keys, 0, prefix.tokens + 1)
        if answer is None:
            return -1
        self.client.step(release=[answer.lease])
        return answer.n_chunks


@pytest.fixture
def pair(server):
    made = Pair(server).start()
    yield made
    made.close()


@contextlib.contextmanager
def stopped(server: ServerProcess):
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def restarted(server: ServerProcess, number: int = signal.SIGKILL) -> ServerProcess:
    server.end(number)
    return ServerProcess(server.instance)


@pytest.fixture
def successors():
    """Servers that a test started after the fixture's; ended with it."""
    made: list[ServerProcess] = []
    yield made
    for server in made:
        server.end()


def test_it_stores_and_finds(pair):
    assert pair.client.wait(5)
    prefix = Prefix(1, 4)
    pair.store(prefix)

    assert pair.hit(prefix) == 4
    assert pair.client.arena.arena_id == pair.client.registration.arena_id == pair.client.arena_id
    assert pair.worker.client == pair.client.registration.client
    assert pair.client.registration.chunk_size == CHUNK
    pair.client.clear()
    assert pair.hit(prefix) == 0


def test_it_waits_in_the_background_for_the_workers(server):
    pair = Pair(server)
    pair.client.start()
    with contextlib.closing(pair):
        assert pair.client.wait_hello(5) is not None
        assert not pair.client.wait(0.2)
        assert pair.client.acquire(b"", 0, 1) is None
        pair.worker.start()
        assert pair.client.wait(5)


def test_without_a_server_everything_is_a_miss_at_once(instance, runtime_dir, caplog):
    class Nowhere:
        config = staticmethod(lambda **o: ServerProcess.config(absent, **o))

    absent = ServerProcess.__new__(ServerProcess)
    absent.instance, absent.path = instance, str(runtime_dir / f"{instance}.sock")
    pair = Pair(absent)
    with caplog.at_level(logging.INFO, "lmcache_shm"), contextlib.closing(pair.start()):
        assert not pair.client.wait(0.3)
        began = time.monotonic()
        for _ in range(1000):
            assert pair.client.acquire(b"", 0, 1) is None
            assert pair.client.step(release=[5]) is None
        assert time.monotonic() - began < 0.5
        assert pair.client.counts["no_server"] == 2000
    said = [r.getMessage() for r in caplog.records if "no server at" in r.getMessage()]
    assert len(said) == 2  # one line for each of the two links, however often they try


def test_a_server_that_comes_later_is_picked_up(instance, runtime_dir, successors):
    absent = ServerProcess.__new__(ServerProcess)
    absent.instance, absent.path = instance, str(runtime_dir / f"{instance}.sock")
    pair = Pair(absent)
    with contextlib.closing(pair.start()):
        assert not pair.client.wait(0.3)
        successors.append(ServerProcess(instance))
        until(lambda: pair.client.up, "picked up")
        pair.store(Prefix(1, 2))
        assert pair.hit(Prefix(1, 2)) == 2


def test_a_stopped_server_costs_one_deadline_and_then_nothing(server, pair):
    assert pair.client.wait(5)
    pair.store(Prefix(1, 2))
    with stopped(server):
        began = time.monotonic()
        assert pair.hit(Prefix(1, 2)) == -1
        first = time.monotonic() - began
        began = time.monotonic()
        for _ in range(100):
            assert pair.hit(Prefix(1, 2)) == -1
        rest = time.monotonic() - began
    assert DEADLINE_MS / 1e3 * 0.9 < first < DEADLINE_MS / 1e3 + 0.25
    assert rest < 0.1
    assert pair.client.counts["deadline"] == 1
    until(lambda: pair.client.up, "back")
    assert pair.hit(Prefix(1, 2)) == 2


def test_the_deadline_holds_for_a_request_that_fills_the_socket(server, pair):
    """A look-up of 128k chunks does not fit the socket's buffer: sending it is what blocks."""
    assert pair.client.wait(5)
    with stopped(server):
        began = time.monotonic()
        assert pair.client.acquire(bytes(16) * 120_000, 0, 1 << 30) is None
        assert time.monotonic() - began < DEADLINE_MS / 1e3 + 0.25


def test_the_deadline_holds_for_threads_that_wait_for_each_other(server, pair):
    assert pair.client.wait(5)
    took = []

    def ask() -> None:
        began = time.monotonic()
        assert pair.client.acquire(b"", 0, 1) is None
        took.append(time.monotonic() - began)

    with stopped(server):
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert max(took) < DEADLINE_MS / 1e3 + 0.25


def test_a_slow_answer_of_an_earlier_time_is_never_taken_for_a_later_one(server, pair):
    assert pair.client.wait(5)
    pair.store(Prefix(1, 2))
    pair.store(Prefix(2, 3))
    for _ in range(3):
        with stopped(server):
            assert pair.hit(Prefix(1, 2)) == -1
        until(lambda: pair.client.up, "back")
        assert pair.hit(Prefix(2, 3)) == 3


def test_a_restart_is_noticed_without_a_request_and_the_engine_registers_again(
    server, pair, successors
):
    assert pair.client.wait(5)
    prefix = Prefix(1, 5)
    pair.store(prefix)
    boot, arena_id = pair.client.hello.boot, pair.client.arena_id
    successors.append(restarted(server))
    until(lambda: len(pair.registered) == 2 and pair.client.up, "registered again")

    assert pair.client.hello.boot != boot
    assert pair.client.arena_id == arena_id  # adopted
    assert len(pair.attached) == 2
    assert pair.hit(prefix) == 5


def test_a_restart_with_another_arena_is_mapped_anew(server, pair, successors):
    assert pair.client.wait(5)
    prefix = Prefix(1, 5)
    pair.store(prefix)
    old = pair.client.arena
    server.end(signal.SIGKILL)
    successors.append(ServerProcess(server.instance, "--fresh"))
    until(lambda: len(pair.registered) == 2 and pair.client.up, "registered again")

    assert pair.client.arena is not old
    assert bytes(pair.client.arena.arena_id) == pair.client.registration.arena_id
    assert old.hot["state"].max() > 0  # the old mapping stays valid as long as it is held
    assert pair.hit(prefix) == 0


def test_rows_of_a_lost_connection_are_aborted_and_never_published(server, pair, successors):
    """The copy may still be running when the server dies; its end frees the slot, but commits nothing."""
    assert pair.client.wait(5)
    prefix = Prefix(1, 3)
    good, bad, late = pair.begin(prefix, 2, 3, 1)
    successors.append(restarted(server))
    until(lambda: len(pair.registered) == 2 and pair.client.up, "registered again")
    assert successors[0].status()["arena"]["slots"]["quarantined"] == 6

    pair.report(good)
    pair.report(bad, ok=False)
    assert pair.hit(prefix) == 0
    assert pair.client.counts["commit_lost"] == 2
    assert successors[0].status()["arena"]["slots"]["quarantined"] == 1
    pair.report(late)
    assert successors[0].status()["arena"]["slots"]["quarantined"] == 0
    assert pair.client.up


def test_copies_that_end_while_the_server_is_away_are_not_waited_for(server, pair, successors):
    assert pair.client.wait(5)
    ended, late = pair.begin(Prefix(1, 3), 4, 2)
    server.end(signal.SIGKILL)
    until(lambda: not pair.client.up, "lost")
    pair.report(ended)
    successors.append(ServerProcess(server.instance))
    until(lambda: len(pair.registered) == 2 and pair.client.up, "registered again")

    assert successors[0].status()["arena"]["slots"]["quarantined"] == 2
    pair.report(late)
    assert successors[0].status()["arena"]["slots"]["quarantined"] == 0


def test_rows_that_were_just_reserved_are_busy_though_no_store_names_them_yet(
    server, pair, successors
):
    """The connection breaks between the answer and the planning of the copies."""
    assert pair.client.wait(5)
    rows = rows_of(pair.stores.flush(lambda _: Prefix(1, 3).reserve()).rows)
    assert pair.stores.busy(pair.latest.arena_id) == sorted(rows)
    successors.append(restarted(server))
    until(lambda: len(pair.registered) == 2 and pair.client.up, "registered again")

    assert successors[0].status()["arena"]["slots"]["quarantined"] == 6


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "control"])
def test_a_message_of_an_earlier_registration_is_not_sent_under_the_next(server, pair, bound):
    """Rows are numbers: those that are reserved now may be the ones that were reserved then."""
    assert pair.client.wait(5)
    earlier, prefix = pair.registered[0], Prefix(1, 3)
    pair.client._connection.shutdown()
    until(lambda: len(pair.registered) == 2 and pair.client.up, "registered again")
    rows = rows_of(pair.client.step(prefix.reserve()).rows)

    answer = pair.client.step(commit=rows, registered=earlier if bound else None)

    assert (answer is None) == bound
    assert pair.hit(prefix) == (0 if bound else 3)
    if bound:
        pair.client.step(abort=rows, registered=pair.registered[1])


def test_leases_of_a_lost_connection_may_be_released_again(server, pair, successors):
    assert pair.client.wait(5)
    prefix = Prefix(1, 3)
    pair.store(prefix)
    lease = pair.client.acquire(prefix.keys, 0, prefix.tokens + 1).lease
    successors.append(restarted(server))
    until(lambda: len(pair.registered) == 2 and pair.client.up, "registered again")

    assert pair.client.step(release=[lease]) is not None
    assert pair.client.acquire(prefix.keys, 0, prefix.tokens + 1, replaces=lease).n_chunks == 3


def test_what_a_model_must_not_do_is_said_once_and_the_cache_stays_off(server, caplog):
    pair = Pair(server)
    pair._register = None
    pair.client._on_connect = lambda hello: (_ for _ in ()).throw(ValueError("block size 7 is odd"))
    with caplog.at_level(logging.INFO, "lmcache_shm"), contextlib.closing(pair.start()):
        assert not pair.client.wait(5)
        assert pair.client.refusal == "block size 7 is odd"
        assert pair.client.acquire(b"", 0, 1) is None
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert [r.getMessage() for r in errors] == [
        "lmcache_shm: the cache stays off: block size 7 is odd"
    ]


def test_a_refusal_of_the_server_is_said_too(instance, successors):
    successors.append(ServerProcess(instance, "--chunk-size", "32"))
    pair = Pair(successors[0])
    with contextlib.closing(pair.start()):
        assert not pair.client.wait(5)
        assert "--chunk-size 16" in pair.client.refusal


def test_an_engine_id_that_is_in_use_is_a_matter_of_now_only(server, caplog):
    """The engine serves without a cache, says so as a warning, and gets one when the other process is gone."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, server.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"registered\n"
    pair = Pair(server).start()
    try:
        assert not pair.client.wait(10)
        assert pair.client.busy
        assert f"engine id engine is in use by pid {holder.pid}" in (pair.client.refusal or "")

        def said() -> list[int]:
            text = "engine id engine is in use"
            return [r.levelno for r in caplog.records if text in r.getMessage()]

        until(said, "a line in the log")  # it follows the refusal that `wait` has seen
        assert said() == [logging.WARNING]
        holder.kill()
        until(lambda: pair.client.up, "the cache in use")
    finally:
        pair.close()
        holder.kill()
        holder.communicate()


HOLDER = """
import sys
from types import SimpleNamespace
from tests.protocol.harness import Engine
engine = Engine(SimpleNamespace(path=sys.argv[1]))
print("registered", flush=True)
sys.stdin.read()
"""


def test_a_descriptor_is_made_of_what_the_workers_say_now(server, caplog):
    """Whatever they said before, the namespace holds what the ranks that are there say of themselves."""
    asked: list[list[bytes]] = []
    config = server.config(deadline_ms=DEADLINE_MS, reconnect_max_s=0.1)

    def register(hello):
        asked.append(list(client.facts))
        return registration("engine", world=2, descriptor=b"|".join([b"{}", *client.facts]))

    client = CacheClient(config, "engine", register)
    workers = [
        WorkerClient(config, "engine", r, 2, 1, [REGION] * len(GROUPS), facts=b"rank %d" % r)
        for r in range(2)
    ]
    try:
        for link in (client, *workers):
            link.start()
        assert client.wait(10)
        assert asked[-1] == [b"rank 0", b"rank 1"]
        assert asked[0] == []
        first = client.registration.namespace
        workers[1].close()
        other = WorkerClient(config, "engine", 1, 2, 1, [REGION] * len(GROUPS), facts=b"other")
        workers.append(other)
        other.start()
        assert other.wait(10)
        client._connection.shutdown()
        until(lambda: asked[-1] == [b"rank 0", b"other"] and client.up, "registered anew")
        assert client.registration.namespace != first
    finally:
        for link in (client, *workers):
            link.close()


def test_reasons_reach_the_server(server, pair, monkeypatch):
    from lmcache_shm.client import client

    monkeypatch.setattr(client, "REPORT_S", 0.0)
    assert pair.client.wait(5)
    pair.client.count("odd", 3)

    until(lambda: server.status()["misses"].get("odd") == 3, "reported")
    until(lambda: pair.client.counts["odd"] == 0, "subtracted, once the server has answered")


def test_a_forked_child_keeps_its_hands_off_the_parent_s_socket(server, pair):
    assert pair.client.wait(5)
    pair.store(Prefix(1, 2))
    answer = pair.client.acquire(Prefix(1, 2).keys, 0, 100)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        word = b"bad"
        with contextlib.suppress(BaseException):
            silent = pair.client.acquire(Prefix(1, 2).keys, 0, 100) is None
            silent &= pair.client.step(release=[answer.lease]) is None and not pair.client.up
            pair.client.close()
            word = b"good" if silent else b"spoke"
        os.write(write, word)
        os._exit(0)
    os.close(write)
    assert os.read(read, 16) == b"good"
    os.close(read)
    os.waitpid(child, 0)

    assert server.status()["arena"]["slots"]["pinned"] == 4
    assert pair.client.step(release=[answer.lease]) is not None
    assert pair.hit(Prefix(1, 2)) == 2


def test_a_living_child_does_not_hold_the_dead_parent_s_leases(server):
    """The child's copy of the socket is closed in it, so the parent's end is seen."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        pair = Pair(server).start()
        pair.client.wait(5)
        pair.store(Prefix(1, 2))
        pair.client.acquire(Prefix(1, 2).keys, 0, 100)
        child = os.fork()
        if child == 0:
            time.sleep(60)
        os.write(write, str(child).encode())
        time.sleep(60)
        os._exit(0)
    child = int(os.read(read, 16))
    os.close(read)
    os.close(write)
    try:
        assert server.status()["arena"]["slots"]["pinned"] == 4
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        until(lambda: server.status()["arena"]["slots"]["pinned"] == 0, "pins given back")
    finally:
        os.kill(child, signal.SIGKILL)


def test_close_ends_the_thread_at_once_also_while_the_server_is_stopped(server):
    pair = Pair(server).start()
    assert pair.client.wait(5)
    with stopped(server):
        assert pair.hit(Prefix(1, 1)) == -1  # now its thread waits for a greeting
        began = time.monotonic()
        pair.close()
        assert time.monotonic() - began < 1.0
    assert not pair.client._thread.is_alive()


def test_an_untrustworthy_runtime_directory_is_one_line(instance, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    absent = ServerProcess.__new__(ServerProcess)
    absent.instance, absent.path = instance, str(link / "x.sock")
    with pytest.raises(ConfigError, match="is not a directory"):
        Pair(absent)


def test_many_threads_share_a_client(server, pair):
    assert pair.client.wait(5)
    wrong = []

    def work(number: int) -> None:
        prefix = Prefix(number, 3)
        for _ in range(40):
            pair.store(prefix)
            if pair.hit(prefix) != 3:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not pair.client.counts["deadline"]


def test_a_request_beyond_the_frame_limit_is_a_miss_and_harms_nothing(server, pair):
    assert pair.client.wait(5)

    assert pair.client.acquire(bytes(17 << 20), 0, 100) is None
    assert pair.client.counts["too_large"] == 1
    pair.store(Prefix(1, 1))
    assert pair.hit(Prefix(1, 1)) == 1


def test_links_that_nobody_holds_are_not_kept(server):
    before = len(gc.get_objects())
    for _ in range(3):
        Pair(server).start().close()
    gc.collect()
    assert len(gc.get_objects()) - before < 5000
    one = Engine(server, "last")
    one.scheduler.call(Clear(), Done)
    one.close()
