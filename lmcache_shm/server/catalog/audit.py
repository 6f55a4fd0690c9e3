"""Does the index agree with the slot table?"""

import numpy as np

from lmcache_shm.arena.check import check as check_arena
from lmcache_shm.arena.layout import FLAG_DROP, Mask, SlotState
from lmcache_shm.server.catalog.slots import Slots

THOROUGH = 50_000
"""Rows in use up to which every row is looked at. Engines wait meanwhile, so beyond that only the numbers are
compared; the table itself can be checked from another process (arena.check)."""


def check(slots: Slots, *, thorough: bool | None = None) -> list[str]:
    """Findings, one line each. `thorough` None: as THOROUGH says."""
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
