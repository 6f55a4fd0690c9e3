"""Copies between device memory and the arena on two streams, one for stores and one for loads.

The engine's thread only records an event and queues the job. A thread per stream issues the copies and
asks for their end events; nobody but these threads ever waits for the device. Life of a job::

    queued ──begin──▶ issuing ──mark──▶ in flight ──reached──▶ slots checked ──▶ result
      │ cancel, deadline   │ a call fails    │ device lost            │ changed hands, checksum
      └──────▶ result      └─▶ in flight, failing (what was issued must end first)
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_shm.transfer.bundles import Bundle, part_bundles
from lmcache_shm.transfer.device import Device, DeviceError, Ranges
from lmcache_shm.transfer.engine import CopyItem, CopyJob, EngineStats, JobKind, JobResult
from lmcache_shm.transfer.guard import ArenaView, SlotGuard
from lmcache_shm.transfer.jobs import JobBook, Record
from lmcache_shm.transfer.pages import SlotLayout
from lmcache_shm.transfer.pinning import PinnedMemory
from lmcache_shm.transfer.plan import (
    KERNEL_BELOW,
    LaneTable,
    Wish,
    choose,
    join,
    lane_table,
    merge,
    page_ranges,
    page_rows,
    plan_pieces,
    split,
)

logger = logging.getLogger(__name__)

POLL_SECONDS = (0.0002, 0.002)
"""Between two looks at the end event: least and most. In between it is a sixteenth of the time that the
oldest job has been in flight, so that a store that waits for a long prefill costs the engine no GIL."""
REFUSED = {1, 801}
"""What a driver answers that has batches and 2D copies, but not for this device or memory (a pitch that leads
from one allocation into another, say): invalid value, not supported."""


@dataclass(slots=True)
class Flight:
    """A job whose copies were issued; ``end`` is the event behind the last of them."""

    record: Record
    end: Any
    moved: int
    reason: str
    keep: list[Any]
    issued: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Flow:
    """One stream's work."""

    kind: JobKind
    queue: deque[tuple[Record, Any]] = field(default_factory=deque)
    flights: deque[Flight] = field(default_factory=deque)


class StreamEngine:
    """TransferEngine over any Device; see the interface for what each method promises.

    On a device *every* job waits for an event: without ``ready_event`` one is recorded on the stream
    that is current when ``submit`` is called. A store so reads what the forward computed; a load
    overwrites blocks only after kernels that still use them. ``backend`` is a wish (see ``plan.choose``).
    With ``start=False`` nothing runs by itself: call ``step(kind)`` (tests do).
    """

    def __init__(
        self,
        arena: ArenaView,
        layouts: Sequence[SlotLayout],
        device: Device,
        *,
        backend: Wish = "auto",
        kernel_below: Mapping[str, int] = KERNEL_BELOW,
        pieces: Sequence[tuple[int, int]] | None = None,
        start: bool = True,
    ) -> None:
        layouts = tuple(layouts)
        self._device = device
        self._guard = SlotGuard(arena, layouts)
        self._bundles: list[list[list[Bundle]]] = [
            [part_bundles(layout, part) for part in range(len(layout.parts))] for layout in layouts
        ]
        self._tables: list[list[LaneTable]] = [
            [lane_table(layout, part) for part in range(len(layout.parts))] for layout in layouts
        ]
        self._arena = arena.data_array.ctypes.data
        self.backend: Wish = backend
        self._kernel_below = kernel_below
        self._has_kernel, self._has_batch = device.has_kernel, device.has_batch
        self._has_rows = True
        self.used: Counter[str] = Counter()
        """How many slots each back end has copied (a part that was not pinned yet counts as pageable)."""
        planned = plan_pieces(arena.data_array.nbytes) if pieces is None else pieces
        if backend == "pageable":
            planned = ()
        self.pinned = PinnedMemory(
            device, self._arena, planned, reserved=lambda: arena.backed_bytes, start=start
        )
        self._book = JobBook()
        self._lost = ""
        self._flows: dict[JobKind, Flow] = {"store": Flow("store"), "load": Flow("load")}
        self._threads = [
            threading.Thread(target=self._run, args=(f,), name=f"lmcache-shm-{f.kind}", daemon=True)
            for f in self._flows.values()
            if start
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stats(self) -> EngineStats:
        return self._book.stats

    def submit(self, job: CopyJob, ready_event: Any = None) -> None:
        """Queue a job (see TransferEngine.submit and the class)."""
        reason = self._lost or self._guard.refuse(job)
        if not reason and ready_event is None:
            try:
                ready_event = self._device.marker_here()
            except DeviceError as error:
                reason = f"error: {error}"
        record = self._book.open(job, 1, reason)
        with self._book.changed:
            if not record.ended:
                self._flows[job.kind].queue.append((record, ready_event))
                self._book.changed.notify_all()

    def poll(self) -> list[JobResult]:
        """Results since the last call."""
        return self._book.fetch()

    def cancel(self, job_id: int) -> None:
        """Stop a job that was not issued yet; one in flight ends as failed when its event comes."""
        self._book.stop(job_id)

    def drain(self, timeout: float) -> bool:
        """Wait until every job has a result, at most ``timeout`` seconds."""
        return self._book.wait_idle(timeout)

    def close(self) -> None:
        """Drop what is queued, wait for what is in flight, unpin the arena."""
        self._book.close()
        for thread in self._threads:
            thread.join()
        self.pinned.close()

    def step(self, kind: JobKind) -> bool:
        """Issue what is queued and finish what has ended; True if anything happened."""
        flow, busy = self._flows[kind], False
        while flow.queue:
            record, event = flow.queue.popleft()
            if self._book.begin(record):
                self._issue(flow, record, event)
            busy = True
        while flow.flights and self._has_ended(kind, flow.flights[0]):
            self._finish(flow.flights.popleft())
            busy = True
        return busy

    def _run(self, flow: Flow) -> None:
        try:
            self._device.enter_thread()
        except Exception as error:  # noqa: BLE001 - without this thread jobs would never end
            self._lose(error)
        if flow.kind == "load" and self.backend in {"auto", "kernel"} and not self._lost:
            self._warm_up()
        changed = self._book.changed
        while True:
            with changed:
                while not flow.queue and not flow.flights:
                    if self._book.closed:
                        return
                    changed.wait()
            try:
                busy = self.step(flow.kind)
            except Exception as error:  # a bug here must not leave jobs without a result
                logger.exception("the %s stream stopped", flow.kind)
                self._lose(error)
                busy = True
            if not busy:
                least, most = POLL_SECONDS
                age = time.monotonic() - flow.flights[0].issued if flow.flights else 0.0
                with changed:
                    if not flow.queue:
                        changed.wait(min(max(age / 16, least), most))

    def _warm_up(self) -> None:
        try:
            self._device.warm_up()
        except Exception as error:  # noqa: BLE001 - no compiler, …: no common class
            self._give_up_kernel(error)

    def _give_up_kernel(self, error: Exception) -> None:
        if self._has_kernel:
            logger.warning("the copy kernel cannot be used, copying without it: %s", error)
        self._has_kernel = False

    def _issue(self, flow: Flow, record: Record, event: Any) -> None:
        flight = Flight(record, None, 0, self._lost, [])
        try:
            if not flight.reason:
                self._device.wait(flow.kind, event)
                self._copy_items(flow.kind, flight)
        except Exception as error:  # whatever it is, what was issued before must end first
            logger.warning("copy job %d failed", record.job.id, exc_info=True)
            flight.reason = f"error: {error}"
        flow.flights.append(flight)
        try:
            flight.end = self._device.mark(flow.kind)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing may run when the job ends
            flight.reason = flight.reason or f"error: {error}"
            self._empty(flow.kind)

    def _copy_items(self, kind: JobKind, flight: Flight) -> None:
        for item in flight.record.job.items:
            if self._book.must_stop(flight.record):
                return
            flight.reason = self._guard.changed_hands(item, kind)
            if flight.reason:
                return
            flight.moved += self._copy_item(kind, item, flight.keep)

    def _copy_item(self, kind: JobKind, item: CopyItem, keep: list[Any]) -> int:
        region = self._arena + item.offset
        tables = self._tables[item.group]
        named = [
            page_ranges(tables[run.part], region, run.first, run.block_ids)
            for run in item.runs
            if len(run.block_ids)
        ]
        if not named:
            return 0
        whole = merge(join(named))
        ranges = split(whole, self.pinned.edges)
        mask = self.pinned.is_pinned(ranges)
        if not mask.all():
            self.used["pageable"] += 1
            self._copy_ranges(kind, ranges.pick(~mask))
            ranges = ranges.pick(mask)
        elif (
            self._backend(kind, ranges) == "rows"
            and self.pinned.in_one_piece(whole)
            and self._copy_rows(kind, item)
        ):
            return whole.total
        self._copy_pinned(kind, ranges, keep)
        return whole.total

    def _copy_rows(self, kind: JobKind, item: CopyItem) -> bool:
        """The whole item by 2D copies; False if they cannot be used, and it is still to be copied."""
        if not self._has_rows:
            return False
        region, pitch = self._arena + item.offset, self._device.max_pitch
        copies = (
            rows
            for run in item.runs
            if len(run.block_ids)
            for bundle in self._bundles[item.group][run.part]
            for rows in page_rows(bundle, region, run.first, run.block_ids, pitch)
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
        """Try what was chosen; what cannot be used is given up for good, and its copies are done again."""
        if not len(ranges.nbytes):
            return
        if self._backend(kind, ranges) == "kernel":
            try:
                keep.append(self._device.copy_kernel(kind, self.pinned.as_device_sees(ranges)))
            except Exception as error:  # noqa: BLE001 - no compiler, …: no common class
                self._give_up_kernel(error)
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

    def _has_ended(self, kind: JobKind, flight: Flight) -> bool:
        """True when the device is done with the job, or cannot be asked any more."""
        if flight.end is None:
            return True
        if not self._lost:
            try:
                return self._device.reached(flight.end)
            except Exception as error:  # noqa: BLE001 - whatever it is, the answer is not known
                self._lose(error)
        self._empty(kind)
        flight.end = None
        return True

    def _empty(self, kind: JobKind) -> None:
        """Wait until nothing runs on the stream; a device that cannot even do that is lost."""
        try:
            self._device.synchronize(kind)
        except Exception as error:  # noqa: BLE001 - there is nothing left to try
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """The device is unusable: nothing runs on it any more, every job fails from now on."""
        if not self._lost:
            logger.error("the device is lost, the cache stops: %s", error)
        self._lost = f"error: device lost: {error}"

    def _finish(self, flight: Flight) -> None:
        """The copies have ended: look at the slots (after the event, before anyone hears of it)."""
        record, reason = flight.record, flight.reason or self._lost
        try:
            if not reason and not self._book.must_stop(record):
                reason = "error: the check of the slots did not finish"
                reason = self._check(record.job)
        finally:
            self._book.end(record, flight.moved, reason)

    def _check(self, job: CopyJob) -> str:
        for item in job.items:
            reason = ""
            if job.kind == "store":
                self._guard.seal(item)
            else:
                reason = self._guard.verify(item)
            reason = self._guard.changed_hands(item, job.kind) or reason
            if reason:
                return reason
        return ""
