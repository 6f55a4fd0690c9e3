"""What the arena holds and what it ought to: hits found the slow way, bytes computed from prefixes."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmcache_shm.arena.layout import FLAG_DROP, SlotState
from lmcache_shm.protocol.keys import ChunkKeys
from tests.scheduler.content import Stream
from tests.scheduler.late import Pace
from tests.scheduler.oracle import Oracle
from tests.scheduler.prefixes import Known, Prefixes
from tests.scheduler.server import CacheServer
from tests.scheduler.storage import Group, Storage
from tests.scheduler.wiring import Wiring
from tests.scheduler.worker import ours


class Contents(Wiring):
    """The arena as an oracle sees it."""

    oracle: Oracle
    prefixes: Prefixes

    def __init__(
        self,
        server: CacheServer,
        rng: random.Random,
        pace: Pace | None,
        known: Known | None,
        *,
        own_threads: bool,
    ) -> None:
        super().__init__(server, rng, pace, own_threads=own_threads)
        self.known = known if known is not None else {}
        self._scratch: dict[int, Storage] = {}

    def attached(self) -> None:
        self.oracle = self.engine.oracle
        self.chunk = self.engine.setup.chunk
        self.prefixes = Prefixes(self.engine, self._seed, self.known)

    def _seed(self, namespace: int) -> bytes:
        return next(s.key for s in self.server.catalog.namespaces() if s.id == namespace)

    def demanded(self, row: int) -> tuple[Stream, int]:
        """The prefix that a row's key stands for, and its chunk."""
        arena = self.server.arena
        key = arena.cold["key"][row].tobytes()
        found = self.prefixes.of_key(key, int(arena.hot["namespace"][row]))
        if found is None:
            self.oracle.fail("key", f"row {row} has a key that belongs to no prefix of any request")
        return found

    def keys_of(self, req_id: str) -> ChunkKeys:
        return self.prefixes.keys(self.namespace(), req_id)

    # ---------------------------------------------------------------------------- hits
    def stored(self, *, kept: bool = False) -> dict[tuple[int, int, bytes], int]:
        """Committed rows that can be found: (namespace, object group, key) → row. `kept`: and those that are
        out of the index but still pinned."""
        hot, cold = self.server.arena.hot, self.server.arena.cold
        found = (hot["flags"] & FLAG_DROP == 0) | (kept & (hot["pins"] > 0))
        rows = np.flatnonzero((hot["state"] == SlotState.COMMITTED) & found)
        return {
            (int(hot["namespace"][r]), int(hot["group"][r]), cold["key"][r].tobytes()): int(r)
            for r in rows
        }

    def usable(self, req_id: str, local: int, num_tokens: int, *, kept: bool = False) -> int:
        """The largest hit in chunks, found the slow way: token by token, without any of hits.py."""
        namespace, members = self.namespace(), self.members()
        keys = self.keys_of(req_id)
        stored = self.stored(kept=kept)
        groups = self.engine.workers.ranks[0].groups
        for n in range((num_tokens - 1) // self.chunk, local // self.chunk, -1):
            end = n * self.chunk
            if end <= local:
                break
            if all(
                (namespace, number, keys.key(chunk)) in stored
                for number, kv_groups in enumerate(members)
                for chunk in self._needed([groups[g] for g in kv_groups], end, local)
            ):
                return n
        return 0

    def _needed(self, groups: Sequence[Group], end: int, local: int) -> set[int]:
        """Chunks that an object group must have for a request to go on at token `end`."""
        needed: set[int] = set()
        if not self.engine.setup.family.separate:
            needed.update(range(local // self.chunk, end // self.chunk))
        for group in groups:
            first = end - 1 if group.recurrent else group.first_read(end)
            needed.update(t // self.chunk for t in range(first, end))
        return {chunk for chunk in needed if (chunk + 1) * self.chunk > local}

    def namespace(self) -> int:
        return int(self.side.start.latest.namespace)

    def members(self) -> list[list[int]]:
        """KV cache groups of each object group."""
        return [[p.group.index for p in g.parts] for g in self.side.start.latest.plan.groups]

    # ---------------------------------------------------------------------------- bytes
    def compare(
        self, rank: int, kind: str, what: str, pages: Sequence[Any], stream: Stream, chunk: int
    ) -> None:
        """The blocks of these `pages` (KV cache group, first page, blocks) hold chunk number `chunk` of this prefix."""
        for index, first, blocks in pages:
            group = self.engine.workers.ranks[rank].groups[index]
            if group.recurrent:
                end = (chunk + 1) * self.chunk
                good = group.state_is(int(blocks[0]), stream.after(end))
                bad = [] if good else [(end, int(blocks[0]))]
            else:
                page = chunk * (self.chunk // group.block_size) + self.first_page(group) + first
                table = np.zeros(page + len(blocks), np.int64)
                table[page:] = blocks
                begin, end = page * group.block_size, (page + len(blocks)) * group.block_size
                bad = group.wrong(table, stream.h, begin, end)
            if bad:
                self.oracle.fail(
                    kind,
                    f"{what}, rank {rank}: group {index} of chunk {chunk} is wrong at token {bad[0][0]} in "
                    f"block {bad[0][1]} ({len(bad)} places)",
                )

    def first_page(self, group: Group) -> int:
        """Number of the first page of a chunk that is kept: a window needs only its tail (decision D2)."""
        pages = self.chunk // group.block_size
        if not group.window:
            return 0
        tail = max(1, -(-(group.window - 1) // group.block_size))
        return int(pages - min(pages, tail))

    def check_arena(self) -> None:
        """Every byte of every committed slot is what its key demands, for all ranks."""
        for row in self.stored().values():
            stream, chunk = self.demanded(row)
            for rank in range(len(self.engine.workers.ranks)):
                self._check_slot(rank, row, stream, chunk)

    def _check_slot(self, rank: int, row: int, stream: Stream, chunk: int) -> None:
        real = self.engine.workers.ranks[rank]
        scratch = self._scratch.get(rank)
        if scratch is None:
            scratch = self._scratch[rank] = Storage(real.config, rank)
        number = int(self.server.arena.hot["group"][row])
        layout, offset, parts = self.slot(rank, number, row)
        for kv_group, place in parts.items():
            part, segments = layout.parts[place], layout.segments[place]
            group = scratch.groups[kv_group]
            blocks = np.arange(1, 1 + part.stored_pages)
            if group.recurrent:
                group.write_state(1, stream.after((chunk + 1) * self.chunk))
            else:
                page = chunk * part.pages_per_chunk + self.first_page(group)
                table = np.zeros(page + part.stored_pages, np.int64)
                table[page:] = blocks
                size = group.block_size
                group.write(table, stream.h, page * size, (page + part.stored_pages) * size)
            for run, segment in zip(part.pages.runs, segments, strict=True):
                at = run.base_addr - real.address
                want = np.stack(
                    [scratch.raw[at + b * run.block_stride :][: run.nbytes] for b in blocks]
                )
                have = self.server.arena.data_array[offset + segment :][: want.size]
                if not np.array_equal(have.reshape(want.shape), want):
                    self.oracle.fail(
                        "stored",
                        f"row {row} (rank {rank}, KV cache group {kv_group}, chunk {chunk}) holds bytes that its "
                        "prefix did not produce",
                    )

    def slot(self, rank: int, number: int, row: int) -> tuple[Any, int, Mapping[int, int]]:
        """(layout, arena offset of the rank's region, KV cache group → part) of a row of object group `number`."""
        worker = ours(self.engine.workers.connectors[rank]).worker
        mapped = worker._mapped[bytes(self.server.arena.arena_id)]
        place = self.side.start.latest.place
        offset = int(self.server.arena.cold["offset"][row]) + place.region_offsets[number][rank]
        parts = mapped.plan.groups[number].parts
        return mapped.layouts[number], offset, {part.group.index: i for i, part in enumerate(parts)}
