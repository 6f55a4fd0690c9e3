"""Does the index agree with the slot table?"""

import numpy as np

from lmcache_shm.arena.check import check as check_arena
from lmcache_shm.arena.layout import FLAG_DROP, SlotState
from lmcache_shm.catalog.slots import Slots


def check(slots: Slots) -> list[str]:
    """Findings, one line each."""
    findings = check_arena(slots.arena)
    state = slots.state
    named = (state == SlotState.COMMITTED) | (state == SlotState.RESERVED)
    named &= slots.flags & FLAG_DROP == 0
    expected = set(np.flatnonzero(named).tolist())
    indexed: set[int] = set()
    for space in slots.spaces.values():
        for group in space.groups:
            rows = group.index.all_rows()
            indexed.update(rows.tolist())
            hot = slots.arena.hot[rows]
            right = (hot["namespace"] == space.id) & (hot["group"] == group.number)
            same = slots.keys_of(rows) == list(group.index.keys())
            reserved = int((hot["state"] == SlotState.RESERVED).sum())
            if not (right.all() and same and reserved == group.reserved):
                findings.append(
                    f"namespace {space.id} group {group.spec.name}: the index names wrong rows"
                )
    if indexed - expected:
        findings.append(f"rows in the index that should not be: {_some(indexed - expected)}")
    if expected - indexed:
        findings.append(f"rows missing in the index: {_some(expected - indexed)}")
    used = int((state >= SlotState.RESERVED).sum())
    if used != slots.used:
        findings.append(f"{used} rows are in use, counted were {slots.used}")
    return findings + _free(slots)


def _free(slots: Slots) -> list[str]:
    """Every FREE row must be on its class's free list, and nothing else."""
    listed = np.sort(slots.allocator.free_rows())
    free = np.flatnonzero(slots.state == SlotState.FREE)
    if len(listed) != len(free) or (listed != free).any():
        return [f"{len(free)} rows are free, {len(listed)} on the free lists"]
    return []


def _some(rows: set[int]) -> str:
    shown = ", ".join(map(str, sorted(rows)[:5]))
    return shown if len(rows) <= 5 else f"{shown} and {len(rows) - 5} more"
