"""Reserve: which entries are missing, how recent they count, and where they go.

Ticks. In a prefix every chunk is older than the one before it, so a prefix shrinks from its tail. A new chunk
counts as just older than its parent; if the parent itself has not been used for a while, the whole prefix is
first made new again (it is in use: it is being continued). What leaves for a new chunk must be older than it,
so a prefix never evicts its own beginning, and one that is longer than the arena keeps its first chunks.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.layout import HOT_DTYPE, U64, Numbers, Rows, SlotState, cold_words
from lmcache_shm.catalog.index import split
from lmcache_shm.catalog.namespace import Group, Namespace
from lmcache_shm.catalog.room import Room
from lmcache_shm.catalog.slots import Slots

EXISTS, BUSY, FULL = -1, -2, -3
SLACK = 16
"""A prefix is made new again when more ticks passed than one in so many of the rows in use."""

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

    def reserve(self, space: Namespace, groups: npt.NDArray[np.uint16], entries: Entries) -> Rows:
        """A row, EXISTS, BUSY or FULL for each entry."""
        out = np.full(len(groups), FULL, np.int32)
        numbers = np.unique(groups).tolist()
        # Full groups first: their rows are where the others' parents are looked up.
        for number in sorted(numbers, key=lambda g: (not space.groups[g].full, g)):
            picks = np.flatnonzero(groups == number)
            self._reserve_group(space, space.groups[number], picks, entries, out)
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
        if not len(picks):
            return
        # Where nothing is older than the newcomers, make their prefixes new and look once more.
        for renew in (False, True):
            ticks = self._ticks(space, group, picks, entries, renew=renew)
            rows = self._room.make(group.size, len(picks), int(ticks.min()))
            placed, picks = picks[: len(rows)], picks[len(rows) :]
            self._write(space, group, rows, placed, entries, ticks[: len(rows)])
            group.index.add(wanted, rows.tolist())
            group.reserved += len(rows)
            out[placed] = rows
            wanted = wanted[len(rows) :]
            if not wanted:
                break

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

    def _ticks(
        self, space: Namespace, group: Group, picks: Picks, entries: Entries, *, renew: bool
    ) -> U64:
        """A tick for each new entry; falling along every run of consecutive chunks."""
        follows = np.zeros(len(picks), np.bool_)
        parents, keys = entries.parents[picks[1:]], entries.keys[picks[:-1]]
        follows[1:] = (parents[:, 0] == keys[:, 0]) & (parents[:, 1] == keys[:, 1])
        heads = np.flatnonzero(~follows)
        lengths = np.diff(heads, append=len(picks))
        first = np.empty(len(heads), np.uint64)
        for i, (head, length) in enumerate(zip(heads.tolist(), lengths.tolist(), strict=True)):
            parent = entries.parents[picks[head]].tobytes()
            first[i] = self._head_tick(space, group, parent, length, renew=renew)
        run = np.cumsum(~follows) - 1
        ticks: U64 = first[run] - (np.arange(len(picks)) - heads[run]).astype(np.uint64)
        return ticks

    def _head_tick(
        self, space: Namespace, group: Group, parent: bytes, length: int, *, renew: bool
    ) -> int:
        slots = self._slots
        chain = [g for g in space.groups if g.full]
        row = chain[0].index.get(parent) if chain else -1
        if row < 0:
            slots.tick += length
            return slots.tick
        tick = int(slots.ticks[row])
        if not renew and slots.tick - tick <= slots.used // SLACK:
            return tick - 1
        return self._renew(chain, parent, length)

    def _renew(self, chain: list[Group], parent: bytes, length: int) -> int:
        """Make a prefix, from `parent` back to its start, newer than all else; the tick of its successor."""
        slots = self._slots
        index, limit = chain[0].index, slots.used
        path: list[bytes] = []
        row = index.get(parent)
        while row >= 0 and len(path) <= limit:  # a damaged table could hold a circle
            path.append(parent)
            parent = slots.parent_of(row)
            row = index.get(parent)
        head = slots.tick + length
        ticks = head + 1 + np.arange(len(path), dtype=np.uint64)
        for group in chain:
            rows = group.index.rows(path)
            slots.ticks[rows[rows >= 0]] = ticks[rows >= 0]
        slots.tick = head + len(path)
        return head

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
