"""Rows and their owners: the table's columns, the LRU clock, and the way from a row to its index."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.allocator import SlabAllocator
from lmcache_shm.arena.layout import (
    COLD_DTYPE,
    FLAG_DROP,
    U64,
    Mask,
    Rows,
    SlotState,
    cold_words,
    hot_words,
    owners_of,
    word,
)
from lmcache_shm.arena.segment import Arena
from lmcache_shm.protocol.keys import split
from lmcache_shm.protocol.messages import KEY
from lmcache_shm.server.catalog.groups import Group, Namespace
from lmcache_shm.server.counters import zeros

FIRST_TICK = 1 << 32
"""Ticks start here, so that a row may be made older than any that is in use."""
LAST_TICK = 1 << 62

PARENT_AT = 16
"""Offset of `parent` in a cold row."""

# Parts of the words of a hot row (see hot_words).
STATE_AND_FLAGS, DROPPED = word(0xFFFF), word(FLAG_DROP << 8)
GROUP_AT, GROUP = word(16), word(0xFFFF)
KNOWN = word(0xFFFFFFFF)  # all but the pins
PIN = word(1 << 32)
NO_CLIENT = word(0xFFFF)
RESERVED = word(SlotState.RESERVED)  # comparing with the enum itself costs several µs
COMMIT = word(SlotState.COMMITTED - SlotState.RESERVED)
ONE = word(1)


def room_for(chunks: int) -> int:
    """Ticks to give to a prefix of `chunks` chunks: with some to spare, as it may grow; a power of two."""
    return max(1 << (chunks - 1).bit_length(), 8)


class Ghosts:
    """Fingerprints of evicted keys, to explain misses: one word per bucket, the latest wins. 2 MiB for 2^18 buckets.

    A key that was evicted long ago is forgotten when another takes its bucket. A false memory has odds
    of 2^-64.
    """

    def __init__(self, buckets: int = 1 << 18) -> None:
        self._words: U64 = np.zeros(buckets, np.uint64)

    def add(self, keys: U64) -> None:
        """Remember evicted keys, u64[n, 2]."""
        self._words[keys[:, 0] % np.uint64(len(self._words))] = keys[:, 1] | np.uint64(1)

    def __contains__(self, key: bytes) -> bool:
        low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        return int(self._words[low % len(self._words)]) == high | 1


class Slots:
    """The state that all operations of the catalog share."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.allocator = SlabAllocator(arena)
        self.spaces: dict[int, Namespace] = {}
        self.ghosts = Ghosts()
        self.counters: Counter[str] = zeros("catalog")
        self.tick = FIRST_TICK
        """The LRU clock: the highest tick given so far."""
        self.used = 0
        """Rows that are neither UNUSED nor FREE."""
        self.changes = 0
        """Raised whenever rows may have become evictable."""
        # Views made once: to look up a field of a structured array costs as much as to read a few rows of it.
        hot, cold = arena.hot, arena.cold
        self.words, self.cold_words = hot_words(hot), cold_words(cold)
        self.keys: npt.NDArray[np.void] = cold["key"].view(f"V{KEY}")[:, 0]
        """One item per key: gathered several times faster than pairs of words."""
        self.seals, self.checks = cold["seal"], cold["checks"]
        self.state, self.flags, self.pins = hot["state"], hot["flags"], hot["pins"]
        self.ticks: U64 = hot["tick"]
        self._parents = arena.regions.cold + PARENT_AT

    def parent_of(self, row: int) -> bytes:
        """Key of the chunk before a row's."""
        at = self._parents + row * COLD_DTYPE.itemsize
        return self.arena.meta[at : at + KEY]

    def keys_of(self, rows: Rows) -> list[bytes]:
        return split(self.keys[rows].tobytes())

    def owners(self, rows: Rows) -> Iterator[tuple[Group, Rows]]:
        """`rows` by group; those of namespaces that are gone are left out."""
        if not len(rows):
            return
        owner = self._owner(rows)
        first = int(owner[0])
        same = bool((owner == owner[0]).all())
        for number in [first] if same else np.unique(owner).tolist():
            group = self._group(number)
            if group is not None:
                yield group, rows if same else rows[owner == number]

    def _owner(self, rows: Rows) -> U64:
        """Namespace and group of each row, for `_group`."""
        return owners_of(self.words.take(rows, 0))

    def _group(self, owner: int) -> Group | None:
        space, number = self.spaces.get(owner >> 32), owner >> 16 & 0xFFFF
        return space.groups[number] if space is not None and number < len(space.groups) else None

    def count_by_owner(self, owners: U64) -> Iterator[tuple[Group, int]]:
        """How many of some rows, given as their owners, belong to each group."""
        for number, n in Counter(owners.tolist()).items():
            group = self._group(number)
            if group is not None:
                yield group, n

    def forget(self, rows: Rows) -> None:
        """Take rows out of their indices; those that are in none (FLAG_DROP) must not be among them."""
        for group, mine in self.owners(rows):
            group.index.remove(self.keys_of(mine))
            group.reserved -= int((self.state[mine] == SlotState.RESERVED).sum())

    def evict(self, rows: Rows) -> None:
        """Committed, unpinned rows leave: out of the index, FREE, remembered as ghosts."""
        keys = self.keys[rows]
        self.ghosts.add(keys.view(np.uint64).reshape(-1, 2))
        by_owner: dict[int, list[bytes]] = {}
        for owner, key in zip(self._owner(rows).tolist(), split(keys.tobytes()), strict=True):
            by_owner.setdefault(owner, []).append(key)
        for owner, mine in by_owner.items():
            group = self._group(owner)
            if group is not None:
                group.index.remove(mine)
                group.evictions += len(mine)
                self.counters["evictions"] += len(mine)
                self.counters["bytes_evicted"] += len(mine) * group.size
        self.free(rows)

    def free(self, rows: Rows) -> None:
        """Rows that are in no index any more become FREE."""
        self.allocator.free(rows)
        self.used -= len(rows)

    def bytes_of(self, rows: Rows) -> int:
        return int(self.arena.cold["slot_bytes"][rows].sum())

    def is_dropped(self, rows: Rows) -> Mask:
        dropped: Mask = self.flags[rows] & FLAG_DROP != 0
        return dropped

    def in_state(self, rows: Rows, *states: SlotState) -> Rows:
        """Those of `rows` that are in one of `states`."""
        now = self.state[rows]
        keep = np.zeros(len(rows), np.bool_)
        for state in states:
            keep |= now == state
        kept: Rows = rows[keep]
        return kept
