"""Acquire: the usable prefix of a request over all groups, pinned."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from lmcache_shm.arena.allocator import NO_ROWS
from lmcache_shm.arena.layout import U64, Rows, SlotState, places
from lmcache_shm.protocol.keys import split
from lmcache_shm.protocol.messages import KEY
from lmcache_shm.protocol.rules import needed, usable_chunks
from lmcache_shm.server.catalog import misses
from lmcache_shm.server.catalog.hints import FEW, Hints
from lmcache_shm.server.catalog.namespaces import Group, Namespace
from lmcache_shm.server.catalog.slots import PIN, Slots

HIT = np.uint64(1 << 16)
ALL_HITS = np.uint64(0xFFFF << 16)
FIRST_LOOK = 64
STRIDE = 8
"""FIRST_LOOK keys are probed before looking whether the prefix goes on; then STRIDE times as many, and so on."""


class Hit(NamedTuple):
    """A usable prefix of `n_chunks` chunks (0: none). By group: number of the first chunk that has to be
    loaded, and the rows of it and all that follow up to n_chunks, i32, pinned until release()."""

    n_chunks: int
    first: list[int]
    rows: list[Rows]


class Lookup:
    def __init__(self, slots: Slots, hints: Hints) -> None:
        self._slots = slots
        self._hints = hints
        self.misses: Counter[str] = misses.no_misses()
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
        rows = self._hints.find(space, group, words[at:end])
        left = np.flatnonzero(rows < 0)
        if len(left):
            rows[left] = self._indexed(group, [names[at + i] for i in left.tolist()])
        return rows

    def _indexed(self, group: Group, names: list[bytes]) -> Rows:
        rows = group.index.rows(names)
        # Index -1 reads the last row, whatever it is; the result is -1 either way.
        return np.where(self._slots.state[rows] == SlotState.COMMITTED, rows, np.int32(-1))

    def _pin(
        self, space: Namespace, held: list[Rows], n: int, start: int, local_tokens: int
    ) -> Hit:
        slots, size = self._slots, space.chunk_size
        top = slots.tick + max(n, start) + 1
        first, pinned = [], []
        for group, rows in zip(space.groups, held, strict=True):
            need = needed(group.spec.rule, size, n, local_tokens) if n else range(0)
            mine = rows[need.start : need.stop].copy()  # not a view: a lease may be held for long
            first.append(need.start)
            pinned.append(mine)
            if len(mine):
                slots.counters["bytes_acquired"] += len(mine) * group.size
                group.hits += len(mine)
                group.served += 1
            # The whole prefix counts as used, also what the engine holds itself.
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
