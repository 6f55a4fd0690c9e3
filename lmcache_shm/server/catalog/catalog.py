"""The catalog: which chunk each slot holds, which engines use it, which slots leave. One thread, the server's.

Life of a row::

    FREE ─reserve→ RESERVED ─commit→ COMMITTED ─evict/clear→ FREE
                       ├─abort→ FREE     └ acquire/release: pins
                       └─quarantine→ QUARANTINED ─unquarantine/abort→ FREE

A reserved or pinned row that is cleared is in no index any more (FLAG_DROP) and becomes FREE at its
commit, abort or last release. The slot table in shared memory is the truth; the dicts here are an index over it.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.allocator import NO_ROWS
from lmcache_shm.arena.layout import FLAG_DROP, U64, Rows, SlotState, owners_of, places, seal_of
from lmcache_shm.arena.segment import Arena
from lmcache_shm.protocol.keys import TOKEN, salt_word
from lmcache_shm.server.catalog import consistency, stats
from lmcache_shm.server.catalog.eviction import Allocation
from lmcache_shm.server.catalog.groups import CatalogError, GroupSpec, Namespace
from lmcache_shm.server.catalog.lookup import Hit, IndexCache, Lookup
from lmcache_shm.server.catalog.namespaces import MAX_NAMESPACES, Registry
from lmcache_shm.server.catalog.reservation import Entries, Reserver
from lmcache_shm.server.catalog.slots import (
    COMMIT,
    DROPPED,
    GROUP,
    GROUP_AT,
    NO_CLIENT,
    PIN,
    RESERVED,
    STATE_AND_FLAGS,
    Slots,
)

AnyRows = Rows | Sequence[int]


class Catalog:
    """Over a fresh arena, or (after `recover`) over an adopted one.

    Rows are trusted: the caller checks that a client names only rows that are its own.
    """

    def __init__(self, arena: Arena, *, max_namespaces: int = MAX_NAMESPACES) -> None:
        self.arena = arena
        self._slots = Slots(arena)
        self._registry = Registry(self._slots, self._empty, max_namespaces)
        self._cache = IndexCache(self._slots)
        self._lookup = Lookup(self._slots, self._cache)
        self._reserver = Reserver(self._slots, Allocation(self._slots))
        self.adopted: dict[str, int] = {"slots": 0, "bytes": 0, "dropped": 0, "quarantined": 0}

    def recover(self) -> dict[str, int]:
        """Build the index from an adopted table; once, before anything else.

        Committed rows stay. Rows that are implausible or were half-written are dropped; those that a live
        process of a known client may still be writing become QUARANTINED. Returns counts ("slots",
        "bytes", "dropped", "quarantined", "damaged"); raises CatalogError when the table cannot be trusted.
        """
        self._registry.load()
        self.adopted = consistency.recover(self._slots)
        return self.adopted

    # ------------------------------------------------------------------------------- namespaces
    def register(
        self, descriptor: bytes, groups: Sequence[GroupSpec], chunk_size: int = 0
    ) -> Namespace:
        """The namespace of this descriptor, chunk size and groups, made if it is new.

        chunk_size 0: that of the arena. The namespace has one user more until `leave`; without users and
        slots it may be dropped. Raises CatalogError (one line: what is needed, what there is, what to
        change), e.g. when one slot is larger than the arena.
        """
        return self._registry.register(
            descriptor, groups, chunk_size or self.arena.geometry.chunk_size
        )

    def leave(self, ns: int) -> None:
        """A session that registered this namespace has ended."""
        space = self._slots.spaces.get(ns)
        if space is not None:
            self._registry.leave(space)

    def namespaces(self) -> list[Namespace]:
        return list(self._slots.spaces.values())

    def _space(self, ns: int) -> Namespace:
        space = self._slots.spaces.get(ns)
        if space is None:
            raise CatalogError(f"there is no namespace {ns}; register again")
        return space

    # ---------------------------------------------------------------------------------- reading
    def acquire(self, ns: int, keys: bytes, local_tokens: int, num_tokens: int) -> Hit:
        """The largest usable prefix, its needed rows pinned (see hits). `keys`: 16 bytes per chunk from the first."""
        return self._lookup.acquire(self._space(ns), keys, local_tokens, num_tokens)

    def release(self, rows: AnyRows) -> None:
        """Unpin rows, each once (the rows of one group of one hit)."""
        slots = self._slots
        at = places(rows)
        hot = slots.words.take(at, 0)
        pinned = hot[:, 0] >= PIN
        if not pinned.all():
            slots.counters["wrong_releases"] += int((~pinned).sum())
            at, hot = at[pinned], hot[pinned]
        hot[:, 0] -= PIN
        slots.words[at] = hot
        slots.changes += 1
        gone = (hot[:, 0] < PIN) & (hot[:, 0] & DROPPED != 0)
        if gone.any():
            slots.free(at[gone].astype(np.int32))

    # ---------------------------------------------------------------------------------- writing
    def reserve(
        self,
        ns: int,
        groups: npt.NDArray[np.uint16],
        keys: bytes,
        parents: bytes,
        chunks: npt.NDArray[np.uint32],
        digests: bytes,
        salts: U64,
        client: int,
    ) -> Rows:
        """Slots to write, i32[n]: a row, EXISTS, BUSY (being written), or FULL (no room now; counted).

        Entry i is chunk `chunks[i]` of group `groups[i]`; keys, parents, digests: 16 bytes each. Entries of
        one prefix should come in rising order: where room is short the first ones get it.
        """
        space = self._space(ns)
        if not len(groups):
            return NO_ROWS
        now = time.time_ns()
        token_bytes = TOKEN * space.chunk_size
        entries = Entries.of(keys, parents, chunks, token_bytes, digests, salts, client, now)
        return self._reserver.reserve(space, groups, entries)

    def commit(self, rows: AnyRows, checks: Sequence[int] = ()) -> int:
        """Publish reserved rows; those cleared meanwhile become FREE. Returns how many were published.

        `checks`: for each group the number of the layout of its checksums; (): none were written.
        """
        slots = self._slots
        counters = slots.counters
        rows = _rows(rows)
        at = places(rows)
        hot = slots.words.take(at, 0)
        if (hot[:, 0] & STATE_AND_FLAGS != RESERVED).any():  # rare
            rows = self._pending(rows)
            dropped = slots.is_dropped(rows)
            slots.free(rows[dropped])
            counters["dropped_at_commit"] += int(dropped.sum())
            rows = rows[~dropped]
            at = places(rows)
            hot = slots.words.take(at, 0)
        cold = slots.cold_words.take(at, 0)
        owners = owners_of(hot)
        slots.seals[at] = seal_of(hot[:, 2], owners, cold)
        slots.checks[at] = (
            np.array(checks, np.uint32)[hot[:, 0] >> GROUP_AT & GROUP] if len(checks) else 0
        )
        hot[:, 0] += COMMIT
        hot[:, 3] |= NO_CLIENT
        slots.words[at] = hot  # last: a COMMITTED row is sealed
        self._cache.note(rows, owners, cold[:, 0])
        for group, n in slots.count_by_owner(owners):
            group.commits += n
            group.reserved -= n
            counters["tokens_committed"] += n * group.leading
            counters["bytes_committed"] += n * group.size
        counters["commits"] += len(rows)
        slots.changes += 1
        return len(rows)

    def abort(self, rows: AnyRows) -> int:
        """Free reserved or quarantined rows that nobody writes any more; how many there were."""
        slots = self._slots
        rows = slots.in_state(_rows(rows), SlotState.RESERVED, SlotState.QUARANTINED)
        indexed = slots.in_state(rows, SlotState.RESERVED)
        slots.forget(indexed[~slots.is_dropped(indexed)])
        slots.free(rows)
        slots.counters["aborts"] += len(rows)
        slots.changes += 1
        return len(rows)

    def quarantine(self, rows: AnyRows) -> int:
        """Keep reserved rows, whose writer is lost, out of use until a late copy is ruled out; how many."""
        slots = self._slots
        rows = self._pending(rows)
        slots.forget(rows[~slots.is_dropped(rows)])
        slots.flags[rows] = 0
        slots.state[rows] = SlotState.QUARANTINED
        return len(rows)

    def unquarantine(self, client: int) -> int:
        """Free a client's quarantined rows, now that none of its processes can write any more; how many."""
        held = (self._slots.state == SlotState.QUARANTINED) & (self.arena.hot["client"] == client)
        return self.abort(np.flatnonzero(held).astype(np.int32))

    def _pending(self, rows: AnyRows) -> Rows:
        given = _rows(rows)
        reserved = self._slots.in_state(given, SlotState.RESERVED)
        self._slots.counters["wrong_commits"] += len(given) - len(reserved)
        return reserved

    # ---------------------------------------------------------------------------------- clearing
    def clear(self, ns: int | None = None, salt: bytes | int | None = None) -> int:
        """Forget committed and reserved slots of a namespace (None: of all) and cache salt (None: any).

        Pinned slots stay readable for those who hold them; reserved ones are dropped at their commit.
        Returns how many committed slots were forgotten.
        """
        slots = self._slots
        hot = self.arena.hot
        mine = (slots.state == SlotState.COMMITTED) | (slots.state == SlotState.RESERVED)
        if ns is not None:
            mine &= hot["namespace"] == ns
        if salt is not None:
            mine &= self.arena.cold["salt"] == (
                salt_word(salt) if isinstance(salt, bytes) else salt
            )
        rows = np.flatnonzero(mine).astype(np.int32)
        rows = rows[~slots.is_dropped(rows)]
        committed = slots.state[rows] == SlotState.COMMITTED
        now = committed & (slots.pins[rows] == 0)
        if salt is None:
            for space in slots.spaces.values():
                if ns in {None, space.id}:
                    space.forget_all()
        else:
            slots.forget(rows)
        slots.flags[rows[~now]] |= FLAG_DROP
        slots.free(rows[now])
        slots.allocator.release_empty()
        self._reserver.forget()
        slots.counters["clears"] += 1
        slots.counters["cleared_slots"] += int(committed.sum())
        slots.changes += 1
        return int(committed.sum())

    def discard(self, rows: AnyRows) -> int:
        """Drop committed rows with damaged content: freed now, or at their last release; how many."""
        slots = self._slots
        rows = slots.in_state(_rows(rows), SlotState.COMMITTED)
        rows = rows[~slots.is_dropped(rows)]
        pinned = slots.pins[rows] > 0
        slots.forget(rows[pinned])
        slots.flags[rows[pinned]] |= FLAG_DROP
        slots.evict(rows[~pinned])
        slots.changes += 1
        return len(rows)

    def _empty(self, space: Namespace) -> None:
        rows = np.concatenate([group.index.all_rows() for group in space.groups])
        rows = self._slots.in_state(rows, SlotState.COMMITTED)
        self._slots.evict(rows[self._slots.pins[rows] == 0])
        self._slots.changes += 1

    # ------------------------------------------------------------------------------------- stats
    def snapshot(self) -> dict[str, Any]:
        """Counters and gauges: "arena", "counters", "misses", "adopted", "namespaces", "slab_map"."""
        return stats.snapshot(self._slots, self._lookup.misses, self.adopted)

    def tree(self, ns: int | None = None, limit: int = 1000) -> list[dict[str, Any]]:
        """The most recently used cached chunks of a namespace (None or negative: of all), by prefix."""
        return stats.tree(self._slots, ns, limit)

    def check(self, *, thorough: bool | None = None) -> list[str]:
        """Findings of arena.check, and where the index and the table disagree; empty when all is well.

        With more than consistency.THOROUGH slots in use only numbers are compared, unless `thorough` is True.
        """
        return consistency.check(self._slots, thorough=thorough)

    @property
    def tick(self) -> int:
        """The LRU clock: the highest tick that a slot has."""
        return self._slots.tick


def _rows(rows: Iterable[int]) -> Rows:
    if isinstance(rows, np.ndarray):
        return rows.astype(np.int32, copy=False)
    return np.fromiter(rows, np.int32)
