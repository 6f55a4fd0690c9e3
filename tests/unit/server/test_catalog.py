"""Namespaces, clearing, reasons of misses, and the index against the table."""

import json

import numpy as np
import pytest

from lmcache_shm.arena.layout import SlotState
from lmcache_shm.cli.formatting import differences
from lmcache_shm.protocol import keys as k
from lmcache_shm.protocol.keys import canonical, describe
from lmcache_shm.protocol.messages import BUSY
from lmcache_shm.protocol.rules import Full, Recurrent, Window
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.catalog.groups import CatalogError
from tests.unit.server import rig
from tests.unit.server.rig import CHUNK, SLAB, Prefix, reserve, spec, store


@pytest.fixture
def catalog():
    with rig.arena_of(40 * SLAB) as arena:
        yield Catalog(arena)


GROUPS = [spec(Full(), 12000), spec(Recurrent(), 5000)]


def look(catalog, space, prefix, chunks=9, local=0):
    hit = catalog.acquire(space.id, prefix.keys, local, chunks * CHUNK + 1)
    for rows in hit.rows:
        catalog.release(rows)
    return hit.n_chunks


# ------------------------------------------------------------------------------------- namespaces
def test_same_descriptor_is_the_same_namespace(catalog):
    one, other = catalog.register(b"m", GROUPS), catalog.register(b"m", GROUPS)

    assert one is other
    assert one.users == 2


def test_another_geometry_is_another_namespace(catalog):
    """Two engines that say the same of themselves but lay out slots differently never share them."""
    one = catalog.register(b"m", GROUPS)

    assert catalog.register(b"m", [spec(Full(), 12001), GROUPS[1]]).id != one.id
    assert catalog.register(b"m", GROUPS, chunk_size=32).id != one.id


def test_thousands_of_namespaces():
    with rig.arena_of(40 * SLAB) as arena:
        catalog = Catalog(arena, max_namespaces=50)
        keep = catalog.register(b"keep", GROUPS)
        prefix = Prefix(keep, "a", 3)
        for i in range(400):
            space = catalog.register(b"tenant %d" % i, GROUPS)
            store(catalog, space, Prefix(space, "x", 2), range(2))
            catalog.leave(space.id)
            if i == 200:
                store(catalog, keep, prefix, range(3))
                store(catalog, keep, prefix, [2], 1)
            look(catalog, keep, prefix)

        assert look(catalog, keep, prefix) == 3
        assert len(catalog.namespaces()) <= 50
        assert catalog.snapshot()["counters"]["namespaces_dropped"] >= 340
        assert catalog.check() == []


def test_namespaces_in_use_are_never_dropped():
    with rig.arena_of(40 * SLAB) as arena:
        catalog = Catalog(arena, max_namespaces=3)
        for i in range(3):
            catalog.register(b"%d" % i, GROUPS)
        with pytest.raises(CatalogError, match="all 3 namespaces are in use"):
            catalog.register(b"one more", GROUPS)
        catalog.leave(1)

        assert catalog.register(b"one more", GROUPS).id == 4
        with pytest.raises(CatalogError, match="register again"):
            catalog.acquire(1, b"", 0, 0)


def test_a_namespace_with_slots_in_flight_is_not_dropped():
    with rig.arena_of(40 * SLAB) as arena:
        catalog = Catalog(arena, max_namespaces=2)
        flying, idle = catalog.register(b"flying", GROUPS), catalog.register(b"idle", GROUPS)
        rows = reserve(catalog, flying, Prefix(flying, "a", 2), range(2))
        catalog.leave(flying.id)
        catalog.leave(idle.id)
        catalog.register(b"new", GROUPS)

        assert {space.descriptor for space in catalog.namespaces()} == {b"flying", b"new"}
        assert catalog.commit(rows) == 2


def test_descriptors_that_do_not_fit_push_out_idle_ones():
    """The table of namespaces has room for 256 KiB here."""
    with rig.arena_of(40 * SLAB) as arena:
        catalog = Catalog(arena)
        for i in range(20):
            catalog.leave(catalog.register(bytes([i]) * 60_000, GROUPS).id)

        assert 1 <= len(catalog.namespaces()) <= 4
        with pytest.raises(CatalogError, match="descriptors of 1 namespaces take"):
            catalog.register(bytes(300_000), GROUPS)
        assert catalog.check() == []


def test_descriptor_is_the_same_for_equal_facts():
    assert canonical({"b": 1, "a": {"d": [1], "c": "ü"}}) == canonical(
        {"a": {"c": "ü", "d": [1]}, "b": 1}
    )
    assert describe(canonical({"a": 1})) == {"a": 1}
    assert describe(b"\xff") == {"descriptor": "ff"}
    with pytest.raises(ValueError, match="JSON"):
        canonical({"a": float("nan")})


def test_differences_are_named():
    one, other = (
        {"description": {"model": "x", "tp": {"size": 1}}},
        {"description": {"model": "x", "tp": {"size": 2}, "n": 0}},
    )

    assert differences(one, other) == ["n (- / 0)", "tp.size (1 / 2)"]
    assert differences(one, one) == []


@pytest.mark.parametrize("groups", [[], [spec(Full(), 0)]])
def test_senseless_groups_are_refused(catalog, groups):
    with pytest.raises(CatalogError):
        catalog.register(b"m", groups)


def test_chunk_size_must_be_known():
    with rig.arena_of(40 * SLAB, chunk_size=0) as arena:
        catalog = Catalog(arena)
        with pytest.raises(CatalogError, match="say how long a chunk is"):
            catalog.register(b"m", GROUPS)
        assert catalog.register(b"m", GROUPS, 64).chunk_size == 64


# --------------------------------------------------------------------------------------- clearing
def test_what_is_reserved_before_a_clear_is_dropped_at_its_commit(catalog):
    space = catalog.register(b"m", GROUPS)
    prefix = Prefix(space, "a", 3)
    rows = reserve(catalog, space, prefix, range(3))

    assert catalog.clear(space.id) == 0
    again = reserve(catalog, space, prefix, range(3))
    assert min(again) >= 0, "the keys are free for whoever comes after the clear"
    assert catalog.commit(rows) == 0
    assert catalog.commit(again) == 3
    assert catalog.check() == []
    assert set(rig.visible(catalog).values()) == set(again)


def test_what_is_pinned_can_be_read_to_the_end(catalog):
    space = catalog.register(b"m", [spec(Full(), 12000)])
    prefix = Prefix(space, "a", 3)
    store(catalog, space, prefix, range(3))
    hit = catalog.acquire(space.id, prefix.keys, 0, 3 * CHUNK + 1)
    generations = catalog.arena.hot["generation"][hit.rows[0]].copy()

    assert catalog.clear() == 3
    assert look(catalog, space, prefix) == 0
    hot = catalog.arena.hot[hit.rows[0]]
    assert (hot["state"] == SlotState.COMMITTED).all()
    assert (hot["generation"] == generations).all()
    store(catalog, space, prefix, range(3))
    assert look(catalog, space, prefix) == 3

    catalog.release(hit.rows[0])
    assert (catalog.arena.hot["state"][hit.rows[0]] <= SlotState.FREE).all()
    assert look(catalog, space, prefix) == 3
    assert catalog.check() == []


def test_clear_of_one_salt(catalog):
    space = catalog.register(b"m", [spec(Full(), 12000)])
    salted = Prefix(space, "a", 3, salt=k.salt_word(b"tenant"))
    plain = Prefix(space, "b", 3)
    for prefix in (salted, plain):
        store(catalog, space, prefix, range(3))

    assert catalog.clear(space.id, b"nobody") == 0
    assert catalog.clear(space.id, b"tenant") == 3
    assert (look(catalog, space, salted), look(catalog, space, plain)) == (0, 3)


def test_clearing_gives_the_room_back_to_all_sizes(catalog):
    space = catalog.register(b"m", [spec(Full(), 12000)])
    for i in range(20):
        store(catalog, space, Prefix(space, f"{i}", 9), range(9))
    assert catalog.snapshot()["arena"]["slabs_free"] < 5

    catalog.clear()

    assert catalog.snapshot()["arena"]["slabs_free"] == 40


# ------------------------------------------------------------------------------- misses, counters
def reasons(catalog):
    return {reason: n for reason, n in catalog.snapshot()["misses"].items() if n}


def test_why_a_look_up_missed(catalog):
    full, hybrid = (
        catalog.register(b"full", [spec(Full(), 12000)]),
        catalog.register(b"hybrid", GROUPS),
    )
    a, b = Prefix(full, "a", 4), Prefix(hybrid, "b", 4)

    assert look(catalog, full, a) == 0
    assert reasons(catalog) == {"never_seen": 1}

    rows = reserve(catalog, full, a, range(4))
    assert look(catalog, full, a) == 0
    assert reasons(catalog) == {"never_seen": 1, "in_flight": 1}

    catalog.commit(rows)
    assert look(catalog, full, a, 4) == 4
    assert look(catalog, hybrid, b, 4) == 0
    assert reasons(catalog) == {"never_seen": 1, "in_flight": 1, "other_namespace": 1}

    store(catalog, hybrid, b, range(4))
    store(catalog, hybrid, b, [1], 1)
    assert look(catalog, hybrid, b, 4) == 2
    assert reasons(catalog) == {
        "never_seen": 1, "in_flight": 1, "other_namespace": 1, "incomplete_group": 1,
    }  # fmt: skip

    for i in range(60):
        store(catalog, full, Prefix(full, f"x{i}", 4), range(4))
    assert look(catalog, full, a, 4) == 0
    assert reasons(catalog)["evicted"] == 1


def test_a_group_is_blamed_for_a_miss_or_for_a_short_hit(catalog):
    """So that hits and misses of a group are those of its look-ups, and their share says something."""
    space = catalog.register(b"hybrid", GROUPS)
    prefix = Prefix(space, "b", 4)
    store(catalog, space, prefix, range(4))
    names = ("served", "misses", "short")

    def counted() -> list[tuple[int, ...]]:
        (found,) = catalog.snapshot()["namespaces"]
        return [tuple(group[name] for name in names) for group in found["groups"]]

    assert look(catalog, space, prefix, 4) == 0
    assert counted() == [(0, 0, 0), (0, 1, 0)]
    store(catalog, space, prefix, [1], 1)
    assert look(catalog, space, prefix, 4) == 2
    assert counted() == [(1, 0, 0), (1, 1, 1)]
    assert look(catalog, space, Prefix(space, "c", 4), 4) == 0
    assert counted() == [(1, 1, 0), (1, 2, 1)]
    (found,) = catalog.snapshot()["namespaces"]
    assert (found["hits"], found["misses"]) == (1, 2)


def test_a_short_request_asks_for_nothing(catalog):
    space = catalog.register(b"m", GROUPS)

    assert catalog.acquire(space.id, b"", 0, CHUNK).n_chunks == 0
    assert catalog.acquire(space.id, Prefix(space, "a", 1).keys, 0, CHUNK).n_chunks == 0
    assert reasons(catalog) == {}


def test_token_counters(catalog):
    space = catalog.register(b"m", [spec(Full(), 12000)])
    prefix = Prefix(space, "a", 5)
    store(catalog, space, prefix, range(3))

    assert look(catalog, space, prefix, 5, local=20) == 3

    counters = catalog.snapshot()["counters"]
    assert counters["query_tokens"] == 5 * CHUNK - 20
    assert counters["hit_tokens"] == 3 * CHUNK - 20
    assert counters["hit_chunks"] == 2


def test_releasing_twice_does_no_harm(catalog):
    space = catalog.register(b"m", [spec(Full(), 12000)])
    prefix = Prefix(space, "a", 3)
    store(catalog, space, prefix, range(3))
    hit = catalog.acquire(space.id, prefix.keys, 0, 3 * CHUNK + 1)
    catalog.release(hit.rows[0])
    catalog.release(hit.rows[0])

    assert not catalog.arena.hot["pins"].any()
    assert catalog.snapshot()["counters"]["wrong_releases"] == 3


def test_commit_and_abort_of_rows_that_are_not_reserved_do_no_harm(catalog):
    space = catalog.register(b"m", [spec(Full(), 12000)])
    rows = store(catalog, space, Prefix(space, "a", 3), range(3))

    assert catalog.commit(rows) == 0
    assert catalog.abort(rows) == 0
    assert catalog.quarantine([0, 1, 2]) == 0
    assert look(catalog, space, Prefix(space, "a", 3)) == 3
    assert catalog.check() == []


def test_a_key_twice_in_one_request_is_reserved_once(catalog):
    space = catalog.register(b"m", [spec(Full(), 12000)])
    prefix = Prefix(space, "a", 3)
    rows = reserve(catalog, space, prefix, [0, 1, 1, 0, 2])

    assert [row for row in rows if row < 0] == [BUSY, BUSY]
    assert rows[2] == rows[3] == BUSY
    assert catalog.check() == []


def test_groups_of_a_chunk_in_one_request(catalog):
    space = catalog.register(
        b"m", [spec(Recurrent(), 5000), spec(Full(), 12000), spec(Window(9), 777)]
    )
    prefix = Prefix(space, "a", 4)
    entries = [(prefix, c, g) for c in range(4) for g in range(3)]
    rows = rig.reserve_all(catalog, space, entries)
    assert min(rows) >= 0
    catalog.commit(rows)

    hit = catalog.acquire(space.id, prefix.keys, 0, 4 * CHUNK + 1)

    assert hit.first == [3, 0, 3]
    assert [rows.tolist() for rows in hit.rows] == [[rows[9]], rows[1::3], [rows[11]]]


# ------------------------------------------------------------------------------------------ people
def test_snapshot_is_plain_data_and_adds_up(catalog):
    space = catalog.register(canonical({"model": "m"}), GROUPS)
    prefix = Prefix(space, "a", 5)
    store(catalog, space, prefix, range(5))
    reserve(catalog, space, prefix, [2, 3], 1)
    catalog.acquire(space.id, prefix.keys, 0, 2 * CHUNK)

    found = json.loads(json.dumps(catalog.snapshot()))

    arena = found["arena"]
    assert arena["slots"]["used"] == 5
    assert arena["slots"]["reserved"] == 2
    assert sum(arena["bytes"].values()) == arena["data_bytes"]
    groups = found["namespaces"][0]["groups"]
    assert [(g["slots"], g["reserved"]) for g in groups] == [(5, 0), (0, 2)]
    assert [g["kind"] for g in groups] == ["full", "recurrent"]


def test_tree_lists_prefixes_from_their_start(catalog):
    space = catalog.register(b"m", GROUPS)
    old, new = Prefix(space, "old", 3), Prefix(space, "new", 2)
    for prefix, n in ((old, 3), (new, 2)):
        store(catalog, space, prefix, range(n))
    store(catalog, space, new, [1], 1)

    nodes = json.loads(json.dumps(catalog.tree(space.id)))

    assert [(n["chunk"], n["depth"], n["groups"]) for n in nodes] == [
        (0, 0, [0]), (1, 1, [0, 1]), (0, 0, [0]), (1, 1, [0]), (2, 2, [0]),
    ]  # fmt: skip
    assert nodes[0]["key"] == new.key(0).hex()
    assert len(catalog.tree(None, limit=2)) == 2
    assert catalog.tree(space.id + 1) == []


# ------------------------------------------------------------------------------- negative controls
def test_check_reports_an_index_that_disagrees(catalog):
    space = catalog.register(b"m", [spec(Full(), 12000)])
    prefix = Prefix(space, "a", 3)
    store(catalog, space, prefix, range(3))
    index = space.groups[0].index
    row = index.get(prefix.key(1))

    index.remove([prefix.key(1)])
    assert catalog.check() == [
        "rows with a name; in the indices: 3 and 2", f"rows missing in the index: {row}",
    ]  # fmt: skip

    index.add([prefix.key(1)], [index.get(prefix.key(0))])
    assert "namespace 1 group full: the index names wrong rows" in catalog.check()


def test_check_reports_a_lost_free_row(catalog):
    space = catalog.register(b"m", [spec(Full(), 12000)])
    store(catalog, space, Prefix(space, "a", 1), [0])
    catalog._slots.allocator.alloc(12000, 1)

    assert any("on the free lists" in finding for finding in catalog.check())


def test_check_reports_a_forgotten_row(catalog):
    space = catalog.register(b"m", [spec(Full(), 12000)])
    store(catalog, space, Prefix(space, "a", 1), [0])
    catalog._slots.used += 1

    assert catalog.check() == ["rows in use; counted: 1 and 2"]


def test_a_large_table_is_not_walked_while_engines_wait(catalog, monkeypatch):
    space = catalog.register(b"m", [spec(Full(), 12000)])
    rows = store(catalog, space, Prefix(space, "a", 3), range(3))
    catalog.arena.cold["salt"][rows[0]] = 5
    monkeypatch.setattr("lmcache_shm.server.catalog.consistency.THOROUGH", 2)

    assert catalog.check() == []
    assert catalog.check(thorough=True) == [f"committed rows that do not fit their seal: {rows[0]}"]


def test_ghosts_are_bounded_and_remember():
    from lmcache_shm.server.catalog.slots import Ghosts

    ghosts = Ghosts(64)
    keys = np.arange(2000, dtype="<u8").reshape(-1, 2)
    ghosts.add(keys)

    remembered = [key.tobytes() in ghosts for key in keys]
    assert sum(remembered) == 32  # even first words share every second bucket
    assert remembered[-32:] == [True] * 32
    assert b"\x05" * 16 not in ghosts
