"""Where keys were last seen, for many keys at a time: guesses that the slot table itself confirms.

A dict of a million keys costs several cache misses a key, one after the other. Here a key's bucket says a row,
and the row's own key, owner and state say whether it is the right one; numpy does that for hundreds of keys
at once. Nothing has to be taken out: what is not true any more is not confirmed. The index of a group stays
the one that knows; it is asked about the keys that are not confirmed.
"""

import numpy as np

from lmcache_shm.arena.layout import NAMESPACE, U64, Rows, SlotState, places, word
from lmcache_shm.server.catalog.namespaces import Group, Namespace
from lmcache_shm.server.catalog.slots import KNOWN, Slots

ROOM = 8
"""Buckets per slot, at least: one key in sixteen loses its bucket to another one when all slots are in use."""
FEW = 24
"""Up to so many keys the index is faster."""
_SPREAD, _HIGH = word(0x9E3779B97F4A7C15), word(32)
_NOT_FOUND = np.int32(-1)


class Hints:
    """32 to 64 bytes a slot."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        buckets = 1 << (ROOM * slots.arena.max_slots - 1).bit_length()
        self._rows = np.zeros(buckets, np.int32)
        self._mask = word(buckets - 1)

    def note(self, rows: Rows, owners: U64, keys: U64) -> None:
        """Committed rows, their owners (see layout.owners_of), and the first words of their keys."""
        self._rows[self._buckets(owners, keys)] = rows

    def find(self, space: Namespace, group: Group, keys: U64) -> Rows:
        """Committed rows of keys, u64[n, 2]; -1 where there may be one nevertheless."""
        owner = space.id << 32 | group.number << 16
        rows = self._rows.take(self._buckets(word(owner), keys[:, 0]))
        at = places(rows)
        hot = self._slots.words.take(at, 0)
        found = self._slots.keys[at].view(np.uint64).reshape(-1, 2)
        right = hot[:, 0] & KNOWN == word(SlotState.COMMITTED | group.number << 16)
        right &= hot[:, 3] & NAMESPACE == word(space.id << 32)
        right &= found[:, 0] == keys[:, 0]
        right &= found[:, 1] == keys[:, 1]
        return np.where(right, rows, _NOT_FOUND)

    def _buckets(self, owners: U64, keys: U64) -> U64:
        return (keys ^ owners * _SPREAD >> _HIGH) & self._mask
