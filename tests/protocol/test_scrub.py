"""The scrub of a server with `--checksum verify`: damaged slots are dropped, all others stay."""

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

from lmcache_shm.arena.layout import SlotState
from lmcache_shm.arena.segment import Arena, attach
from lmcache_shm.control.connection import Connection
from lmcache_shm.control.messages import PROTOCOL, Attached, AttachWorker, Hello, Registered
from lmcache_shm.transfer.cpu import CpuEngine
from lmcache_shm.transfer.engine import CopyItem, CopyJob, PageRun
from lmcache_shm.transfer.pages import Part, RawTensor, SlotLayout, group_pages
from tests.protocol.harness import (
    WAIT_S,
    Engine,
    Prefix,
    ServerProcess,
    registration,
    rows_of,
    until,
)

VERIFY = ["--checksum", "verify"]
BLOCKS = 8
PAGES = 2
CHUNKS = 3


class Storing(Engine):
    """An engine of two ranks in this process that copies real blocks, and writes checksums as a worker does."""

    def __init__(
        self, server: ServerProcess, page_bytes: tuple[int, int] = (5000, 1 << 20)
    ) -> None:
        self.server = server
        rng = np.random.default_rng(1)
        self.blocks = [rng.integers(0, 256, (BLOCKS, n), np.uint8) for n in page_bytes]
        self.layouts = [_layout(blocks) for blocks in self.blocks]
        self.workers: list[Connection] = []
        with contextlib.ExitStack() as undo:
            # The second rank has nothing of the second group, as with pipeline parallelism.
            regions = [[layout.region_bytes for layout in self.layouts] for _ in range(2)]
            regions[1][1] = 0
            for rank in range(2):
                hello = Hello(PROTOCOL, "worker", "engine")
                self.workers.append(Connection.open(server.path, hello, WAIT_S))
                undo.callback(self.workers[-1].close)
                self.workers[-1].call(AttachWorker("engine", rank, 2, 1, regions[rank]), Attached)
            hello = Hello(PROTOCOL, "scheduler", "engine")
            self.scheduler = Connection.open(server.path, hello, WAIT_S)
            undo.callback(self.scheduler.close)
            self.registered = self.scheduler.call(registration("engine", 2), Registered)
            self.arena: Arena = attach(server.instance, writable_data=True)
            undo.callback(self.arena.close)
            self.engine = CpuEngine(self.arena, self.layouts, populate=False)
            undo.callback(self.engine.close)
            self._undo = undo.pop_all()

    def store(self, prefix: Prefix) -> list[int]:
        """Reserve, copy, commit; the rows, group after group."""
        rows = self.step(prefix.reserve())
        self.copy(rows)
        self.step(commit=np.array(rows, "<i4").tobytes())
        return rows

    def copy(self, rows: list[int], *, sealed: bool = True) -> None:
        places = self.registered
        items = []
        for i, row in enumerate(rows):
            group = i * 2 // len(rows)
            slot = int(self.arena.cold["offset"][row])
            for rank in range(2 - group):
                first = (i + rank) % (BLOCKS - PAGES)
                items.append(
                    CopyItem(
                        row,
                        slot + places.region_offsets[group][rank],
                        int(self.arena.hot["generation"][row]),
                        group,
                        [PageRun(0, 0, np.arange(first, first + PAGES))],
                        slot + places.checksum_offset[group] + 8 * rank if sealed else -1,
                    )
                )
        self.engine.submit(CopyJob(1, "store", items, WAIT_S))
        assert self.engine.drain(WAIT_S)
        (result,) = self.engine.poll()
        assert result.ok, result.reason

    def flip(self, row: int, group: int, rank: int, at: int) -> None:
        """One bit of a rank's region."""
        slot = int(self.arena.cold["offset"][row])
        self.arena.data_array[slot + self.registered.region_offsets[group][rank] + at] ^= 4

    def states(self, rows: list[int]) -> list[int]:
        return [int(state) for state in self.arena.hot["state"][rows]]

    def close(self) -> None:
        self._undo.close()


def _layout(blocks: np.ndarray) -> SlotLayout:
    nbytes = blocks.shape[1]
    tensor = RawTensor(blocks.ctypes.data, blocks.shape, (nbytes, 1))
    return SlotLayout([Part(group_pages([tensor], BLOCKS), PAGES)])


@pytest.fixture
def one(server: ServerProcess) -> Iterator[Storing]:
    made = Storing(server)
    yield made
    made.close()


def counted(server: ServerProcess, name: str) -> int:
    return int(server.status()["counters"][name])


def rounds(server: ServerProcess, slots: int, n: int = 2) -> None:
    """Wait until `slots` slots have been judged n times more."""
    goal = counted(server, "scrubbed_slots") + n * slots
    until(lambda: counted(server, "scrubbed_slots") >= goal, f"{n} rounds over {slots} slots")


verifying = pytest.mark.parametrize("server", [VERIFY], indirect=True)


@verifying
@pytest.mark.parametrize(("group", "rank", "at"), [(0, 0, 0), (0, 1, 9999), (1, 0, (2 << 20) - 1)])
def test_a_damaged_slot_is_dropped_and_the_others_stay(server, one, group, rank, at):
    prefix = Prefix(1, CHUNKS)
    rows = one.store(prefix)
    rounds(server, len(rows))
    assert counted(server, "scrub_mismatches") == 0

    victim = rows[group * CHUNKS + 2]
    one.flip(victim, group, rank, at)
    until(lambda: counted(server, "scrub_mismatches") == 1, "the damage was found")
    assert one.states([victim]) == [SlotState.FREE]
    rest = [row for row in rows if row != victim]
    rounds(server, len(rest))
    assert one.states(rest) == [SlotState.COMMITTED] * len(rest)
    assert counted(server, "scrub_mismatches") == 1
    assert server.errors.count("does not fit its checksum") == 1
    assert one.acquire(prefix).n_chunks < CHUNKS


@verifying
def test_nothing_is_dropped_without_damage(server, one):
    prefix = Prefix(1, CHUNKS)
    rows = one.store(prefix)
    rounds(server, len(rows), 5)
    assert one.states(rows) == [SlotState.COMMITTED] * len(rows)
    assert counted(server, "scrub_mismatches") == 0
    assert one.acquire(prefix).n_chunks == CHUNKS


@verifying
def test_a_damaged_slot_that_is_pinned_goes_at_its_release(server, one):
    prefix = Prefix(1, CHUNKS)
    rows = one.store(prefix)
    hit = one.acquire(prefix)
    one.flip(rows[0], 0, 0, 100)
    until(lambda: counted(server, "scrub_mismatches") == 1, "the damage was found")
    assert one.states(rows[:1]) == [SlotState.COMMITTED]  # its reader may go on
    assert rows_of(hit.rows[0])[0] == rows[0]
    assert one.acquire(prefix).n_chunks == 0
    rounds(server, len(rows) - 1)
    assert counted(server, "scrub_mismatches") == 1  # it is not judged twice
    one.step(release=[hit.lease])
    assert one.states(rows[:1]) == [SlotState.FREE]


@verifying
def test_what_is_stored_again_after_damage_is_good(server, one):
    prefix = Prefix(1, 1)
    rows = one.store(prefix)
    one.flip(rows[0], 0, 0, 1)
    until(lambda: counted(server, "scrub_mismatches") == 1, "the damage was found")
    (again, _) = one.step(prefix.reserve())
    assert again >= 0
    fresh = int(one.arena.hot["generation"][again])
    one.step(abort=np.array([again], "<i4").tobytes())
    assert fresh > 0
    rounds(server, 1)
    assert counted(server, "scrub_mismatches") == 1


@pytest.mark.parametrize("server", [[], ["--checksum", "store"]], indirect=True)
def test_other_modes_do_not_scrub(server, one):
    rows = one.store(Prefix(1, CHUNKS))
    one.flip(rows[0], 0, 0, 0)
    ticks = time.monotonic() + 1.0
    until(lambda: time.monotonic() > ticks, "some ticks")
    assert counted(server, "scrubbed_slots") == 0
    assert one.states(rows) == [SlotState.COMMITTED] * len(rows)


def restarted(server: ServerProcess, *flags: str) -> ServerProcess:
    """The server killed, and another on its arena."""
    import signal

    server.end(signal.SIGKILL)
    return ServerProcess(server.instance, *flags)


@verifying
def test_adopted_slots_are_judged_before_any_engine_is_back(server, instance):
    one = Storing(server)
    rows = one.store(Prefix(1, CHUNKS))
    one.close()
    second = restarted(server, *VERIFY)
    arena = attach(instance, writable_data=True)
    try:
        rounds(second, len(rows))
        assert counted(second, "scrub_mismatches") == 0
        arena.data_array[int(arena.cold["offset"][rows[-1]])] ^= 1
        until(lambda: counted(second, "scrub_mismatches") == 1, "the damage was found")
        assert int(arena.hot["state"][rows[-1]]) == SlotState.FREE
    finally:
        arena.close()
        second.end()


@pytest.mark.parametrize("server", [[]], indirect=True)
def test_slots_of_a_server_without_checksums_are_not_judged(server, instance):
    one = Storing(server)
    rows = one.step(Prefix(1, CHUNKS).reserve())
    one.copy(rows, sealed=False)
    one.step(commit=np.array(rows, "<i4").tobytes())
    one.close()
    second = restarted(server, *VERIFY)
    two = Storing(second)
    try:
        more = two.store(Prefix(2, CHUNKS))
        rounds(second, len(more))
        assert counted(second, "scrub_mismatches") == 0
        assert two.states(rows + more) == [SlotState.COMMITTED] * len(rows + more)
        assert two.acquire(Prefix(1, CHUNKS)).n_chunks == CHUNKS
    finally:
        two.close()
        second.end()


@pytest.mark.parametrize("server", [["--checksum", "store"]], indirect=True)
def test_slots_of_a_server_that_only_wrote_checksums_are_judged(server, instance):
    one = Storing(server)
    rows = one.store(Prefix(1, CHUNKS))
    one.flip(rows[1], 0, 1, 77)
    one.close()
    second = restarted(server, *VERIFY)
    try:
        until(lambda: counted(second, "scrub_mismatches") == 1, "the damage was found")
        rounds(second, len(rows) - 1)
        assert counted(second, "scrub_mismatches") == 1
    finally:
        second.end()


@verifying
def test_requests_are_answered_fast_while_it_scrubs(server, one):
    """The median, as other processes may run: a scrub that went on regardless would show in it."""
    for number in range(4):
        one.store(Prefix(number, CHUNKS))
    miss = Prefix(99, 1)
    taken = []
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        began = time.perf_counter()
        one.acquire(miss)
        taken.append(time.perf_counter() - began)
    assert np.median(taken) < 0.005
