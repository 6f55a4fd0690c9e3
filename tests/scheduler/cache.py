"""The real connector on both sides of the simulated engine, and the checks around every copy and look-up."""

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from lmcache_shm.arena.layout import FLAG_DROP, SlotState
from lmcache_shm.catalog.keys import ChunkKeys
from lmcache_shm.transfer.engine import CopyItem, CopyJob
from lmcache_shm.vllm import connector as connector_module
from lmcache_shm.vllm import worker as worker_module
from lmcache_shm.vllm.identity import extra_of
from lmcache_shm.vllm.settler import Settler
from lmcache_shm.vllm.worker import WorkerSide
from tests.scheduler.content import Stream
from tests.scheduler.engine import Engine
from tests.scheduler.families import Setup
from tests.scheduler.late import LateEngine, Pace
from tests.scheduler.server import CacheServer
from tests.scheduler.storage import Group, Storage
from tests.scheduler.worker import Step


@dataclass
class Planned:
    """A job as the scheduler side planned it, with the world as it was then."""

    job: Any
    generation: npt.NDArray[np.int64]
    stream: Stream | None
    """Of a load: the prefix that the request needs."""


class Cache:
    """Connectors of one engine to `server`. One Cache per Engine."""

    def __init__(
        self,
        server: CacheServer,
        rng: random.Random,
        pace: Pace | None = None,
        *,
        known: dict[bytes, tuple[Stream, int]] | None = None,
        own_threads: bool = False,
    ) -> None:
        """`known`: what keys stand for, shared by engines that share the arena. `own_threads`: let the
        connector's threads report and settle, as in an engine."""
        self.server = server
        self.rng = rng
        self.pace = pace or Pace()
        self.own_threads = own_threads
        self.engine: Engine = None  # type: ignore[assignment]  # from `begin` on
        self.watching = True
        self.engines: list[LateEngine] = []
        self.plans: dict[int, Planned] = {}
        self.spoiled: set[str] = set()
        """Requests that had a failed load: nothing may be offered to them again, and need not."""
        self.lossy = False
        """Slots are taken away on purpose, or the server is: copies may find them changed."""
        self.blind = False
        """The server is away: misses are no surprise."""
        self.stores = self.loads = self.failed_loads = 0
        self.offered_tokens = 0
        self._patches = ExitStack()
        self._known = known if known is not None else {}
        self._keys: dict[str, tuple[ChunkKeys, Stream]] = {}
        self._scratch: dict[int, Storage] = {}

    def options(self, setup: Setup) -> Mapping[str, Any]:
        return {
            "lmcache_shm.instance": self.server.config.instance,
            "lmcache_shm.chunk_size": setup.chunk,
            "lmcache_shm.deadline_ms": 20000,
        }

    # ---------------------------------------------------------------------------- beginning and end
    def begin(self, engine: Engine) -> None:
        """Before the scheduler is built: from here on copies, reports and settling happen when we say."""
        self.engine = engine
        self._patches.enter_context(patch.object(worker_module, "open_engine", self._open_engine))
        if not self.own_threads:
            self._patches.enter_context(patch.object(Settler, "_run", lambda settler: None))

    def attach(self, engine: Engine, configs: Sequence[KVCacheConfig]) -> None:
        """Build the workers' connectors, hand over their caches, and wait until the cache is in use."""
        self.oracle = engine.oracle
        self.chunk = engine.setup.chunk
        self.scheduler_side = engine.scheduler.connector
        handshake = {}
        for rank, config in enumerate(configs):
            connector = self._worker(rank, config)
            engine.workers.connectors.append(connector)
            facts = connector.get_handshake_metadata()
            if facts is not None:
                handshake[0, rank] = facts
        self.scheduler_side.set_xfer_handshake_metadata_pp_aware(handshake)
        assert self.side.start.client.up, self.side.start.client.refusal
        matched = self.scheduler_side.get_num_new_matched_tokens

        def checked(request: Any, local_tokens: int) -> tuple[int | None, bool]:
            before = self._acquires()
            answer = matched(request, local_tokens)
            self._check_offer(request, local_tokens, answer, asked=self._acquires() > before)
            return answer

        self.scheduler_side.get_num_new_matched_tokens = checked

    def _worker(self, rank: int, config: KVCacheConfig) -> Any:
        with ExitStack() as patches:
            patches.enter_context(patch.object(connector_module, "rank_in_engine", lambda: rank))
            if not self.own_threads:
                patches.enter_context(patch.object(WorkerSide, "_publish_on", lambda side: None))
            connector: Any = KVConnectorFactory.create_connector(
                self.engine.config, KVConnectorRole.WORKER, config
            )
            connector.register_kv_caches(self.engine.workers.ranks[rank].tensors)
        return connector

    def _open_engine(self, arena: Any, layouts: Any, tensors: Any, *, threads: int) -> LateEngine:
        """In place of transfer.select.open_engine: which rank it is for shows in where the tensors lie."""
        address = tensors[0].data_ptr()
        ranks = self.engine.workers.ranks
        rank = next(i for i, r in enumerate(ranks) if 0 <= address - r.address < r.raw.size)
        engine = LateEngine(
            arena, layouts, self.rng, self.pace, lambda *around: self.watch(rank, *around), self._refused
        )
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        """The engine ends, whatever state it is in."""
        self.watching = False
        with self._patches:
            if self.engine is None:
                return
            try:
                self.finish_copies()
            finally:
                for connector in self.engine.workers.connectors:
                    connector.shutdown()
                if self.engine.scheduler is not None:
                    self.engine.scheduler.shutdown()

    @property
    def side(self) -> Any:
        """Our scheduler side behind vLLM's interface."""
        return self.scheduler_side.side

    # ---------------------------------------------------------------------------- time
    def tick(self) -> None:
        """Some copies get on, and what has ended may be reported."""
        for engine in self.engines:
            engine.tick()
        if self.rng.random() < 0.7:
            self.publish()

    def publish(self) -> None:
        """What the workers' reporting threads do (they do not run here)."""
        for connector in self.engine.workers.connectors:
            connector.worker.publish()

    def settle(self) -> None:
        """What the settling thread does while the engine is idle (it does not run here)."""
        self.side.settler.settle()

    def finish_copies(self) -> None:
        """Everything that was submitted comes to its end."""
        for engine in self.engines:
            engine.finish()
        self.publish()

    def catch_up(self) -> None:
        """Workers run all that is scheduled, and finish all their copies."""
        while any(step.result is None for step in self.engine.queue):
            self.engine.execute()
        self.finish_copies()

    # ---------------------------------------------------------------------------- plans
    def planned(self, step: Step) -> None:
        """A schedule() is over: note what was planned in it, and what must hold from the start."""
        meta = step.output.kv_connector_metadata
        for job in meta.stores:
            self.stores += 1
            self._plan(job, step, None)
        for job in meta.loads:
            self.loads += 1
            request = self.engine.scheduler.requests[job.req_id]
            stream = Stream(self.engine.asked[job.req_id].identity, list(request.all_token_ids))
            self._plan(job, step, stream)
            pool = self.oracle.pool
            for _, _, block in self._blocks(job):
                if pool.blocks[block].block_hash is not None or pool.blocks[block].ref_cnt != 1:
                    self.oracle.fail("overwrite", f"load {job.id} of {job.req_id} writes block {block}, which vLLM uses")

    def _plan(self, job: Any, step: Step, stream: Stream | None) -> None:
        if job.id in self.plans:
            self.oracle.fail("plan", f"job {job.id} is planned twice")
        self.plans[job.id] = Planned(job, step.generation, stream)
        for group, _, block in self._blocks(job):
            if block == 0:
                self.oracle.fail("null_block", f"job {job.id} takes the null block for a page of group {group}")
            if self.oracle.pool.blocks[block].ref_cnt < 1:
                self.oracle.fail("changed_hands", f"job {job.id} names block {block}, which nobody holds")

    @staticmethod
    def _blocks(job: Any) -> list[tuple[int, int, int]]:
        """(KV cache group, row, block) of a job."""
        return [
            (group, slot.row, int(block))
            for slot in job.slots
            for group, _, blocks in slot.runs
            for block in blocks
        ]

    def updated(self, reply: Any) -> None:
        """A step's result has reached the scheduler."""
        self.failed_loads += len(reply.failed_recving or ())
        self.spoiled |= set(reply.failed_recving or ())

    # ---------------------------------------------------------------------------- copies
    def watch(self, rank: int, job: CopyJob, item: CopyItem, when: str) -> None:
        """Around the copy of one slot on one rank (see LateEngine)."""
        if not self.watching:
            return
        planned = self.plans.get(job.id)
        if planned is None:
            self.oracle.fail("plan", f"rank {rank} copies for job {job.id}, which was never planned")
        slot = next(s for s in planned.job.slots if s.row == item.row)
        for group, _, blocks in slot.runs:
            for block in blocks:
                if not self.oracle.owned(int(block), int(planned.generation[block])):
                    self.oracle.fail(
                        "changed_hands",
                        f"{job.kind} {job.id} {when} its copy: block {block} of group {group} belongs to "
                        "someone else by now",
                    )
        row = item.row
        chunk = int(self.server.arena.cold["chunk"][row])
        if job.kind == "store" and when == "before":
            stream, chunk = self._demanded(row)
            self._compare(rank, "store_source", f"store {job.id}", slot, stream, chunk)
        elif job.kind == "load" and when == "after":
            assert planned.stream is not None
            self._compare(rank, "load", f"load {job.id} of {planned.job.req_id}", slot, planned.stream, chunk)

    def _refused(self, job: CopyJob, item: CopyItem, reason: str) -> None:
        """The real engine did not copy a slot."""
        if self.watching and reason == "generation" and not self.lossy:
            self.oracle.fail(
                "lost_pin", f"{job.kind} {job.id}: slot {item.row} changed hands although it was {job.kind}d under a lease"
            )
        if self.watching and reason not in ("generation", "arena"):
            self.oracle.fail("copy", f"{job.kind} {job.id}: slot {item.row}: {reason}")

    def _compare(self, rank: int, kind: str, what: str, slot: Any, stream: Stream, chunk: int) -> None:
        """The blocks of `slot` hold chunk number `chunk` of this prefix."""
        for index, first, blocks in slot.runs:
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
        return pages - min(pages, max(1, -(-(group.window - 1) // group.block_size)))

    # ---------------------------------------------------------------------------- keys
    def _demanded(self, row: int) -> tuple[Stream, int]:
        """The prefix that a row's key stands for, and its chunk."""
        key = self.server.arena.cold["key"][row].tobytes()
        if key not in self._known:
            self._learn(int(self.server.arena.hot["namespace"][row]))
        if key not in self._known:
            self.oracle.fail("key", f"row {row} has a key that belongs to no prefix of any request")
        return self._known[key]

    def _learn(self, namespace: int) -> None:
        """Hash what every request consists of by now."""
        seed = next(space.key for space in self.server.catalog.namespaces() if space.id == namespace)
        for req_id, asked in self.engine.asked.items():
            self._learn_one(seed, req_id, asked.request)

    def keys_of(self, namespace: int, req_id: str) -> ChunkKeys:
        seed = next(space.key for space in self.server.catalog.namespaces() if space.id == namespace)
        return self._learn_one(seed, req_id, self.engine.asked[req_id].request)

    def _learn_one(self, seed: bytes, req_id: str, request: Any) -> ChunkKeys:
        tokens = list(request.all_token_ids)
        keys, stream = self._keys.get(req_id) or (
            ChunkKeys(seed, self.chunk), Stream(self.engine.asked[req_id].identity, ()),
        )  # fmt: skip
        if tokens[: len(stream.tokens)] != stream.tokens:
            self.oracle.fail("engine", f"{req_id} has changed tokens")
        stream.extend(tokens[len(stream.tokens) :])
        self._keys[req_id] = keys, stream
        for chunk in range(len(keys), keys.extend(tokens, None, extra_of(request, self.chunk))):
            key, h = keys.key(chunk), stream.after((chunk + 1) * self.chunk)
            other = self._known.setdefault(key, (stream, chunk))
            if other[0].after((chunk + 1) * self.chunk) != h or other[1] != chunk:
                self.oracle.fail("key", f"one key for two prefixes ({req_id}, chunk {chunk})")
        return keys

    # ---------------------------------------------------------------------------- hits
    def _acquires(self) -> int:
        return int(self.server.service.latency["acquire"].count)

    def _check_offer(
        self, request: Any, local: int, answer: tuple[int | None, bool], *, asked: bool
    ) -> None:
        """What is offered is what the arena has; an earlier answer may be kept while its rows are pinned."""
        tokens, asynchronous = answer
        req_id = request.request_id
        self.oracle.note(f"offer {req_id}: {tokens} beyond {local} of {request.num_tokens}")
        self.offered_tokens += tokens or 0
        if tokens is None or (not tokens and self.side._recomputing):  # noqa: SLF001
            return  # to be asked again, or nothing is loaded until a failed load was made good
        if tokens and not asynchronous:
            self.oracle.fail("offer", f"{req_id}: a synchronous load is offered")
        if tokens and req_id in self.spoiled:
            self.oracle.fail("offer", f"{req_id} had a failed load and is offered {tokens} tokens again")
        if self.blind or req_id in self.spoiled or request.skip_reading_prefix_cache:
            return
        best = max(self.usable(req_id, local, request.num_tokens, kept=not asked) * self.chunk - local, 0)
        given = tokens or 0
        if given > best or (given < best and (asked or not given)):
            self.oracle.fail(
                "invented" if given > best else "missed",
                f"{req_id} with {local} of {request.num_tokens} tokens is offered {given}, the arena has {best}",
            )

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
        keys = self.keys_of(namespace, req_id)
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

    # ---------------------------------------------------------------------------- the end
    def drained(self) -> None:
        """Nothing is underway: nothing may be held, and every stored byte is right."""
        self.oracle.all_free()
        server = self.server
        if server.pins:
            self.oracle.fail("leak", f"{server.pins} pins are left")
        for state in (SlotState.RESERVED, SlotState.QUARANTINED):
            if rows := server.in_state(state):
                self.oracle.fail("leak", f"rows {rows[:10]} are still {state.name}")
        if findings := server.check():
            self.oracle.fail("check", "; ".join(findings))
        self.check_arena()

    def check_arena(self) -> None:
        """Every byte of every committed slot is what its key demands, for all ranks."""
        for row in self.stored().values():
            stream, chunk = self._demanded(row)
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
            for lane, segment in zip(part.pages.lanes, segments, strict=True):
                at = lane.base_addr - real.address
                want = np.stack(
                    [scratch.raw[at + b * lane.block_stride :][: lane.nbytes] for b in blocks]
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
        worker = self.engine.workers.connectors[rank].worker
        mount = worker._mounts[bytes(self.server.arena.arena_id)]  # noqa: SLF001
        place = self.side.start.latest.place
        offset = int(self.server.arena.cold["offset"][row]) + place.region_offsets[number][rank]
        return mount.layout.layouts[mount.layout.place[number]], offset, mount.layout.part[number]
