"""The worker side of the connector: register tensors, map the arena, copy what the scheduler planned.

It never talks to the server while serving: its connection only says that this rank is there. Stores are
reported on the completion board in shared memory, by a thread, so no engine step is needed for it; loads
are reported to vLLM with the next step.
"""

import logging
import threading
import time
from typing import Any, cast

from lmcache_shm.arena.layout import RING
from lmcache_shm.arena.segment import Arena
from lmcache_shm.client.counts import Counts
from lmcache_shm.client.jobs import Adapter, Job, Place, SlotCopy
from lmcache_shm.client.plan import chosen_chunk_size, make_plan
from lmcache_shm.config import Config
from lmcache_shm.protocol.messages import HelloReply
from lmcache_shm.transfer.engine import CopyItem, CopyJob, JobResult, PageRun
from lmcache_shm.transfer.pages import GroupPages
from lmcache_shm.transfer.plan import Wish
from lmcache_shm.transfer.select import open_engine
from lmcache_shm.vllm.adapters import LoadedAdapters
from lmcache_shm.vllm.groups import kv_groups
from lmcache_shm.vllm.hooks import CHANGES, watch_worker
from lmcache_shm.vllm.layouts import (
    LayerFacts,
    WorkerFacts,
    pages_by_group,
    rank_layout,
    tensors_of,
    worker_facts,
)
from lmcache_shm.vllm.metadata import StepMetadata, WorkerReport
from lmcache_shm.vllm.mount import Attachment, Mount
from lmcache_shm.vllm.start import engine_id

log = logging.getLogger("lmcache_shm")

PUBLISH_S = 0.002
REST_S = 0.002
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
        self.attachment = Attachment(
            config, engine_id(vllm_config), rank, world, self.replicas, self._prepare
        )
        self._pages: dict[int, GroupPages] = {}
        self._tensors: list[Any] = []
        self._mounts: dict[bytes, Mount] = {}
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
        self.attachment.say(self.facts.encode())
        self._publisher.start()
        self.attachment.start()

    def _prepare(self, hello: HelloReply, arena: Arena) -> list[int]:
        """Be ready to copy in this arena under this server's options; bytes of this rank's regions."""
        wanted = chosen_chunk_size(hello.chunk_size, self.config.chunk_size)
        plan = make_plan(self.groups, self.ignored, wanted, separate=hello.separate)
        arena_id = bytes(arena.arena_id)
        mount = self._mounts.get(arena_id)
        if mount is not None and mount.plan == plan:
            return mount.layout.region_bytes
        if mount is not None:  # the same memory, cut differently
            self._unmount(mount)
        layout = rank_layout(plan, self._pages)
        below = {"load": self.config.load_kernel_below, "store": self.config.store_kernel_below}
        engine = open_engine(
            arena,
            layout.layouts,
            self._tensors,
            threads=self.config.transfer_threads,
            backend=cast("Wish", self.config.copy_backend),
            kernel_below=below,
        )
        with self._lock:
            self._mounts[arena_id] = Mount(arena, plan, layout, engine)
        self._submitted.set()  # there may be another to be given up
        return layout.region_bytes

    def _unmount(self, mount: Mount) -> None:
        """End what is underway in a mount, and report it. Its memory may be pinned again afterwards."""
        with self._lock:  # from now on no job finds it
            self._mounts.pop(bytes(mount.arena.arena_id), None)
        mount.engine.close()
        while mount.jobs:  # also one that was being submitted meanwhile: it has a result, too
            for result in mount.engine.poll():
                self._report(mount, result)
            time.sleep(PUBLISH_S)

    # ------------------------------------------------------------------------------------- steps
    def start_loads(self, meta: StepMetadata) -> None:
        """Submit this step's loads, after the work that was submitted to the device before."""
        self._planned_for = meta.weights.get(self.rank, 0)
        with self._lock:
            self._loaded += [(req_id, False) for req_id in meta.doomed]
        for job in meta.loads:
            self._try(job, "load", meta.places[job.arena_id], self.config.load_deadline_s)

    def start_stores(self, meta: StepMetadata) -> None:
        """Submit this step's stores; they read what this step has written."""
        for job in meta.stores:
            # Where another rank holds the same bytes, and stores them, this one has only to agree.
            if self.writer or job.adapter is not None:
                self._try(job, "store", meta.places[job.arena_id], self.config.store_deadline_s)

    def _try(self, job: Job, kind: Any, place: Place, deadline_s: float) -> None:
        """Submit; whatever goes wrong, the job gets an answer, and the engine lives."""
        if self.changes != self._planned_for:
            self._fail(f"{kind}s_failed.weights", "it was planned before the weights were changed")
            self._refuse(job, kind)
            return
        with self._lock:
            mount = self._mounts.get(job.arena_id)
            if mount is not None and not mount.fits(place):
                mount = None
            if mount is not None:
                mount.jobs[job.id] = job, place
                if kind == "load":
                    self._loads.add(job.id)
        if mount is None:
            self._fail(
                f"{kind}s_failed.arena", "the arena it was planned for is not mapped so any more"
            )
            self._refuse(job, kind)
            return
        if job.adapter is not None and not self._fits_adapter(job.adapter, kind):
            self._report(
                mount, JobResult(job.id, kind, ok=False, reason="adapter: it was replaced")
            )
            return
        try:
            self._submit(mount, job, kind, place, deadline_s)
        except Exception:
            log.exception("lmcache_shm: a %s could not be submitted", kind)
            self.counts.add("errors")
            if mount.jobs.pop(job.id, None) is not None:
                self._refuse(job, kind)

    def _fits_adapter(self, adapter: Adapter, kind: str) -> bool:
        """A store's bytes were computed with it; a load's are those that would be computed now."""
        loaded = self.adapters
        return loaded.same(adapter) if kind == "store" else loaded.would_compute(adapter)

    def _refuse(self, job: Job, kind: str) -> None:
        """It was not even begun."""
        with self._lock:
            if kind == "load":
                self._loads.discard(job.id)
                self._loaded.append((job.req_id, False))
            else:
                self._refused.setdefault(job.id, set()).add(self.rank)

    def _submit(self, mount: Mount, job: Job, kind: Any, place: Place, deadline_s: float) -> None:
        writes = kind == "load" or self.writer
        slots = job.slots if writes else []
        items = [
            item for slot in slots if (item := self._item(mount, slot, place, kind)) is not None
        ]
        if items:
            copy = CopyJob(job.id, kind, items, deadline_s, job.arena_id)
            mount.engine.submit(copy)  # on a device it waits for what was launched before
            self._submitted.set()
        else:  # nothing of it lies on this rank, or another one stores it
            self._report(mount, JobResult(job.id, kind, ok=True))

    def _item(self, mount: Mount, slot: SlotCopy, place: Place, kind: str) -> CopyItem | None:
        at = mount.layout.place[slot.group]
        parts = mount.layout.part[slot.group]
        runs = [
            PageRun(parts[group], first, ids) for group, first, ids in slot.runs if group in parts
        ]
        if at < 0 or not runs:
            return None
        writer = self.rank - self.rank % self.replicas
        if kind == "store":
            checked = place.checksum != "off"
        else:  # a slot may have been committed under an earlier server, without checksums
            checked = place.checksum == "verify" and bool(mount.arena.cold["checks"][slot.row])
        return CopyItem(
            row=slot.row,
            offset=slot.offset + place.region_offsets[slot.group][self.rank],
            generation=slot.generation,
            group=at,
            runs=runs,
            checksum_at=slot.offset + place.checksum_offset[slot.group] + 8 * writer
            if checked
            else -1,
        )

    # ------------------------------------------------------------------------------------ results
    def rest(self) -> None:
        """In a step that computes nothing: let the copy threads have the interpreter for a moment.

        vLLM would come back at once, again and again, and each time they are between two copies they would
        have to wait for it (up to 5 ms, the interpreter's switch interval).
        """
        for mount in list(self._mounts.values()):
            mount.engine.drain(REST_S)

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
        """Pass on what the engines have ended. Any thread."""
        for mount in list(self._mounts.values()):
            for result in mount.engine.poll():
                self._report(mount, result)

    def _report(self, mount: Mount, result: JobResult) -> None:
        with self._lock:
            job, place = mount.jobs.pop(result.id)
            ok, kind = result.ok and job.id not in self._void, result.kind
            if kind == "load" and job.adapter is not None:
                ok = ok and self.adapters.same(job.adapter)
            self._void.discard(job.id)
            self._loads.discard(job.id)
            mount.arena.boards[place.client, self.rank, job.id % RING] = job.id << 1 | int(ok)
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
            self._unmount_idle()
            while any(mount.jobs for mount in list(self._mounts.values())):
                for mount in list(self._mounts.values()):
                    mount.engine.drain(PUBLISH_S)  # returns as soon as nothing is underway
                self.publish()
                self._unmount_idle()
            if self._closed:
                return

    def _unmount_idle(self) -> None:
        """Close the engines of arenas that were replaced, once nothing is underway in them. To unpin a large one
        takes seconds: not for the engine's thread."""
        current = self.attachment.arena_id
        with self._lock:
            idle = [a for a, m in self._mounts.items() if a != current and not m.jobs]
            mounts = [self._mounts.pop(a) for a in idle]
        for mount in mounts:
            mount.engine.close()

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
        for mount in list(self._mounts.values()):
            mount.engine.drain(max(end - time.monotonic(), 0))
        self.publish()
        self._submitted.set()
        if self._publisher.is_alive():
            self._publisher.join(DRAIN_S)
        self.attachment.close()
        for mount in list(self._mounts.values()):
            mount.engine.close()
        self._mounts.clear()
