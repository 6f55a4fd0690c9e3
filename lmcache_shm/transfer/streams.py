"""Copies between device memory and the arena on two streams, one for stores and one for loads.

The engine's thread only records an event and queues the job. A thread per stream issues the copies and
polls their end events; no other thread ever waits for the device. Life of a job::

    queued ──begin──▶ issuing ──mark──▶ in flight ──reached──▶ slots checked ──▶ result
      │ deadline, close    │ a call fails    │ device lost            │ changed hands, checksum
      └──────▶ result      └─▶ in flight, failing (what was issued must end first)
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_shm.arena.job import CopyJob, JobKind, Pages
from lmcache_shm.transfer.device import Device, DeviceError, Ranges
from lmcache_shm.transfer.engine import DEADLINE_S, InFlightJob, InFlightJobs, JobResult, Offsets
from lmcache_shm.transfer.guard import ArenaView, SlotGuard
from lmcache_shm.transfer.pages import SlotLayout
from lmcache_shm.transfer.plan import (
    KERNEL_BELOW,
    RequestedBackend,
    RunTable,
    choose,
    join,
    merge,
    page_ranges,
    page_rows,
    registration_ranges,
    run_table,
    split,
)
from lmcache_shm.transfer.reserved import PinnedMemory
from lmcache_shm.transfer.strided import Run2D, part_runs

logger = logging.getLogger(__name__)

POLL_SECONDS = (0.0002, 0.002)
"""Between two looks at the end event: least and most. In between it is a sixteenth of the time that the
oldest job has been in flight, so that a store that waits for a long prefill costs the engine no GIL."""
REFUSED = {1, 801}
"""Invalid value, not supported: codes of a driver that has batches and 2D copies, but not for this device or
memory (for example a pitch that leads from one allocation into another)."""


@dataclass(slots=True)
class IssuedJob:
    """A job whose copies were issued; ``end`` is the event behind the last of them."""

    one: InFlightJob
    end: Any = None
    moved: int = 0
    reason: str = ""
    keep: list[Any] = field(default_factory=list)
    """What has to live until the end event."""
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class StreamQueue:
    """One stream's work."""

    kind: JobKind
    queue: deque[tuple[InFlightJob, Any]] = field(default_factory=deque)
    issued: deque[IssuedJob] = field(default_factory=deque)


class StreamEngine:
    """TransferEngine over any Device; see the interface for what each method promises.

    Every job waits for an event that is recorded on the stream that is current when ``submit`` is called. So a
    store reads what the forward computed, and a load overwrites blocks only after kernels that still use them.
    ``backend``: see ``plan.choose``. ``registrations``: what is pinned in one go, all of the arena by default.
    With ``start=False`` nothing runs by itself: call ``step(kind)`` (tests do).
    """

    def __init__(
        self,
        arena: ArenaView,
        layouts: Sequence[SlotLayout],
        device: Device,
        *,
        backend: RequestedBackend = "auto",
        kernel_below: Mapping[str, int] = KERNEL_BELOW,
        registrations: Sequence[tuple[int, int]] | None = None,
        start: bool = True,
    ) -> None:
        layouts = tuple(layouts)
        self._device = device
        self._guard = SlotGuard(arena, layouts)
        self._runs: list[list[list[Run2D]]] = [
            [part_runs(layout, part) for part in range(len(layout.parts))] for layout in layouts
        ]
        self._tables: list[list[RunTable]] = [
            [run_table(layout, part) for part in range(len(layout.parts))] for layout in layouts
        ]
        self._arena = arena.data_array.ctypes.data
        self.backend: RequestedBackend = backend
        self._kernel_below = kernel_below
        self._has_kernel, self._has_batch = device.has_kernel, device.has_batch
        self._has_rows = True
        self.used: Counter[str] = Counter()
        """How many slots each back end has copied (a part that was not pinned yet counts as pageable)."""
        if registrations is None:
            registrations = registration_ranges(arena.data_array.nbytes)
        if backend == "pageable":
            registrations = ()
        self.pinned = PinnedMemory(
            device, self._arena, registrations, reserved=lambda: arena.backed_bytes, start=start
        )
        self._jobs = InFlightJobs()
        self._lost = ""
        self._queues: dict[JobKind, StreamQueue] = {
            "store": StreamQueue("store"),
            "load": StreamQueue("load"),
        }
        self._threads = [
            threading.Thread(target=self._run, args=(f,), name=f"lmcache-shm-{f.kind}", daemon=True)
            for f in self._queues.values()
            if start
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
        """Queue a job (see TransferEngine.submit and the class)."""
        reason, event = self._lost or self._guard.refuse(job, regions, checksums), None
        if not reason:
            try:
                event = self._device.marker_here()
            except DeviceError as error:
                reason = f"error: {error}"
        units = min(len(job.rows), 1)
        one = self._jobs.add(job, regions, checksums, deadline_s, units=units, reason=reason)
        with self._jobs.changed:
            if not one.ended:
                self._queues[job.kind].queue.append((one, event))
                self._jobs.changed.notify_all()

    def poll(self) -> list[JobResult]:
        """Results since the last call."""
        return self._jobs.fetch()

    def drain(self, timeout: float) -> bool:
        """Wait until every job has a result, at most ``timeout`` seconds."""
        return self._jobs.wait_idle(timeout)

    def close(self) -> None:
        """Drop what is queued, wait for what is in flight, unpin the arena."""
        self._jobs.close()
        for thread in self._threads:
            thread.join()
        self.pinned.close()

    def step(self, kind: JobKind) -> bool:
        """Issue what is queued and finish what has ended; True if anything happened."""
        stream, busy = self._queues[kind], False
        while stream.queue:
            one, event = stream.queue.popleft()
            if self._jobs.begin(one):
                self._issue(stream, one, event)
            busy = True
        while stream.issued and self._has_ended(kind, stream.issued[0]):
            self._finish(stream.issued.popleft())
            busy = True
        return busy

    def _run(self, stream: StreamQueue) -> None:
        try:
            self._device.enter_thread()
        except Exception as error:  # noqa: BLE001 - without this thread jobs would never end
            self._lose(error)
        if stream.kind == "load" and self.backend in {"auto", "kernel"} and not self._lost:
            self._warm_up()
        changed = self._jobs.changed
        while True:
            with changed:
                while not stream.queue and not stream.issued:
                    if self._jobs.closed:
                        return
                    changed.wait()
            try:
                busy = self.step(stream.kind)
            except Exception as error:  # a bug here must not leave jobs without a result
                logger.exception("the %s stream stopped", stream.kind)
                self._lose(error)
                busy = True
            if not busy:
                least, most = POLL_SECONDS
                age = time.monotonic() - stream.issued[0].since if stream.issued else 0.0
                with changed:
                    if not stream.queue:
                        changed.wait(min(max(age / 16, least), most))

    def _warm_up(self) -> None:
        try:
            self._device.warm_up()
        except Exception as error:  # noqa: BLE001 - no compiler, …: no common class
            self._disable_kernel(error)

    def _disable_kernel(self, error: Exception) -> None:
        if self._has_kernel:
            logger.warning("the copy kernel cannot be used, copying without it: %s", error)
        self._has_kernel = False

    def _issue(self, stream: StreamQueue, one: InFlightJob, event: Any) -> None:
        issued = IssuedJob(one, reason=self._lost)
        try:
            if not issued.reason:
                self._device.wait(stream.kind, event)
                self._copy_slots(issued)
        except Exception as error:  # whatever it is, what was issued before must end first
            logger.warning("copy job %d failed", one.job.id, exc_info=True)
            issued.reason = f"error: {error}"
        stream.issued.append(issued)
        try:
            issued.end = self._device.mark(stream.kind)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing may run when the job ends
            issued.reason = issued.reason or f"error: {error}"
            self._empty(stream.kind)

    def _copy_slots(self, issued: IssuedJob) -> None:
        job, regions = issued.one.job, issued.one.regions.tolist()
        for slot, (group, pages) in enumerate(zip(job.groups.tolist(), job.pages(), strict=True)):
            if self._jobs.must_stop(issued.one):
                return
            issued.reason = self._guard.changed_hands(job, slot)
            if issued.reason:
                return
            region = self._arena + regions[slot]
            issued.moved += self._copy_slot(job.kind, group, region, pages, issued.keep)

    def _copy_slot(
        self, kind: JobKind, group: int, region: int, pages: list[Pages], keep: list[Any]
    ) -> int:
        """Issue the copies of one slot; `region`: host address of this rank's region. Bytes moved."""
        tables = self._tables[group]
        named = [
            page_ranges(tables[part], region, first, ids) for part, first, ids in pages if len(ids)
        ]
        if not named:
            return 0
        whole = merge(join(named))
        ranges = split(whole, self.pinned.boundaries)
        mask = self.pinned.is_pinned(ranges)
        if not mask.all():
            self.used["pageable"] += 1
            self._copy_ranges(kind, ranges.pick(~mask))
            ranges = ranges.pick(mask)
        elif (
            self._backend(kind, ranges) == "rows"
            and self.pinned.in_one_registration(whole)
            and self._copy_rows(kind, group, region, pages)
        ):
            return whole.total
        self._copy_pinned(kind, ranges, keep)
        return whole.total

    def _copy_rows(self, kind: JobKind, group: int, region: int, pages: list[Pages]) -> bool:
        """The whole slot by 2D copies; False if they cannot be used, and it is still to be copied."""
        if not self._has_rows:
            return False
        copies = (
            rows
            for part, first, ids in pages
            if len(ids)
            for run in self._runs[group][part]
            for rows in page_rows(run, region, first, ids, self._device.max_pitch)
        )
        try:
            for rows in copies:
                self._device.copy_rows(kind, rows)
        except DeviceError as error:
            if error.code not in REFUSED:
                raise
            logger.warning("2D copies cannot be used, copying range by range: %s", error)
            self._has_rows = False
        else:
            self.used["rows"] += 1
        return self._has_rows

    def _copy_pinned(self, kind: JobKind, ranges: Ranges, keep: list[Any]) -> None:
        """By the chosen back end; one that cannot be used is not tried again, and its copies are issued anew."""
        if not len(ranges.nbytes):
            return
        if self._backend(kind, ranges) == "kernel":
            try:
                keep.append(self._device.copy_kernel(kind, self.pinned.as_device_sees(ranges)))
            except Exception as error:  # noqa: BLE001 - no compiler, …: no common class
                self._disable_kernel(error)
            else:
                self.used["kernel"] += 1
                return
        if self._backend(kind, ranges) == "batch":
            try:
                self._device.copy_batch(kind, self.pinned.as_device_sees(ranges))
            except DeviceError as error:
                if error.code not in REFUSED:
                    raise
                logger.warning("batched copies cannot be used, copying without them: %s", error)
                self._has_batch = False
            else:
                self.used["batch"] += 1
                return
        self.used["ranges"] += 1
        self._copy_ranges(kind, ranges)

    def _backend(self, kind: JobKind, ranges: Ranges) -> str:
        return choose(
            self.backend,
            kind,
            ranges,
            has_batch=self._has_batch,
            has_kernel=self._has_kernel,
            kernel_below=self._kernel_below,
        )

    def _copy_ranges(self, kind: JobKind, ranges: Ranges) -> None:
        for device, host, nbytes in zip(*(column.tolist() for column in ranges), strict=True):
            self._device.copy(kind, device, host, nbytes)

    def _has_ended(self, kind: JobKind, issued: IssuedJob) -> bool:
        """True when the device is done with the job, or is lost."""
        if issued.end is None:
            return True
        if not self._lost:
            try:
                return self._device.reached(issued.end)
            except Exception as error:  # noqa: BLE001 - whatever it is, the answer is not known
                self._lose(error)
        self._empty(kind)
        issued.end = None
        return True

    def _empty(self, kind: JobKind) -> None:
        """Wait until nothing runs on the stream; if that fails, too, the device is lost."""
        try:
            self._device.synchronize(kind)
        except Exception as error:  # noqa: BLE001 - there is nothing left to try
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """The device is unusable: nothing runs on it any more, every job fails from now on."""
        if not self._lost:
            logger.error("the device is lost, the cache stops: %s", error)
        self._lost = f"error: device lost: {error}"

    def _finish(self, issued: IssuedJob) -> None:
        """The copies have ended: check the slots, after the event and before the result."""
        one, reason = issued.one, issued.reason or self._lost
        try:
            if not reason and not self._jobs.must_stop(one):
                reason = "error: the check of the slots did not finish"
                reason = self._check(one)
        finally:
            self._jobs.end(one, issued.moved, reason)

    def _check(self, one: InFlightJob) -> str:
        """Write or compare checksums, then check that the slots are still the job's: why it has failed, or ""."""
        reason = ""
        for slot in range(len(one.job.rows)) if one.checksums is not None else ():
            if one.job.kind == "store":
                self._guard.write_checksum(one, slot)
            else:
                reason = reason or self._guard.check_checksum(one, slot)
        # A slot that changed hands fails its checksum, too: report what happened.
        return self._guard.changed_hands(one.job) or reason
