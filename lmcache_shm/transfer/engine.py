"""The interface that every transfer engine keeps, and the life of its jobs: queued → touching memory → one result.

A job ends in exactly one JobResult, and only when the engine has stopped touching both the arena and the blocks:
after that the caller may hand the blocks to someone else, and may commit (store) or use (load) the bytes if ``ok``.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.job import CopyJob, JobKind

REASON_DEADLINE = "deadline"
REASON_GENERATION = "generation"
"""The slot changed hands (or was not ours) while it was being copied."""
REASON_CHECKSUM = "checksum"
REASON_ARENA = "arena"
"""The job was planned for another arena than the one that is mapped."""
REASON_CLOSED = "closed"
REASON_ERROR = "error"
"""Anything else; the reason string is ``error: …``."""
DEADLINE_S = 30.0

Offsets = npt.NDArray[np.int64]
"""One arena offset per slot of a job."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """The end of a job. ``nbytes`` counts content bytes moved, ``seconds`` from submit to end."""

    id: int
    kind: JobKind
    ok: bool
    reason: str = ""
    nbytes: int = 0
    seconds: float = 0.0


class TransferEngine(Protocol):
    """Moves pages between registered tensors and the arena. All methods are thread-safe."""

    def submit(
        self,
        job: CopyJob,
        regions: Offsets,
        checksums: Offsets | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Queue a job; never blocks on the copy and never raises for a bad job (its result has the reason).

        ``regions``: where this rank's region begins in each slot. ``checksums``: where the 8 bytes of the region's
        checksum are, -1 for slots without one (None: no slot has one). A checksum covers the whole region: a partial
        load of a checksummed slot reads all of it. ``deadline_s``: seconds until the engine gives up (it still waits
        for its own copies to stop).

        A CPU engine starts at once. A device engine waits for what was submitted to the caller's current stream
        so far: submit stores after the forward was launched, and loads before kernels that need them. A job id may be
        used again once its result was polled.
        """

    def poll(self) -> list[JobResult]:
        """Results since the last call, in order of completion. Does not block."""

    def drain(self, timeout: float) -> bool:
        """Wait until every submitted job has a result; False when ``timeout`` seconds were too short."""

    def close(self) -> None:
        """Fail what is queued, wait for what runs, end the threads. Idempotent."""


@dataclass(slots=True, eq=False)
class InFlightJob:
    """A job from its submission to its result. It consists of ``units`` (slots on CPU, the whole job on a device)."""

    job: CopyJob
    regions: Offsets
    checksums: Offsets | None
    submitted: float
    deadline: float
    units: int
    touching: int = 0
    """Units that are touching memory now."""
    nbytes: int = 0
    reason: str = ""
    ended: bool = False


class InFlightJobs:
    """Jobs without a result yet, and results that were not fetched yet. Thread-safe.

    A job ends when nothing touches its memory any more *and* either all units are done or there is a reason to
    stop: a failure, a passed deadline, the engine's end. So a job that was not started can end at once, and a running
    one never ends early. ``changed`` is the condition behind everything: notified when a job is added or ends,
    and usable by the owner for its own queues.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._live: dict[int, InFlightJob] = {}
        self._results: deque[JobResult] = deque()
        self._closed = False

    def add(
        self,
        job: CopyJob,
        regions: Offsets,
        checksums: Offsets | None,
        deadline_s: float,
        *,
        units: int,
        reason: str = "",
    ) -> InFlightJob:
        """Enter a job; with a ``reason``, without units, or after `close` it has ended already."""
        now = time.monotonic()
        one = InFlightJob(job, regions, checksums, now, now + deadline_s, units, reason=reason)
        with self.changed:
            if self._closed:
                one.reason = REASON_CLOSED
            elif job.id in self._live:
                one.reason = f"error: job {job.id} is already in issued_job"
            else:
                self._live[job.id] = one
            self._end_if_due(one)
            self.changed.notify_all()
        return one

    def begin(self, one: InFlightJob) -> bool:
        """Before memory is touched; False: do not, the job is over or about to be."""
        with self.changed:
            self._check_deadline(one, time.monotonic())
            if one.ended or one.reason:
                self._end_if_due(one)
                return False
            one.touching += 1
            return True

    def end(self, one: InFlightJob, nbytes: int, reason: str = "") -> None:
        """One unit has stopped touching memory, having moved ``nbytes``."""
        with self.changed:
            one.touching -= 1
            one.units -= 1
            one.nbytes += nbytes
            one.reason = one.reason or reason
            self._end_if_due(one)

    def must_stop(self, one: InFlightJob) -> bool:
        """Asked between copies. Taking the lock here also orders the copy's reads before later ones."""
        with self.changed:
            self._check_deadline(one, time.monotonic())
            return bool(one.reason)

    def fetch(self) -> list[JobResult]:
        """All results since the last call, oldest first."""
        with self.changed:
            self._expire()
            results = list(self._results)
            self._results.clear()
        return results

    def wait_idle(self, timeout: float) -> bool:
        """Until no job is live, at most ``timeout`` seconds; jobs pass their deadlines meanwhile."""
        until = time.monotonic() + timeout
        with self.changed:
            while True:
                self._expire()
                if not self._live:
                    return True
                now = time.monotonic()
                if now >= until:
                    return False
                pending = [one.deadline for one in self._live.values() if not one.reason]
                self.changed.wait(max(0.0, min([until, *pending]) - now))

    def close(self) -> None:
        """Every live job gets a reason to stop; new ones end at once."""
        with self.changed:
            self._closed = True
            for one in list(self._live.values()):
                one.reason = one.reason or REASON_CLOSED
                self._end_if_due(one)
            self.changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def _expire(self) -> None:
        now = time.monotonic()
        for one in list(self._live.values()):
            self._check_deadline(one, now)
            self._end_if_due(one)

    @staticmethod
    def _check_deadline(one: InFlightJob, now: float) -> None:
        if not one.reason and now > one.deadline:
            one.reason = REASON_DEADLINE

    def _end_if_due(self, one: InFlightJob) -> None:
        """The lock is held."""
        if one.ended or one.touching or (one.units and not one.reason):
            return
        one.ended = True
        job = one.job
        if self._live.get(job.id) is one:
            del self._live[job.id]
        seconds = time.monotonic() - one.submitted
        self._results.append(
            JobResult(job.id, job.kind, not one.reason, one.reason, one.nbytes, seconds)
        )
        self.changed.notify_all()
