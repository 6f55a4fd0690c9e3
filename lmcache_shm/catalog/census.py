"""The slot table counted: by state, by owner and by extent, in one pass over the rows that extents have."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.layout import SlotState, hot_words
from lmcache_shm.catalog.namespace import Namespace
from lmcache_shm.catalog.slots import Slots

STATES = {
    "free": SlotState.FREE,
    "used": SlotState.COMMITTED,
    "reserved": SlotState.RESERVED,
    "quarantined": SlotState.QUARANTINED,
}
Counts = npt.NDArray[np.int64]


class Census:
    """Valid at the moment it was taken. A slot's owner is its (namespace, group)."""

    def __init__(self, slots: Slots) -> None:
        arena, allocator = slots.arena, slots.allocator
        self.starts = allocator.extents()
        """First slabs of all extents, ascending."""
        self.lengths = arena.slabs["extent_slabs"][self.starts].astype(np.int64)
        """Slabs of each extent."""
        self.slots = arena.slabs["slots"][self.starts].astype(np.int64)
        """Slots of each extent."""
        self.slot_bytes = arena.slabs["slot_bytes"][self.starts].astype(np.int64)
        ends = np.cumsum(self.slots)
        self._extent = np.repeat(np.arange(len(self.starts)), self.slots)
        within = np.arange(int(ends[-1]) if len(ends) else 0) - (ends - self.slots)[self._extent]
        rows = self.starts[self._extent] * allocator.per_slab + within
        table = hot_words(arena.hot)
        first, last = table[rows, 0], table[rows, 3]
        self._state = (first & np.uint64(0xFF)).astype(np.int64)
        self._pinned: npt.NDArray[np.bool_] = first >> np.uint64(32) != 0
        # 16 bits of group below the namespace, as one number.
        self._owner = (last >> np.uint64(32) << np.uint64(16)) | (
            first >> np.uint64(16) & np.uint64(0xFFFF)
        )
        self._ticks = table[rows, 1]
        self._rows = rows

    def in_state(self, name: str) -> npt.NDArray[np.bool_]:
        """By row of this census: whether it is in a state of STATES, or "pinned"."""
        if name == "pinned":
            return self._pinned
        found: npt.NDArray[np.bool_] = self._state == STATES[name]
        return found

    def total(self, name: str) -> int:
        return int(self.in_state(name).sum())

    def nbytes(self, name: str) -> int:
        return int((self.by_extent(name) * self.slot_bytes).sum())

    def by_extent(self, name: str) -> Counts:
        return np.bincount(self._extent[self.in_state(name)], minlength=len(self.starts))

    def by_owner(self, name: str, spaces: Sequence[Namespace]) -> dict[int, int]:
        """namespace << 16 | group → slots; of owners that are not among `spaces`, none."""
        known = np.array(
            sorted(space.id << 16 | group.number for space in spaces for group in space.groups),
            np.uint64,
        )
        owners = self._owner[self.in_state(name)]
        if not len(known) or not len(owners):
            return {}
        at = np.minimum(np.searchsorted(known, owners), len(known) - 1)
        counts = np.bincount(at[known[at] == owners], minlength=len(known))
        return dict(zip(known.tolist(), counts.tolist(), strict=True))

    def owners_of_extents(self) -> list[tuple[int, int]]:
        """(namespace, group) of each extent's first slot in use; (-1, -1) where none is."""
        found = [(-1, -1)] * len(self.starts)
        in_use = np.flatnonzero(self._state >= SlotState.RESERVED)
        # Rows are ascending by extent: the first of each stands where the extent changes.
        extents = self._extent[in_use]
        heads = np.flatnonzero(np.diff(extents, prepend=-1))
        for extent, owner in zip(
            extents[heads].tolist(), self._owner[in_use[heads]].tolist(), strict=True
        ):
            found[extent] = (owner >> 16, owner & 0xFFFF)
        return found

    def coldest(self) -> tuple[int, int] | None:
        """(row, tick) of the committed slot that was used least recently."""
        committed = np.flatnonzero(self._state == SlotState.COMMITTED)
        if not len(committed):
            return None
        at = committed[np.argmin(self._ticks[committed])]
        return int(self._rows[at]), int(self._ticks[at])
