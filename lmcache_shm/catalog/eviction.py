"""Which slots leave: least recently used first, in batches, never pinned, reserved or quarantined ones.

One scan over the tick column finds many victims; they wait in a queue and are looked at again before
they are used. So the price of a scan is shared by thousands of evictions.
"""

import numpy as np

from lmcache_shm.arena.allocator import NO_ROWS, SlabAllocator, slot_class
from lmcache_shm.arena.layout import U64, Numbers, Rows, SlotState, Table

SHARE = 32
"""A scan looks for one part in so many of a class, and for no more than MOST."""
MOST = 32768
SAMPLE = 4096
NO_TICKS: U64 = np.empty(0, np.uint64)

# A hot row as four u64 words: word 0 holds state (byte 0) and pins (upper half), word 1 the tick.
_STATE_AND_PINS = np.uint64(0xFFFFFFFF000000FF)
_COMMITTED = np.uint64(SlotState.COMMITTED)


def words(hot: Table) -> U64:
    """The hot table as u64[n, 4]."""
    return hot.view(np.uint64).reshape(-1, 4)


def victims(hot: Table, n: int, rows: Rows | None = None) -> Rows:
    """Up to n evictable rows (of `rows`, ascending; None: of all), oldest tick first."""
    table = words(hot) if rows is None else words(hot)[rows]
    if n <= 0 or not len(table):
        return NO_ROWS
    found = _below(table, _threshold(table, n))
    if len(found) < n:  # many of the old ones are pinned, or the sample misled
        found = np.flatnonzero(table[:, 0] & _STATE_AND_PINS == _COMMITTED)
    ticks = table[found, 1]
    if len(found) > n:
        part = np.argpartition(ticks, n - 1)[:n]
        found, ticks = found[part], ticks[part]
    found = found[np.argsort(ticks, kind="stable")]
    return (found if rows is None else rows[found]).astype(np.int32)


def _threshold(table: U64, n: int) -> np.uint64:
    """A tick that about 2n rows are not above, from a sample (exact choice happens among those)."""
    sample = table[:: max(len(table) // SAMPLE, 1), 1]
    at = min(2 * n * len(sample) // len(table) + 1, len(sample) - 1)
    return np.uint64(np.partition(sample, at)[at])


def _below(table: U64, tick: np.uint64) -> Numbers:
    old = np.flatnonzero(table[:, 1] <= tick)
    evictable: Numbers = old[table[old, 0] & _STATE_AND_PINS == _COMMITTED]
    return evictable


class Lru:
    """Victims of each class. Ticks may change behind its back; that rows may have become evictable must
    be told (`changed`), so that a full arena of pinned slots is not scanned again and again."""

    def __init__(self, slabs: SlabAllocator) -> None:
        self._slabs = slabs
        self._hot = slabs.arena.hot
        self._words = words(self._hot)
        self._queues: dict[int, tuple[Rows, U64]] = {}
        self._barren: dict[int, int] = {}  # class → `changes` at a scan that found nothing
        self.changes = 0

    def changed(self) -> None:
        """Rows may have become evictable (commit, release)."""
        self.changes += 1

    def oldest(self, slot_bytes: int, before: int) -> int | None:
        """Tick of the next victim of this class if it is below `before`."""
        rows, ticks = self._queue(slot_class(slot_bytes), 1)
        return int(ticks[0]) if len(rows) and int(ticks[0]) < before else None

    def take(self, slot_bytes: int, n: int, before: int) -> Rows:
        """Up to n victims of this class with ticks below `before`, oldest first. The caller evicts them."""
        size = slot_class(slot_bytes)
        parts = [NO_ROWS]
        while n > 0:
            rows, ticks = self._queue(size, n)
            count = min(int(np.searchsorted(ticks, np.uint64(before))), n)
            if not count:
                break
            parts.append(rows[:count])
            self._queues[size] = rows[count:], ticks[count:]
            n -= count
        return np.concatenate(parts)

    def _queue(self, size: int, n: int) -> tuple[Rows, U64]:
        """Victims that are still what they were at the scan; scanned anew when none is left."""
        rows, ticks = self._queues.get(size, (NO_ROWS, NO_TICKS))
        if len(rows):
            now = self._words[rows]
            same = (now[:, 0] & _STATE_AND_PINS == _COMMITTED) & (now[:, 1] == ticks)
            same &= self._slabs.arena.cold["slot_bytes"][rows] == size
            rows, ticks = rows[same], ticks[same]
        if not len(rows) and self._barren.get(size) != self.changes:
            members, count = self._members(size)
            rows = victims(self._hot, max(n, min(count // SHARE, MOST)), members)
            ticks = self._words[rows, 1]
            if not len(rows):
                self._barren[size] = self.changes
        self._queues[size] = rows, ticks
        return rows, ticks

    def _members(self, size: int) -> tuple[Rows | None, int]:
        """Rows of a class's extents (None: all rows, where there is no other class), and how many."""
        sizes = self._slabs.arena.slabs["slot_bytes"]
        mine = sizes == size
        if (mine | (sizes == 0)).all():
            return None, len(self._hot)
        q = self._slabs.per_slab
        rows = np.flatnonzero(mine)[:, None] * q + np.arange(q)
        return rows.ravel().astype(np.int32), rows.size
