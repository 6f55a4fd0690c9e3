"""Loads from the moment vLLM has allocated their blocks until every worker has reported."""

import logging
from collections.abc import Sequence

from lmcache_shm.client.counts import Counts
from lmcache_shm.client.in_flight import StoreBook
from lmcache_shm.client.jobs import Adapter, Job, SlotCopy, StepCopies
from lmcache_shm.client.load_plan import SlotRuns
from lmcache_shm.client.lookup import Hit

log = logging.getLogger("lmcache_shm")


class Loading:
    """Scheduler thread only. A load keeps its hit, and so its pins, until it has ended."""

    def __init__(self, book: StoreBook, counts: Counts) -> None:
        self._book = book
        self._counts = counts
        self._underway: dict[str, tuple[int, Hit]] = {}
        self._planned: list[tuple[Job, Hit]] = []
        self._doomed: list[str] = []
        self._void: set[str] = set()

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._underway

    def __len__(self) -> int:
        return len(self._underway)

    def begin(
        self, req_id: str, hit: Hit, slots: Sequence[SlotRuns], adapter: Adapter | None = None
    ) -> None:
        """Let the next step's metadata tell the workers to read these slots of `hit`."""
        offsets = hit.epoch.arena.cold["offset"]
        copies = []
        for group, chunk, runs in slots:
            i = chunk - hit.first[group]
            row, generation = int(hit.rows[group][i]), int(hit.generations[group][i])
            copies.append(SlotCopy(row, int(offsets[row]), generation, group, runs))
        number = self._book.open_load(hit.epoch)
        job = Job(number, hit.epoch.arena_id, copies, req_id, adapter)
        self._underway[req_id] = job.id, hit
        self._planned.append((job, hit))

    def doom(self, req_id: str, why: str) -> None:
        """Let the workers report a load as failed: vLLM waits for it, and will compute the tokens."""
        log.warning("lmcache_shm: a load of %s cannot be done: %s", req_id, why)
        self._counts.add("loads_failed.plan")
        self._doomed.append(req_id)

    def cancel(self) -> None:
        """What is being loaded must not be used, also if it has arrived and vLLM was not told yet."""
        self._void.update(self._underway)

    def tell(self, meta: StepCopies) -> None:
        """Put everything into a step's metadata that the workers have not been told yet."""
        for job, hit in self._planned:
            meta.loads.append(job)
            meta.places[job.arena_id] = hit.epoch.place
        meta.doomed, self._doomed = self._doomed, []
        self._planned = []

    def ended(self, req_id: str) -> tuple[Hit | None, bool]:
        """Every worker has reported: the hit whose lease can go (None for a load that was doomed), and whether
        the load was cancelled."""
        cancelled = req_id in self._void
        self._void.discard(req_id)
        number, hit = self._underway.pop(req_id, (0, None))
        if hit is not None:
            self._book.close_load(number)
        return hit, cancelled
