"""The worker side of the connector: register tensors, map the arena, copy what the scheduler planned.

It never talks to the server while serving: its connection only says that this rank is there. Stores are
reported on the completion board in shared memory, by a thread, so no engine step is needed for it; loads
are reported to vLLM with the next step.
"""

import logging
import threading
import time
from typing import Any, cast

from lmcache_shm.arena.job import Adapter, CopyJob
from lmcache_shm.arena.layout import RING
from lmcache_shm.arena.segment import Arena
from lmcache_shm.client.counts import Counts
from lmcache_shm.client.jobs import Place
from lmcache_shm.client.plan import chosen_chunk_size, make_plan
from lmcache_shm.config import Config
from lmcache_shm.protocol.messages import HelloReply
from lmcache_shm.transfer.engine import JobResult
from lmcache_shm.transfer.pages import GroupPages
from lmcache_shm.transfer.plan import RequestedBackend
from lmcache_shm.transfer.select import open_engine
from lmcache_shm.vllm.adapters import LoadedAdapters
from lmcache_shm.vllm.engine_api import StepMetadata, WorkerReport
from lmcache_shm.vllm.groups import kv_groups
from lmcache_shm.vllm.hooks import CHANGES, watch_worker
from lmcache_shm.vllm.layouts import (
    LayerFacts,
    WorkerFacts,
    pages_by_group,
    rank_layouts,
    tensors_of,
    worker_facts,
)
from lmcache_shm.vllm.mapped_arena import MappedArena, WorkerConnection
from lmcache_shm.vllm.start import engine_id

log = logging.getLogger("lmcache_shm")

PUBLISH_S = 0.002
BACKOFF_S = 0.002
"""How long a request that arrives meanwhile may have to wait for it."""
DRAIN_S = 5.0
"""At the end, stores that are underway get this long."""
QUIET_S = 30.0
"""Between two lines about the same kind of failed copy."""


class WorkerSide:
    """One per rank."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, config: Config, rank: int, world: int
    ) -> None:
        self.config = config
        self.kv_cache_config = kv_cache_config
        self.rank, self.world = rank, world
        self.replicas = int(kv_cache_config.kv_tp_replicas)
        self.writer = rank % self.replicas == 0
        dcp = vllm_config.parallel_config.decode_context_parallel_size
        self.groups, self.ignored = kv_groups(kv_cache_config, dcp)
        self.counts = Counts()
        self.adapters = LoadedAdapters(rank, vllm_config.lora_config)
        self.adapters.watch()
        self.facts: WorkerFacts | None = None
        self.connection = WorkerConnection(
            config, engine_id(vllm_config), rank, world, self.replicas, self._prepare
        )
        self._pages: dict[int, GroupPages] = {}
        self._tensors: list[Any] = []
        self._mapped: dict[bytes, MappedArena] = {}
        self._lock = threading.Lock()
        self._loaded: list[tuple[str, bool]] = []
        self._refused: dict[int, set[int]] = {}
        self._void: set[int] = set()
        """Loads that were underway when the weights changed: failed, however they end."""
        watch_worker()
        self._weights = CHANGES
        self._first = CHANGES.count  # earlier changes belong to another engine of this process
        CHANGES.listeners.append(self._weights_changed)
        # Changes of the weights that the scheduler knew of when it planned this step.
        self._planned_for = 0
        self._loads: set[int] = set()  # underway
        self._said: dict[str, float] = {}
        self._submitted = threading.Event()
        self._closed = False
        self._publisher = threading.Thread(
            target=self._publish_on, name="lmcache-shm-report", daemon=True
        )

    # ------------------------------------------------------------------------------------- start
    def register(self, kv_caches: dict[str, Any], layers: dict[str, LayerFacts]) -> None:
        """Learn where the pages are and begin to look for a server. Raises ModelError when the bytes of
        the tensors are not those that the specs promise."""
        self._pages = pages_by_group(self.kv_cache_config, kv_caches, self.groups)
        self._tensors = [t for g in self.groups for t in tensors_of(kv_caches, g.layers)]
        self.facts = worker_facts(
            self.kv_cache_config, kv_caches, self.groups, self._pages, layers, self.rank, self.world
        )
        self.connection.say(self.facts.encode())
        self._publisher.start()
        self.connection.start()

    def _prepare(self, hello: HelloReply, arena: Arena) -> list[int]:
        """Be ready to copy in this arena under this server's options; bytes of this rank's regions."""
        wanted = chosen_chunk_size(hello.chunk_size, self.config.chunk_size)
        plan = make_plan(self.groups, self.ignored, wanted, separate=hello.separate)
        arena_id = bytes(arena.arena_id)
        mapped = self._mapped.get(arena_id)
        if mapped is not None and mapped.plan == plan:
            return mapped.region_bytes
        if mapped is not None:  # the same memory, cut differently
            self._unmap(mapped)
        layouts = rank_layouts(plan, self._pages)
        below = {"load": self.config.load_kernel_below, "store": self.config.store_kernel_below}
        engine = open_engine(
            arena,
            layouts,
            self._tensors,
            threads=self.config.transfer_threads,
            backend=cast("RequestedBackend", self.config.copy_backend),
            kernel_below=below,
        )
        mapped = MappedArena(arena, plan, layouts, engine)
        with self._lock:
            self._mapped[arena_id] = mapped
        self._submitted.set()  # there may be another to be given up
        return mapped.region_bytes

    def _unmap(self, mapped: MappedArena) -> None:
        """End the jobs in flight in a mapped arena, and report them. Its memory may be pinned again afterwards."""
        with self._lock:  # from now on no job finds it
            self._mapped.pop(bytes(mapped.arena.arena_id), None)
        mapped.engine.close()
        while mapped.jobs:  # also one that was being submitted meanwhile: it has a result, too
            for result in mapped.engine.poll():
                self._report(mapped, result)
            time.sleep(PUBLISH_S)

    # ------------------------------------------------------------------------------------- steps
    def start_loads(self, meta: StepMetadata) -> None:
        """Submit this step's loads, after the work that was submitted to the device before."""
        self._planned_for = meta.weights.get(self.rank, 0)
        with self._lock:
            self._loaded += [(req_id, False) for req_id in meta.failed]
        for job in meta.loads:
            self._try(job, meta.places[job.arena_id], self.config.load_deadline_s)

    def start_stores(self, meta: StepMetadata) -> None:
        """Submit this step's stores; they read what this step has written."""
        for job in meta.stores:
            # Where another rank holds the same bytes, and stores them, this one has only to agree.
            if self.writer or job.adapter is not None:
                self._try(job, meta.places[job.arena_id], self.config.store_deadline_s)

    def _try(self, job: CopyJob, place: Place, deadline_s: float) -> None:
        """Submit; whatever goes wrong, the job gets an answer, and the engine lives."""
        if self.changes != self._planned_for:
            why = "it was planned before the weights were changed"
            self._fail(f"{job.kind}s_failed.weights", why)
            self._refuse(job)
            return
        with self._lock:
            mapped = self._mapped.get(job.arena_id)
            if mapped is not None and not mapped.fits(place):
                mapped = None
            if mapped is not None:
                mapped.jobs[job.id] = job, place
                if job.kind == "load":
                    self._loads.add(job.id)
        if mapped is None:
            self._fail(
                f"{job.kind}s_failed.arena",
                "the arena it was planned for is not mapped so any more",
            )
            self._refuse(job)
            return
        if job.adapter is not None and not self._fits_adapter(job.adapter, job.kind):
            self._report(
                mapped, JobResult(job.id, job.kind, ok=False, reason="adapter: it was replaced")
            )
            return
        try:
            self._submit(mapped, job, place, deadline_s)
        except Exception:
            log.exception("lmcache_shm: a %s could not be submitted", job.kind)
            self.counts.add("errors")
            if mapped.jobs.pop(job.id, None) is not None:
                self._refuse(job)

    def _fits_adapter(self, adapter: Adapter, kind: str) -> bool:
        """A store's bytes were computed with it; a load's are those that would be computed now."""
        loaded = self.adapters
        return loaded.same(adapter) if kind == "store" else loaded.would_compute(adapter)

    def _refuse(self, job: CopyJob) -> None:
        """Report a job that was not begun."""
        with self._lock:
            if job.kind == "load":
                self._loads.discard(job.id)
                self._loaded.append((job.req_id, False))
            else:
                self._refused.setdefault(job.id, set()).add(self.rank)

    def _submit(self, mapped: MappedArena, job: CopyJob, place: Place, deadline_s: float) -> None:
        if job.kind == "store" and not self.writer:  # another rank stores it
            self._report(mapped, JobResult(job.id, job.kind, ok=True))
            return
        writer = self.rank - self.rank % self.replicas
        checks = mapped.arena.cold["checks"]
        regions, checksums = place.on_rank(job, self.rank, writer, checks)
        mapped.engine.submit(job, regions, checksums, deadline_s)
        self._submitted.set()

    # ------------------------------------------------------------------------------------ results
    def back_off(self) -> None:
        """In a step that computes nothing: let the copy threads have the interpreter for a moment.

        vLLM would come back at once, again and again, and each time they are between two copies they would
        have to wait for it (up to 5 ms, the interpreter's switch interval).
        """
        for mapped in list(self._mapped.values()):
            mapped.engine.drain(BACKOFF_S)

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last call, and those of them that failed."""
        self.publish()
        with self._lock:
            ended, self._loaded = self._loaded, []
        return {req_id for req_id, _ in ended}, {req_id for req_id, ok in ended if not ok}

    def report(self, question: int = 0) -> WorkerReport | None:
        """For the scheduler side: stores that could not even begin, changes of the weights that it did not know of,
        adapters that were loaded. None if there is nothing to say and no `question` to answer."""
        changes = self.changes
        adapters = self.adapters.report(everything=question > 0)
        if not (self._refused or adapters or question) and changes == self._planned_for:
            return None
        with self._lock:
            refused, self._refused = self._refused, {}
        known = changes == self._planned_for
        weights = {} if known else {self.rank: (changes, self._weights.at)}
        return WorkerReport(refused, {self.rank: adapters}, question, weights)

    def publish(self) -> None:
        """Report the jobs that the engines have ended. Any thread."""
        for mapped in list(self._mapped.values()):
            for result in mapped.engine.poll():
                self._report(mapped, result)

    def _report(self, mapped: MappedArena, result: JobResult) -> None:
        with self._lock:
            job, place = mapped.jobs.pop(result.id)
            ok, kind = result.ok and job.id not in self._void, result.kind
            if kind == "load" and job.adapter is not None:
                ok = ok and self.adapters.same(job.adapter)
            self._void.discard(job.id)
            self._loads.discard(job.id)
            mapped.arena.boards[place.client, self.rank, job.id % RING] = job.id << 1 | int(ok)
            if kind == "load":
                self._loaded.append((job.req_id, ok))
        if ok:
            self.counts.add(f"{kind}s")
            self.counts.add("loaded_bytes" if kind == "load" else "stored_bytes", result.nbytes)
            self.counts.add(f"{kind}_seconds", result.seconds)
        else:
            self._fail(
                f"{kind}s_failed.{result.reason.split(':')[0] or 'cancelled'}", result.reason
            )

    def _fail(self, counter: str, why: str) -> None:
        self.counts.add(counter)
        now = time.monotonic()
        if now - self._said.get(counter, -QUIET_S) >= QUIET_S:
            self._said[counter] = now
            kind = counter.partition("s_")[0]
            rest = "its request is computed" if kind == "load" else "its chunks are not cached"
            log.warning("lmcache_shm: a %s failed (%s); %s", kind, why, rest)

    def _publish_on(self) -> None:
        while True:
            self._submitted.wait()
            self._submitted.clear()
            self._unmap_idle()
            while any(mapped.jobs for mapped in list(self._mapped.values())):
                for mapped in list(self._mapped.values()):
                    mapped.engine.drain(PUBLISH_S)  # returns as soon as nothing is underway
                self.publish()
                self._unmap_idle()
            if self._closed:
                return

    def _unmap_idle(self) -> None:
        """Close the engines of arenas that were replaced, once nothing is underway in them. To unpin a large one
        takes seconds: not for the engine's thread."""
        current = self.connection.arena_id
        with self._lock:
            idle = [a for a, m in self._mapped.items() if a != current and not m.jobs]
            mapped_arenas = [self._mapped.pop(a) for a in idle]
        for mapped in mapped_arenas:
            mapped.engine.close()

    # ------------------------------------------------------------------------------------ weights
    @property
    def changes(self) -> int:
        """How often the weights in this process were changed since this rank was set up."""
        return self._weights.count - self._first

    def _weights_changed(self) -> None:
        """Fail every load that is underway or not reported yet: it belongs to the weights of before."""
        with self._lock:
            self._void |= self._loads
            self._loaded = [(req_id, False) for req_id, _ in self._loaded]

    # ---------------------------------------------------------------------------------------- end
    def close(self) -> None:
        """Let stores end (bounded), report them, stop touching the arena and the blocks."""
        if self._closed:
            return
        self._closed = True
        self._weights.listeners.remove(self._weights_changed)
        end = time.monotonic() + DRAIN_S
        for mapped in list(self._mapped.values()):
            mapped.engine.drain(max(end - time.monotonic(), 0))
        self.publish()
        self._submitted.set()
        if self._publisher.is_alive():
            self._publisher.join(DRAIN_S)
        self.connection.close()
        for mapped in list(self._mapped.values()):
            mapped.engine.close()
        self._mapped.clear()
