"""One step's stores over all requests: found cheaply, reserved in one message, turned into jobs."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lmcache_shm.arena.job import CopyJob
from lmcache_shm.client.client import unpack_rows
from lmcache_shm.client.copy_plan import ChunkCopy, States, step_states, storable
from lmcache_shm.client.counts import Counts
from lmcache_shm.client.in_flight import InFlightStores
from lmcache_shm.client.registration import Registration
from lmcache_shm.client.requests import RequestState
from lmcache_shm.protocol.messages import BUSY, EXISTS, KEY, Reserve, Stepped

MAX_ENTRIES = 64 << 10
"""Of one reservation; further chunks are not stored in this step."""

Tables = Sequence[Sequence[int]]


class BlockPool(Protocol):
    """The engine's blocks. A block with a reference is not given to another request."""

    null_block: Any
    """Stands in block tables where there is no block."""
    blocks: Sequence[Any]
    """By block id."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Take a reference on each."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Release a reference on each; first to be evicted come first."""


class BlockState(Protocol):
    """Where the requests' tokens are once the step has run."""

    boundary_state_offloads: Mapping[str, Sequence[tuple[int, int, int]]]
    """By request: recurrent states as (KV cache group, block, boundary in tokens)."""

    def get_block_ids(self, req_id: str) -> Tables | None:
        """Block tables by KV cache group."""


class EngineStep(Protocol):
    """One step of the engine as it was scheduled."""

    num_scheduled_tokens: Mapping[str, int]
    scheduled_spec_decode_tokens: Mapping[str, Any]
    preempted_req_ids: Iterable[str] | None
    kv_connector_block_state: BlockState


@dataclass(slots=True)
class RequestStores:
    """Chunks that one request could store in this step."""

    state: RequestState
    candidates: list[ChunkCopy]


class StorePlanner:
    """Scheduler thread only."""

    def __init__(self, in_flight: InFlightStores, counts: Counts) -> None:
        self._in_flight = in_flight
        self._counts = counts

    def plan(
        self,
        output: EngineStep,
        registration: Registration,
        requests: Mapping[str, RequestState],
        pool: BlockPool,
    ) -> "Batch | None":
        """The reservation of this step; None in most steps. Costs a few integer comparisons per request."""
        blocks = output.kv_connector_block_state
        offers = blocks.boundary_state_offloads
        due: dict[str, int] = {}
        for req_id, n in output.num_scheduled_tokens.items():
            state = requests.get(req_id)
            if state is None:
                continue
            if state.registration is not registration and not state.enter(registration):
                continue
            if state.request.num_computed_tokens + n >= state.next_end:
                due[req_id] = n
        for req_id in offers:
            if req_id not in due and req_id in requests:
                due[req_id] = output.num_scheduled_tokens.get(req_id, 0)
        if not due:
            return None
        found = []
        for req_id, n in due.items():
            state = requests[req_id]
            tables = blocks.get_block_ids(req_id)
            if tables is None or state.outdated or not state.enter(registration):
                continue
            drafts = req_id in output.scheduled_spec_decode_tokens
            stores = self._request(
                state, registration, n, tables, offers.get(req_id, ()), pool, drafts=drafts
            )
            if stores.candidates:
                found.append(stores)
        if not found:
            return None
        if not self._in_flight.has_room(len(found)):
            self._counts.add("stores_skipped.backlog", sum(len(f.candidates) for f in found))
            return None
        return Batch(registration, found, pool, self._in_flight, self._counts)

    def _request(
        self,
        state: RequestState,
        registration: Registration,
        n: int,
        tables: Tables,
        offers: Sequence[tuple[int, int, int]],
        pool: BlockPool,
        *,
        drafts: bool,
    ) -> RequestStores:
        request, plan, null = state.request, registration.plan, pool.null_block.block_id
        start = request.num_computed_tokens
        # Draft tokens may be rejected, and those still to be sampled are not known.
        end = min(start + n, request.num_tokens)
        stores = RequestStores(state, [])
        ends = exact_ends(state, start, n, drafts=drafts)
        states = step_states(plan, tables, offers, ends, null)
        states.update({at: block.block_id for at, block in state.held.items()})
        done = end // plan.chunk_size
        chunks = list(range(state.next_chunk, done))
        late = {boundary // plan.chunk_size - 1 for _, boundary in states}
        chunks += sorted(c for c in late if c < state.next_chunk and c not in state.states)
        if chunks:
            keys = state.extend(done)
            for chunk in chunks:
                if chunk >= len(keys):
                    continue
                self._chunk(stores, registration, chunk, tables, states, null)
        state.advance(done)
        self._hold(state, states, end, pool)
        return stores

    def _chunk(
        self,
        stores: RequestStores,
        registration: Registration,
        chunk: int,
        tables: Tables,
        states: States,
        null: int,
    ) -> None:
        state = stores.state
        late = chunk < state.next_chunk
        # Chunks that came from a cache are mostly in the arena already, but not in a new one.
        cached = (chunk + 1) * registration.plan.chunk_size <= state.prefix_tokens
        key = state.extend(chunk + 1).key(chunk) if cached else b""
        for index, group in enumerate(registration.plan.groups):
            if late and not group.recurrent:
                continue
            if cached and key in registration.known[index]:
                continue
            pages = storable(registration.plan, group, chunk, tables, states, null)
            if pages is None:
                if not cached:
                    why = "no_state" if group.recurrent else "no_block"
                    self._counts.add(f"stores_skipped.{why}")
                continue
            if group.recurrent:
                state.states.add(chunk)
            stores.candidates.append(ChunkCopy(index, chunk, pages))

    def _hold(self, state: RequestState, states: States, end: int, pool: BlockPool) -> None:
        """Keep states whose chunk's last tokens are still being sampled; let go of those now dealt with."""
        for at in [at for at in state.held if at[1] <= end]:
            pool.free_blocks([state.held.pop(at)])
        for at, block_id in states.items():
            if at[1] > end and at not in state.held:
                block = pool.blocks[block_id]
                pool.touch([block])
                state.held[at] = block


def exact_ends(state: RequestState, start: int, n: int, *, drafts: bool) -> list[int]:
    """Token counts at which a recurrent state is known to stand in its positional place in this step.

    Where the step ends, and, in the first step of a request that got a prefix, where that ends. With
    draft tokens about, a state may lie elsewhere: then only what vLLM offers is certain.
    """
    ends = [start] if start and start == state.prefix_tokens else []
    if n and not drafts and (not state.speculative or start + n <= state.request.num_prompt_tokens):
        ends.append(start + n)
    return ends


class Batch:
    """The stores of one step between planning and the server's answer."""

    def __init__(
        self,
        registration: Registration,
        found: list[RequestStores],
        pool: Any,
        in_flight: InFlightStores,
        counts: Counts,
    ) -> None:
        self.registration = registration
        self._pool = pool
        self._in_flight = in_flight
        self._counts = counts
        self._entries = [(stores.state, c) for stores in found for c in stores.candidates]
        if len(self._entries) > MAX_ENTRIES:
            counts.add("stores_skipped.backlog", len(self._entries) - MAX_ENTRIES)
            del self._entries[MAX_ENTRIES:]
        self.reserve = self._pack()

    def _pack(self) -> Reserve:
        entries = self._entries
        n = len(entries)
        keys, parents, digests = [], [], []
        for state, c in entries:
            known, at = state.extend(c.chunk + 1), c.chunk * KEY
            keys.append(known.keys[at : at + KEY])
            parents.append(known.keys[at - KEY : at] if at else known.seed)
            digests.append(known.digests[at : at + KEY])
        return Reserve(
            groups=struct.pack(f"<{n}H", *(c.group for _, c in entries)),
            keys=b"".join(keys),
            parents=b"".join(parents),
            chunks=struct.pack(f"<{n}I", *(c.chunk for _, c in entries)),
            digests=b"".join(digests),
            salts=struct.pack(f"<{n}Q", *(state.salt for state, _ in entries)),
        )

    def drop(self) -> None:
        """Nothing was reserved."""
        self._counts.add("stores_skipped.unreachable", len(self._entries))

    def open_jobs(self, answer: Stepped) -> list[CopyJob]:
        """Fill in the token ids, take references on the blocks: one job per request that got rows."""
        registration, jobs = self.registration, []
        by_request: dict[int, tuple[RequestState, list[tuple[int, ChunkCopy]]]] = {}
        for row, (state, candidate) in zip(unpack_rows(answer.rows), self._entries, strict=True):
            if row >= 0:
                by_request.setdefault(id(state), (state, []))[1].append((row, candidate))
            else:
                self._refused(row, state, candidate)
        for state, granted in by_request.values():
            jobs.append(self._open(registration, state, granted))
        return jobs

    def _refused(self, row: int, state: RequestState, candidate: ChunkCopy) -> None:
        if row == EXISTS:
            self.registration.remember(candidate.group, state.extend(0).key(candidate.chunk))
            self._counts.add("stores_skipped.exists")
        else:
            self._counts.add("stores_skipped.busy" if row == BUSY else "stores_skipped.full")

    def _open(
        self, registration: Registration, state: RequestState, granted: list[tuple[int, ChunkCopy]]
    ) -> CopyJob:
        arena, keys = registration.arena, state.extend(0)
        rows, copies = [row for row, _ in granted], [copy for _, copy in granted]
        offsets = arena.cold["offset"][rows]
        for copy, offset in zip(copies, offsets.tolist(), strict=True):
            tokens = keys.token_bytes(copy.chunk)
            at = offset + registration.token_offset[copy.group]
            arena.data[at : at + len(tokens)] = tokens
        job = CopyJob.of(
            self._in_flight.next_id,
            "store",
            registration.arena_id,
            rows,
            offsets,
            arena.hot["generation"][rows],
            [copy.group for copy in copies],
            [copy.pages for copy in copies],
            adapter=state.adapter,
        )
        blocks = [self._pool.blocks[i] for i in dict.fromkeys(job.block_ids.tolist())]
        self._pool.touch(blocks)
        keyed = [(copy.group, keys.key(copy.chunk)) for copy in copies]
        # A replica that writes nothing has taken part in the computation, with its own copy of the adapter.
        everybody = state.adapter is not None
        self._in_flight.add(registration, job, keyed, blocks, everybody=everybody)
        self._counts.add("stored_chunks", len(granted))
        return job
