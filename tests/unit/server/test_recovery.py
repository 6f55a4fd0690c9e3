"""Warm restart: what was committed stays, what was half-written goes, and no damaged row is believed."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_shm.arena import segment
from lmcache_shm.arena.clients import ClientRecord, erase_client, write_client
from lmcache_shm.arena.layout import FLAG_DROP, SlotState
from lmcache_shm.arena.processes import start_time
from lmcache_shm.protocol.rules import Full, Recurrent, Window
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.catalog.groups import CatalogError
from tests.unit.server import rig
from tests.unit.server.rig import CHUNK, SLAB, Prefix, reserve, spec, store

GROUPS = [spec(Full(), 12345), spec(Window(40), 5000), spec(Recurrent(), 70001)]


@pytest.fixture
def arena():
    with rig.arena_of(40 * SLAB) as arena:
        yield arena


def restarted(arena: segment.Arena) -> tuple[Catalog, dict[str, int]]:
    """Another server's catalog over the same segments. (The first mapping stays open for its fixture.)"""
    catalog = Catalog(arena)
    return catalog, catalog.recover()


def filled(arena: segment.Arena) -> tuple[Catalog, Prefix]:
    catalog = Catalog(arena)
    space = catalog.register(b"m", GROUPS)
    prefix = Prefix(space, "a", 9)
    store(catalog, space, prefix, range(9), 0)
    store(catalog, space, prefix, range(9), 1)
    store(catalog, space, prefix, [3, 7], 2)
    return catalog, prefix


def test_committed_slots_are_found_again(arena):
    before, prefix = filled(arena)
    visible = rig.visible(before)

    catalog, found = restarted(arena)

    assert found == {
        "slots": 20, "bytes": found["bytes"], "dropped": 0, "quarantined": 0, "damaged": 0,
    }  # fmt: skip
    assert rig.visible(catalog) == visible
    space = catalog.register(b"m", GROUPS)
    assert catalog.acquire(space.id, prefix.keys, 0, 9 * CHUNK + 1).n_chunks == 8
    assert catalog.check() == []
    assert catalog.snapshot()["adopted"]["slots"] == 20


def test_pins_of_the_dead_server_are_gone_and_generations_stay(arena):
    before, prefix = filled(arena)
    before.acquire(1, prefix.keys, 0, 9 * CHUNK + 1)
    generations = arena.hot["generation"].copy()

    restarted(arena)

    assert not arena.hot["pins"].any()
    rows = arena.hot["state"] == SlotState.COMMITTED
    assert (arena.hot["generation"][rows] == generations[rows]).all()


def test_use_order_survives(arena):
    before, _prefix = filled(arena)
    ticks = {name: int(arena.hot["tick"][row]) for name, row in rig.visible(before).items()}
    top = max(ticks.values())

    catalog, _ = restarted(arena)
    space = catalog.register(b"m", GROUPS)
    rows = store(catalog, space, Prefix(space, "b", 1), [0])

    assert {
        n: int(arena.hot["tick"][r]) for n, r in rig.visible(catalog).items() if n in ticks
    } == ticks
    assert int(arena.hot["tick"][rows[0]]) > top


@pytest.mark.parametrize("alive", [True, False])
def test_half_written_slots_go_unless_their_writer_lives(arena, alive):
    catalog, _ = filled(arena)
    space = catalog.register(b"m", GROUPS)
    rows = reserve(catalog, space, Prefix(space, "b", 4), range(4), client=5)
    other = reserve(catalog, space, Prefix(space, "c", 2), range(2), client=6)
    catalog.quarantine(rows[:1])
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = ClientRecord("e", 1, 1, [(0, child.pid, start_time(child.pid))])
    write_client(arena, 5, record)
    generations = arena.hot["generation"].copy()
    if not alive:
        child.communicate()

    catalog, found = restarted(arena)

    assert found["quarantined"] == (4 if alive else 0)
    assert found["dropped"] == (2 if alive else 6)
    assert catalog.check() == []
    expected = SlotState.QUARANTINED if alive else SlotState.FREE
    # An extent without any slot in use is given back.
    states = set(arena.hot["state"][rows].tolist())
    assert states <= ({expected} if alive else {SlotState.FREE, SlotState.UNUSED})
    assert (arena.hot["generation"][other] > generations[other]).all()
    assert catalog.unquarantine(5) == found["quarantined"]
    assert catalog.check() == []
    child.communicate()


def test_a_pid_that_was_reused_is_not_the_writer(arena):
    catalog, _ = filled(arena)
    space = catalog.register(b"m", GROUPS)
    reserve(catalog, space, Prefix(space, "b", 4), range(4), client=5)
    write_client(arena, 5, ClientRecord("e", 1, 1, [(0, os.getpid(), start_time(os.getpid()) + 1)]))

    assert restarted(arena)[1]["quarantined"] == 0


def test_a_client_that_was_erased_writes_no_more(arena):
    catalog, _ = filled(arena)
    space = catalog.register(b"m", GROUPS)
    reserve(catalog, space, Prefix(space, "b", 4), range(4), client=5)
    write_client(arena, 5, ClientRecord("e", 1, 1, [(0, os.getpid(), start_time(os.getpid()))]))
    erase_client(arena, 5)

    assert restarted(arena)[1]["quarantined"] == 0


def test_cleared_slots_stay_cleared(arena):
    catalog, prefix = filled(arena)
    catalog.acquire(1, prefix.keys, 0, 9 * CHUNK + 1)
    catalog.clear(1)
    assert (arena.hot["flags"] & FLAG_DROP).any()

    catalog, found = restarted(arena)

    assert found["slots"] == 0
    assert catalog.check() == []
    assert arena.hot["state"].max() == SlotState.UNUSED


def test_what_was_stored_anew_after_a_clear_stays(arena):
    """The cleared slots are still pinned, and so still in the table, when the same keys are stored again."""
    catalog, prefix = filled(arena)
    before = catalog.acquire(1, prefix.keys, 0, 9 * CHUNK + 1)
    catalog.clear(1)
    space = catalog.register(b"m", GROUPS)
    catalog.commit(reserve(catalog, space, prefix, range(4)))

    catalog, found = restarted(arena)

    assert (found["slots"], found["damaged"]) == (4, 0)
    assert found["dropped"] == sum(map(len, before.rows))
    assert catalog.check() == []


DAMAGES = {
    "key": lambda hot, cold, row: cold["key"].__setitem__((row, 0), 1234567),
    "parent": lambda hot, cold, row: cold["parent"].__setitem__((row, 1), 1234567),
    "digest": lambda hot, cold, row: cold["extra_digest"].__setitem__((row, 1), 1),
    "salt": lambda hot, cold, row: cold["salt"].__setitem__(row, 1),
    "offset": lambda hot, cold, row: cold["offset"].__setitem__(row, cold["offset"][row] + 4096),
    "slot_bytes": lambda hot, cold, row: cold["slot_bytes"].__setitem__(row, 4096),
    "slab": lambda hot, cold, row: cold["slab"].__setitem__(row, 2**31),
    "token_bytes": lambda hot, cold, row: cold["token_bytes"].__setitem__(row, 2**31),
    "chunk": lambda hot, cold, row: cold["chunk"].__setitem__(row, 77),
    "group": lambda hot, cold, row: hot["group"].__setitem__(row, 1),
    "namespace": lambda hot, cold, row: hot["namespace"].__setitem__(row, 999),
    "generation": lambda hot, cold, row: hot["generation"].__setitem__(row, 3),
    "state": lambda hot, cold, row: hot["state"].__setitem__(row, 77),
    "seal": lambda hot, cold, row: cold["seal"].__setitem__(row, 0),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_row_is_dropped_and_counted_and_the_others_stay(arena, what):
    before, prefix = filled(arena)
    row = before._slots.spaces[1].groups[0].index.get(prefix.key(4))
    DAMAGES[what](arena.hot, arena.cold, row)

    assert before.check() != []
    catalog, found = restarted(arena)

    assert (found["slots"], found["damaged"], found["dropped"]) == (19, 1, 1)
    assert catalog.check() == []
    assert row not in rig.visible(catalog).values()


def test_an_aborted_row_that_turns_committed_by_a_flipped_bit_is_not_believed(arena):
    """FREE and COMMITTED differ in one bit; the slot's bytes are whatever the aborted copy left."""
    catalog, _ = filled(arena)
    space = catalog.register(b"m", GROUPS)
    rows = reserve(catalog, space, Prefix(space, "b", 2), range(2))
    catalog.abort(rows)
    evicted = store(catalog, space, Prefix(space, "c", 1), [0])
    catalog.clear(salt=0)
    arena.hot["state"][[*rows, *evicted]] = SlotState.COMMITTED

    assert restarted(arena)[1]["slots"] == 0


def test_two_rows_of_one_key_are_both_dropped(arena):
    from lmcache_shm.arena.layout import seal

    catalog, prefix = filled(arena)
    space = catalog.register(b"m", GROUPS)
    one = space.groups[0].index.get(prefix.key(0))
    (other,) = store(catalog, space, Prefix(space, "b", 1), [0])
    for name in ("key", "parent", "token_bytes", "chunk"):
        arena.cold[name][other] = arena.cold[name][one]
    both = np.array([one, other], np.int32)
    arena.cold["seal"][both] = seal(arena.hot, arena.cold, both)

    assert any("stands twice" in finding for finding in catalog.check())
    assert restarted(arena)[1]["damaged"] == 2


def test_a_damaged_slab_table_is_never_trusted(arena):
    filled(arena)
    arena.slabs["slots"][0] += 1

    with pytest.raises(CatalogError, match="slab table is damaged"):
        restarted(arena)


@pytest.mark.parametrize("what", ["bind", "unbind"])
def test_killed_while_an_extent_was_bound_or_unbound(arena, what):
    """Some of its slabs say so already, some do not yet; nothing is in it."""
    catalog, _ = filled(arena)
    visible = rig.visible(catalog)
    free = int(np.flatnonzero(arena.slabs["extent_slabs"] == 0)[-3])
    arena.slabs[free : free + 3] = (3 * SLAB, free, 3, 1, 0)
    arena.slabs["extent_slabs"][free + 1 : free + 3] = 0
    if what == "unbind":
        arena.hot["state"][free * catalog._slots.allocator.per_slab] = SlotState.FREE

    catalog, found = restarted(arena)

    assert found["damaged"] == 0
    assert rig.visible(catalog) == visible
    assert catalog.check() == []
    space = catalog.register(b"large", [spec(Full(), 3 * SLAB)])
    assert len(store(catalog, space, Prefix(space, "l", 1), [0])) == 1


def test_damaged_namespaces_are_never_trusted(arena):
    filled(arena)
    start, area = arena.regions.namespaces, arena.regions.namespace_area
    for at in (start, start + area):
        arena.meta[at + 30 : at + 34] = b"\xff\xff\xff\xff"

    with pytest.raises(CatalogError, match="namespaces is damaged"):
        restarted(arena)


def test_one_half_written_namespace_buffer_leaves_the_other(arena):
    """Killed while it wrote the second namespace: the first is still there."""
    catalog, _prefix = filled(arena)
    catalog.register(b"second", GROUPS)
    latest = arena.regions.namespaces + 2 % 2 * arena.regions.namespace_area
    arena.meta[latest + 40] ^= 1

    catalog, found = restarted(arena)

    assert found["slots"] == 20
    assert [space.descriptor for space in catalog.namespaces()] == [b"m"]


def test_a_namespace_id_is_never_given_twice(arena):
    catalog, _ = filled(arena)
    second = catalog.register(b"second", GROUPS)

    catalog, _ = restarted(arena)

    assert catalog.register(b"second", GROUPS).id == second.id
    assert catalog.register(b"third", GROUPS).id == second.id + 1


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=30))
def test_scribbles_all_over_the_table_are_refused_or_repaired(scribbles):
    """Whatever eight bytes are overwritten: the arena is not adopted, or what was adopted is consistent."""
    with rig.arena_of(40 * SLAB) as arena:
        filled(arena)
        name, geometry = arena.instance, arena.geometry
        for where, value in scribbles:
            # Half of the table's bytes are rows that are not in use; aim at the first ones.
            at = int(where**3 * (arena.regions.boards - 8))
            arena.meta[at : at + 8] = value.to_bytes(8, "little")
        arena.close()
        try:
            adopted = segment.adopt(name, geometry)
        except segment.AdoptError:
            segment.create(name, geometry.data_bytes).unlink()
            return
        try:
            catalog = Catalog(adopted)
            catalog.recover()
        except CatalogError:
            return
        finally:
            adopted.unlink()
        assert catalog.check() == []
        space = catalog.register(b"after", GROUPS)
        for i in range(30):
            prefix = Prefix(space, f"n{i}", 9)
            store(catalog, space, prefix, range(9))
            assert catalog.acquire(space.id, prefix.keys, 0, 9 * CHUNK + 1).rows
        assert catalog.check() == []
        adopted.close()


def test_adopting_is_quick():
    """Stated: under a second for 200,000 slots."""
    n = 200_000
    with rig.arena_of(n * 4096, max_slots=n, slab_bytes=1 << 20) as arena:
        catalog = Catalog(arena)
        space = catalog.register(b"m", [spec(Full(), 4096)])
        for start in range(0, n, 10_000):
            count = min(10_000, n - start)
            keys = os.urandom(16 * count)
            rows = catalog.reserve(
                space.id, np.zeros(count, "<u2"), keys, space.key + keys[:-16],
                np.arange(count, dtype="<u4"), bytes(16 * count), np.zeros(count, "<u8"), 0,
            )  # fmt: skip
            catalog.commit(rows)
        used = catalog.snapshot()["arena"]["slots"]["used"]
        began = time.thread_time()
        _, found = restarted(arena)
        seconds = time.thread_time() - began

        assert used >= 0.99 * n
        assert found["slots"] == used
        assert seconds < 1.0


def test_key_of_rows_is_what_clients_hash(arena):
    """The table's bytes are the packed keys themselves, in any byte order of words."""
    catalog, prefix = filled(arena)
    row = catalog._slots.spaces[1].groups[0].index.get(prefix.key(2))

    assert arena.cold["key"][row].tobytes() == prefix.key(2)
    assert arena.cold["parent"][row].tobytes() == prefix.key(1)
    assert arena.cold["token_bytes"][row] == 4 * catalog._slots.spaces[1].chunk_size
