"""A request longer than the arena: the longest beginning of it that fits stays, whole in all groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_shm.arena.allocator import SlabAllocator
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.protocol.messages import FULL
from lmcache_shm.protocol.rules import ChunkedLocal, Full, Recurrent, Rule, Window
from lmcache_shm.server.catalog import reservation
from lmcache_shm.server.catalog.catalog import Catalog
from tests.unit.server import rig
from tests.unit.server.rig import CHUNK, SLAB, Prefix, reserve, reserve_all, spec, store

OTHER_RULES = st.one_of(
    st.just(Recurrent()),
    st.builds(Window, st.sampled_from([1, 16, 20, 40])),
    st.builds(ChunkedLocal, st.sampled_from([16, 32, 64])),
)
SIZES = st.sampled_from([3000, 4096, 12_000, 20_000, 60_000, 70_000, 100_000])


def store_all(catalog, space, prefix, chunks):
    """Reserve and commit these chunks in all groups with one message, as an engine's step does."""
    entries = [(prefix, chunk, group.number) for chunk in chunks for group in space.groups]
    rows = [row for row in reserve_all(catalog, space, entries) if row >= 0]
    catalog.commit(rows)
    return rows


def usable(catalog, space, prefix, n):
    hit = catalog.acquire(space.id, prefix.keys, 0, n * CHUNK + 1)
    for rows in hit.rows:
        catalog.release(rows)
    return hit.n_chunks


def fitting(allocator: SlabAllocator, sizes: list[int]) -> int:
    """Chunks of which all groups surely fit: an extent of each group may be cut short."""
    extents = [allocator.extent_slabs(size) for size in sizes]
    each = sum(m / allocator.slots_in(size, m) for size, m in zip(sizes, extents, strict=True))
    return max(int((allocator.slabs - sum(extents)) / each), 0)


@settings(max_examples=150)
@given(st.data())
def test_whatever_fits_of_one_long_prefix_is_usable(data):
    """Any groups, sizes, and steps; the engine looks up what it has in between, or does not."""
    rules: list[Rule] = [Full(), *data.draw(st.lists(OTHER_RULES, max_size=2))]
    sizes = [data.draw(SIZES) for _ in rules]
    slabs = data.draw(st.integers(2, 24))
    chunks = data.draw(st.integers(1, 80))
    look = data.draw(st.booleans())
    with rig.arena_of(slabs * SLAB) as arena:
        allocator = SlabAllocator(arena)
        if not all(allocator.fits(size) for size in sizes):
            return
        catalog = Catalog(arena)
        specs = [
            spec(rule, size, str(i))
            for i, (rule, size) in enumerate(zip(rules, sizes, strict=True))
        ]
        space = catalog.register(b"m", specs)
        prefix = Prefix(space, "long", chunks)
        at = 0
        while at < chunks:
            if look:
                usable(catalog, space, prefix, at)
            step = data.draw(st.integers(1, 9))
            store_all(catalog, space, prefix, range(at, min(at + step, chunks)))
            at += step

        assert usable(catalog, space, prefix, chunks) >= min(chunks, fitting(allocator, sizes))
        assert catalog.check() == []


@pytest.fixture
def tight():
    """Room for exactly 15 slots of 12000 bytes: five a slab."""
    with rig.arena_of(3 * SLAB) as arena:
        catalog = Catalog(arena)
        yield catalog, catalog.register(b"m", [spec(Full(), 12000)])


def test_what_follows_a_chunk_without_room_finds_none(tight):
    """Step by step, each committed before the next: the tail, which no hit could reach, takes nothing."""
    catalog, space = tight
    prefix = Prefix(space, "long", 40)
    stored = [len(store(catalog, space, prefix, [i])) for i in range(40)]

    assert stored == [1] * 15 + [0] * 25
    assert usable(catalog, space, prefix, 40) == 15
    counters = catalog.snapshot()["counters"]
    assert (counters["evictions"], counters["stores_skipped_full"]) == (0, 25)


def test_a_chunk_that_was_refused_is_stored_when_there_is_room(tight):
    """All was pinned; the next request with the same prompt stores what the first one could not."""
    catalog, space = tight
    other, long = Prefix(space, "other", 12), Prefix(space, "long", 9)
    store(catalog, space, other, range(12))
    hit = catalog.acquire(space.id, other.keys, 0, 12 * CHUNK + 1)
    assert len(store(catalog, space, long, range(5))) == 3
    assert len(store(catalog, space, long, range(5, 9))) == 0
    catalog.release(hit.rows[0])
    assert len(store(catalog, space, long, range(5, 9))) == 0  # chunks 3 and 4 are still missing

    assert len(store(catalog, space, long, range(3, 5))) == 2
    assert len(store(catalog, space, long, range(5, 9))) == 4

    assert usable(catalog, space, long, 9) == 9


def test_a_branch_off_what_was_refused_finds_no_room_either(tight):
    catalog, space = tight
    prefix, branch = Prefix(space, "long", 20), Prefix(space, "long", 21)
    store(catalog, space, prefix, range(20))

    assert reserve(catalog, space, branch, [20]) == [FULL]
    assert usable(catalog, space, prefix, 20) == 15


def test_the_next_request_takes_the_room_of_a_long_one(tight):
    """The long one is not in anybody's way: what is newer takes its tail."""
    catalog, space = tight
    long, new = Prefix(space, "long", 40), Prefix(space, "new", 6)
    for i in range(40):
        store(catalog, space, long, [i])

    assert len(store(catalog, space, new, range(6))) == 6
    assert usable(catalog, space, new, 6) == 6
    assert usable(catalog, space, long, 40) == 9


def test_a_chunk_whose_parent_left_by_itself_is_stored(tight):
    """An engine may hold the beginning in its own cache. Nothing was refused, so nothing is held against it."""
    catalog, space = tight
    prefix = Prefix(space, "a", 6)
    store(catalog, space, Prefix(space, "old", 15), range(15))

    assert len(store(catalog, space, prefix, range(4, 6))) == 2


def test_after_a_clear_nothing_is_held_against_anybody(tight):
    catalog, space = tight
    prefix = Prefix(space, "long", 20)
    store(catalog, space, prefix, range(16))
    assert len(store(catalog, space, prefix, [16])) == 0
    catalog.clear()

    assert len(store(catalog, space, prefix, [16])) == 1


def test_few_refused_chunks_are_remembered(tight, monkeypatch):
    monkeypatch.setattr(reservation, "REMEMBERED", 8)
    catalog, space = tight
    for name in "abc":
        store(catalog, space, Prefix(space, name, 40), range(40))

    assert len(catalog._reserver._refused) == 8


def test_one_group_does_not_take_all_the_room_of_a_large_step():
    """Sixty chunks at once, with room for about twenty of both groups."""
    with rig.arena_of(8 * SLAB) as arena:
        catalog = Catalog(arena)
        space = catalog.register(b"m", [spec(Full(), 12_000), spec(Recurrent(), 12_000)])
        prefix = Prefix(space, "long", 60)

        store_all(catalog, space, prefix, range(60))

        assert usable(catalog, space, prefix, 60) >= 19


def test_a_growing_group_leaves_the_state_that_its_prefix_needs():
    """Full attention takes the extents of old states, but never the one with the newest."""
    with rig.arena_of(12 * SLAB) as arena:
        catalog = Catalog(arena)
        space = catalog.register(b"m", [spec(Full(), 20_000), spec(Recurrent(), 60_000)])
        prefix = Prefix(space, "long", 60)
        found = []
        for i in range(60):
            store_all(catalog, space, prefix, [i])
            found.append(usable(catalog, space, prefix, 60))

        assert found == sorted(found), "it never shrinks while it grows"
        assert found[-1] > 12 * 3 / 2
        assert catalog.snapshot()["counters"]["rebinds"] > 0
        groups = [
            np.count_nonzero(arena.hot["group"][arena.hot["state"] == SlotState.COMMITTED] == g)
            for g in (0, 1)
        ]
        assert groups[0] > groups[1] > 0
