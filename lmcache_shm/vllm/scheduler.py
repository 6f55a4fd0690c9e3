"""The scheduler side of the connector: look up, plan loads and stores, hold blocks, flush ended stores.

Everything here runs in the scheduler's thread. One round trip to the server per looked-up
request, at most one per step; nothing waits longer than the deadline, and nothing raises into the engine.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.v1.request import RequestStatus

from lmcache_shm.client.copy_plan import CannotLoad, plan_load
from lmcache_shm.client.counts import Counts
from lmcache_shm.client.loads import LoadAdmission, Loading
from lmcache_shm.client.lookup import Hit, look_up
from lmcache_shm.client.registration import Registration
from lmcache_shm.client.requests import Identity, RequestState
from lmcache_shm.client.store_planner import Batch, EngineStep, StorePlanner
from lmcache_shm.protocol.messages import Reserve
from lmcache_shm.vllm.adapters import KnownAdapters
from lmcache_shm.vllm.engine_api import (
    ConnectorOutput,
    KVCacheManager,
    ScheduledRequest,
    StepMetadata,
    WorkerReport,
)
from lmcache_shm.vllm.identity import identify
from lmcache_shm.vllm.start import Start

log = logging.getLogger("lmcache_shm")

NEVER = float("inf")
NOTHING = (0, False)
LATER = (None, False)
FLUSH_S = 10.0
"""A reset of the prefix cache, or the end, waits this long for copies that are underway."""
_KEEP_BLOCKS = {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_STREAMING_REQ}
"""Who is in one of these states holds blocks also without us: they are in the way of any reset."""


class SchedulerSide:
    """One per engine. `start` is open already."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.client = start.client
        self.counts = Counts()
        self.in_flight = start.in_flight
        self.planner = StorePlanner(self.in_flight, self.counts)
        self.admission = LoadAdmission(start.vllm_config, start.groups, len(start.ignored))
        self._manager: Any = None
        self.pool: Any = None
        self.adapters = KnownAdapters(start.world)
        self._requests: dict[str, RequestState] = {}
        self._loading = Loading(self.in_flight, self.counts)
        self._recomputing: set[str] = set()
        """Requests whose load failed, and that were not scheduled again since."""
        # Rank → changes of its weights that it has reported.
        self._counted: dict[int, int] = {}
        self._weights_since = start.weights.since
        self._dirty_since = NEVER  # the first step since vLLM's own cache was last empty
        self._local_outdated = False  # it may hold blocks that other weights have computed
        self._null = 0

    # -------------------------------------------------------------------------------- requests
    def on_new_request(self, request: ScheduledRequest) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            state = RequestState(request, self._identify, speculative=self.start.speculative)
            self._requests[request.request_id] = state
            if request.lora_request is not None:
                self.adapters.seen(request.lora_request)
        return state

    def _identify(self, request: ScheduledRequest, chunk_size: int) -> Identity | None:
        return identify(request, chunk_size, self.adapters)

    def matched_tokens(
        self, request: ScheduledRequest, local_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond `local_tokens` can be loaded; idempotent until they are allocated for.

        None: vLLM shall pass over this request now and ask again in its next step.
        """
        state = self.on_new_request(request)
        self.admission.leave(request.request_id)
        if state.passed_over:
            # After a failed load vLLM leaves a request at the head of those that hold blocks, though it
            # has none: without room for it, it would stop them all. Passed over once, it goes back to
            # where it belongs.
            state.passed_over = False
            return LATER
        registration, lora = self._current(), request.lora_request
        state.loading = False
        self._drop_states(state)
        state.since = time.monotonic()
        foreign = lora is not None and self.adapters.foreign_blocks(lora)
        state.outdated = local_tokens > 0 and (self._local_outdated or foreign)
        if registration is not None and lora is not None and self.adapters.awaited(lora):
            return LATER
        if registration is None or not state.enter(registration):
            self._drop_hit(state)
            return NOTHING
        state.rewind()
        state.prefix_tokens = local_tokens
        if request.skip_reading_prefix_cache or state.no_external or not self.start.reads:
            return NOTHING
        if self._recomputing and request.request_id not in self._recomputing:
            # vLLM sets blocks aside for those whose load failed before it begins another load, and this
            # request may stand before them in the queue: each would wait for the other.
            self._drop_hit(state)
            self.counts.add("misses.recomputing")
            return NOTHING
        hit = state.hit
        if hit is None or hit.registration is not registration or hit.local_tokens != local_tokens:
            hit = self._look_up(state, registration, local_tokens)
        if hit is None:
            return NOTHING
        if not self.admission.has_room(
            request.num_tokens, hit.tokens, self.pool.num_gpu_blocks - 1
        ):
            return LATER
        return hit.tokens - local_tokens, True

    def _look_up(
        self, state: RequestState, registration: Registration, local_tokens: int
    ) -> Hit | None:
        request = state.request
        chunks = (request.num_tokens - 1) // registration.plan.chunk_size
        old, state.hit = state.hit, None
        replaces = old.lease if old is not None and old.registration is registration else 0
        if chunks * registration.plan.chunk_size <= local_tokens:
            if replaces:
                self.in_flight.release(replaces)
            return None
        keys = state.extend(chunks)
        hit, why = look_up(
            self.client,
            registration,
            keys,
            local_tokens,
            request.num_tokens,
            replaces,
            self.in_flight.release,
        )
        self.counts.lookup(
            request.num_tokens - local_tokens, hit.tokens - local_tokens if hit else 0
        )
        if why:
            self.counts.add(f"misses.{why}")
            if why == "collision":
                self.client.count("collision")
        state.hit = hit
        self.in_flight.wake()
        return hit

    def allocated(
        self, request: ScheduledRequest, tables: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """VLLM has allocated blocks for `external_tokens` of the offered tokens (0: it will not load any)."""
        state = self.on_new_request(request)
        if external_tokens == 0:
            self._drop_hit(state)
            return
        state.loading = True
        req_id, hit = request.request_id, state.hit
        held = hit.local_tokens if hit is not None else 0
        self.admission.enter(req_id, request.num_tokens, held + external_tokens, tables, self._null)
        if hit is None or req_id in self._loading:
            self.fail_load(request, "nothing was offered")
            return
        state.hit = None
        state.prefix_tokens = total = hit.local_tokens + external_tokens
        try:
            copies = plan_load(
                hit.registration.plan,
                hit.first,
                hit.n_chunks,
                hit.local_tokens,
                total,
                tables,
                self._null,
            )
        except CannotLoad as error:
            self.in_flight.release(hit.lease)
            self.fail_load(request, str(error))
            return
        self._loading.begin(req_id, hit, copies, state.adapter)

    def fail_load(self, request: ScheduledRequest, why: str) -> None:
        """Report a load that vLLM waits for as failed."""
        self.on_new_request(request).no_external = True
        self._loading.fail(request.request_id, why)

    def request_finished(self, request: ScheduledRequest) -> None:
        self._recomputing.discard(request.request_id)
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._drop_hit(state)
            self._drop_states(state)
        if request.request_id not in self._loading:
            self.admission.leave(request.request_id)

    # ------------------------------------------------------------------------------------ steps
    def build_metadata(self, output: EngineStep) -> StepMetadata:
        """Plan this step's stores and flush ended ones; at most one round trip."""
        self._notice()
        meta = StepMetadata(weights=self._counted, question=self.adapters.question)
        self._loading.hand_over(meta)
        if output.num_scheduled_tokens or len(self._loading):
            self._dirty_since = min(self._dirty_since, time.monotonic())
        everybody = len(self._loading) == len(self._requests) > 0
        meta.waiting = everybody and not output.num_scheduled_tokens
        with self.survives("planning stores"):  # the loads go on their way in any case
            self._follow(output)
            self.in_flight.stepped()
            self._store(output, meta)
        self.in_flight.wake()
        return meta

    def _follow(self, output: EngineStep) -> None:
        """Update preempted and newly scheduled requests."""
        for req_id in output.preempted_req_ids or ():
            if req_id in self._requests:
                self._drop_states(self._requests[req_id])
        if self.admission or self._recomputing:
            for req_id in output.num_scheduled_tokens:
                self.admission.leave(req_id)
                self._recomputing.discard(req_id)

    @contextmanager
    def survives(self, what: str) -> Iterator[None]:
        """A bug of ours must cost a hit and not the engine."""
        try:
            yield
        except Exception:
            log.exception("lmcache_shm: %s failed", what)
            self.counts.add("errors")

    def _store(self, output: EngineStep, meta: StepMetadata) -> None:
        batch: Batch | None = None
        current = self._current()  # before the flush: registering anew takes its lock

        def reserve(registration: Registration | None) -> Reserve | None:
            nonlocal batch
            self._release_blocks()
            if registration is not None and registration is current and self.start.writes:
                batch = self.planner.plan(output, registration, self._requests, self.pool)
            return batch.reserve if batch is not None else None

        answer = self.in_flight.flush(reserve, defer=True)
        if batch is None:
            return
        if answer is None:
            batch.drop()
            return
        for job in batch.open_jobs(answer):
            meta.stores.append(job)
            meta.places[job.arena_id] = batch.registration.place

    def output(self, connector_output: ConnectorOutput) -> None:
        """Take the workers' reports of a step: ended loads, stores that could not begin."""
        failed = connector_output.failed_recving or ()
        for req_id in connector_output.finished_recving or ():
            hit, cancelled = self._loading.ended(req_id)
            if hit is not None:
                self.in_flight.release(hit.lease)
            state = self._requests.get(req_id)
            if req_id in failed:
                self.counts.add("requests_recomputed")
                self.client.count("load_failed")
            if state is None:
                self.admission.leave(req_id)
            elif cancelled:
                self._take_blocks(state)
            elif req_id in failed:
                state.start_anew()
                self._recomputing.add(req_id)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self.in_flight.refuse(report.refused)
            self._weights_changed(report.weights)
            self._follow_adapters(self.adapters.take(report.adapters, report.answer))
        self.in_flight.wake()

    def _follow_adapters(self, changed: set[int]) -> None:
        """Another content is loaded under these ids: what was computed or looked up before is void."""
        for state in self._requests.values() if changed else ():
            lora = state.request.lora_request
            if lora is not None and lora.lora_int_id in changed:
                self._drop_hit(state)
                state.void()

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for copies frees blocks, so that no request need be preempted. Releases ended stores' blocks."""
        # vLLM does not try again in this step, so blocks that were released just now count, too.
        return self._flush_now() or self.in_flight.held_alone()

    def has_pending_work(self) -> bool:
        """Whether the engine should go on stepping: copies are in flight, or blocks wait to be released.

        A paused engine that keeps its requests does not count them as work, but goes on until loads have ended:
        they write into its blocks.
        """
        return self.in_flight.storing or self.in_flight.ended or len(self._loading) > 0

    # ------------------------------------------------------------------------------------- cache
    def bind(self, manager: KVCacheManager) -> None:
        """Take references in this manager's block pool; let its reset find all of them released.

        Before vLLM allocates blocks or counts free ones, those of ended copies are given back: so an idle
        engine needs no step for it, and nobody is preempted for blocks that nobody needs. Never *while* it
        allocates: it counts the blocks of a prefix that become unavailable, then the free ones, and a
        block that is freed in between would be available twice.
        """
        self._manager, self.pool = manager, manager.block_pool
        self._null = self.pool.null_block.block_id
        reset, count = manager.reset_prefix_cache, self.pool.get_num_free_blocks
        allocate = manager.allocate_slots
        allocating = resetting = False

        def reset_when_released() -> bool:
            nonlocal resetting
            resetting = self._give_up_blocks() and self.start.alone
            try:
                emptied = bool(reset())
            finally:
                resetting = False
            if emptied:
                self._dirty_since, self._local_outdated = NEVER, False
                self.adapters.local_cache_is_empty()
            return emptied

        def count_when_released() -> int:
            if resetting:
                # What is in use now is freed by vLLM when a step that is underway has ended. It puts this
                # off since we are there; nobody will find those blocks, and nobody gets them before.
                return int(self.pool.num_gpu_blocks) - 1
            if not allocating:
                self._release_blocks()
            return int(count())

        def allocate_when_released(*args: Any, **options: Any) -> Any:
            nonlocal allocating
            self._release_blocks()
            allocating = True
            try:
                return allocate(*args, **options)
            finally:
                allocating = False

        manager.reset_prefix_cache = reset_when_released
        manager.allocate_slots = allocate_when_released
        self.pool.get_num_free_blocks = count_when_released

    def reset(self) -> bool:
        """The weights may have changed: move to another namespace. Nothing computed before is stored or served."""
        self.start.weights.reset()
        self._notice()
        return True

    def _give_up_blocks(self) -> bool:
        """Before a reset of the engine's cache: give back every block that is held because we are there.

        These are blocks of stores, recurrent states whose tokens are not known yet, and prefixes that were
        loaded for requests that do not run: those are computed from their beginning. False, and nothing is given
        up, if others hold blocks: without us, too, there could be no reset.
        """
        managers = self._manager.coordinator.single_type_managers
        holders = {r for m in managers for r, blocks in m.req_to_blocks.items() if blocks}
        if not all(map(self._holds_for_us, holders)):
            return False
        if not self.wait_flushed(FLUSH_S, loads=True):
            return False
        for state in self._requests.values():
            self._drop_states(state)
        for req_id in holders:
            if req_id in self._requests:
                self._take_blocks(self._requests[req_id])
            else:  # it was aborted, and vLLM waits for the report of its load
                self._manager.coordinator.free(req_id)
        return True

    def _holds_for_us(self, req_id: str) -> bool:
        """Whether a request that holds blocks would hold none without us. Another connector's load is not ours."""
        state = self._requests.get(req_id)
        if state is None:
            return req_id in self._loading
        remote = state.request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        return state.request.status not in _KEEP_BLOCKS and (state.loading or not remote)

    def _take_blocks(self, state: RequestState) -> None:
        """A request that does not run, and into whose blocks nobody writes, begins anew without them."""
        request = state.request
        self._manager.free(request)
        request.num_computed_tokens = 0
        state.start_anew()
        self.admission.leave(request.request_id)
        self._recomputing.add(request.request_id)

    def wait_flushed(self, timeout_s: float, *, loads: bool = False) -> bool:
        """Until no store (and, with `loads`, no load) is underway and all is committed; False when the time was
        too short."""
        end = time.monotonic() + timeout_s
        while True:
            self._flush_now()
            if not self.in_flight.storing and not (loads and self.in_flight.loading):
                return True
            if time.monotonic() > end:
                log.warning("lmcache_shm: copies are still in flight after %.0f s", timeout_s)
                return False
            time.sleep(0.002)  # the engine is idle, or shutting down

    def close(self) -> None:
        """Flush the stores in flight, for a bounded time, then disconnect."""
        if self.client.up:
            self.wait_flushed(FLUSH_S / 2)
        self.start.close()

    # ------------------------------------------------------------------------------------ inside
    def _current(self) -> Registration | None:
        """The registration to work in; it belongs to the weights in memory."""
        self._notice()
        return self.start.current()

    def _notice(self) -> None:
        """If the weights changed: cancel loads, and mark what was computed before as outdated."""
        since = self.start.weights.since
        if since != self._weights_since:
            self._weights_since = since
            self._outdate(since)

    def _weights_changed(self, told: dict[int, tuple[int, float]]) -> None:
        """Ranks reported changes of their weights: rank → (number, time of the last one)."""
        if not told:
            return
        self._counted = self._counted | {rank: count for rank, (count, _) in told.items()}
        if not self.start.weights.changed(max(at for _, at in told.values())):
            # The engine has moved on since, so only the count was outdated: plan the refused stores again.
            for state in self._requests.values():
                state.registration = None
        self._notice()

    def _outdate(self, at: float) -> None:
        """The weights changed at `at`."""
        self._loading.cancel()
        self._local_outdated = self._local_outdated or self._dirty_since <= at
        for state in self._requests.values():
            self._drop_hit(state)
            state.outdated = state.outdated or state.since <= at

    def _flush_now(self) -> bool:
        """Whether blocks were released."""
        self.in_flight.flush()
        return self._release_blocks()

    def _release_blocks(self) -> bool:
        if not self.in_flight.ended:
            return False
        self.pool.free_blocks(self.in_flight.take_ended_blocks())
        return True

    def _drop_hit(self, state: RequestState) -> None:
        if state.hit is not None:
            self.in_flight.release(state.hit.lease)
            state.hit = None

    def _drop_states(self, state: RequestState) -> None:
        if state.held:
            blocks, state.held = list(state.held.values()), {}
            self.pool.free_blocks(blocks)
