"""The slot table counted by state, by owner and by extent, without walking its rows one by one.

A server answers nobody while it counts, so this must stay within some milliseconds for a million rows:
columns are counted slab by slab, and owners are asked for their own numbers where they know them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.layout import Numbers, SlotState
from lmcache_shm.server.catalog.namespaces import Namespace
from lmcache_shm.server.catalog.slots import Slots

STATES = {
    "free": SlotState.FREE,
    "used": SlotState.COMMITTED,
    "reserved": SlotState.RESERVED,
    "quarantined": SlotState.QUARANTINED,
}


class Census:
    """Valid at the moment it was taken. A slot's owner is its (namespace, group)."""

    def __init__(self, slots: Slots) -> None:
        arena, allocator = slots.arena, slots.allocator
        self._slots = slots
        self.starts = allocator.extents()
        """First slabs of all extents, ascending."""
        self.lengths = arena.slabs["extent_slabs"][self.starts].astype(np.int64)
        """Slabs of each extent."""
        self.slots = arena.slabs["slots"][self.starts].astype(np.int64)
        """Slots of each extent."""
        self.slot_bytes = arena.slabs["slot_bytes"][self.starts].astype(np.int64)
        shape = (allocator.slabs, allocator.per_slab)
        # One strided pass each; what follows works on the compact copies.
        self._state: npt.NDArray[np.uint8] = np.ascontiguousarray(slots.state).reshape(shape)
        self._pinned: npt.NDArray[np.bool_] = (slots.pins > 0).reshape(shape)
        masks = {name: self._state == state for name, state in STATES.items()}
        masks["pinned"] = self._pinned
        self._by_extent = {name: self._sum(mask) for name, mask in masks.items()}

    def _sum(self, mask: npt.NDArray[np.bool_]) -> Numbers:
        """Rows of `mask` by extent. Slabs between extents have none that could be counted to the wrong one."""
        if not len(self.starts):
            return np.zeros(0, np.int64)
        by_slab = np.count_nonzero(mask, axis=1)
        counts: Numbers = np.add.reduceat(by_slab, self.starts).astype(np.int64)
        return counts

    def by_extent(self, name: str) -> Numbers:
        """Slots of each extent in a state of STATES, or "pinned"."""
        return self._by_extent[name]

    def total(self, name: str) -> int:
        return int(self._by_extent[name].sum())

    def nbytes(self, name: str) -> int:
        return int((self._by_extent[name] * self.slot_bytes).sum())

    def by_owner(self, name: str, spaces: Sequence[Namespace]) -> dict[int, int]:
        """namespace << 16 | group → its slots that are "used", "reserved" or "pinned" and not cleared."""
        groups = [
            (space.id << 16 | group.number, group) for space in spaces for group in space.groups
        ]
        if name == "used":
            return {owner: len(group.index) - group.reserved for owner, group in groups}
        if name == "reserved":
            return {owner: group.reserved for owner, group in groups}
        known = np.sort(np.array([owner for owner, _ in groups], np.uint64))
        owners = self._owners(np.flatnonzero(self._pinned))
        if not len(known) or not len(owners):
            return {}
        at = np.minimum(np.searchsorted(known, owners), len(known) - 1)
        counts = np.bincount(at[known[at] == owners], minlength=len(known))
        return dict(zip(known.tolist(), counts.tolist(), strict=True))

    def _owners(self, rows: Numbers) -> npt.NDArray[np.uint64]:
        hot = self._slots.arena.hot
        owners: npt.NDArray[np.uint64] = hot["namespace"][rows].astype(np.uint64) << np.uint64(16)
        owners |= hot["group"][rows]
        return owners

    def owners_of_extents(self) -> list[tuple[int, int]]:
        """(namespace, group) of each extent's first slot in use; (-1, -1) where none is."""
        found = [(-1, -1)] * len(self.starts)
        in_use = self._state >= SlotState.RESERVED
        filled = np.flatnonzero(in_use.any(axis=1))
        rows = filled * in_use.shape[1] + in_use[filled].argmax(axis=1)
        extents = np.searchsorted(self.starts, filled, side="right") - 1
        heads = np.flatnonzero(np.diff(extents, prepend=-1))
        for extent, owner in zip(
            extents[heads].tolist(), self._owners(rows[heads]).tolist(), strict=True
        ):
            found[extent] = (owner >> 16, owner & 0xFFFF)
        return found

    def coldest(self) -> tuple[int, int] | None:
        """(row, tick) of the committed slot that was used least recently."""
        committed = self._state.ravel() == SlotState.COMMITTED
        if not committed.any():
            return None
        ticks = np.where(committed, self._slots.ticks, np.iinfo(np.uint64).max)
        row = int(ticks.argmin())
        return row, int(ticks[row])
