"""Slots for newcomers: free ones, else the least recently used ones of their size, else colder extents of others.

Least recently used. One scan over the LRU clock's column finds many victims; they wait in a queue and are
checked again before they are used, so thousands of evictions share the price of a scan. Pinned, reserved and
quarantined slots never leave.

Reclaiming. When one slot size starves it may take extents of other sizes, coldest first. A candidate is a run
of neighbouring slabs without any pinned, reserved or quarantined slot; its coldness is the mean clock of the
slots that would be lost. One pass scores all extents; the coldest candidates wait in a list and are checked
again before they are used.

All of it is synchronous, and bounded by the number of slots asked for.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.allocator import NO_ROWS, slot_class
from lmcache_shm.arena.layout import U64, Numbers, Rows, SlotState, Table, hot_words
from lmcache_shm.server.catalog.slots import Slots

SHARE = 32
"""A scan looks for at most 1/SHARE of a class's rows, and for no more than MOST."""
MOST = 32768
SAMPLE = 4096
AHEAD = 16
"""Rows checked beyond those that are needed now: some will have been used since the scan."""
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
    """Victims of each class. `Slots.changes` counts events after which rows may have become evictable, so that a
    full arena of pinned slots is not scanned again and again."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._slabs = slots.allocator
        self._hot = slots.arena.hot
        self._words = hot_words(self._hot)
        self._queues: dict[int, tuple[Rows, U64]] = {}
        self._barren: dict[int, int] = {}  # class → `changes` at a scan that found nothing

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
        if size in self._barren and not worth_it(self._slots.changes - self._barren[size], count):
            return False
        self._barren.pop(size, None)
        rows = victims(self._hot, max(n, min(count // SHARE, MOST)), members)
        self._queues[size] = rows, self._words[rows, 1]
        if not len(rows):
            self._barren[size] = self._slots.changes
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


KEPT = 64
"""Candidates kept from one scoring."""
PATIENCE = 16
"""Score again, when nothing is urgent, after 1/PATIENCE of all rows was evicted."""

Candidate = tuple[int, int]
"""First slab, number of slabs."""


class Candidates:
    """Runs of slabs that one class may take from others."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._slabs = slabs = slots.allocator
        self._words = hot_words(slabs.arena.hot).reshape(slabs.slabs, slabs.per_slab, 4)
        self._kept: dict[int, list[Candidate]] = {}
        self._barren: dict[int, int] = {}
        self._evicted: dict[int, int] = {}  # class → evictions since its last scoring

    def evicted(self, slot_bytes: int, n: int) -> None:
        """Count n slots of this class that had to leave."""
        size = slot_class(slot_bytes)
        self._evicted[size] = self._evicted.get(size, 0) + n

    def colder(
        self, slot_bytes: int, than: float, in_use: Callable[[], Rows], *, urgent: bool
    ) -> Candidate | None:
        """A candidate for this class whose slots' mean tick is below `than`, and with none of `in_use()`.

        `urgent`: the class has no other place.
        """
        if self._slabs.alone(slot_bytes):
            return None
        size = slot_class(slot_bytes)
        candidate = self._next(size, than, in_use)
        if candidate is not None:
            return candidate
        due = self._evicted.get(size, 0) * PATIENCE > self._slabs.arena.max_slots
        if not (urgent or due):
            return None
        since = self._slots.changes - self._barren.get(size, -self._slabs.arena.max_slots)
        if not worth_it(since, self._slabs.arena.max_slots):
            return None
        self._evicted[size] = 0
        self._kept[size] = self._score(size)
        candidate = self._next(size, than, in_use)
        if candidate is None:
            self._barren[size] = self._slots.changes
        return candidate

    def extents_in(self, candidate: Candidate) -> list[int]:
        """First slabs of the extents that a candidate touches."""
        slabs = self._slabs.arena.slabs[candidate[0] : candidate[0] + candidate[1]]
        starts: list[int] = np.unique(slabs["first"][slabs["extent_slabs"] > 0]).tolist()
        return starts

    def rows_in(self, start: int) -> Rows:
        """All rows of the extent at slab `start`."""
        return self._slabs.rows_of(start, int(self._slabs.arena.slabs["slots"][start]))

    def _next(self, size: int, than: float, in_use: Callable[[], Rows]) -> Candidate | None:
        kept = self._kept.get(size, [])
        while kept:
            score = self._score_now(size, kept[-1])
            if score is None:
                kept.pop()
            elif score < than:
                candidate = kept.pop()
                if not self._holds(candidate, in_use()):
                    return candidate
            else:
                kept.clear()  # the others are warmer still; the next scoring may find better ones
        return None

    def _holds(self, candidate: Candidate, rows: Rows) -> bool:
        """Whether the extents that a candidate touches hold one of these rows."""
        first = self._slabs.arena.slabs["first"][rows // self._slabs.per_slab]
        return bool(np.isin(first, self.extents_in(candidate)).any())

    def _score_now(self, size: int, candidate: Candidate) -> float | None:
        """Mean tick of the slots that a candidate would cost now; None if it may not be taken any more."""
        total, count = 0.0, 0
        for start in self.extents_in(candidate):
            if int(self._slabs.arena.slabs["slot_bytes"][start]) == size:
                return None
            table = hot_words(self._slabs.arena.hot)[self.rows_in(start)]
            blocked, used, ticks = _facts(table)
            if blocked.any():
                return None
            total += float(ticks.sum())
            count += int(used.sum())
        return total / count if count else 0.0

    def _score(self, size: int) -> list[Candidate]:
        """The coldest candidates for a class, the coldest last."""
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
            candidates = _coldest(score, shut, m)
            if candidates:
                return candidates
        return []


def _facts(table: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.bool_], ...]:
    """Per row of `table` (u64[…, 4]): may not be evicted; holds a committed slot; its tick (else 0)."""
    state = table[..., 0] & np.uint64(0xFF)
    blocked = (state == SlotState.RESERVED) | (state == SlotState.QUARANTINED)
    blocked |= table[..., 0] >> np.uint64(32) != 0
    used = state == SlotState.COMMITTED
    return blocked, used, np.where(used, table[..., 1], np.uint64(0))


def _coldest(
    score: npt.NDArray[np.float64], shut: npt.NDArray[np.bool_], m: int
) -> list[Candidate]:
    """Up to KEPT runs of m slabs without a shut one that do not overlap, the coldest last."""
    if not 0 < m <= len(score):
        return []
    closed = np.concatenate([[0], np.cumsum(shut)])
    warmth = np.concatenate([[0.0], np.cumsum(score)])
    starts = np.flatnonzero(closed[m:] == closed[:-m])
    order = starts[np.argsort((warmth[m:] - warmth[:-m])[starts], kind="stable")]
    chosen: list[Candidate] = []
    taken = np.zeros(len(score), np.bool_)
    for start in order.tolist():
        if not taken[start : start + m].any():
            chosen.append((start, m))
            taken[start : start + m] = True
            if len(chosen) == KEPT:
                break
    return chosen[::-1]


class Allocation:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._lru = Lru(slots)
        self._candidates = Candidates(slots)

    def make(self, slot_bytes: int, n: int, before: int, in_use: Callable[[], Rows]) -> Rows:
        """Up to n rows for slots of this size; fewer when all others are pinned, in flight or newer.

        Slots that leave are older than `before`, the newcomers' tick, one by one or (extents of other sizes) on the
        average; only a size that has no place at all takes newer ones from others. `in_use()`: rows that
        never leave, because the newcomers continue them.
        """
        slots, allocator = self._slots, self._slots.allocator
        # While the arena's memory is still being reserved nothing leaves: newcomers are refused instead, for some
        # seconds at most. Ask before `alloc`, which takes slabs that are reserved in between.
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
        """Free slots of this size, or slabs for them; False when there are none."""
        allocator = self._slots.allocator
        if not allocator.alone(slot_bytes):
            oldest = self._lru.oldest(slot_bytes, before)
            if oldest is not None:
                than: float = oldest
            else:
                than = before if allocator.extents_of(slot_bytes) else math.inf
            candidate = self._candidates.colder(slot_bytes, than, in_use, urgent=oldest is None)
            if candidate is not None:
                self._take_over(slot_bytes, candidate)
                return True
        gone = self._lru.take(slot_bytes, missing, before)
        self._slots.evict(gone)
        self._candidates.evicted(slot_bytes, len(gone))
        return len(gone) > 0

    def _take_over(self, slot_bytes: int, candidate: Candidate) -> None:
        """Empty the extents that a candidate touches and bind its slabs to this size."""
        slots, allocator = self._slots, self._slots.allocator
        starts = self._candidates.extents_in(candidate)
        for start in starts:
            slots.evict(slots.in_state(self._candidates.rows_in(start), SlotState.COMMITTED))
        allocator.unbind(starts)
        allocator.bind(slot_bytes, *candidate)
        self._slots.counters["rebinds"] += 1
