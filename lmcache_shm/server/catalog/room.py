"""Room for new slots: free ones, else the least recently used ones of the same size, else colder extents of
other sizes. Synchronous, and bounded by what is asked for."""

import math
from collections.abc import Callable

import numpy as np

from lmcache_shm.arena.layout import Rows, SlotState
from lmcache_shm.server.catalog.eviction import Lru
from lmcache_shm.server.catalog.slots import Slots
from lmcache_shm.server.catalog.windows import Window, Windows


class Room:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._lru = Lru(slots.allocator)
        self._windows = Windows(slots.allocator, self._lru)

    def make(self, slot_bytes: int, n: int, before: int, in_use: Callable[[], Rows]) -> Rows:
        """Up to n rows for slots of this size; fewer when all the rest is pinned, in flight or newer.

        What leaves is older than `before`, the newcomers' tick, one by one or (extents of other sizes) on the
        average; only a size that has no place at all takes newer ones from others. `in_use()`: rows that
        stay in any case, because the newcomers continue them.
        """
        slots, allocator = self._slots, self._slots.allocator
        self._lru.changes = slots.changes
        # While the arena's memory is still being reserved nothing leaves: the newcomers are refused instead,
        # for some seconds at most. Asked first: what comes in between is there for `alloc`.
        growing = allocator.growing()
        parts = [allocator.alloc(slot_bytes, n)]
        missing = n - len(parts[0])
        while missing and not growing and self._free_some(slot_bytes, missing, before, in_use):
            parts.append(allocator.alloc(slot_bytes, missing))
            missing -= len(parts[-1])
        rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
        slots.used += len(rows)
        return rows

    def _free_some(
        self, slot_bytes: int, missing: int, before: int, in_use: Callable[[], Rows]
    ) -> bool:
        """Free slots of this size, or slabs for them; False when there are none to be had."""
        allocator = self._slots.allocator
        if not allocator.alone(slot_bytes):
            oldest = self._lru.oldest(slot_bytes, before)
            if oldest is not None:
                than: float = oldest
            else:
                than = before if allocator.extents_of(slot_bytes) else math.inf
            window = self._windows.colder(slot_bytes, than, in_use, urgent=oldest is None)
            if window is not None:
                self._take_over(slot_bytes, window)
                return True
        gone = self._lru.take(slot_bytes, missing, before)
        self._slots.evict(gone)
        self._windows.evicted(slot_bytes, len(gone))
        return len(gone) > 0

    def _take_over(self, slot_bytes: int, window: Window) -> None:
        """Empty the extents that a window touches and bind the window to this size."""
        slots, allocator = self._slots, self._slots.allocator
        starts = self._windows.extents_in(window)
        for start in starts:
            slots.evict(slots.in_state(self._windows.rows_in(start), SlotState.COMMITTED))
        allocator.unbind(starts)
        allocator.bind(slot_bytes, *window)
        self._slots.counters["rebinds"] += 1
