"""Slabs → extents → slots: which rows exist, and which of them are free.

An extent is a run of m neighbouring slabs cut into slots of one size (a *class*: the slot's bytes rounded
up to a page). m is the smallest run that wastes at most 1/32, and no larger than 1/16 of the arena unless
one slot needs it. An extent that is taken back (`unbind`) returns its slabs to all classes.

The allocator writes the columns of places (offset, slot_bytes, slab) and the states UNUSED and FREE; the catalog
owns all others.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.ma  # np.unique would import it at its first call, and must not need a file descriptor then

from lmcache_shm.arena.layout import PAGE, Mask, Numbers, Rows, SlotState, hot_words, places
from lmcache_shm.arena.segment import Arena

WASTE = 32
"""An extent wastes at most 1/WASTE of its bytes."""
SHARE = 16
"""An extent takes at most 1/SHARE of the arena."""
NO_ROWS: Rows = np.empty(0, np.int32)


def slot_class(slot_bytes: int) -> int:
    """Bytes that a slot really takes: whole pages."""
    return max(-(-slot_bytes // PAGE), 1) * PAGE


class _Stack:
    """Free rows of one class, last in first out."""

    def __init__(self) -> None:
        self._rows = np.empty(64, np.int32)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def push(self, rows: Rows) -> None:
        need = self._n + len(rows)
        if need > len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty(need, np.int32)])
        self._rows[self._n : need] = rows
        self._n = need

    def pop(self, n: int) -> Rows:
        n = min(n, self._n)
        self._n -= n
        return self._rows[self._n : self._n + n][::-1].copy()

    def rows(self) -> Rows:
        return self._rows[: self._n].copy()

    def keep(self, wanted: Callable[[Rows], Mask]) -> None:
        """Forget the rows that are not wanted."""
        held = self._rows[: self._n]
        kept = held[wanted(held)]
        self._n = len(kept)
        self._rows[: self._n] = kept


def _length(gap: list[int]) -> int:
    return gap[1]


class SlabAllocator:
    """Free slots of every size, from the slab table on (see `adopt_extents`).

    Only slabs below the arena's reserved size (see layout) are bound to a slot size; the reserved size may rise at
    any time.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.slab_bytes = arena.geometry.slab_bytes
        self.slabs = arena.geometry.slabs
        self.data_bytes = arena.geometry.data_bytes
        self.per_slab = arena.geometry.rows_per_slab
        self._words = hot_words(arena.hot)
        # Views made once: to look up a field costs more than to write a few rows of it.
        hot, cold = arena.hot, arena.cold
        self._offset, self._slot_bytes = cold["offset"], cold["slot_bytes"]
        self._slab, self._bound = cold["slab"], arena.slabs["extent_slabs"]
        self._client, self._state = hot["client"], hot["state"]
        self._free: dict[int, _Stack] = {}
        self._extents: dict[int, int] = {}  # class → number of its extents
        self._usable = 0
        self._plan = lru_cache(maxsize=1024)(self._extent_slabs)
        self.count_free()

    def count_free(self) -> None:
        """The slab table was changed from outside (a repair): count its free slabs anew."""
        self._usable = self._below_mark()
        self._free_slabs = int((self.arena.slabs["extent_slabs"][: self._usable] == 0).sum())
        self._gaps: list[list[int]] | None = None  # free_runs(), where nothing changed since

    def usable_slabs(self) -> int:
        """How many slabs, from the first on, are reserved."""
        if self._usable < self.slabs:
            now = self._below_mark()
            if now != self._usable:
                self._free_slabs += now - self._usable  # those beyond were all free
                self._usable = now
                self._gaps = None
        return self._usable

    def _below_mark(self) -> int:
        return min(self.arena.backed_bytes // self.slab_bytes, self.slabs)

    def growing(self) -> bool:
        """Whether more slabs will be reserved soon, so that no slot has to leave for want of them."""
        return self._usable < self.slabs and self.usable_slabs() < self.slabs and self.arena.growing

    # -------------------------------------------------------------------------------- planning
    def min_slabs(self, slot_bytes: int) -> int:
        """Slabs that one slot needs."""
        return -(-slot_class(slot_bytes) // self.slab_bytes)

    def fits(self, slot_bytes: int) -> bool:
        """Whether one slot of this size fits into the empty arena."""
        return self.min_slabs(slot_bytes) <= self.room_slabs()

    def room_slabs(self) -> int:
        """Slabs that are reserved, or will be when all memory is."""
        return self.slabs if self.growing() else self.usable_slabs()

    def extent_slabs(self, slot_bytes: int, at_most: int | None = None) -> int:
        """Slabs of an extent for this size, at most `at_most`; 0 when not even one slot fits."""
        return self._plan(slot_class(slot_bytes), self.slabs if at_most is None else at_most)

    def _extent_slabs(self, size: int, at_most: int) -> int:
        least = self.min_slabs(size)
        most = min(max(self.slabs // SHARE, least), at_most)
        best, best_waste = 0, 1.0
        for m in range(least, most + 1):
            waste = m * self.slab_bytes % size / (m * self.slab_bytes)
            if waste * WASTE <= 1:
                return m
            if waste < best_waste:
                best, best_waste = m, waste
        return best

    def slots_in(self, slot_bytes: int, m: int) -> int:
        """Slots of an extent of m slabs: bounded by bytes, and by the rows that m slabs own."""
        return min(m * self.slab_bytes // slot_class(slot_bytes), m * self.per_slab)

    # ----------------------------------------------------------------------------------- slots
    def alloc(self, slot_bytes: int, n: int) -> Rows:
        """Up to n FREE rows of this size, binding free slabs as needed. They are the caller's now.

        May be fewer: then some extent must be taken back first.
        """
        size = slot_class(slot_bytes)
        stack = self._stack(size)
        while len(stack) < n and self._bind_free(size):
            pass
        return stack.pop(n)

    def free(self, rows: Rows) -> None:
        """Take slots back: FREE, owned by nobody, generation raised (so that no old seal fits)."""
        if not len(rows):
            return
        wiped = np.zeros((len(rows), 4), np.uint64)
        wiped[:, 0] = SlotState.FREE
        at = places(rows)
        wiped[:, 2] = self._words.take(at, 0)[:, 2] + np.uint64(1)  # the generation
        wiped[:, 3] = 0xFFFF  # client -1
        self._words[at] = wiped
        self._push(rows)

    def _push(self, rows: Rows) -> None:
        sizes = self._slot_bytes[rows]
        first = int(sizes[0])
        if (sizes == first).all():
            self._stack(first).push(rows)
            return
        for size in np.unique(sizes).tolist():
            self._stack(size).push(rows[sizes == size])

    def _stack(self, size: int) -> _Stack:
        return self._free.setdefault(size, _Stack())

    def free_rows(self) -> Rows:
        """All rows on the free lists."""
        return np.concatenate([NO_ROWS, *(stack.rows() for stack in self._free.values())])

    def extents_of(self, slot_bytes: int) -> int:
        """Extents bound to this size."""
        return self._extents.get(slot_class(slot_bytes), 0)

    def alone(self, slot_bytes: int) -> bool:
        """No extent is bound to another size."""
        mine = slot_class(slot_bytes)
        return not any(n for size, n in self._extents.items() if size != mine)

    # --------------------------------------------------------------------------------- extents
    def bind(self, slot_bytes: int, start: int, m: int) -> int:
        """Cut free slabs [start, start + m) into slots; their number."""
        size = slot_class(slot_bytes)
        n = self.slots_in(size, m)
        rows = self.rows_of(start, n)
        span = slice(start * self.per_slab, start * self.per_slab + n)
        at = start * self.slab_bytes
        self._offset[span] = np.arange(at, at + n * size, size, np.uint64)
        self._slot_bytes[span] = size
        self._slab[span] = start
        self._client[span] = -1
        self.arena.slabs[start : start + m] = (size, start, 0, n, 0)
        self._bound[start : start + m] = m  # after the other fields: now the slabs are not free
        self._state[span] = SlotState.FREE  # last: a FREE row is always inside a bound extent
        self._stack(size).push(rows[::-1])
        self._extents[size] = self._extents.get(size, 0) + 1
        self._free_slabs -= m
        self._gaps = None
        return n

    def unbind(self, starts: Sequence[int]) -> None:
        """Return the slabs of the extents that start at these slabs; all their rows must be FREE."""
        slabs, q = self.arena.slabs, self.per_slab
        heads = slabs[list(starts)].copy()
        leaving = np.zeros(self.slabs, np.bool_)
        for start, m in zip(starts, heads["extent_slabs"].tolist(), strict=True):
            leaving[start : start + m] = True
        sizes, counts = np.unique(heads["slot_bytes"], return_counts=True)
        for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
            self._stack(size).keep(lambda rows: ~leaving[rows // q])
            self._extents[size] -= count
        state = self.arena.hot["state"].reshape(self.slabs, q)
        state[leaving] = SlotState.UNUSED  # first: a FREE row is always inside a bound extent
        slabs[leaving] = 0
        self._free_slabs += int(leaving.sum())
        self._gaps = None

    def rows_of(self, start: int, slots: int) -> Rows:
        """Rows of an extent by its first slab and number of slots."""
        first = start * self.per_slab
        return np.arange(first, first + slots, dtype=np.int32)

    def extents(self) -> Numbers:
        """First slabs of all extents, ascending."""
        slabs = self.arena.slabs
        return np.flatnonzero(
            (slabs["extent_slabs"] > 0) & (slabs["first"] == np.arange(self.slabs))
        )

    def release_empty(self) -> int:
        """Unbind every extent all of whose slots are FREE; how many there were."""
        state = self.arena.hot["state"].reshape(self.slabs, self.per_slab)
        idle: Mask = state.max(axis=1) <= SlotState.FREE
        starts = self.extents()
        if not len(starts):
            return 0
        slabs = self.arena.slabs
        bound = np.flatnonzero(slabs["extent_slabs"])
        busy = np.unique(slabs["first"][bound[~idle[bound]]])
        empty = np.setdiff1d(starts, busy)
        self.unbind(empty.tolist())
        return len(empty)

    def adopt_extents(self, starts: Iterable[int]) -> None:
        """After a warm restart: take over extents that were found sound, with their FREE rows."""
        state = self.arena.hot["state"]
        for start in starts:
            slab = self.arena.slabs[start]
            size = int(slab["slot_bytes"])
            rows = self.rows_of(start, int(slab["slots"]))
            self._stack(size).push(rows[state[rows] == SlotState.FREE][::-1])
            self._extents[size] = self._extents.get(size, 0) + 1

    def _bind_free(self, size: int) -> bool:
        """Bind one more extent in free slabs, in the smallest gap that is large enough. False: there is none."""
        end = self.usable_slabs()
        if not self._free_slabs:
            return False
        gaps = self.free_runs(end).tolist() if self._gaps is None else self._gaps
        wanted = self.extent_slabs(size)
        enough = [gap for gap in gaps if gap[1] >= wanted]
        if wanted and enough:
            gap, m = min(enough, key=_length), wanted
        else:
            # The last one will soon be larger: not cut small.
            whole = [gap for gap in gaps if sum(gap) < end] if self.growing() else gaps
            if not whole:
                return False
            gap = max(whole, key=_length)
            m = self.extent_slabs(size, gap[1])
        if not m:
            return False
        n = self.bind(size, gap[0], m)
        gap[0], gap[1] = gap[0] + m, gap[1] - m
        if end == self._usable:  # the reserved size has not risen meanwhile
            self._gaps = [gap for gap in gaps if gap[1]]
        return n > 0

    def free_runs(self, end: int | None = None) -> Numbers:
        """[[first slab, length], …] of all gaps between extents, as far as they lie before slab `end`."""
        free = self.arena.slabs["extent_slabs"][:end] == 0
        free = np.concatenate([[0], free, [0]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(free)).reshape(-1, 2)
        return np.stack([edges[:, 0], edges[:, 1] - edges[:, 0]], axis=1)
