"""Slots of every size side by side: no byte twice, little wasted, and `check` that notices when it is not so."""

import itertools
import os
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_shm.arena import segment
from lmcache_shm.arena.allocator import SlabAllocator, slot_class
from lmcache_shm.arena.check import check
from lmcache_shm.arena.layout import PAGE, SlotState

SLAB = 64 << 10
SIZES = [1, 3333, 4096, 4097, 12345, 20000, 33333, 65536, 65537, 70001, 100_000, 333_333]


def new_arena(
    tag: str, slabs: int, *, max_slots: int | None = None, tail: int = 0
) -> segment.Arena:
    return segment.create(
        f"test-{os.getpid()}-{tag}", slabs * SLAB + tail, slab_bytes=SLAB, max_slots=max_slots
    )


@pytest.fixture
def arena():
    arena = new_arena("alloc", 40, tail=3333)
    yield arena
    arena.unlink()
    arena.close()


def reserve(arena: segment.Arena, rows: np.ndarray, first_key: int = 1) -> None:
    """What the catalog does to rows it got, in short."""
    arena.cold["key"][rows, 0] = np.arange(first_key, first_key + len(rows))
    arena.hot["state"][rows] = SlotState.RESERVED


def ranges(arena: segment.Arena, rows: np.ndarray) -> list[tuple[int, int]]:
    offset = arena.cold["offset"][rows].astype(int)
    return sorted(
        zip(
            offset.tolist(),
            (offset + arena.cold["slot_bytes"][rows].astype(int)).tolist(),
            strict=True,
        )
    )


def test_slots_are_pages():
    assert [slot_class(n) for n in (0, 1, 4096, 4097, 12345)] == [4096, 4096, 4096, 8192, 16384]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.integers(1, 60)), min_size=1, max_size=12),
    st.sampled_from([1, 7, 40]),
    st.sampled_from([None, 1, 50, 333]),
    st.integers(0, 2**32),
)
def test_whatever_is_asked_for_no_byte_is_given_twice(wishes, slabs, max_slots, seed):
    arena = new_arena("hyp", slabs, max_slots=max_slots)
    try:
        allocator, rng, held, key = SlabAllocator(arena), np.random.default_rng(seed), [], 1
        for size, n in wishes:
            rows = allocator.alloc(size, n)
            assert len(rows) == len(set(rows.tolist())) <= n
            assert (arena.hot["state"][rows] == SlotState.FREE).all()
            assert (arena.cold["slot_bytes"][rows] == slot_class(size)).all()
            reserve(arena, rows, key)
            key += len(rows)
            held += rows.tolist()
            if held and rng.random() < 0.4:
                back = rng.choice(held, size=rng.integers(1, len(held) + 1), replace=False)
                before = arena.hot["generation"][back].copy()
                allocator.free(back.astype(np.int32))
                assert (arena.hot["generation"][back] == before + 1).all()
                held = sorted(set(held) - set(back.tolist()))
                if rng.random() < 0.5:
                    allocator.release_empty()
            spans = ranges(arena, np.array(held, np.int32))
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
            assert all(start % PAGE == 0 and end <= arena.data_bytes for start, end in spans)
            assert check(arena) == []
            free = np.flatnonzero(arena.hot["state"] == SlotState.FREE)
            assert sorted(allocator.free_rows().tolist()) == free.tolist()
    finally:
        arena.unlink()
        arena.close()


@pytest.mark.parametrize(
    "slot", [4096, 5000, 33_000_000, 18_000_000, 9_999_999, 800_000, 1_234_567]
)
@pytest.mark.parametrize("gib", [4, 64, 900])
def test_an_extent_wastes_at_most_one_part_in_32(slot, gib):
    """Sizes of real models in arenas of real size. Nothing is mapped: the plan is arithmetic."""
    from lmcache_shm.arena.layout import Geometry

    g = Geometry.plan(gib << 30, 0, True)
    allocator = SlabAllocator.__new__(SlabAllocator)
    allocator.slab_bytes, allocator.slabs, allocator.per_slab = (
        g.slab_bytes,
        g.slabs,
        g.rows_per_slab,
    )
    m = allocator._extent_slabs(slot_class(slot), g.slabs)
    run = m * g.slab_bytes
    by_bytes = run // slot_class(slot)

    assert run - by_bytes * slot_class(slot) <= run / 32
    assert run <= max((gib << 30) / 16, slot_class(slot) + g.slab_bytes)
    # Rows suffice for all slots of at least 1/4000 of an arena's slab... that is, of any real model.
    assert slot < 500_000 or by_bytes <= m * g.rows_per_slab


def test_the_whole_arena_can_be_used(arena):
    allocator = SlabAllocator(arena)
    rows = allocator.alloc(20000, 10_000)

    assert len(rows) == 40 * (SLAB // 20480)
    assert len(allocator.alloc(20000, 1)) == 0
    assert len(allocator.alloc(1, 1)) == 0


def test_what_is_left_between_extents_is_used_too():
    """Three slabs, slots of one and a half slabs: the best run (3 slabs, two slots); then 1 + 2 slabs."""
    arena = new_arena("gap", 3)
    try:
        allocator = SlabAllocator(arena)
        assert len(allocator.alloc(65536, 1)) == 1
        assert len(allocator.alloc(98304, 5)) == 1
        assert len(allocator.alloc(4096, 50)) == 0
        assert check(arena) == []
    finally:
        arena.unlink()
        arena.close()


def test_rows_bound_the_number_of_tiny_slots():
    arena = new_arena("rows", 4, max_slots=8)
    try:
        allocator = SlabAllocator(arena)
        assert len(allocator.alloc(4096, 1000)) == 8
        assert check(arena) == []
    finally:
        arena.unlink()
        arena.close()


def test_neighbouring_slots_are_handed_out_in_order(arena):
    """A prefix's chunks follow each other in memory, which is kind to prefetchers and DMA."""
    rows = SlabAllocator(arena).alloc(12345, 4)

    assert np.diff(arena.cold["offset"][rows].astype(int)).tolist() == [16384] * 3


def test_release_empty_leaves_what_is_used(arena):
    allocator = SlabAllocator(arena)
    rows = allocator.alloc(70001, 6)
    reserve(arena, rows)
    others = allocator.alloc(5000, 9)
    reserve(arena, others, 100)
    allocator.free(rows[1:])

    released = allocator.release_empty()

    assert released >= 1
    assert check(arena) == []
    assert (arena.hot["state"][rows[0]], arena.hot["state"][others[0]]) == (2, 2)
    assert allocator.extents_of(70001) >= 1


# ------------------------------------------------------------------------- check: negative controls
def damaged(arena, change):
    """What `check` says after a change to a table with ten reserved rows."""
    rows = SlabAllocator(arena).alloc(12345, 10)
    reserve(arena, rows)
    assert check(arena) == []
    change(arena.hot, arena.cold, arena.slabs, rows)
    return check(arena)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda h, c, s, r: c["key"].__setitem__(r[1], c["key"][r[0]]), "key stands twice"),
        (lambda h, c, s, r: c["key"].__setitem__(r[1], 0), "named rows without a key"),
        (
            lambda h, c, s, r: c["offset"].__setitem__(r[1], c["offset"][r[1]] - 4096),
            "overlap the one before",
        ),
        (
            lambda h, c, s, r: c["offset"].__setitem__(r[1], c["offset"][r[0]]),
            "not at their extent's place",
        ),
        (lambda h, c, s, r: c["offset"].__setitem__(r[1], 1 << 40), "beyond the arena's end"),
        (
            lambda h, c, s, r: c["slot_bytes"].__setitem__(r[1], 20480),
            "not at their extent's place",
        ),
        (
            lambda h, c, s, r: c["token_bytes"].__setitem__(r[1], 20000),
            "token bytes exceed the slot",
        ),
        (lambda h, c, s, r: h["state"].__setitem__(r[1], 3), "do not fit their seal"),
        (lambda h, c, s, r: h["state"].__setitem__(r[1], 9), "unknown state"),
        (lambda h, c, s, r: h["state"].__setitem__(r[1], 0), "whose rows are not in use"),
        (lambda h, c, s, r: h["state"].__setitem__(-1, 1), "in use outside any extent"),
        (lambda h, c, s, r: h["pins"].__setitem__(r[1], 1), "pinned rows that are not committed"),
        (
            lambda h, c, s, r: h.__setitem__(r[1], (1, 1, *h[r[1]].tolist()[2:])),
            "cleared rows that were not freed",
        ),
        (lambda h, c, s, r: s["slots"].__setitem__(0, 99), "part of no sound extent"),
        (lambda h, c, s, r: s["first"].__setitem__(0, 3), "part of no sound extent"),
        (lambda h, c, s, r: s["extent_slabs"].__setitem__(0, 2), "part of no sound extent"),
        (lambda h, c, s, r: s["slot_bytes"].__setitem__(0, 1234), "part of no sound extent"),
        (lambda h, c, s, r: s["extent_slabs"].__setitem__(0, 2**32 - 1), "part of no sound extent"),
    ],
)
def test_check_reports(arena, change, finding):
    findings = damaged(arena, change)

    assert any(finding in line for line in findings), findings
    assert all("\n" not in line for line in findings)


def test_check_names_a_few_rows_and_counts_the_rest(arena):
    findings = damaged(arena, lambda h, c, s, r: h["pins"].__setitem__(r, 1))

    assert len(findings) == 1
    assert re.fullmatch(
        r"pinned rows that are not committed: (\d+, ){4}\d+ and 5 more", findings[0]
    )


def test_check_from_another_mapping(arena):
    reader = segment.attach(arena.instance, writable_data=False)
    rows = SlabAllocator(arena).alloc(12345, 3)
    reserve(arena, rows)

    assert check(reader, live=True) == []
    arena.hot["pins"][rows[0]] = 1
    assert check(reader, live=True) == [f"pinned rows that are not committed: {rows[0]}"]
    reader.close()


def test_check_beside_a_busy_server_has_no_false_alarm(arena):
    """Another thread reserves and frees all the time; what is merely under way is no finding."""
    import threading

    allocator, stop = SlabAllocator(arena), threading.Event()

    def churn():
        key = 1
        while not stop.is_set():
            rows = allocator.alloc(12345, 40)
            reserve(arena, rows, key)
            key += 40
            allocator.free(rows)
            allocator.release_empty()

    thread = threading.Thread(target=churn)
    thread.start()
    reader = segment.attach(arena.instance, writable_data=False)
    try:
        assert [check(reader, live=True) for _ in range(20)] == [[]] * 20
    finally:
        stop.set()
        thread.join()
        reader.close()
