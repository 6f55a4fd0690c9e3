"""The scrub of a server with `--checksum verify`: damaged slots are dropped, all others stay."""

import contextlib
import signal
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from lmcache_shm.arena.job import CopyJob, Pages
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.arena.segment import Arena, attach, create
from lmcache_shm.arena.slot import checks_number, slot_geometry
from lmcache_shm.client.connection import Connection
from lmcache_shm.protocol.messages import PROTOCOL, Attached, AttachWorker, Hello, Registered
from lmcache_shm.protocol.rules import Full
from lmcache_shm.server import scrub
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.catalog.groups import GroupSpec
from lmcache_shm.server.stats import EventLog
from lmcache_shm.transfer.cpu import CpuEngine
from lmcache_shm.transfer.pages import Part, RawTensor, SlotLayout, group_pages
from tests.protocol.harness import (
    CHUNK,
    WAIT_S,
    Engine,
    Prefix,
    ServerProcess,
    registration,
    rows_of,
)
from tools.harness.wait import until

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
        """Reserve, copy, commit what is missing; its rows, group after group."""
        rows = [row for row in self.step(prefix.reserve()) if row >= 0]
        self.copy(rows)
        self.step(commit=np.array(rows, "<i4").tobytes())
        return rows

    def copy(self, rows: list[int], *, sealed: bool = True) -> None:
        places, hot = self.registered, self.arena.hot
        slots, regions, cells = [], [], []
        for row in rows:
            group, slot = int(hot["group"][row]), int(self.arena.cold["offset"][row])
            for rank in range(2 - group):
                first = (row + rank) % (BLOCKS - PAGES)
                slots.append((row, slot, int(hot["generation"][row]), group, first))
                regions.append(slot + places.region_offsets[group][rank])
                cells.append(slot + places.checksum_offset[group] + 8 * rank if sealed else -1)
        *columns, firsts = zip(*slots, strict=True)
        pages = [[Pages(0, 0, range(first, first + PAGES))] for first in firsts]
        job = CopyJob.of(1, "store", b"", *columns, pages)
        self.engine.submit(job, np.array(regions), np.array(cells), WAIT_S)
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
def test_what_was_dropped_can_be_stored_again(server, one):
    prefix = Prefix(1, CHUNKS)
    rows = one.store(prefix)
    one.flip(rows[0], 0, 0, 1)
    until(lambda: counted(server, "scrub_mismatches") == 1, "the damage was found")
    assert len(one.store(prefix)) == 1
    rounds(server, len(rows))
    assert counted(server, "scrub_mismatches") == 1
    assert one.acquire(prefix).n_chunks == CHUNKS


@pytest.mark.parametrize("server", [[], ["--checksum", "store"]], indirect=True)
def test_other_modes_do_not_scrub(server, one):
    rows = one.store(Prefix(1, CHUNKS))
    one.flip(rows[0], 0, 0, 0)
    now = server.status()["server"]["uptime_s"]
    until(lambda: server.status()["server"]["uptime_s"] > now + 0.75, "three ticks")
    assert counted(server, "scrubbed_slots") == 0
    assert one.states(rows) == [SlotState.COMMITTED] * len(rows)


def restarted(server: ServerProcess, *flags: str) -> ServerProcess:
    """The server killed, and another on its arena."""
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


# ---------------------------------------------------------------------- piece by piece, without a server
class Alone:
    """A scrub and one slot of 8 MiB; a piece of work at a time."""

    SIZE = 8 * scrub.PIECE

    def __init__(self, instance: str) -> None:
        self.arena = create(instance, 2 * self.SIZE, chunk_size=CHUNK, separate=True)
        self.catalog = Catalog(self.arena)
        self.counters: Counter[str] = Counter()
        self.place = slot_geometry([self.SIZE], 1, CHUNK)
        spec = GroupSpec("full", Full(), self.place.slot_bytes)
        self.space = self.catalog.register(b"{}", [spec])
        self.scrub = scrub.Scrub(self.arena, self.catalog, self.counters, EventLog())
        self.scrub.learn(self.place.checked)

    def store(self, number: int) -> int:
        """The only slot that fits, with content of its own and the right checksum."""
        prefix = Prefix(number, 1)
        one, word = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
        rows = self.catalog.reserve(
            self.space.id, np.zeros(1, np.uint16), prefix.keys, prefix.parents, one, bytes(16), word, 0
        )  # fmt: skip
        start = int(self.arena.cold["offset"][rows[0]])
        region = self.arena.data_array[start : start + self.SIZE]
        region[:] = number % 256
        cell = start + self.place.checksum_offset
        digest = xxhash.xxh3_64_intdigest(region.data)
        self.arena.data_array[cell : cell + 8].view(np.uint64)[0] = digest
        assert self.catalog.commit(rows, [checks_number(self.place.checked)]) == 1
        return int(rows[0])

    def work(self, pieces: int) -> None:
        left = iter([True] * pieces)
        self.scrub.run(lambda: next(left, False))


@pytest.fixture
def alone(instance: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Alone]:
    monkeypatch.setattr(scrub, "RUN_S", 60.0)
    made = Alone(instance)
    yield made
    made.arena.unlink()
    made.arena.close()


def test_it_stops_after_a_piece_when_somebody_waits(alone):
    alone.store(1)
    alone.work(0)
    alone.work(7)
    assert alone.counters["scrubbed_slots"] == 0
    alone.work(2)  # the judgement comes with the next step after the last piece
    assert alone.counters == {"scrubbed_slots": 1}


def test_it_stops_when_its_time_is_over(alone, monkeypatch):
    alone.store(1)
    monkeypatch.setattr(scrub, "RUN_S", 0.0)
    alone.work(1000)
    assert alone.counters["scrubbed_slots"] == 0


def change_hands(alone: Alone) -> None:
    """Half of the slot is hashed, then other content comes into it."""
    row = alone.store(1)
    alone.work(4)
    alone.catalog.clear()
    assert alone.store(2) == row
    alone.work(6)


def test_a_slot_that_changed_hands_is_not_judged(alone):
    change_hands(alone)
    assert alone.counters["scrub_mismatches"] == 0
    alone.work(20)
    assert alone.counters["scrubbed_slots"] >= 1
    assert alone.counters["scrub_mismatches"] == 0


def test_without_the_look_at_the_generation_it_would_be(alone, monkeypatch):
    monkeypatch.setattr(scrub.Scrub, "_is_still", lambda *_: True)
    change_hands(alone)
    assert alone.counters["scrub_mismatches"] == 1


def test_a_layout_that_nobody_told_is_not_judged(alone):
    row = alone.store(1)
    alone.arena.cold["checks"][row] += 1
    alone.work(50)
    assert alone.counters["scrubbed_slots"] == 0
