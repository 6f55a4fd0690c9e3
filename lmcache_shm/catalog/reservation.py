"""Reserve: which entries are missing, how recent they count, and where they go.

Ticks. In a prefix every chunk is older than the one before it, so a prefix shrinks from its tail. A new chunk
counts as just older than its parent; if the prefix has not been used for a while, the whole of it is first made
new again (it is in use: it is being continued). What leaves for a new chunk must be older than it, so a prefix
never evicts its own beginning, and one that is longer than the arena keeps its first chunks.

Making a prefix new costs a walk over it. It gets ticks for twice its length then (see room_for), so that one
which grows step by step is walked over once each time it has doubled: linear in the prompt.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.layout import U64, Rows, SlotState
from lmcache_shm.catalog.index import split
from lmcache_shm.catalog.namespace import Group, Namespace
from lmcache_shm.catalog.room import Room
from lmcache_shm.catalog.slots import ONE, Slots, room_for

EXISTS, BUSY, FULL = -1, -2, -3
SLACK = 16
"""A prefix is made new again when more ticks passed than one in so many of the rows in use."""

Picks = Sequence[int]
"""Numbers of entries."""
Heads = dict[tuple[bytes, bytes], int]
"""(parent, key) of the first chunk of a run → its tick."""


class Entries(NamedTuple):
    """What is to be reserved; n entries each, as in Catalog.reserve."""

    names: list[bytes]
    parents: list[bytes]
    chunks: list[int]
    identity: U64
    """[n, 9]: the words of a cold row up to its place."""
    client: int

    @classmethod
    def of(
        cls, keys: bytes, parents: bytes, chunks: npt.NDArray[np.uint32],
        token_lens: npt.NDArray[np.uint32], digests: bytes, salts: U64, client: int, now_ns: int,
    ) -> "Entries":  # fmt: skip
        identity = np.empty((len(chunks), 9), np.uint64)
        for at, packed in ((0, keys), (2, parents), (4, digests)):
            identity[:, at : at + 2] = np.frombuffer(packed, "<u8").reshape(-1, 2)
        identity[:, 6] = salts
        identity[:, 7] = now_ns
        halves = identity.view(np.uint32)
        halves[:, 16] = token_lens
        halves[:, 17] = chunks
        return cls(split(keys), split(parents), chunks.tolist(), identity, client)


class Reserver:
    """Written for few entries at a time, some for each group: lists where numpy would cost more to call."""

    def __init__(self, slots: Slots, room: Room) -> None:
        self._slots = slots
        self._room = room
        self._identity = slots.cold_words[:, :9]

    def reserve(self, space: Namespace, groups: npt.NDArray[np.uint16], entries: Entries) -> Rows:
        """A row, EXISTS, BUSY or FULL for each entry."""
        out = [FULL] * len(groups)
        by_group: dict[int, list[int]] = {}
        for i, number in enumerate(groups.tolist()):
            by_group.setdefault(number, []).append(i)
        heads: Heads = {}
        # Full groups first: their rows are where the others' parents are looked up.
        for number in sorted(by_group, key=lambda g: (not space.groups[g].full, g)):
            self._reserve_group(space, space.groups[number], by_group[number], entries, heads, out)
        space.last_tick = self._slots.tick
        counters = self._slots.counters
        counters["stores_exist"] += out.count(EXISTS)
        counters["stores_skipped_busy"] += out.count(BUSY)
        counters["stores_skipped_full"] += out.count(FULL)
        return np.array(out, np.int32)

    def _reserve_group(
        self,
        space: Namespace,
        group: Group,
        picks: Picks,
        entries: Entries,
        heads: Heads,
        out: list[int],
    ) -> None:
        names = entries.names
        wanted = [names[i] for i in picks]
        found = group.index.find(wanted)
        if max(found) >= 0 or len(set(wanted)) < len(wanted):
            picks = self._missing(picks, wanted, found, out)
            wanted = [names[i] for i in picks]
        # Where nothing is older than the newcomers, make their prefixes new and look once more.
        for renew in (False, True):
            if not wanted:
                break
            ticks = self._ticks(space, picks, entries, heads, renew=renew)
            rows = self._room.make(group.size, len(picks), min(ticks))
            placed, picks = picks[: len(rows)], picks[len(rows) :]
            self._write(space, group, rows, placed, entries, ticks[: len(rows)])
            numbers = rows.tolist()
            group.index.add(wanted, numbers)
            group.reserved += len(numbers)
            for i, row in zip(placed, numbers, strict=True):
                out[i] = row
            wanted = wanted[len(rows) :]

    def _missing(
        self, picks: Picks, wanted: list[bytes], found: list[int], out: list[int]
    ) -> list[int]:
        """Those of `picks` that are in no slot; a key named twice in one request is reserved once."""
        states = self._slots.state[found].tolist()  # -1 reads the last row, and is not looked at
        seen: set[bytes] = set()
        missing = []
        for i, name, row, state in zip(picks, wanted, found, states, strict=True):
            if row >= 0:
                out[i] = EXISTS if state == SlotState.COMMITTED else BUSY
            elif name in seen:
                out[i] = BUSY
            else:
                seen.add(name)
                missing.append(i)
        return missing

    def _ticks(
        self, space: Namespace, picks: Picks, entries: Entries, heads: Heads, *, renew: bool
    ) -> list[int]:
        """A tick for each new entry; falling along every run of consecutive chunks."""
        names, parents = entries.names, entries.parents
        starts = [
            k
            for k, i in enumerate(picks)
            if not k or parents[i] != names[picks[k - 1]]
        ]  # fmt: skip
        ticks: list[int] = []
        for start, end in zip(starts, [*starts[1:], len(picks)], strict=True):
            i = picks[start]
            run = parents[i], names[i]
            if (
                renew or run not in heads
            ):  # another group's run of the same chunks has the same ticks
                heads[run] = self._head_tick(
                    space, parents[i], entries.chunks[i], end - start, renew=renew
                )
            ticks.extend(range(heads[run], heads[run] - (end - start), -1))
        return ticks

    def _head_tick(
        self, space: Namespace, parent: bytes, chunk: int, length: int, *, renew: bool
    ) -> int:
        """Tick of the first of `length` consecutive chunks, which is number `chunk` in its prefix."""
        slots = self._slots
        if not space.full:  # nothing tells where the parent is
            slots.tick += length
            return slots.tick
        row = space.full[0].index.get(parent)
        if row < 0:
            return self._new_ticks(min(chunk, slots.arena.max_slots), length)
        tick = int(slots.ticks[row])
        slack = slots.used // SLACK
        since = slots.tick - (tick + chunk - 1)  # ticks given since this prefix was made new
        if not renew and since <= slack and chunk + length <= max(room_for(chunk), slack):
            return tick - 1
        return self._renew(space, parent, chunk, length)

    def _new_ticks(self, depth: int, length: int) -> int:
        """Tick of the first of `length` chunks after `depth` others, newer than all else but for these."""
        self._slots.tick += room_for(depth + length)
        return self._slots.tick - depth

    def _renew(self, space: Namespace, parent: bytes, chunk: int, length: int) -> int:
        """Make a prefix, from `parent` back to its start, newer than all else; the tick of its successor."""
        slots = self._slots
        index, limit = space.full[0].index, slots.used
        path: list[bytes] = []
        rows: list[int] = []
        row = index.get(parent)
        while row >= 0 and len(path) <= limit:  # a damaged table could hold a circle
            path.append(parent)
            rows.append(row)
            parent = slots.parent_of(row)
            row = index.get(parent)
        # Some chunks may be missing between; a client may also say any number.
        head = self._new_ticks(max(len(path), min(chunk, slots.arena.max_slots)), length)
        ticks = head + 1 + np.arange(len(path), dtype=np.uint64)
        slots.ticks[rows] = ticks
        for group in space.full[1:]:
            others = group.index.rows(path)
            slots.ticks[others[others >= 0]] = ticks[others >= 0]
        return head

    def _write(
        self,
        space: Namespace,
        group: Group,
        rows: Rows,
        picks: Picks,
        entries: Entries,
        ticks: list[int],
    ) -> None:
        """Whole rows at once: scattering each column by itself takes three times as long."""
        if not len(rows):
            return
        words, at = self._slots.words, _place(rows)
        self._identity[at] = entries.identity.take(picks, 0)  # the rest is the place, which stays
        hot = words[at]
        hot[:, 1] = ticks
        hot[:, 2] += ONE  # the generation
        hot[:, 3] = entries.client & 0xFFFF | space.id << 32
        hot[:, 0] = SlotState.RESERVED | group.number << 16  # last: what is RESERVED is complete
        words[at] = hot


def _place(rows: Rows) -> slice | Rows:
    """Rows that follow each other as a slice: a view is cheaper than a gather and a scatter."""
    first, n = int(rows[0]), len(rows)
    together = rows[-1] == first + n - 1 and rows.tolist() == list(range(first, first + n))
    return slice(first, first + n) if together else rows
