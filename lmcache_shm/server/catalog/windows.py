"""When one slot size starves: which extents of other sizes it may take, coldest first.

A window is a run of neighbouring slabs without any pinned, reserved or quarantined slot. Its coldness is the
mean tick of the slots that would be lost. All extents are scored in one pass; the coldest windows wait in a
list and are looked at again before they are used.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.allocator import SlabAllocator, slot_class
from lmcache_shm.arena.layout import Rows, SlotState, hot_words
from lmcache_shm.server.catalog.eviction import Lru, worth_it

KEPT = 64
"""Windows kept from one scoring."""
PATIENCE = 16
"""Score again, when nothing is urgent, after one part in so many of all rows was evicted."""

Window = tuple[int, int]
"""First slab, number of slabs."""


class Windows:
    def __init__(self, slabs: SlabAllocator, lru: Lru) -> None:
        self._slabs = slabs
        self._lru = lru
        self._words = hot_words(slabs.arena.hot).reshape(slabs.slabs, slabs.per_slab, 4)
        self._kept: dict[int, list[Window]] = {}
        self._barren: dict[int, int] = {}
        self._evicted: dict[int, int] = {}  # class → evictions since its last scoring

    def evicted(self, slot_bytes: int, n: int) -> None:
        """Tell that n slots of this class had to leave."""
        size = slot_class(slot_bytes)
        self._evicted[size] = self._evicted.get(size, 0) + n

    def colder(
        self, slot_bytes: int, than: float, in_use: Callable[[], Rows], *, urgent: bool
    ) -> Window | None:
        """A window for this class whose slots' mean tick is below `than`, and with none of `in_use()`.

        `urgent`: the class has nothing else.
        """
        if self._slabs.alone(slot_bytes):
            return None
        size = slot_class(slot_bytes)
        window = self._next(size, than, in_use)
        if window is not None:
            return window
        due = self._evicted.get(size, 0) * PATIENCE > self._slabs.arena.max_slots
        if not (urgent or due):
            return None
        since = self._lru.changes - self._barren.get(size, -self._slabs.arena.max_slots)
        if not worth_it(since, self._slabs.arena.max_slots):
            return None
        self._evicted[size] = 0
        self._kept[size] = self._score(size)
        window = self._next(size, than, in_use)
        if window is None:
            self._barren[size] = self._lru.changes
        return window

    def extents_in(self, window: Window) -> list[int]:
        """First slabs of the extents that a window touches."""
        slabs = self._slabs.arena.slabs[window[0] : window[0] + window[1]]
        starts: list[int] = np.unique(slabs["first"][slabs["extent_slabs"] > 0]).tolist()
        return starts

    def rows_in(self, start: int) -> Rows:
        """All rows of the extent at slab `start`."""
        return self._slabs.rows_of(start, int(self._slabs.arena.slabs["slots"][start]))

    def _next(self, size: int, than: float, in_use: Callable[[], Rows]) -> Window | None:
        kept = self._kept.get(size, [])
        while kept:
            score = self._score_now(size, kept[-1])
            if score is None:
                kept.pop()
            elif score < than:
                window = kept.pop()
                if not self._holds(window, in_use()):
                    return window
            else:
                kept.clear()  # the rest is warmer still; better ones are for the next scoring
        return None

    def _holds(self, window: Window, rows: Rows) -> bool:
        """Whether the extents that a window touches hold one of these rows."""
        first = self._slabs.arena.slabs["first"][rows // self._slabs.per_slab]
        return bool(np.isin(first, self.extents_in(window)).any())

    def _score_now(self, size: int, window: Window) -> float | None:
        """Mean tick of what a window would cost now; None if it may not be taken any more."""
        total, count = 0.0, 0
        for start in self.extents_in(window):
            if int(self._slabs.arena.slabs["slot_bytes"][start]) == size:
                return None
            table = hot_words(self._slabs.arena.hot)[self.rows_in(start)]
            blocked, used, ticks = _facts(table)
            if blocked.any():
                return None
            total += float(ticks.sum())
            count += int(used.sum())
        return total / count if count else 0.0

    def _score(self, size: int) -> list[Window]:
        """The coldest windows for a class, the coldest last."""
        slabs = self._slabs.arena.slabs
        blocked, used, ticks = (fact.sum(axis=1) for fact in _facts(self._words))
        first = np.where(slabs["extent_slabs"] > 0, slabs["first"], np.arange(len(slabs)))
        n = len(slabs)
        blocked, used, ticks = (
            np.bincount(first, fact, minlength=n)[first] for fact in (blocked, used, ticks)
        )
        score = ticks / np.maximum(used, 1)
        shut = (blocked > 0) | (slabs["slot_bytes"] == size)
        shut |= np.arange(n) >= self._slabs.usable_slabs()
        for m in (self._slabs.extent_slabs(size), self._slabs.min_slabs(size)):
            windows = _coldest(score, shut, m)
            if windows:
                return windows
        return []


def _facts(table: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.bool_], ...]:
    """Per row of `table` (u64[…, 4]): may not be evicted; holds a committed slot; its tick (else 0)."""
    state = table[..., 0] & np.uint64(0xFF)
    blocked = (state == SlotState.RESERVED) | (state == SlotState.QUARANTINED)
    blocked |= table[..., 0] >> np.uint64(32) != 0
    used = state == SlotState.COMMITTED
    return blocked, used, np.where(used, table[..., 1], np.uint64(0))


def _coldest(score: npt.NDArray[np.float64], shut: npt.NDArray[np.bool_], m: int) -> list[Window]:
    """Up to KEPT windows of m slabs without a shut one that do not overlap, the coldest last."""
    if not 0 < m <= len(score):
        return []
    closed = np.concatenate([[0], np.cumsum(shut)])
    warmth = np.concatenate([[0.0], np.cumsum(score)])
    starts = np.flatnonzero(closed[m:] == closed[:-m])
    order = starts[np.argsort((warmth[m:] - warmth[:-m])[starts], kind="stable")]
    chosen: list[Window] = []
    taken = np.zeros(len(score), np.bool_)
    for start in order.tolist():
        if not taken[start : start + m].any():
            chosen.append((start, m))
            taken[start : start + m] = True
            if len(chosen) == KEPT:
                break
    return chosen[::-1]
