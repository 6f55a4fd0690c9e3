"""The indices and the slot table: rebuilt from it after a restart, compared with it at any time.

A warm restart trusts no row of the table unseen: a dead server left it.
"""

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.check import bad_slabs, bound_rows, duplicates, misplaced, unbacked
from lmcache_shm.arena.check import check as check_arena
from lmcache_shm.arena.clients import read_clients
from lmcache_shm.arena.layout import FLAG_DROP, Mask, Rows, SlotState, seal
from lmcache_shm.server.catalog.groups import CatalogError
from lmcache_shm.server.catalog.slots import FIRST_TICK, LAST_TICK, Slots

THOROUGH = 50_000
"""Rows in use up to which every row is looked at. Engines wait meanwhile, so beyond that only the numbers are
compared; the table itself can be checked from another process (arena.check)."""


def recover(slots: Slots) -> dict[str, int]:
    """See Catalog.recover. The namespaces are loaded already."""
    arena = slots.arena
    geometry, hot, cold, slabs = arena.geometry, arena.hot, arena.cold, arena.slabs
    state = hot["state"].copy()
    _repair_slabs(slots, state)
    hot["tick"][hot["tick"] > LAST_TICK] = FIRST_TICK  # the seal does not cover it
    bound = bound_rows(geometry, slabs)
    wrong = misplaced(geometry, cold, slabs)
    in_use = state >= SlotState.RESERVED
    damaged = in_use & (wrong | ~bound | (state > SlotState.QUARANTINED))
    # Cleared while pinned: the pins ended with the old server's connections. Drop these rows unseen: the same
    # key may have been stored anew since.
    cleared = (state == SlotState.COMMITTED) & (hot["flags"] & FLAG_DROP != 0)
    committed = _sound_rows(slots, (state == SlotState.COMMITTED) & ~damaged & ~cleared)
    damaged |= (state == SlotState.COMMITTED) & ~committed & ~cleared
    held = ((state == SlotState.RESERVED) | (state == SlotState.QUARANTINED)) & ~damaged
    quarantined = held & _may_be_written(slots)
    _rewrite(slots, committed, quarantined, bound)
    rows = np.flatnonzero(committed).astype(np.int32)
    _index(slots, rows)
    slots.used = len(rows) + int(quarantined.sum())
    slots.tick = max(FIRST_TICK, int(hot["tick"].max(initial=0)))
    slots.allocator.adopt_extents(slots.allocator.extents().tolist())
    slots.allocator.release_empty()
    return {
        "slots": len(rows),
        "bytes": slots.bytes_of(rows),
        "dropped": int((in_use & ~committed & ~quarantined).sum()),
        "quarantined": int(quarantined.sum()),
        "damaged": int(damaged.sum()),
    }


def _repair_slabs(slots: Slots, state: npt.NDArray[np.uint8]) -> None:
    """Free the slabs of extents that were being bound or unbound when the server died: nothing is in them.

    Raises CatalogError when something is in use where no extent is sound.
    """
    geometry, slabs = slots.arena.geometry, slots.arena.slabs
    bad = bad_slabs(geometry, slabs) | unbacked(geometry, slabs, slots.arena.backed_bytes)
    in_use = (state >= SlotState.RESERVED).reshape(geometry.slabs, -1).any(axis=1)
    if (bad & in_use).any():
        raise CatalogError(
            f"the slab table is damaged ({int(bad.sum())} of {geometry.slabs} entries)"
        )
    slabs[bad] = 0
    slots.allocator.count_free()


def _sound_rows(slots: Slots, candidates: Mask) -> Mask:
    """Those of the committed rows whose owner is known, whose seal fits, and whose key is theirs alone."""
    arena = slots.arena
    rows = np.flatnonzero(candidates).astype(np.int32)
    owner = (
        arena.hot["namespace"][rows].astype(np.uint64) << np.uint64(16) | arena.hot["group"][rows]
    )
    sizes = arena.cold["slot_bytes"][rows]
    good = np.zeros(len(rows), np.bool_)
    for space in slots.spaces.values():
        for group in space.groups:
            good |= (owner == (space.id << 16 | group.number)) & (sizes == group.size)
    good &= arena.cold["seal"][rows] == seal(arena.hot, arena.cold, rows)
    good &= arena.cold["token_bytes"][rows] <= sizes
    rows = rows[good]
    twice = duplicates(arena.hot, arena.cold, rows.astype(np.int64))
    sound = np.zeros(len(candidates), np.bool_)
    sound[rows] = True
    sound[twice] = False
    return sound


def _may_be_written(slots: Slots) -> Mask:
    """Rows whose client has a process that still runs; a client that is not in the table counts as dead."""
    alive = [index for index, record in read_clients(slots.arena).items() if record.alive()]
    return np.isin(slots.arena.hot["client"], np.array(alive, np.int32))


def _rewrite(slots: Slots, committed: Mask, quarantined: Mask, bound: Mask) -> None:
    """Write the decisions into the table; the extents' other rows become FREE at their places."""
    arena, allocator = slots.arena, slots.allocator
    hot, cold = arena.hot, arena.cold
    kept = committed | quarantined
    lost = np.flatnonzero(~kept & (hot["state"] != SlotState.UNUSED)).astype(np.int32)
    hot["generation"][lost] += np.uint64(1)
    hot["state"][lost] = SlotState.UNUSED
    hot["flags"] = 0
    hot["pins"] = 0
    hot["client"][np.flatnonzero(~quarantined)] = -1
    hot["state"][np.flatnonzero(quarantined)] = SlotState.QUARANTINED
    free = np.flatnonzero(bound & ~kept).astype(np.int32)
    first = np.repeat(arena.slabs["first"].astype(np.uint64), allocator.per_slab)[free]
    size = np.repeat(arena.slabs["slot_bytes"], allocator.per_slab)[free]
    number = free.astype(np.uint64) - first * np.uint64(allocator.per_slab)
    cold["offset"][free] = first * np.uint64(allocator.slab_bytes) + number * size
    cold["slot_bytes"][free] = size
    cold["slab"][free] = first
    hot["tick"][free] = 0
    hot["state"][free] = SlotState.FREE


def _index(slots: Slots, rows: Rows) -> None:
    newest: dict[int, int] = {}
    for group, mine in slots.owners(rows):
        group.index.add(slots.keys_of(mine), mine.tolist())
        newest[id(group)] = int(slots.ticks[mine].max())
    for space in slots.spaces.values():
        space.last_tick = max(newest.get(id(group), 0) for group in space.groups)


def check(slots: Slots, *, thorough: bool | None = None) -> list[str]:
    """Findings, one line each. `thorough` None: up to THOROUGH rows in use."""
    named = (slots.state == SlotState.COMMITTED) | (slots.state == SlotState.RESERVED)
    named &= slots.flags & FLAG_DROP == 0
    findings = _numbers(slots, named)
    if slots.used <= THOROUGH if thorough is None else thorough:
        findings += check_arena(slots.arena) + _rows(slots, named) + _free(slots)
    return findings


def _numbers(slots: Slots, named: Mask) -> list[str]:
    groups = [group for space in slots.spaces.values() for group in space.groups]
    pairs = {
        "rows with a name; in the indices": (int(named.sum()), sum(len(g.index) for g in groups)),
        "rows reserved; counted": (
            int((named & (slots.state == SlotState.RESERVED)).sum()),
            sum(g.reserved for g in groups),
        ),
        "rows in use; counted": (int((slots.state >= SlotState.RESERVED).sum()), slots.used),
        "rows free; on the free lists": (
            int((slots.state == SlotState.FREE).sum()),
            len(slots.allocator.free_rows()),
        ),
    }
    return [f"{what}: {a} and {b}" for what, (a, b) in pairs.items() if a != b]


def _rows(slots: Slots, named: Mask) -> list[str]:
    findings = []
    expected, indexed = set(np.flatnonzero(named).tolist()), set()
    for space in slots.spaces.values():
        for group in space.groups:
            rows = group.index.all_rows()
            indexed.update(rows.tolist())
            hot = slots.arena.hot[rows]
            right = (hot["namespace"] == space.id) & (hot["group"] == group.number)
            if not right.all() or slots.keys_of(rows) != list(group.index.keys()):
                findings.append(
                    f"namespace {space.id} group {group.spec.name}: the index names wrong rows"
                )
    if indexed - expected:
        findings.append(f"rows in the index that should not be: {_some(indexed - expected)}")
    if expected - indexed:
        findings.append(f"rows missing in the index: {_some(expected - indexed)}")
    return findings


def _free(slots: Slots) -> list[str]:
    """Every FREE row must be on its class's free list, and nothing else."""
    listed = np.sort(slots.allocator.free_rows())
    free = np.flatnonzero(slots.state == SlotState.FREE)
    return [] if np.array_equal(listed, free) else ["the free lists name wrong rows"]


def _some(rows: set[int]) -> str:
    shown = ", ".join(map(str, sorted(rows)[:5]))
    return shown if len(rows) <= 5 else f"{shown} and {len(rows) - 5} more"
