"""One step's stores over all requests: found cheaply, reserved in one message, turned into jobs."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_shm.client.client import unpack_rows
from lmcache_shm.client.counts import Counts
from lmcache_shm.client.in_flight import StoreBook
from lmcache_shm.client.jobs import Job, SlotCopy
from lmcache_shm.client.registration import Epoch
from lmcache_shm.client.store_plan import Candidate, States, step_states, storable
from lmcache_shm.protocol.keys import KEY
from lmcache_shm.protocol.messages import BUSY, EXISTS, Reserve, Stepped
from lmcache_shm.vllm.requests import RequestState

MAX_ENTRIES = 64 << 10
"""Of one reserve; what is beyond is not stored in this step."""

Tables = tuple[list[int], ...]


@dataclass(slots=True)
class RequestStores:
    """What one request could store in this step."""

    state: RequestState
    candidates: list[Candidate]


class StorePlanner:
    """Scheduler thread only."""

    def __init__(self, book: StoreBook, counts: Counts) -> None:
        self._book = book
        self._counts = counts

    def plan(
        self, output: Any, epoch: Epoch, requests: Mapping[str, RequestState], pool: Any
    ) -> "Batch | None":
        """What to ask the server for; None in most steps. A few integer comparisons per request, no more."""
        blocks = output.kv_connector_block_state
        offers = blocks.boundary_state_offloads
        due: dict[str, int] = {}
        for req_id, n in output.num_scheduled_tokens.items():
            state = requests.get(req_id)
            if state is None:
                continue
            if state.epoch is not epoch and not state.enter(epoch):
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
            if tables is None or state.outdated or not state.enter(epoch):
                continue
            drafts = req_id in output.scheduled_spec_decode_tokens
            stores = self._request(
                state, epoch, n, tables, offers.get(req_id, ()), pool, drafts=drafts
            )
            if stores.candidates:
                found.append(stores)
        if not found:
            return None
        if not self._book.has_room(len(found)):
            self._counts.add("stores_skipped.backlog", sum(len(f.candidates) for f in found))
            return None
        return Batch(epoch, found, pool, self._book, self._counts)

    def _request(
        self,
        state: RequestState,
        epoch: Epoch,
        n: int,
        tables: Tables,
        offers: Any,
        pool: Any,
        *,
        drafts: bool,
    ) -> RequestStores:
        request, plan, null = state.request, epoch.plan, pool.null_block.block_id
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
                self._chunk(stores, epoch, chunk, tables, states, null)
        state.advance(done)
        self._hold(state, states, end, pool)
        return stores

    def _chunk(
        self,
        stores: RequestStores,
        epoch: Epoch,
        chunk: int,
        tables: Tables,
        states: States,
        null: int,
    ) -> None:
        state = stores.state
        late = chunk < state.next_chunk
        # Most of what came from a cache is in the arena; but a new arena does not have it.
        cached = (chunk + 1) * epoch.plan.chunk_size <= state.prefix_tokens
        key = state.extend(chunk + 1).key(chunk) if cached else b""
        for index, group in enumerate(epoch.plan.groups):
            if late and not group.recurrent:
                continue
            if cached and key in epoch.known[index]:
                continue
            runs = storable(epoch.plan, group, chunk, tables, states, null)
            if runs is None:
                if not cached:
                    why = "no_state" if group.recurrent else "no_block"
                    self._counts.add(f"stores_skipped.{why}")
                continue
            if group.recurrent:
                state.states.add(chunk)
            stores.candidates.append(Candidate(index, chunk, runs))

    def _hold(self, state: RequestState, states: States, end: int, pool: Any) -> None:
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
        self, epoch: Epoch, found: list[RequestStores], pool: Any, book: StoreBook, counts: Counts
    ) -> None:
        self._epoch = epoch
        self._pool = pool
        self._book = book
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

    @staticmethod
    def rows_of(answer: Stepped) -> list[int]:
        """Rows that were reserved after all."""
        return [row for row in unpack_rows(answer.rows) if row >= 0]

    def open_jobs(self, answer: Stepped) -> list[Job]:
        """Fill in the token ids, take references on the blocks: one job per request that got rows."""
        epoch, jobs = self._epoch, []
        by_request: dict[int, tuple[RequestState, list[tuple[int, Candidate]]]] = {}
        for row, (state, candidate) in zip(unpack_rows(answer.rows), self._entries, strict=True):
            if row >= 0:
                by_request.setdefault(id(state), (state, []))[1].append((row, candidate))
            else:
                self._refused(row, state, candidate)
        for state, granted in by_request.values():
            jobs.append(self._open(epoch, state, granted))
        return jobs

    def _refused(self, row: int, state: RequestState, candidate: Candidate) -> None:
        if row == EXISTS:
            self._epoch.remember(candidate.group, state.extend(0).key(candidate.chunk))
            self._counts.add("stores_skipped.exists")
        else:
            self._counts.add("stores_skipped.busy" if row == BUSY else "stores_skipped.full")

    def _open(self, epoch: Epoch, state: RequestState, granted: list[tuple[int, Candidate]]) -> Job:
        arena, keys = epoch.arena, state.extend(0)
        rows = [row for row, _ in granted]
        offsets = arena.cold["offset"][rows].tolist()
        generations = arena.hot["generation"][rows].tolist()
        copies, held, marks = [], [], []
        for (row, c), offset, generation in zip(granted, offsets, generations, strict=True):
            tokens = keys.token_bytes(c.chunk)
            at = offset + epoch.token_offset[c.group]
            arena.data[at : at + len(tokens)] = tokens
            copies.append(SlotCopy(row, offset, generation, c.group, c.runs))
            held += c.block_ids()
            marks.append((c.group, keys.key(c.chunk)))
        blocks = [self._pool.blocks[i] for i in dict.fromkeys(held)]
        self._pool.touch(blocks)
        # A replica that writes nothing has taken part in the computation, with its own copy of the adapter.
        everybody = state.adapter is not None
        job = self._book.open(epoch, rows, marks, blocks, everybody=everybody)
        self._counts.add("stored_chunks", len(granted))
        return Job(job.id, epoch.arena_id, copies, adapter=state.adapter)
