"""Reserve: find the missing entries, give them ticks of the LRU clock, and write them into slots.

Ticks. In a prefix every chunk is older than the one before it, so a prefix shrinks from its tail. A new chunk
counts as just older than its parent; a prefix that has not been used for a while is renewed first (a prefix that
grows is in use), together with the slots of other groups that a hit on it would need. Slots that leave for a new
chunk must be older than it, so a prefix never evicts its own beginning.

Renewing a prefix costs a walk over it. It gets ticks for twice its length then (see room_for), so a prefix that
grows step by step is walked once each time it has doubled: linear in the prompt.

A prefix longer than the arena keeps its first chunks: chunks that follow one without room in a group of full
attention could never be used, so they are refused, too, in all groups.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.allocator import NO_ROWS
from lmcache_shm.arena.layout import U64, Numbers, Rows, SlotState, places
from lmcache_shm.protocol.keys import split
from lmcache_shm.protocol.messages import BUSY, EXISTS, FULL
from lmcache_shm.protocol.rules import needed, usable_chunks
from lmcache_shm.server.catalog.eviction import Allocation
from lmcache_shm.server.catalog.groups import Group, Namespace
from lmcache_shm.server.catalog.slots import ONE, Slots, room_for

SLACK = 16
"""A prefix is renewed when more ticks have passed than 1/SLACK of the rows in use."""
PIECES = 16
"""A request is handled in pieces of at most 1/PIECES of the arena each."""
REMEMBERED = 16384
"""Keys of refused chunks that are remembered, so that their successors are refused, too."""

Picks = Sequence[int]
"""Numbers of entries."""
Heads = dict[tuple[bytes, bytes], int]
"""(parent, key) of the first chunk of a run → its tick."""


class Entries(NamedTuple):
    """The entries to reserve; n each, as in Catalog.reserve."""

    names: list[bytes]
    parents: list[bytes]
    chunks: list[int]
    identity: U64
    """[n, 9]: the words of a cold row up to its place."""
    client: int

    @classmethod
    def of(
        cls, keys: bytes, parents: bytes, chunks: npt.NDArray[np.uint32],
        token_bytes: int, digests: bytes, salts: U64, client: int, now_ns: int,
    ) -> "Entries":  # fmt: skip
        n = len(chunks)
        identity = np.empty((n, 9), np.uint64)
        names = np.frombuffer(b"".join((keys, parents, digests)), "<u8").reshape(3, n, 2)
        identity[:, :6].reshape(n, 3, 2)[:] = names.transpose(1, 0, 2)
        identity[:, 6] = salts
        identity[:, 7] = now_ns
        halves = identity.view(np.uint32)
        halves[:, 16] = token_bytes
        halves[:, 17] = chunks
        return cls(split(keys), split(parents), chunks.tolist(), identity, client)


class Reserver:
    """Written for few entries at a time, some for each group: lists where numpy would cost more to call."""

    def __init__(self, slots: Slots, allocation: Allocation) -> None:
        self._slots = slots
        self._allocation = allocation
        self._identity = slots.cold_words[:, :9]
        self._refused: dict[bytes, None] = {}  # in the order in which they came

    def reserve(self, space: Namespace, groups: npt.NDArray[np.uint16], entries: Entries) -> Rows:
        """A row, EXISTS, BUSY or FULL for each entry."""
        out = [FULL] * len(groups)
        # In pieces, so that one group does not take all the room from the other groups of the same chunks.
        share = self._slots.allocator.data_bytes // sum(g.size for g in space.groups) // PIECES
        piece = max(share, 1) * len(space.groups)
        numbers = groups.tolist()
        for start in range(0, len(numbers), piece):
            by_group: dict[int, list[int]] = {}
            for i, number in enumerate(numbers[start : start + piece], start):
                by_group.setdefault(number, []).append(i)
            heads: Heads = {}
            # Full groups first: their rows are where the others' parents are looked up.
            for number in sorted(by_group, key=lambda g: (not space.groups[g].full, g)):
                group = space.groups[number]
                self._reserve_group(space, group, by_group[number], entries, heads, out)
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
        if self._refused:
            picks = self._usable(space, group, picks, entries)
            wanted = [names[i] for i in picks]
        in_use = self._in_use(space, picks, entries)
        # Where nothing is older than the newcomers, renew their prefixes and try once more.
        for renew in (False, True):
            if not wanted:
                return
            ticks = self._ticks(space, picks, entries, heads, renew=renew)
            rows = self._allocation.make(group.size, len(picks), min(ticks), in_use)
            placed, picks = picks[: len(rows)], picks[len(rows) :]
            self._write(space, group, rows, placed, entries, ticks[: len(rows)])
            numbers = rows.tolist()
            group.index.add(wanted, numbers)
            group.reserved += len(numbers)
            for i, row in zip(placed, numbers, strict=True):
                out[i] = row
            wanted = wanted[len(rows) :]
        if group.full:
            self._remember(wanted)

    def forget(self) -> None:
        """The arena was cleared: refused chunks may find room now."""
        self._refused.clear()

    def _remember(self, refused: list[bytes]) -> None:
        self._refused.update(dict.fromkeys(refused))
        for name in list(islice(self._refused, max(len(self._refused) - REMEMBERED, 0))):
            del self._refused[name]

    def _usable(self, space: Namespace, group: Group, picks: Picks, entries: Entries) -> list[int]:
        """Those that a hit could reach: no refused chunks, and in a full group none that follows one."""
        on = entries.parents if group.full else entries.names
        usable = []
        coming: set[bytes] = set()
        for i in picks:
            if on[i] in self._refused and on[i] not in coming and self._lacks(space, on[i]):
                if group.full:
                    self._remember([entries.names[i]])
            else:
                coming.add(entries.names[i])
                usable.append(i)
        return usable

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

    @staticmethod
    def _lacks(space: Namespace, name: bytes) -> bool:
        """Whether a chunk, once refused, was not stored since."""
        return any(group.index.get(name) < 0 for group in space.full)

    def _ticks(
        self, space: Namespace, picks: Picks, entries: Entries, heads: Heads, *, renew: bool
    ) -> list[int]:
        """A tick for each new entry; falling along every run of consecutive chunks."""
        starts = _starts(picks, entries)
        ticks: list[int] = []
        for start, end in zip(starts, [*starts[1:], len(picks)], strict=True):
            i = picks[start]
            run = entries.parents[i], entries.names[i]
            # Another group's run of the same chunks has the same ticks.
            if renew or run not in heads:
                heads[run] = self._head_tick(
                    space, entries.parents[i], entries.chunks[i], end - start, renew=renew
                )
            ticks.extend(range(heads[run], heads[run] - (end - start), -1))
        return ticks

    def _head_tick(
        self, space: Namespace, parent: bytes, chunk: int, length: int, *, renew: bool
    ) -> int:
        """Tick of the first of `length` consecutive chunks, which is number `chunk` in its prefix."""
        slots = self._slots
        if not space.full:  # no index has the parent's row
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
        """Make a prefix, from its start to `parent`, newer than all others; the tick of its successor."""
        slots = self._slots
        path = self._path(space, parent)
        # Some chunks may be missing between; a client may also say any number.
        head = self._new_ticks(max(len(path), min(chunk, slots.arena.max_slots)), length)
        for chunks, rows in _in_use_of(space, path):
            slots.ticks[rows] = (head + len(path) - chunks).astype(np.uint64)
        return head

    def _in_use(self, space: Namespace, picks: Picks, entries: Entries) -> Callable[[], Rows]:
        """The rows of the prefixes that these entries continue; looked up when they are first asked for."""
        # functools.cache would cost more than all else here, and is rarely needed.
        found: list[Rows] = []

        def in_use() -> Rows:
            if not found:
                starts = _starts(picks, entries)
                paths = [self._path(space, entries.parents[picks[k]]) for k in starts]
                rows = [rows for path in paths for _, rows in _in_use_of(space, path)]
                found.append(np.concatenate(rows) if rows else NO_ROWS)
            return found[0]

        return in_use

    def _path(self, space: Namespace, parent: bytes) -> list[bytes]:
        """Keys of a prefix's chunks up to `parent`, as far back as they are stored."""
        slots, limit = self._slots, self._slots.used
        if not space.full:
            return []
        index = space.full[0].index
        path: list[bytes] = []
        row = index.get(parent)
        while row >= 0 and len(path) <= limit:  # a damaged table could hold a circle
            path.append(parent)
            parent = slots.parent_of(row)
            row = index.get(parent)
        return path[::-1]

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
        words, at = self._slots.words, places(rows)
        self._identity[at] = entries.identity.take(
            picks, 0
        )  # the other words are the place, which stays
        hot = words.take(at, 0)
        hot[:, 1] = ticks
        hot[:, 2] += ONE  # the generation
        hot[:, 3] = entries.client & 0xFFFF | space.id << 32
        hot[:, 0] = SlotState.RESERVED | group.number << 16  # last: a RESERVED row is complete
        words[at] = hot


def _starts(picks: Picks, entries: Entries) -> list[int]:
    """Where in `picks` runs of consecutive chunks begin."""
    names, parents = entries.names, entries.parents
    return [k for k, i in enumerate(picks) if not k or parents[i] != names[picks[k - 1]]]


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
