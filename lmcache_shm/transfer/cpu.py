"""Copies between CPU KV caches and the arena, in worker threads."""

import logging
import threading
from collections import deque
from collections.abc import Sequence

from lmcache_shm.arena.job import CopyJob, Pages
from lmcache_shm.transfer.engine import DEADLINE_S, InFlightJob, InFlightJobs, JobResult, Offsets
from lmcache_shm.transfer.guard import ArenaView, SlotGuard
from lmcache_shm.transfer.pages import SlotLayout
from lmcache_shm.transfer.reserved import PageTables
from lmcache_shm.transfer.strided import RunCopier, part_runs

logger = logging.getLogger(__name__)

LOADS_PER_STORE = 4
"""Loads go first, a request waits for them; but every so many loads one waiting store is let through."""

Task = tuple[InFlightJob, int, list[Pages]]
"""A slot of a job, and what is copied of it."""


class CpuEngine:
    """TransferEngine for tensors in host memory; see the interface for what each method promises.

    ``layouts[g]`` is the slot layout of object group g; its tensors and the arena's mapping must stay
    alive until ``close()`` returns. Jobs are cut into slots that up to ``threads`` threads copy side by
    side. ``populate`` fills the mapping's page tables in the background.
    """

    def __init__(
        self,
        arena: ArenaView,
        layouts: Sequence[SlotLayout],
        threads: int = 1,
        *,
        populate: bool = True,
    ) -> None:
        self._layouts = tuple(layouts)
        self._guard = SlotGuard(arena, self._layouts)
        self._copiers = [
            [
                [RunCopier(run, arena.data_array) for run in part_runs(layout, part)]
                for part in range(len(layout.parts))
            ]
            for layout in self._layouts
        ]
        self.page_tables = PageTables(arena) if populate else None
        self._jobs = InFlightJobs()
        self._queues: dict[str, deque[Task]] = {"load": deque(), "store": deque()}
        self._loads_in_row = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"lmcache-shm-copy-{i}", daemon=True)
            for i in range(max(1, threads))
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        job: CopyJob,
        regions: Offsets,
        checksums: Offsets | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Queue a job (see TransferEngine.submit)."""
        reason = self._guard.refuse(job, regions, checksums)
        one = self._jobs.add(
            job, regions, checksums, deadline_s, units=len(job.rows), reason=reason
        )
        with self._jobs.changed:
            if not one.ended:
                self._queues[job.kind].extend((one, i, p) for i, p in enumerate(job.pages()))
                self._jobs.changed.notify_all()

    def poll(self) -> list[JobResult]:
        """Results since the last call."""
        return self._jobs.fetch()

    def drain(self, timeout: float) -> bool:
        """Wait until every job has a result, at most ``timeout`` seconds."""
        return self._jobs.wait_idle(timeout)

    def close(self) -> None:
        """Stop everything; when this returns neither blocks nor arena are touched any more."""
        self._jobs.close()
        for thread in self._threads:
            thread.join()
        if self.page_tables is not None:
            self.page_tables.close()

    def _work(self) -> None:
        while True:
            task = self._next_task()
            if task is None:
                return
            one, slot, pages = task
            if not self._jobs.begin(one):
                continue
            moved, reason = 0, ""
            try:
                moved, reason = self._copy(one, slot, pages)
            except Exception as error:  # whatever it is, the job must get its result
                logger.warning("copy job %d failed", one.job.id, exc_info=True)
                reason = f"error: {error!r}"
            finally:
                self._jobs.end(one, moved, reason)

    def _next_task(self) -> Task | None:
        loads, stores = self._queues["load"], self._queues["store"]
        with self._jobs.changed:
            while not loads and not stores:
                if self._jobs.closed:
                    return None
                self._jobs.changed.wait()
            if loads and (not stores or self._loads_in_row < LOADS_PER_STORE):
                self._loads_in_row += 1
                return loads.popleft()
            self._loads_in_row = 0
            return stores.popleft()

    def _copy(self, one: InFlightJob, slot: int, pages: list[Pages]) -> tuple[int, str]:
        """Copy one slot; bytes moved and why it must not be used (or "")."""
        job, guard = one.job, self._guard
        reason = guard.changed_hands(job, slot)
        if reason:
            return 0, reason
        group, region = int(job.groups[slot]), int(one.regions[slot])
        if self.page_tables is not None:
            self.page_tables.need(region, self._layouts[group].region_bytes)
        moved = 0
        for part, first, block_ids in pages:
            for copier in self._copiers[group][part]:
                if self._jobs.must_stop(one):
                    return moved, ""
                move = copier.store if job.kind == "store" else copier.load
                moved += move(region, first, block_ids)
        if job.kind == "store":
            guard.write_checksum(one, slot)
        elif reason := guard.check_checksum(one, slot):
            # A slot that changed hands in between fails its checksum, too: report what happened.
            return moved, guard.changed_hands(job, slot) or reason
        self._jobs.must_stop(one)
        return moved, guard.changed_hands(job, slot)
