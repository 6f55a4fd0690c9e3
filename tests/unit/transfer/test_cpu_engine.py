"""The CPU engine against a byte oracle: what was stored comes back, and nothing else is touched."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from lmcache_shm.arena.job import Pages
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.transfer import cpu, strided
from lmcache_shm.transfer.cpu import CpuEngine
from lmcache_shm.transfer.engine import (
    REASON_ARENA,
    REASON_CHECKSUM,
    REASON_CLOSED,
    REASON_DEADLINE,
    REASON_GENERATION,
)
from lmcache_shm.transfer.pages import GroupPages, Part, SlotLayout, StridedRun
from lmcache_shm.transfer.strided import RunCopier

from .rig import SLOT, WAIT, Rig
from .worlds import WORLDS, Slot, dense_hnd, gemma4, item, job


@pytest.fixture
def bench():
    made: list[Rig] = []

    def make(world, layouts=None, threads: int = 1) -> Rig:
        made.append(Rig(world, layouts, lambda arena, slots: CpuEngine(arena, slots, threads)))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


@pytest.fixture(params=["as small pages", "as large pages"])
def sizes(request, monkeypatch):
    """The pages of these worlds are small; large ones go block by block in vector registers."""
    if request.param == "as large pages":
        monkeypatch.setattr(strided, "VECTOR_BYTES", 1)
        monkeypatch.setattr(strided, "VECTOR_BLOCK_BYTES", 1)
    else:
        monkeypatch.setattr(strided, "BATCH_PAGES", 3)  # several batches, and a rest


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
def test_store_wipe_load_restores_exactly_the_content_bytes(make, threads, bench):
    """Scattered blocks, other blocks for the load; padding and foreign blocks keep their bytes."""
    b = bench(make(), threads=threads)

    for group, layout in enumerate(b.layouts):
        pages = layout.parts[0].stored_pages
        assert b.round_trip(group, b.world.scattered_blocks(pages), b.world.scattered_blocks(pages))


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
def test_neighbouring_blocks_take_the_same_bytes(make, bench):
    """Runs of neighbours are copied another way; the result is the same."""
    b = bench(make())

    for group, layout in enumerate(b.layouts):
        pages = layout.parts[0].stored_pages
        assert b.round_trip(group, np.arange(3, 3 + pages), b.world.scattered_blocks(pages))
        assert b.round_trip(group, b.world.scattered_blocks(pages), np.arange(2, 2 + pages))


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
def test_part_of_a_slot_can_be_moved(make, bench):
    """A load that starts in the middle of a chunk (the engine holds the first pages already)."""
    b = bench(make())

    for group, layout in enumerate(b.layouts):
        pages = layout.parts[0].stored_pages
        for first in range(pages):
            count = pages - first
            blocks = b.world.scattered_blocks(count)
            assert b.round_trip(group, blocks, b.world.scattered_blocks(count), first)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
def test_only_the_region_of_the_slot_is_written(make, bench):
    """Neighbouring slots and ranks keep their bytes; so does what a partial store leaves out."""
    b = bench(make())

    for group, layout in enumerate(b.layouts):
        b.arena.data_array[:] = 0xEE
        blocks = b.world.scattered_blocks(layout.parts[0].stored_pages)
        b.run("store", [item(b.layouts, group, 3, SLOT, blocks)])
        touched = np.flatnonzero(b.arena.data_array != 0xEE)
        assert touched.min() >= SLOT
        assert touched.max() < SLOT + layout.region_bytes


def test_stored_bytes_lie_where_the_layout_says(bench):
    """Part → run → page: another engine, or another process, reads them by this rule alone."""
    b = bench(gemma4(), layouts=[SlotLayout([gemma4().part(0)])])
    world = b.world
    layout = SlotLayout([world.part(0), world.part(1)])
    b.engine.close()
    b.engine = CpuEngine(b.arena, [layout])
    full, tail = world.scattered_blocks(4), world.scattered_blocks(3)
    pages = [Pages(0, 0, full), Pages(1, 0, tail)]

    b.run("store", [Slot(3, SLOT, 5, 0, pages)])

    base = world.memory.ctypes.data
    for part, blocks in enumerate((full, tail)):
        for run, segment in enumerate(layout.segments[part]):
            place = layout.parts[part].pages.runs[run]
            for page, block in enumerate(blocks):
                at = place.base_addr - base + int(block) * place.block_stride
                slot = SLOT + segment + page * place.nbytes
                assert np.array_equal(
                    world.memory[at : at + place.nbytes],
                    b.arena.data_array[slot : slot + place.nbytes],
                )


# ------------------------------------------------------------------- negative controls of the oracle


@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
def test_an_omitted_lane_is_noticed(make, bench):
    world = make()
    parts = [world.part(g) for g in range(len(world.groups))]
    short = [
        SlotLayout(
            [Part(replace(p.pages, runs=p.pages.runs[:-1]), p.pages_per_chunk, p.first_page)]
        )
        for p in parts
        if len(p.pages.runs) > 1
    ]
    if not short:
        pytest.skip("a world whose groups have a single run")
    group = next(g for g, p in enumerate(parts) if len(p.pages.runs) > 1)
    layouts = world.layouts()
    layouts[group] = short[0]
    b = bench(world, layouts=layouts)
    pages = layouts[group].parts[0].stored_pages

    assert not b.round_trip(group, world.scattered_blocks(pages), world.scattered_blocks(pages))


def test_a_shifted_page_is_noticed(bench):
    world = dense_hnd()
    part = world.part(0)
    runs = [StridedRun(p.base_addr, p.block_stride, p.nbytes) for p in part.pages.runs]
    runs[2] = replace(runs[2], nbytes=runs[2].nbytes - 1)
    b = bench(world, layouts=[SlotLayout([Part(GroupPages(tuple(runs), world.num_blocks), 4)])])

    assert not b.round_trip(0, world.scattered_blocks(4), world.scattered_blocks(4))


def test_swapped_pages_are_noticed(bench):
    b = bench(dense_hnd())
    world = b.world
    blocks = world.scattered_blocks(4)
    before = world.memory.copy()
    b.run("store", [item(b.layouts, 0, 3, SLOT, blocks)])
    world.scramble()

    b.run("load", [item(b.layouts, 0, 3, SLOT, blocks[[1, 0, 2, 3]])])

    places = b.content(0, blocks)
    assert not np.array_equal(before[places], world.memory[places])


# ------------------------------------------------------------------------------ trust in what is read


@pytest.fixture
def halfway(monkeypatch):
    """Run something between the two halves of the next copy: after its bytes, before its checks."""

    def arm(name: str, action) -> None:
        original = getattr(RunCopier, name)

        def moved_then(self, *args):
            moved = original(self, *args)
            action()
            return moved

        monkeypatch.setattr(RunCopier, name, moved_then)

    return arm


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_slot_that_changes_hands_during_the_copy_fails_the_job(kind, bench, halfway):
    b = bench(dense_hnd())
    halfway(kind, lambda: b.arena.set(3, SlotState.COMMITTED, 6))

    result = b.run(kind, [item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))])

    assert not result.ok
    assert result.reason == REASON_GENERATION


@pytest.mark.parametrize("state", [s for s in SlotState if s != SlotState.COMMITTED])
def test_only_committed_slots_are_read(state, bench):
    """Nothing is copied into blocks from a slot that is being written, evicted or quarantined."""
    b = bench(dense_hnd())
    before = b.world.memory.copy()
    b.arena.set(3, state, 5)

    result = b.submit("load", [item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))])

    assert (result.ok, result.reason) == (False, REASON_GENERATION)
    assert np.array_equal(before, b.world.memory)


@pytest.mark.parametrize("state", [s for s in SlotState if s != SlotState.RESERVED])
def test_only_reserved_slots_are_written(state, bench):
    b = bench(dense_hnd())
    b.arena.set(3, state, 5)

    result = b.submit("store", [item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))])

    assert (result.ok, result.reason) == (False, REASON_GENERATION)
    assert np.all(b.arena.data_array == 0xEE)


def test_one_stale_slot_of_eight_fails_the_whole_job(bench):
    b = bench(dense_hnd())
    blocks = b.world.scattered_blocks(4)
    items = [item(b.layouts, 0, row, row * (SLOT // 4), blocks) for row in range(8)]
    assert b.run("store", items).ok
    for row in range(8):
        b.arena.set(row, SlotState.COMMITTED, 5)
    b.arena.set(5, SlotState.COMMITTED, 6)

    assert not b.submit("load", items).ok


def test_checksum_is_written_and_a_flipped_byte_is_found(bench):
    b = bench(dense_hnd())
    one = item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4), checksum_at=2 * SLOT + 8)
    assert b.run("store", [one]).ok
    assert b.run("load", [one]).ok

    b.arena.data_array[SLOT + 77] ^= 1

    result = b.run("load", [one])
    assert (result.ok, result.reason) == (False, REASON_CHECKSUM)


def test_another_arena_is_refused_untouched(bench):
    """After a server came back with a new arena, old offsets must not be applied to it."""
    b = bench(dense_hnd())
    one = item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))

    wrong = b.run("store", [one], arena_id=b"some other arena")
    right = b.run("store", [one], arena_id=b.arena.arena_id)

    assert (wrong.ok, wrong.reason) == (False, REASON_ARENA)
    assert right.ok


@pytest.mark.parametrize(
    "broken",
    [
        {"offset": 8 * SLOT - 64},
        {"offset": -64},
        {"row": 64},
        {"row": -1},
        {"group": 1},
        {"checksum_at": 8 * SLOT - 7},
        {"pages": [Pages(1, 0, [1])]},
        {"pages": [Pages(-1, 0, [1])]},
        {"pages": [Pages(0, 3, [1, 2])]},
        {"pages": [Pages(0, -1, [1])]},
        {"pages": [Pages(0, 0, [24])]},
        {"pages": [Pages(0, 0, [-1])]},
    ],
    ids=str,
)
def test_what_lies_outside_is_refused_not_clipped(broken, bench):
    """A wrong number is a failed job, never a copy to a neighbouring place or a crash."""
    b = bench(dense_hnd())
    before = b.world.memory.copy()
    good = item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))

    result = b.submit("load", [replace(good, **broken)])

    assert not result.ok
    assert result.reason.startswith("error: slot")
    assert np.array_equal(before, b.world.memory)


# ---------------------------------------------------------------------------------- life of the jobs


@pytest.fixture
def held(monkeypatch):
    """Copies that wait at the first run until they are let go."""

    class Gate:
        def __init__(self) -> None:
            self.entered = threading.Event()
            self.go = threading.Event()

    gate = Gate()
    original = RunCopier.store

    def store(self, *args):
        gate.entered.set()
        assert gate.go.wait(WAIT)
        return original(self, *args)

    monkeypatch.setattr(RunCopier, "store", store)
    yield gate
    gate.go.set()


def small_runs(monkeypatch) -> None:
    """One run per run, so that a copy has places to stop."""
    runs = cpu.part_runs
    monkeypatch.setattr(cpu, "part_runs", lambda layout, part: runs(layout, part, 1))


def test_close_takes_effect_between_2d_runs_and_reports_only_then(bench, held, monkeypatch):
    small_runs(monkeypatch)
    b = bench(dense_hnd())
    one = item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))
    b.arena.set(3, SlotState.RESERVED, 5)
    b.engine.submit(*job("store", [one], 9))
    assert held.entered.wait(WAIT)

    closer = threading.Thread(target=b.engine.close)
    closer.start()
    while not b.engine._jobs.closed:
        pass
    while_copying = b.engine.poll()
    held.go.set()
    closer.join(WAIT)
    (result,) = b.engine.poll()

    assert while_copying == []
    assert (result.id, result.ok, result.reason) == (9, False, REASON_CLOSED)
    assert result.nbytes == 4 * 16 * 2 * 32 * 2  # the run that was under way, and no other


def test_a_passed_deadline_fails_the_job_only_after_the_copy_has_stopped(bench, held, monkeypatch):
    small_runs(monkeypatch)
    b = bench(dense_hnd())
    one = item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))
    b.arena.set(3, SlotState.RESERVED, 5)
    b.engine.submit(*job("store", [one], 9, deadline_s=0.05))
    assert held.entered.wait(WAIT)

    in_time = b.engine.drain(0.1)
    while_copying = b.engine.poll()
    held.go.set()
    assert b.engine.drain(WAIT)
    (result,) = b.engine.poll()

    assert not in_time
    assert while_copying == []
    assert (result.ok, result.reason) == (False, REASON_DEADLINE)


def test_a_job_that_never_started_fails_at_its_deadline(bench, held):
    """Behind a copy that hangs, others still get their result in time."""
    b = bench(dense_hnd())
    one = item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))
    b.arena.set(3, SlotState.RESERVED, 5)
    b.engine.submit(*job("store", [one], 1))
    assert held.entered.wait(WAIT)
    b.engine.submit(*job("store", [one], 2, deadline_s=0.02))

    b.engine.drain(0.1)

    assert [(r.id, r.reason) for r in b.engine.poll()] == [(2, REASON_DEADLINE)]


def test_loads_overtake_waiting_stores(bench, held):
    b = bench(dense_hnd())
    blocks = b.world.scattered_blocks(4)
    for row in (1, 2):
        b.arena.set(row, SlotState.RESERVED, 5)
    b.arena.set(3, SlotState.COMMITTED, 5)
    b.engine.submit(*job("store", [item(b.layouts, 0, 1, 0, blocks)], 1))
    assert held.entered.wait(WAIT)
    b.engine.submit(*job("store", [item(b.layouts, 0, 2, SLOT, blocks)], 2))
    b.engine.submit(*job("load", [item(b.layouts, 0, 3, 2 * SLOT, blocks)], 3))

    held.go.set()
    assert b.engine.drain(WAIT)

    assert [r.id for r in b.engine.poll()] == [1, 3, 2]


def test_an_exception_in_the_copy_is_a_failed_job_and_the_thread_goes_on(bench, halfway):
    b = bench(dense_hnd())
    one = item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))

    def break_once(calls=iter([True])) -> None:  # noqa: B008 - one iterator for all calls
        if next(calls, False):
            raise OSError("the memory is on fire")

    halfway("store", break_once)

    first, second = b.run("store", [one]), b.run("store", [one])

    assert not first.ok
    assert first.reason.startswith("error: OSError")
    assert second.ok


def test_after_close_jobs_end_at_once(bench):
    b = bench(dense_hnd())
    b.engine.close()
    b.engine.close()

    result = b.submit("store", [item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))])

    assert (result.ok, result.reason) == (False, REASON_CLOSED)


def test_an_empty_job_succeeds_at_once(bench):
    b = bench(dense_hnd())

    assert b.submit("load", []).ok
