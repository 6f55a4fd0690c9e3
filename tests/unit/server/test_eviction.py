"""Who leaves: the least recently used, from the tail of prefixes, and never what is in use."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_shm.arena.layout import HOT_DTYPE, SlotState
from lmcache_shm.protocol.messages import BUSY, EXISTS, FULL
from lmcache_shm.protocol.rules import Full, Recurrent
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.catalog.eviction import victims
from tests.unit.server import rig
from tests.unit.server.rig import CHUNK, SLAB, Prefix, reserve, spec, store


@given(
    st.lists(
        st.tuples(st.sampled_from(list(SlotState)), st.integers(0, 2), st.integers(0, 50)),
        max_size=300,
    ),
    st.integers(0, 40),
    st.booleans(),
)
def test_victims_are_the_oldest_that_may_leave(rows, n, subset):
    hot = np.zeros(len(rows), HOT_DTYPE)
    for i, (state, pins, tick) in enumerate(rows):
        hot["state"][i], hot["pins"][i], hot["tick"][i] = state, pins, tick
    among = np.arange(0, len(rows), 2, dtype=np.int32) if subset else None
    allowed = range(0, len(rows), 2 if subset else 1)
    may_leave = [i for i in allowed if rows[i][0] == SlotState.COMMITTED and not rows[i][1]]
    expected = sorted(rows[i][2] for i in may_leave)[:n]

    found = victims(hot, n, among).tolist()

    assert expected == [rows[i][2] for i in found]
    assert set(found) <= set(may_leave)
    assert len(set(found)) == len(found)


@pytest.fixture
def tight():
    """Room for exactly 15 slots of 12000 bytes: five a slab."""
    with rig.arena_of(3 * SLAB) as arena:
        catalog = Catalog(arena)
        yield catalog, catalog.register(b"m", [spec(Full(), 12000)])


def chunks_of(catalog, space, prefix, n=20):
    return catalog.acquire(space.id, prefix.keys, 0, n * CHUNK + 1)


def test_prefixes_shrink_from_the_tail(tight):
    """A new prefix takes the last chunks of the old one; what is left of that is still a prefix."""
    catalog, space = tight
    old, new = Prefix(space, "old", 15), Prefix(space, "new", 6)
    assert len(store(catalog, space, old, range(15))) == 15

    assert len(store(catalog, space, new, range(6))) == 6

    assert chunks_of(catalog, space, new).n_chunks == 6
    assert chunks_of(catalog, space, old).n_chunks == 9


def test_what_was_used_stays(tight):
    catalog, space = tight
    a, b, c = (Prefix(space, name, 5) for name in "abc")
    for prefix in (a, b, c):
        store(catalog, space, prefix, range(5))
    for rows in chunks_of(catalog, space, a).rows:
        catalog.release(rows)

    store(catalog, space, Prefix(space, "d", 5), range(5))

    assert [chunks_of(catalog, space, p).n_chunks for p in (a, b, c)] == [5, 0, 5]


def test_a_prefix_that_is_held_by_the_engine_itself_counts_as_used(tight):
    """The engine's own cache covers it all, so nothing is loaded; still it is in use."""
    catalog, space = tight
    a, b, c = (Prefix(space, name, 5) for name in "abc")
    for prefix in (a, b, c):
        store(catalog, space, prefix, range(5))
    hit = catalog.acquire(space.id, a.keys, 5 * CHUNK, 5 * CHUNK + 9)
    assert hit.n_chunks == 0

    store(catalog, space, Prefix(space, "d", 5), range(5))

    assert chunks_of(catalog, space, a).n_chunks == 5


def test_continuing_a_prefix_makes_all_of_it_new(tight):
    """A long answer: its later chunks come one by one, long after its beginning was looked up."""
    catalog, space = tight
    long, others = Prefix(space, "long", 8), [Prefix(space, f"o{i}", 3) for i in range(9)]
    store(catalog, space, long, range(4))
    for i, other in enumerate(others):
        store(catalog, space, other, range(3))
        if i % 2:
            store(catalog, space, long, [4 + i // 2])

    assert chunks_of(catalog, space, long).n_chunks == 8


def test_a_prefix_longer_than_the_arena_keeps_its_beginning(tight):
    catalog, space = tight
    prefix = Prefix(space, "long", 40)
    stored = [reserve(catalog, space, prefix, [i])[0] for i in range(40)]
    catalog.commit([row for row in stored if row >= 0])

    assert [row >= 0 for row in stored] == [i < 15 for i in range(40)]
    assert set(stored[15:]) == {FULL}
    assert chunks_of(catalog, space, prefix, 40).n_chunks == 15
    assert catalog.snapshot()["counters"]["stores_skipped_full"] == 25


def test_a_batch_longer_than_the_arena_does_not_take_its_own_beginning(tight):
    """Ten chunks are there; thirty more of the same prefix are stored at once, with room for five."""
    catalog, space = tight
    prefix = Prefix(space, "long", 40)
    store(catalog, space, prefix, range(10))

    rows = reserve(catalog, space, prefix, range(10, 40))

    assert [row >= 0 for row in rows] == [True] * 5 + [False] * 25
    catalog.commit(rows[:5])
    assert chunks_of(catalog, space, prefix, 40).n_chunks == 15


def test_newest_wins_in_a_burst(tight):
    """Eight times the capacity at once: the last ones are there, the others counted as evicted."""
    catalog, space = tight
    prefixes = [Prefix(space, f"p{i}", 3) for i in range(40)]
    for prefix in prefixes:
        assert len(store(catalog, space, prefix, range(3))) == 3

    found = [chunks_of(catalog, space, prefix).n_chunks for prefix in prefixes]

    assert found == [0] * 35 + [3] * 5
    assert catalog.snapshot()["counters"]["evictions"] == 120 - 15


def test_everything_pinned_is_full_and_counted(tight):
    catalog, space = tight
    old = Prefix(space, "old", 15)
    store(catalog, space, old, range(15))
    hit = chunks_of(catalog, space, old)

    assert reserve(catalog, space, Prefix(space, "new", 3), range(3)) == [FULL] * 3
    assert catalog.snapshot()["counters"]["stores_skipped_full"] == 3

    catalog.release(hit.rows[0])
    assert min(reserve(catalog, space, Prefix(space, "new", 3), range(3))) >= 0


def test_reserved_and_quarantined_slots_never_leave(tight):
    catalog, space = tight
    rows = reserve(catalog, space, Prefix(space, "a", 15), range(15))
    catalog.quarantine(rows[:5])

    assert reserve(catalog, space, Prefix(space, "new", 1), [0]) == [FULL]
    assert catalog.unquarantine(0) == 5
    assert min(reserve(catalog, space, Prefix(space, "new", 5), range(5))) >= 0


def test_second_writer_of_a_key_is_told(tight):
    catalog, space = tight
    prefix = Prefix(space, "a", 3)
    rows = reserve(catalog, space, prefix, [0, 1])
    assert reserve(catalog, space, prefix, [0, 1, 2])[:2] == [BUSY, BUSY]

    catalog.commit(rows)

    assert reserve(catalog, space, prefix, [0, 1, 2]) == [EXISTS, EXISTS, BUSY]


def test_a_starving_size_takes_cold_extents_of_another():
    """One size fills the arena; another one comes, needs more than one extent, and gets them."""
    with rig.arena_of(16 * SLAB) as arena:
        catalog = Catalog(arena)
        first = catalog.register(b"first", [spec(Full(), 12000)])
        second = catalog.register(b"second", [spec(Full(), 20000), spec(Recurrent(), 100_000)])
        cold, warm = Prefix(first, "cold", 60), Prefix(first, "warm", 20)
        assert len(store(catalog, first, cold, range(60))) == 60
        assert len(store(catalog, first, warm, range(20))) == 20

        new = Prefix(second, "new", 9)
        assert len(store(catalog, second, new, range(9))) == 9
        assert len(store(catalog, second, new, [8], group=1)) == 1

        assert catalog.acquire(second.id, new.keys, 0, 9 * CHUNK + 1).n_chunks == 9
        assert chunks_of(catalog, first, warm).n_chunks == 20
        assert 0 < chunks_of(catalog, first, cold, 60).n_chunks < 60
        assert catalog.snapshot()["counters"]["rebinds"] >= 3
        assert catalog.check() == []


def test_a_size_that_is_no_longer_used_gives_its_room_back():
    """No calcification: after the traffic has changed, nearly all of the arena serves the new size."""
    with rig.arena_of(32 * SLAB) as arena:
        catalog = Catalog(arena)
        first = catalog.register(b"first", [spec(Full(), 12000)])
        second = catalog.register(b"second", [spec(Full(), 20000)])
        for i in range(20):
            store(catalog, first, Prefix(first, f"f{i}", 8), range(8))
        for i in range(60):
            store(catalog, second, Prefix(second, f"s{i}", 8), range(8))
        slots = {
            space["id"]: space["groups"][0]["slots"] for space in catalog.snapshot()["namespaces"]
        }

        assert slots[second.id] >= 0.75 * 32 * 3
        assert catalog.check() == []


def test_two_busy_sizes_do_not_rob_each_other():
    """With equal use of both, extents stay where they are."""
    with rig.arena_of(32 * SLAB) as arena:
        catalog = Catalog(arena)
        spaces = [
            catalog.register(b"%d" % i, [spec(Full(), size)])
            for i, size in enumerate((12000, 20000))
        ]
        for i in range(400):
            space = spaces[i % 2]
            store(catalog, space, Prefix(space, f"p{i}", 2), range(2))
            if i == 200:
                before = catalog.snapshot()["counters"]["rebinds"]

        assert catalog.snapshot()["counters"]["rebinds"] - before <= 4
        assert catalog.check() == []


def test_arena_smaller_than_a_slot_is_refused_with_a_remedy():
    with rig.arena_of(2 * SLAB + 4096) as arena:
        catalog = Catalog(arena)
        with pytest.raises(
            Exception, match="larger --l1-size-gb or a smaller --chunk-size"
        ) as error:
            catalog.register(b"m", [spec(Full(), 2 * SLAB + 1, name="full")])

        assert "one chunk of group full takes 0.1 MiB, the arena has room for 0.1 MiB" in str(
            error.value
        )
        assert "\n" not in str(error.value)
        assert catalog.register(b"m", [spec(Full(), 2 * SLAB)]).id


def test_one_slot_as_large_as_the_arena():
    with rig.arena_of(3 * SLAB) as arena:
        catalog = Catalog(arena)
        large = catalog.register(b"large", [spec(Full(), 3 * SLAB)])
        small = catalog.register(b"small", [spec(Full(), 777)])
        for i in range(3):
            assert len(store(catalog, small, Prefix(small, f"s{i}", 48), range(48))) == 48
            assert len(store(catalog, large, Prefix(large, f"l{i}", 1), [0])) == 1
            assert catalog.check() == []
