"""An arena whose memory is not all reserved yet, or never will be: what is not there is not used."""

import errno
import threading

import numpy as np
import pytest

from lmcache_shm.arena import memory, segment
from lmcache_shm.arena.check import check
from lmcache_shm.protocol.messages import FULL
from lmcache_shm.protocol.rules import Full, Recurrent
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.catalog.groups import CatalogError
from tests.unit.server import rig
from tests.unit.server.rig import SLAB, Prefix, reserve, spec, store, visible

SLABS, THERE = 40, 9


@pytest.fixture
def arena():
    """THERE of SLABS slabs are reserved, and half a slab more."""
    with rig.arena_of(SLABS * SLAB, first=THERE * SLAB + SLAB // 2) as arena:
        yield arena


def beyond(arena):
    """Bytes of slots that are bound where no memory is."""
    cold, bound = arena.cold, arena.hot["state"] > 0
    return int((cold["offset"] + cold["slot_bytes"])[bound].max(initial=0)) > arena.backed_bytes


def stop_growing(arena):
    arena.live["stopped"] = errno.ENOSPC


def test_while_it_grows_nothing_leaves_and_what_has_no_room_is_refused(arena):
    catalog = Catalog(arena)
    space = catalog.register(b"m", [spec(Full(), SLAB // 2)])
    first, second = Prefix(space, "a", 2 * THERE), Prefix(space, "b", 6)
    assert len(store(catalog, space, first, range(2 * THERE))) == 2 * THERE

    assert reserve(catalog, space, second, range(6)) == [FULL] * 6
    assert catalog.snapshot()["counters"]["evictions"] == 0
    assert not beyond(arena)

    assert segment.reserve_rest(arena, threading.Event()) is None
    assert FULL not in reserve(catalog, space, second, range(6))
    assert catalog.snapshot()["counters"]["evictions"] == 0
    assert catalog.check(thorough=True) == []


def test_where_it_stopped_growing_the_oldest_leave_as_ever(arena):
    stop_growing(arena)
    catalog = Catalog(arena)
    space = catalog.register(b"m", [spec(Full(), SLAB // 2)])
    store(catalog, space, Prefix(space, "a", 2 * THERE), range(2 * THERE))
    new = store(catalog, space, Prefix(space, "b", 6), range(6))

    assert len(new) == 6
    assert catalog.snapshot()["counters"]["evictions"] == 6
    assert not beyond(arena)
    assert catalog.check(thorough=True) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_another_size_takes_over_only_what_is_there(arena, stopped):
    """Free slabs are the coldest of all: those without memory must not look free."""
    catalog = Catalog(arena)
    space = catalog.register(b"m", [spec(Full(), SLAB // 2), spec(Recurrent(), 2 * SLAB)])
    store(catalog, space, Prefix(space, "a", 2 * THERE), range(2 * THERE))
    if stopped:
        stop_growing(arena)
    rows = store(catalog, space, Prefix(space, "b", 3), range(3), group=1)

    assert bool(rows) == stopped
    assert not beyond(arena)
    assert catalog.check(thorough=True) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_large_slots_wait_for_a_run_that_is_worth_it(arena, stopped):
    """A gap that is still becoming larger is not cut into a small extent that wastes half of it."""
    catalog = Catalog(arena)
    size = 10 * 4096
    if stopped:
        stop_growing(arena)
    allocator = catalog._slots.allocator
    wanted, left = allocator.extent_slabs(size), THERE % allocator.extent_slabs(size)
    assert 0 < left < wanted
    while len(allocator.alloc(size, 1)):
        pass
    bound = arena.slabs["extent_slabs"]

    assert set(bound[bound > 0].tolist()) == ({wanted, left} if stopped else {wanted})
    assert not beyond(arena)


def test_a_slot_that_will_fit_is_let_in_and_one_that_never_will_is_not(arena):
    """Judged by the whole arena while it grows, and by what is there once it has stopped."""
    catalog = Catalog(arena)
    large = [spec(Full(), (THERE + 2) * SLAB)]
    catalog.register(b"m", large)
    stop_growing(arena)

    with pytest.raises(CatalogError, match=f"has room for {THERE * SLAB / 2**20:.1f} MiB"):
        catalog.register(b"other", large)


def test_bytes_of_all_states_add_up(arena):
    found = Catalog(arena).snapshot()["arena"]

    assert sum(found["bytes"].values()) == arena.data_bytes
    assert found["bytes"]["unbacked"] == (SLABS - THERE) * SLAB
    assert found["bytes"]["free"] == THERE * SLAB
    assert (found["backed_bytes"], found["growing"]) == (THERE * SLAB + SLAB // 2, True)


# ---------------------------------------------------------------------------------------- recovery
def test_what_was_stored_before_the_crash_is_found_and_growth_goes_on(arena):
    catalog = Catalog(arena)
    space = catalog.register(b"m", [spec(Full(), SLAB // 2)])
    prefix = Prefix(space, "a", 10)
    store(catalog, space, prefix, range(10))
    again = Catalog(arena)

    assert again.recover()["slots"] == 10
    assert len(visible(again)) == 10
    space = again.register(b"m", [spec(Full(), SLAB // 2)])
    more = Prefix(space, "b", 2 * THERE)
    stored = store(again, space, more, range(2 * THERE))
    assert len(stored) == 2 * THERE - 10, "the rest finds no room yet, and nothing leaves"
    assert not beyond(arena)
    segment.reserve_rest(arena, threading.Event())
    assert len(store(again, space, more, range(2 * THERE))) == 10
    assert again.check(thorough=True) == []


def test_a_table_that_uses_what_is_not_reserved_is_not_trusted(arena):
    """And `check` names the slabs. With the mark where it was it is sound: so this can fail."""
    catalog = Catalog(arena)
    space = catalog.register(b"m", [spec(Full(), SLAB // 2)])
    store(catalog, space, Prefix(space, "a", 2 * THERE), range(2 * THERE))
    assert check(arena) == []
    assert Catalog(arena).recover()["slots"] == 2 * THERE

    arena.live["backed"] = (THERE - 1) * SLAB
    assert check(arena)[0].startswith("slabs in use whose memory is not reserved")
    with pytest.raises(CatalogError, match="slab table is damaged"):
        Catalog(arena).recover()


def test_an_empty_extent_beyond_the_mark_is_given_up(arena):
    catalog = Catalog(arena)
    catalog.register(b"m", [spec(Full(), SLAB // 2)])
    catalog._slots.allocator.bind(SLAB // 2, THERE + 3, 2)
    again = Catalog(arena)

    assert again.recover()["slots"] == 0
    assert not arena.slabs["extent_slabs"].any()
    assert check(arena) == []


def test_stores_beside_a_thread_that_reserves(arena, monkeypatch):
    """Slabs come while slots are given out; never one too early, and all of them in the end."""
    monkeypatch.setattr(memory, "STEP", SLAB // 4)
    catalog = Catalog(arena)
    space = catalog.register(b"m", [spec(Full(), SLAB // 2)])
    thread = threading.Thread(target=segment.reserve_rest, args=(arena, threading.Event()))
    thread.start()
    stored = 0
    while stored < 2 * SLABS:
        rows = store(catalog, space, Prefix(space, f"p{stored}", 1), [0])
        assert not beyond(arena)
        stored += len(rows)
    thread.join()

    assert catalog.snapshot()["counters"]["evictions"] == 0
    assert np.count_nonzero(arena.slabs["extent_slabs"]) == SLABS
    assert catalog.check(thorough=True) == []
