"""Copies between CPU KV caches and the arena, in worker threads."""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from lmcache_shm.transfer.bundles import part_bundles
from lmcache_shm.transfer.engine import CopyItem, CopyJob, EngineStats, JobResult
from lmcache_shm.transfer.guard import ArenaView, SlotGuard
from lmcache_shm.transfer.jobs import JobBook, Record
from lmcache_shm.transfer.pages import SlotLayout
from lmcache_shm.transfer.populate import PageTables
from lmcache_shm.transfer.strided import BundleCopier

logger = logging.getLogger(__name__)

LOADS_PER_STORE = 4
"""Loads go first, a request waits for them; but every so many loads one waiting store is let through."""

Task = tuple[Record, CopyItem, Any]


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
                [BundleCopier(bundle, arena.data_array) for bundle in part_bundles(layout, part)]
                for part in range(len(layout.parts))
            ]
            for layout in self._layouts
        ]
        self.page_tables = PageTables(arena) if populate else None
        self._book = JobBook()
        self._queues: dict[str, deque[Task]] = {"load": deque(), "store": deque()}
        self._loads_in_row = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"lmcache-shm-copy-{i}", daemon=True)
            for i in range(max(1, threads))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stats(self) -> EngineStats:
        return self._book.stats

    def submit(self, job: CopyJob, ready_event: Any = None) -> None:
        """Queue a job (see TransferEngine.submit)."""
        record = self._book.open(job, len(job.items), self._guard.refuse(job))
        with self._book.changed:
            if not record.ended:
                self._queues[job.kind].extend((record, item, ready_event) for item in job.items)
                self._book.changed.notify_all()

    def poll(self) -> list[JobResult]:
        """Results since the last call."""
        return self._book.fetch()

    def cancel(self, job_id: int) -> None:
        """Stop a job at the next bundle."""
        self._book.stop(job_id)

    def drain(self, timeout: float) -> bool:
        """Wait until every job has a result, at most ``timeout`` seconds."""
        return self._book.wait_idle(timeout)

    def close(self) -> None:
        """Stop everything; when this returns neither blocks nor arena are touched any more."""
        self._book.close()
        for thread in self._threads:
            thread.join()
        if self.page_tables is not None:
            self.page_tables.close()

    def _work(self) -> None:
        while True:
            task = self._next_task()
            if task is None:
                return
            record, item, ready_event = task
            if not self._book.begin(record):
                continue
            moved, reason = 0, ""
            try:
                if ready_event is not None:
                    ready_event.synchronize()
                moved, reason = self._copy(record, item)
            except Exception as error:  # whatever it is, the job must get its result
                logger.warning("copy job %d failed", record.job.id, exc_info=True)
                reason = f"error: {error!r}"
            finally:
                self._book.end(record, moved, reason)

    def _next_task(self) -> Task | None:
        loads, stores = self._queues["load"], self._queues["store"]
        with self._book.changed:
            while not loads and not stores:
                if self._book.closed:
                    return None
                self._book.changed.wait()
            if loads and (not stores or self._loads_in_row < LOADS_PER_STORE):
                self._loads_in_row += 1
                return loads.popleft()
            self._loads_in_row = 0
            return stores.popleft()

    def _copy(self, record: Record, item: CopyItem) -> tuple[int, str]:
        """Copy one slot; bytes moved and why it must not be used (or "")."""
        kind, guard = record.job.kind, self._guard
        reason = guard.changed_hands(item, kind)
        if reason:
            return 0, reason
        if self.page_tables is not None:
            self.page_tables.need(item.offset, self._layouts[item.group].region_bytes)
        moved = 0
        for run in item.runs:
            for copier in self._copiers[item.group][run.part]:
                if self._book.must_stop(record):
                    return moved, ""
                move = copier.store if kind == "store" else copier.load
                moved += move(item.offset, run.first, run.block_ids)
        if kind == "store":
            guard.seal(item)
        elif reason := guard.verify(item):
            # A slot that changed hands in between fails its checksum too; say what happened.
            return moved, guard.changed_hands(item, kind) or reason
        self._book.must_stop(record)
        return moved, guard.changed_hands(item, kind)
