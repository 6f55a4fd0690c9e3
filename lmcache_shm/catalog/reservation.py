"""Reserve: which entries are missing, how recent they count, and where they go.

Ticks. In a prefix every chunk is older than the one before it, so a prefix shrinks from its tail. A new chunk
counts as just older than its parent; if the parent itself has not been used for a while, the whole prefix is
first made new again (it is in use: it is being continued), with what a hit on it would need of the other groups.
What leaves for a new chunk must be older than it, so a prefix never evicts its own beginning.

A prefix that is longer than the arena keeps its first chunks: what follows a chunk that found no room in a group
of full attention could never be used, so it finds none either, in no group.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.allocator import NO_ROWS
from lmcache_shm.arena.layout import HOT_DTYPE, U64, Numbers, Rows, SlotState, cold_words
from lmcache_shm.catalog.hits import needed, usable_chunks
from lmcache_shm.catalog.index import split
from lmcache_shm.catalog.namespace import Group, Namespace
from lmcache_shm.catalog.room import Room
from lmcache_shm.catalog.slots import Slots

EXISTS, BUSY, FULL = -1, -2, -3
SLACK = 16
"""A prefix is made new again when more ticks passed than one in so many of the rows in use."""
PIECES = 16
"""What is asked for at once is looked at in pieces of at most one part in so many of the arena."""
REMEMBERED = 16384
"""Keys of chunks without room that are remembered, so that those that follow them find none."""

Picks = Numbers


class Entries(NamedTuple):
    """What is to be reserved; n entries each, as in Catalog.reserve."""

    names: list[bytes]
    keys: U64  # [n, 2]
    parents: U64  # [n, 2]
    chunks: npt.NDArray[np.uint32]
    token_lens: npt.NDArray[np.uint32]
    digests: U64  # [n, 2]
    salts: U64
    client: int
    now_ns: int

    @classmethod
    def of(
        cls, keys: bytes, parents: bytes, chunks: npt.NDArray[np.uint32],
        token_lens: npt.NDArray[np.uint32], digests: bytes, salts: U64, client: int, now_ns: int,
    ) -> "Entries":  # fmt: skip
        words = (np.frombuffer(packed, "<u8").reshape(-1, 2) for packed in (keys, parents, digests))
        key, parent, digest = words
        names = split(keys)
        return cls(names, key, parent, chunks, token_lens, digest, salts, client, now_ns)


class Reserver:
    def __init__(self, slots: Slots, room: Room) -> None:
        self._slots = slots
        self._room = room
        self._refused: dict[bytes, None] = {}  # in the order in which they came

    def reserve(self, space: Namespace, groups: npt.NDArray[np.uint16], entries: Entries) -> Rows:
        """A row, EXISTS, BUSY or FULL for each entry."""
        out = np.full(len(groups), FULL, np.int32)
        # Full groups first: their rows are where the others' parents are looked up.
        order = sorted(space.groups, key=lambda group: not group.full)
        # In pieces, so that one group does not take all the room and leave none for the rest of the same chunks.
        share = self._slots.allocator.data_bytes // sum(group.size for group in order) // PIECES
        piece = max(share, 1) * len(order)
        for start in range(0, len(groups), piece):
            numbers = groups[start : start + piece]
            for group in order:
                picks = start + np.flatnonzero(numbers == group.number)
                if len(picks):
                    self._reserve_group(space, group, picks, entries, out)
        space.last_tick = self._slots.tick
        counters = self._slots.counters
        counters["stores_exist"] += int((out == EXISTS).sum())
        counters["stores_skipped_busy"] += int((out == BUSY).sum())
        counters["stores_skipped_full"] += int((out == FULL).sum())
        return out

    def _reserve_group(
        self, space: Namespace, group: Group, picks: Picks, entries: Entries, out: Rows
    ) -> None:
        names = entries.names
        wanted = names if len(picks) == len(names) else [names[i] for i in picks.tolist()]
        found = group.index.rows(wanted)
        known = found >= 0
        if known.any():
            there = self._slots.state[found[known]] == SlotState.COMMITTED
            out[picks[known]] = np.where(there, EXISTS, BUSY)
            picks = picks[~known]
            wanted = [names[i] for i in picks.tolist()]
        if len(np.unique(entries.keys[picks, 0])) < len(picks):
            picks = self._first_of_each(picks, wanted, out)
            wanted = [names[i] for i in picks.tolist()]
        if self._refused and len(picks):
            picks = self._usable(space, group, picks, entries)
            wanted = [names[i] for i in picks.tolist()]
        if not len(picks):
            return
        in_use = self._in_use(space, picks, entries)
        # Where nothing is older than the newcomers, make their prefixes new and look once more.
        for renew in (False, True):
            ticks = self._ticks(space, picks, entries, renew=renew)
            rows = self._room.make(group.size, len(picks), int(ticks.min()), in_use)
            placed, picks = picks[: len(rows)], picks[len(rows) :]
            self._write(space, group, rows, placed, entries, ticks[: len(rows)])
            group.index.add(wanted, rows.tolist())
            group.reserved += len(rows)
            out[placed] = rows
            wanted = wanted[len(rows) :]
            if not wanted:
                break
        if group.full:
            self._remember(wanted)

    def forget(self) -> None:
        """The arena was cleared: what found no room in it may find some now."""
        self._refused.clear()

    def _remember(self, refused: list[bytes]) -> None:
        self._refused.update(dict.fromkeys(refused))
        for name in list(islice(self._refused, max(len(self._refused) - REMEMBERED, 0))):
            del self._refused[name]

    def _usable(self, space: Namespace, group: Group, picks: Picks, entries: Entries) -> Picks:
        """Those that a hit could reach: of a full group what does not follow a refused chunk, of others what is none."""
        on = split((entries.parents if group.full else entries.keys)[picks].tobytes())
        keep = np.ones(len(picks), np.bool_)
        coming: set[bytes] = set()
        for i, name in enumerate(on):
            new = entries.names[int(picks[i])]
            if name in self._refused and name not in coming and self._lacks(space, name):
                keep[i] = False
                if group.full:
                    self._remember([new])
            else:
                coming.add(new)
        return picks[keep]

    @staticmethod
    def _first_of_each(picks: Picks, wanted: list[bytes], out: Rows) -> Picks:
        """A key named twice in one request is reserved once."""
        seen: set[bytes] = set()
        keep = np.ones(len(picks), np.bool_)
        for i, name in enumerate(wanted):
            keep[i] = name not in seen
            seen.add(name)
        out[picks[~keep]] = BUSY
        return picks[keep]

    @staticmethod
    def _lacks(space: Namespace, name: bytes) -> bool:
        """Whether a chunk, once refused, was not stored since."""
        return any(group.index.get(name) < 0 for group in space.groups if group.full)

    def _ticks(self, space: Namespace, picks: Picks, entries: Entries, *, renew: bool) -> U64:
        """A tick for each new entry; falling along every run of consecutive chunks."""
        heads = _heads(picks, entries)
        lengths = np.diff(heads, append=len(picks))
        first = np.empty(len(heads), np.uint64)
        for i, (head, length) in enumerate(zip(heads.tolist(), lengths.tolist(), strict=True)):
            parent = entries.parents[picks[head]].tobytes()
            first[i] = self._head_tick(space, parent, length, renew=renew)
        run = np.repeat(np.arange(len(heads)), lengths)
        ticks: U64 = first[run] - (np.arange(len(picks)) - heads[run]).astype(np.uint64)
        return ticks

    def _head_tick(self, space: Namespace, parent: bytes, length: int, *, renew: bool) -> int:
        slots = self._slots
        chain = next((g for g in space.groups if g.full), None)
        row = chain.index.get(parent) if chain else -1
        if row < 0:
            slots.tick += length
            return slots.tick
        tick = int(slots.ticks[row])
        if not renew and slots.tick - tick <= slots.used // SLACK:
            return tick - 1
        return self._renew(space, parent, length)

    def _renew(self, space: Namespace, parent: bytes, length: int) -> int:
        """Make a prefix, from its start to `parent`, newer than all else; the tick of its successor."""
        slots = self._slots
        path = self._path(space, parent)
        head = slots.tick + length
        for chunks, rows in _in_use_of(space, path):
            slots.ticks[rows] = (head + len(path) - chunks).astype(np.uint64)
        slots.tick = head + len(path)
        return head

    def _in_use(self, space: Namespace, picks: Picks, entries: Entries) -> Callable[[], Rows]:
        """The rows of the prefixes that these entries continue; looked up when they are first asked for."""

        @lru_cache(maxsize=1)
        def in_use() -> Rows:
            parents = entries.parents[picks[_heads(picks, entries)]]
            paths = [self._path(space, parent) for parent in split(parents.tobytes())]
            rows = [rows for path in paths for _, rows in _in_use_of(space, path)]
            return np.concatenate(rows) if rows else NO_ROWS

        return in_use

    def _path(self, space: Namespace, parent: bytes) -> list[bytes]:
        """Keys of a prefix's chunks up to `parent`, as far back as they are here."""
        slots, limit = self._slots, self._slots.used
        chain = next((g for g in space.groups if g.full), None)
        path: list[bytes] = []
        row = chain.index.get(parent) if chain else -1
        while chain and row >= 0 and len(path) <= limit:  # a damaged table could hold a circle
            path.append(parent)
            parent = slots.parent_of(row)
            row = chain.index.get(parent)
        return path[::-1]

    def _write(
        self, space: Namespace, group: Group, rows: Rows, picks: Picks, entries: Entries, ticks: U64
    ) -> None:
        """Whole rows at once: scattering each column by itself takes three times as long."""
        arena = self._slots.arena
        cold = np.empty((len(rows), 9), np.uint64)
        cold[:, 0:2] = entries.keys[picks]
        cold[:, 2:4] = entries.parents[picks]
        cold[:, 4:6] = entries.digests[picks]
        cold[:, 6] = entries.salts[picks]
        cold[:, 7] = entries.now_ns
        cold[:, 8] = (
            entries.chunks[picks].astype(np.uint64) << np.uint64(32) | entries.token_lens[picks]
        )
        cold_words(arena.cold)[rows, :9] = cold  # the rest is the place, which stays
        hot = np.zeros(len(rows), HOT_DTYPE)
        hot["namespace"] = space.id
        hot["group"] = group.number
        hot["client"] = entries.client
        hot["tick"] = ticks
        hot["generation"] = arena.hot["generation"][rows] + np.uint64(1)
        hot["state"] = SlotState.RESERVED
        arena.hot[rows] = hot  # last: what is RESERVED is complete


def _heads(picks: Picks, entries: Entries) -> Numbers:
    """Where in `picks` runs of consecutive chunks begin."""
    follows = np.zeros(len(picks), np.bool_)
    parents, keys = entries.parents[picks[1:]], entries.keys[picks[:-1]]
    follows[1:] = (parents[:, 0] == keys[:, 0]) & (parents[:, 1] == keys[:, 1])
    return np.flatnonzero(~follows)


def _in_use_of(space: Namespace, path: list[bytes]) -> Iterator[tuple[Numbers, Rows]]:
    """By group: (numbers of chunks, their rows) that the longest hit on this prefix touches (see Lookup)."""
    held = [group.index.rows(path) for group in space.groups]
    rules = [group.spec.rule for group in space.groups]
    size = space.chunk_size
    n = usable_chunks(size, len(path) * size + 1, 0, rules, [rows >= 0 for rows in held])
    for group, rows in zip(space.groups, held, strict=True):
        need = range(len(path)) if group.full else needed(group.spec.rule, size, n, 0)
        chunks = np.arange(need.start, need.stop)
        there = rows[need.start : need.stop] >= 0
        yield chunks[there], rows[need.start : need.stop][there]
