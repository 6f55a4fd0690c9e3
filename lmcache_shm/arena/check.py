"""Prove that a slot table is consistent, offline or beside a running server.

Beside a running server rows change while they are read; a finding counts only if a second look, a moment
later, still shows it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lmcache_shm.arena.layout import (
    FLAG_DROP,
    PAGE,
    U64,
    Geometry,
    Mask,
    Numbers,
    SlotState,
    Table,
    seal,
)
from lmcache_shm.arena.segment import Arena

SHOWN = 5
"""Rows named in one finding."""
LOOKS = 5
Findings = Iterator[tuple[str, Numbers]]


@dataclass(frozen=True)
class Copy:
    """A table as it was at one moment (more or less: the server goes on while it is copied)."""

    geometry: Geometry
    hot: Table
    cold: Table
    slabs: Table
    backed: int
    """The reserved size, read last: it only rises."""


def check(arena: Arena, *, live: bool = False) -> list[str]:
    """Findings, one line each; empty when the table is consistent.

    Proved: every slab belongs to at most one extent and every extent's slots are rows of its own at their
    place (so no two slots overlap); free + reserved + committed + quarantined rows are those that extents
    have; every (namespace, group, key) stands once among committed and reserved rows; committed rows fit
    their seal; pins stand only on committed rows; extents lie where memory is reserved.
    `live`: tolerate a server that is at work.
    """
    found = _look(arena)
    for _ in range(LOOKS if live else 0):
        if not found:
            break
        time.sleep(0.01)
        found &= _look(arena)  # the same rows with the same trouble, or it was a change under way
    return _lines(found)


def _look(arena: Arena) -> set[tuple[str, int]]:
    tables = arena.hot.copy(), arena.cold.copy(), arena.slabs.copy()
    table = Copy(arena.geometry, *tables, arena.backed_bytes)
    found: set[tuple[str, int]] = set()
    for finder in (_slabs, _places, _overlaps, _keys, _states):
        for text, numbers in finder(table):
            found.update((text, number) for number in numbers.tolist())
    return found


def _lines(found: set[tuple[str, int]]) -> list[str]:
    lines: dict[str, list[int]] = {}
    for text, number in sorted(found):
        lines.setdefault(text, []).append(number)
    return [
        f"{text}: {', '.join(map(str, numbers[:SHOWN]))}"
        + (f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else "")
        for text, numbers in lines.items()
    ]


def bad_slabs(geometry: Geometry, slabs: Table) -> Mask:
    """[slabs] True where a slab's entry is not part of a sound extent."""
    n, index = geometry.slabs, np.arange(geometry.slabs)
    bound = slabs["extent_slabs"] > 0
    first = slabs["first"].astype(np.int64)
    m = slabs["extent_slabs"].astype(np.int64)
    size, slots = slabs["slot_bytes"].astype(np.uint64), slabs["slots"].astype(np.uint64)
    inside = (first <= index) & (index < first + m) & (first + m <= n)
    room = m.astype(np.uint64) * np.uint64(geometry.slab_bytes)
    cut = (size > 0) & (size % np.uint64(PAGE) == 0) & (size <= room)
    fits = (
        (slots > 0) & (slots <= room // np.maximum(size, 1)) & (slots <= m * geometry.rows_per_slab)
    )
    at = np.where(inside, first, 0)
    head = slabs[at]
    same = (head["extent_slabs"] == m) & (head["first"] == first)
    same &= (head["slot_bytes"] == size) & (head["slots"] == slots)
    good = ~bound | (inside & cut & fits & same)
    # An extent needs all its slabs: count those that point to each head.
    heads = first[good & bound]
    counted = np.bincount(heads, minlength=n) if len(heads) else np.zeros(n, np.int64)
    good[bound & inside] &= (counted[at] == m)[bound & inside]
    bad: Mask = ~good
    return bad


def unbacked(geometry: Geometry, slabs: Table, backed: int) -> Mask:
    """[slabs] True for those of extents that lie beyond the reserved size, wholly or in part."""
    end = slabs["first"].astype(np.int64) + slabs["extent_slabs"]
    end = np.maximum(end, np.arange(1, geometry.slabs + 1))
    beyond: Mask = (end > backed // geometry.slab_bytes) & (slabs["extent_slabs"] > 0)
    return beyond


def bound_rows(geometry: Geometry, slabs: Table) -> Mask:
    """[max_slots] True for rows that are slots of an extent."""
    q = geometry.rows_per_slab
    behind = np.arange(geometry.slabs) - slabs["first"].astype(np.int64)
    left = np.where(slabs["extent_slabs"] > 0, slabs["slots"].astype(np.int64) - behind * q, 0)
    rows: Mask = (np.arange(q) < left[:, None]).ravel()
    return rows


def misplaced(geometry: Geometry, cold: Table, slabs: Table) -> Mask:
    """[max_slots] True for rows whose offset, size or slab is not what their extent gives them."""
    q = geometry.rows_per_slab
    first = np.repeat(slabs["first"].astype(np.uint64), q)
    size = np.repeat(slabs["slot_bytes"], q)
    number = np.arange(geometry.max_slots, dtype=np.uint64) - first * np.uint64(q)
    offset = first * np.uint64(geometry.slab_bytes) + number * size
    wrong: Mask = (cold["offset"] != offset) | (cold["slot_bytes"] != size)
    wrong |= cold["slab"] != first
    return wrong


def _slabs(table: Copy) -> Findings:
    bad = bad_slabs(table.geometry, table.slabs)
    yield "slabs that are part of no sound extent", np.flatnonzero(bad)
    beyond = unbacked(table.geometry, table.slabs, table.backed)
    yield "slabs in use whose memory is not reserved", np.flatnonzero(beyond)


def _places(table: Copy) -> Findings:
    bound = bound_rows(table.geometry, table.slabs)
    used = table.hot["state"] != SlotState.UNUSED
    yield "rows in use outside any extent", np.flatnonzero(used & ~bound)
    yield "slots of an extent whose rows are not in use", np.flatnonzero(bound & ~used)
    wrong = used & bound & misplaced(table.geometry, table.cold, table.slabs)
    yield "rows that are not at their extent's place", np.flatnonzero(wrong)


def _overlaps(table: Copy) -> Findings:
    """Independent of extents: sort by offset, compare neighbours."""
    cold = table.cold
    rows = np.flatnonzero(table.hot["state"] != SlotState.UNUSED)
    rows = rows[np.argsort(cold["offset"][rows], kind="stable")]
    start = cold["offset"][rows]
    end = start + cold["slot_bytes"][rows]
    yield "slots beyond the arena's end", rows[end > table.geometry.data_bytes]
    yield "slots that overlap the one before", rows[1:][start[1:] < end[:-1]]


def duplicates(hot: Table, cold: Table, rows: Numbers) -> Numbers:
    """Those of `rows` whose (namespace, group, key) also stands in another of them."""
    key = cold["key"][rows]
    owner = hot["namespace"][rows].astype(np.uint64) << np.uint64(16) | hot["group"][rows]
    # One word per row sorts ten times faster than three; rows that share a word are compared in full.
    word = key[:, 0] ^ key[:, 1] ^ owner * np.uint64(0x9E3779B97F4A7C15)
    order = np.argsort(word)
    alike = order[_neighbours(word[order][:, None])]
    alike = alike[np.lexsort((owner[alike], key[alike, 1], key[alike, 0]))]
    whole = np.column_stack([key[alike], owner[alike]])
    found: Numbers = rows[alike[_neighbours(whole)]]
    return found


def _neighbours(table: U64) -> Mask:
    """[n] True for rows of a sorted u64[n, k] that equal the one before or after."""
    same = (table[1:] == table[:-1]).all(axis=1)
    twice = np.zeros(len(table), np.bool_)
    twice[1:] |= same
    twice[:-1] |= same
    return twice


def _keys(table: Copy) -> Findings:
    hot, cold = table.hot, table.cold
    state = hot["state"]
    named = (state == SlotState.COMMITTED) | (state == SlotState.RESERVED)
    named &= hot["flags"] & FLAG_DROP == 0
    rows = np.flatnonzero(named)
    yield "rows whose key stands twice", duplicates(hot, cold, rows)
    yield "named rows without a key", rows[(cold["key"][rows] == 0).all(axis=1)]
    committed = np.flatnonzero(state == SlotState.COMMITTED).astype(np.int32)
    broken = cold["seal"][committed] != seal(hot, cold, committed)
    yield "committed rows that do not fit their seal", committed[broken].astype(np.int64)


def _states(table: Copy) -> Findings:
    hot, cold = table.hot, table.cold
    state, pins = hot["state"], hot["pins"]
    yield "rows of an unknown state", np.flatnonzero(state > SlotState.QUARANTINED)
    yield (
        "pinned rows that are not committed",
        np.flatnonzero((pins > 0) & (state != SlotState.COMMITTED)),
    )
    drop = hot["flags"] & FLAG_DROP != 0
    stale = drop & ~((state == SlotState.RESERVED) | ((state == SlotState.COMMITTED) & (pins > 0)))
    yield "cleared rows that were not freed", np.flatnonzero(stale)
    long = cold["token_bytes"] > cold["slot_bytes"]
    yield (
        "rows whose token bytes exceed the slot",
        np.flatnonzero(long & (state >= SlotState.RESERVED)),
    )
