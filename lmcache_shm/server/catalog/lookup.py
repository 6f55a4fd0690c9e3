"""Acquire: the usable prefix of a request over all groups, pinned.

The index cache. A dict of a million keys costs several cache misses a key, one after the other. Here a key's
bucket holds a row number, and the row's own key, owner and state confirm it; numpy does that for hundreds of
keys at once. Nothing is ever removed: outdated entries are not confirmed. A group's index stays the truth; it is
asked for the keys that were not confirmed.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from lmcache_shm.arena.allocator import NO_ROWS
from lmcache_shm.arena.layout import NAMESPACE, U64, Rows, SlotState, places, word
from lmcache_shm.protocol.keys import split
from lmcache_shm.protocol.messages import KEY
from lmcache_shm.protocol.rules import needed, usable_chunks
from lmcache_shm.server import counters as misses
from lmcache_shm.server.catalog.groups import Group, Namespace
from lmcache_shm.server.catalog.slots import KNOWN, PIN, Slots

BUCKETS = 8
"""Buckets per slot, at least: when all slots are in use, one key in sixteen loses its bucket to another."""
FEW = 24
"""For at most this many keys the index is faster."""
_SPREAD, _HIGH = word(0x9E3779B97F4A7C15), word(32)
_NOT_FOUND = np.int32(-1)


class IndexCache:
    """32 to 64 bytes a slot."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        buckets = 1 << (BUCKETS * slots.arena.max_slots - 1).bit_length()
        self._rows = np.zeros(buckets, np.int32)
        self._mask = word(buckets - 1)

    def note(self, rows: Rows, owners: U64, keys: U64) -> None:
        """Committed rows, their owners (see layout.owners_of), and the first words of their keys."""
        self._rows[self._buckets(owners, keys)] = rows

    def find(self, space: Namespace, group: Group, keys: U64) -> Rows:
        """Committed rows of keys, u64[n, 2]; -1 where the index has to be asked."""
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


HIT = np.uint64(1 << 16)
ALL_HITS = np.uint64(0xFFFF << 16)
FIRST_LOOK = 64
STRIDE = 8
"""FIRST_LOOK keys are probed first; while the prefix goes on, each further probe has STRIDE times as many."""


class Hit(NamedTuple):
    """A usable prefix of `n_chunks` chunks (0: none). By group: number of the first chunk that has to be
    loaded, and the rows of it and all that follow up to n_chunks, i32, pinned until release()."""

    n_chunks: int
    first: list[int]
    rows: list[Rows]


class Lookup:
    def __init__(self, slots: Slots, cache: IndexCache) -> None:
        self._slots = slots
        self._cache = cache
        self.misses: Counter[str] = Counter(dict.fromkeys(misses.MISSES, 0))
        """Look-ups that found less than they asked for, by reason."""

    def acquire(self, space: Namespace, keys: bytes, local_tokens: int, num_tokens: int) -> Hit:
        size = space.chunk_size
        start = local_tokens // size  # the first chunk that the engine does not hold entirely
        high = min((num_tokens - 1) // size, len(keys) // KEY)
        counters = self._slots.counters
        counters["acquires"] += 1
        if high <= 0:
            return Hit(0, [0] * len(space.groups), [NO_ROWS] * len(space.groups))
        names = split(keys[: high * KEY])
        words = np.frombuffer(keys, "<u8", 2 * high).reshape(-1, 2)
        held, reach = self._probe(space, names, words, start)
        n = 0
        if reach > start:
            rules = [group.spec.rule for group in space.groups]
            present = [rows >= 0 for rows in held]
            n = usable_chunks(size, reach * size + 1, local_tokens, rules, present)
        if start < high:
            counters["query_tokens"] += high * size - local_tokens
            space.hits += n > 0
            space.misses += n == 0
            if n < high:
                self.misses[self._reason(space, names, held, n, reach)] += 1
        return self._pin(space, held, n, start, local_tokens)

    def _probe(
        self, space: Namespace, names: list[bytes], words: U64, start: int
    ) -> tuple[list[Rows], int]:
        """By group: committed rows of the chunks (-1: absent), and how far the full groups go.

        Nothing beyond that reach is looked up. Chunks before `start` are, so that they count as used, but
        they need not be there.
        """
        held = [NO_ROWS] * len(space.groups)
        reach = len(names)
        for group in space.full:
            held[group.number] = rows = self._probe_full(space, group, names, words, start, reach)
            reach = len(rows)
        for group in space.groups:
            if not group.full:
                first = needed(
                    group.spec.rule, space.chunk_size, start + 1, start * space.chunk_size
                )
                held[group.number] = np.full(reach, -1, np.int32)
                held[group.number][first.start :] = self._rows(
                    space, group, names, words, first.start, reach
                )
        return held, reach

    def _probe_full(
        self, space: Namespace, group: Group, names: list[bytes], words: U64, start: int, reach: int
    ) -> Rows:
        parts, at, step = [NO_ROWS], 0, start + FIRST_LOOK
        while at < reach:
            rows = self._rows(space, group, names, words, at, min(at + step, reach))
            gaps = np.flatnonzero(rows[max(start - at, 0) :] < 0)
            if len(gaps):
                parts.append(rows[: max(start - at, 0) + int(gaps[0])])
                break
            parts.append(rows)
            at, step = at + step, STRIDE * step
        return np.concatenate(parts)

    def _rows(
        self, space: Namespace, group: Group, names: list[bytes], words: U64, at: int, end: int
    ) -> Rows:
        """Committed rows of chunks [at, end); -1 where there is none."""
        if end - at <= FEW:
            return self._indexed(group, names[at:end])
        rows = self._cache.find(space, group, words[at:end])
        left = np.flatnonzero(rows < 0)
        if len(left):
            rows[left] = self._indexed(group, [names[at + i] for i in left.tolist()])
        return rows

    def _indexed(self, group: Group, names: list[bytes]) -> Rows:
        rows = group.index.rows(names)
        # Index -1 reads the last row, whatever its state; the result is -1 either way.
        return np.where(self._slots.state[rows] == SlotState.COMMITTED, rows, np.int32(-1))

    def _pin(
        self, space: Namespace, held: list[Rows], n: int, start: int, local_tokens: int
    ) -> Hit:
        slots, size = self._slots, space.chunk_size
        top = slots.tick + max(n, start) + 1
        first, pinned = [], []
        for group, rows in zip(space.groups, held, strict=True):
            need = needed(group.spec.rule, size, n, local_tokens) if n else range(0)
            mine = rows[need.start : need.stop].copy()  # no view: a lease may be held for long
            first.append(need.start)
            pinned.append(mine)
            if len(mine):
                slots.counters["bytes_acquired"] += len(mine) * group.size
                group.hits += len(mine)
                group.served += 1
            # The whole prefix counts as used, also the chunks that the engine holds itself.
            at = 0 if group.full else need.start
            use = rows[at : max(n, start) if group.full else need.stop]
            self._touch(use, need.start - at if n else len(use), top - at)
        slots.tick = space.last_tick = top
        slots.counters["hit_chunks"] += max(n - start, 0)
        slots.counters["hit_tokens"] += max(n * size - local_tokens, 0)
        return Hit(n, first, pinned)

    def _touch(self, rows: Rows, pinned: int, tick: int) -> None:
        """Rows of consecutive chunks were used, the first one at `tick`; those from `pinned` on get a pin.

        Negative ones are no rows. One gather and one scatter of whole hot rows (see hot_words).
        """
        there = rows >= 0
        ticks = np.uint64(tick) - np.arange(len(rows), dtype=np.uint64)
        if not there.all():
            pinned = int(there[:pinned].sum())
            rows, ticks = rows[there], ticks[there]
        if not len(rows):
            return
        at = places(rows)
        hot = self._slots.words.take(at, 0)
        hot[:, 1] = ticks
        hot[pinned:, 0] += PIN
        counted = hot[pinned:, 3]
        counted += HIT * ((counted & ALL_HITS) != ALL_HITS)
        self._slots.words[at] = hot

    def _reason(
        self, space: Namespace, names: list[bytes], held: list[Rows], n: int, reach: int
    ) -> str:
        """Why a hit ends at n chunks although there are more keys."""
        if n < reach and any((rows[n:] >= 0).any() for rows in held):
            lacking = [
                group
                for group, rows in zip(space.groups, held, strict=True)
                if not (len(rows) and rows[-1] >= 0)
            ]
            _blame(lacking, n)
            return misses.INCOMPLETE_GROUP
        key = names[min(reach, len(names) - 1)]
        _blame(space.groups, n)
        if any(key in group.index for group in space.groups):
            return misses.IN_FLIGHT
        if key in self._slots.ghosts:
            return misses.EVICTED
        others = self._slots.spaces.values()
        if space.empty and any(not other.empty for other in others):
            return misses.OTHER_NAMESPACE
        return misses.NEVER_SEEN


def _blame(groups: list[Group], n: int) -> None:
    """Count a look-up that found n chunks and no more for want of these groups."""
    for group in groups:
        group.short += n > 0
        group.misses += n == 0
