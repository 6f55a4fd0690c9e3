"""Which slots leave: least recently used first, in batches, never pinned, reserved or quarantined ones.

One scan over the tick column finds many victims; they wait in a queue and are looked at again before
they are used. So the price of a scan is shared by thousands of evictions.
"""

import numpy as np

from lmcache_shm.arena.allocator import NO_ROWS, SlabAllocator, slot_class
from lmcache_shm.arena.layout import U64, Numbers, Rows, SlotState, Table, hot_words

SHARE = 32
"""A scan looks for one part in so many of a class, and for no more than MOST."""
MOST = 32768
SAMPLE = 4096
AHEAD = 16
"""Rows looked at beyond those that are needed now: some will have been used since the scan."""
ROWS_PER_CHANGE = 4096
NO_TICKS: U64 = np.empty(0, np.uint64)

_STATE_AND_PINS = np.uint64(0xFFFFFFFF000000FF)  # of the first word of a hot row
_COMMITTED = np.uint64(SlotState.COMMITTED)


def victims(hot: Table, n: int, rows: Rows | None = None) -> Rows:
    """Up to n evictable rows (of `rows`, ascending; None: of all), oldest tick first."""
    table = hot_words(hot) if rows is None else hot_words(hot)[rows]
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


def worth_it(changes: int, rows: int) -> bool:
    """Whether to scan `rows` again after a scan found nothing and there were `changes` since.

    In a large arena that is pinned from end to end every scan costs milliseconds and finds next to nothing.
    """
    return changes * ROWS_PER_CHANGE >= rows and changes > 0


class Lru:
    """Victims of each class. Ticks may change behind its back; that rows may have become evictable must
    be told (`changed`), so that a full arena of pinned slots is not scanned again and again."""

    def __init__(self, slabs: SlabAllocator) -> None:
        self._slabs = slabs
        self._hot = slabs.arena.hot
        self._words = hot_words(self._hot)
        self._queues: dict[int, tuple[Rows, U64]] = {}
        self._barren: dict[int, int] = {}  # class → `changes` at a scan that found nothing
        self.changes = 0

    def changed(self) -> None:
        """Rows may have become evictable (commit, release)."""
        self.changes += 1

    def oldest(self, slot_bytes: int, before: int) -> int | None:
        """Tick of the next victim of this class if it is below `before`."""
        size = slot_class(slot_bytes)
        if not self._look(size, 1, before):
            return None
        return int(self._queues[size][1][0])

    def take(self, slot_bytes: int, n: int, before: int) -> Rows:
        """Up to n victims of this class with ticks below `before`, oldest first.

        May be fewer although there are more. The caller evicts them before it asks again.
        """
        size = slot_class(slot_bytes)
        count = self._look(size, n, before)
        rows, ticks = self._queues.get(size, (NO_ROWS, NO_TICKS))
        self._queues[size] = rows[count:], ticks[count:]
        return rows[:count]

    def _look(self, size: int, n: int, before: int) -> int:
        """How many rows at the head of the class's queue may be taken, at most n; 0 when there is none."""
        rows, ticks = self._queues.get(size, (NO_ROWS, NO_TICKS))
        while len(rows):
            head = rows[: n + AHEAD]
            now = self._words[head]
            same = (now[:, 0] & _STATE_AND_PINS == _COMMITTED) & (now[:, 1] == ticks[: len(head)])
            same &= self._slabs.arena.cold["slot_bytes"][head] == size
            if not same.all():  # used, pinned or freed since the scan
                head = head[same]
                rows = np.concatenate([head, rows[len(same) :]])
                ticks = np.concatenate([ticks[: len(same)][same], ticks[len(same) :]])
                self._queues[size] = rows, ticks
            if len(head):
                return min(int(np.searchsorted(ticks[: len(head)], np.uint64(before))), n)
        return self._look(size, n, before) if self._scan(size, n) else 0

    def _scan(self, size: int, n: int) -> bool:
        """Fill the queue of a class from the table; False when nothing can be evicted."""
        members, count = self._members(size)
        if size in self._barren and not worth_it(self.changes - self._barren[size], count):
            return False
        self._barren.pop(size, None)
        rows = victims(self._hot, max(n, min(count // SHARE, MOST)), members)
        self._queues[size] = rows, self._words[rows, 1]
        if not len(rows):
            self._barren[size] = self.changes
        return len(rows) > 0

    def _members(self, size: int) -> tuple[Rows | None, int]:
        """Rows of a class's extents (None: all rows, where there is no other class), and how many."""
        sizes = self._slabs.arena.slabs["slot_bytes"]
        mine = sizes == size
        if (mine | (sizes == 0)).all():
            return None, len(self._hot)
        q = self._slabs.per_slab
        rows = np.flatnonzero(mine)[:, None] * q + np.arange(q)
        return rows.ravel().astype(np.int32), rows.size
