"""The life of a copy job, for every engine: queued → touching memory → one result.

A job is a number of *units* (slots on CPU, the whole job on a GPU). It ends when nothing touches its
memory any more *and* either all units are done or there is a reason to stop: a failure, a cancel, a
passed deadline. So a job that nobody has started can end at once, and a running one never ends early.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass

from lmcache_shm.transfer.engine import (
    REASON_CANCELLED,
    REASON_CLOSED,
    REASON_DEADLINE,
    CopyJob,
    EngineStats,
    JobResult,
)


@dataclass(slots=True, eq=False)
class Record:
    """One job in the book."""

    job: CopyJob
    submitted: float
    deadline: float
    units: int
    touching: int = 0
    nbytes: int = 0
    reason: str = ""
    ended: bool = False


class JobBook:
    """Jobs without a result yet, results nobody has fetched yet, totals. Thread-safe.

    ``changed`` is the condition behind everything: notified when a job is added or ends, and usable
    by the owner for its own queues.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.stats = EngineStats()
        self._live: dict[int, Record] = {}
        self._results: deque[JobResult] = deque()
        self._closed = False

    def open(self, job: CopyJob, units: int, reason: str = "") -> Record:
        """Enter a job; with a ``reason``, without units, or in a closed book it has ended already."""
        now = time.monotonic()
        record = Record(job, now, now + job.deadline_s, units, reason=reason)
        with self.changed:
            if self._closed:
                record.reason = REASON_CLOSED
            elif job.id in self._live:
                record.reason = f"error: job {job.id} is already in flight"
            else:
                self._live[job.id] = record
            self._settle(record)
            self.changed.notify_all()
        return record

    def begin(self, record: Record) -> bool:
        """Before memory is touched; False: do not, the job is over or about to be."""
        with self.changed:
            self._check_deadline(record, time.monotonic())
            if record.ended or record.reason:
                self._settle(record)
                return False
            record.touching += 1
            return True

    def end(self, record: Record, nbytes: int, reason: str = "") -> None:
        """One unit has stopped touching memory, having moved ``nbytes``."""
        with self.changed:
            record.touching -= 1
            record.units -= 1
            record.nbytes += nbytes
            record.reason = record.reason or reason
            self._settle(record)

    def must_stop(self, record: Record) -> bool:
        """Asked between copies. Taking the lock here also orders the copy's reads before later ones."""
        with self.changed:
            self._check_deadline(record, time.monotonic())
            return bool(record.reason)

    def stop(self, job_id: int, reason: str = REASON_CANCELLED) -> None:
        """Give a job a reason to stop; unknown ids are ignored."""
        with self.changed:
            record = self._live.get(job_id)
            if record is not None:
                record.reason = record.reason or reason
                self._settle(record)

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
                pending = [r.deadline for r in self._live.values() if not r.reason]
                self.changed.wait(max(0.0, min([until, *pending]) - now))

    def close(self) -> None:
        """Every live job gets a reason to stop; new ones end at once."""
        with self.changed:
            self._closed = True
            for record in list(self._live.values()):
                record.reason = record.reason or REASON_CLOSED
                self._settle(record)
            self.changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def live(self) -> int:
        """Jobs without a result yet."""
        return len(self._live)

    def _expire(self) -> None:
        now = time.monotonic()
        for record in list(self._live.values()):
            self._check_deadline(record, now)
            self._settle(record)

    @staticmethod
    def _check_deadline(record: Record, now: float) -> None:
        if not record.reason and now > record.deadline:
            record.reason = REASON_DEADLINE

    def _settle(self, record: Record) -> None:
        """End the job if its time has come. The lock is held."""
        if record.ended or record.touching or (record.units and not record.reason):
            return
        record.ended = True
        job = record.job
        if self._live.get(job.id) is record:
            del self._live[job.id]
        seconds = time.monotonic() - record.submitted
        self._results.append(
            JobResult(job.id, job.kind, not record.reason, record.reason, record.nbytes, seconds)
        )
        self._count(record)
        self.changed.notify_all()

    def _count(self, record: Record) -> None:
        stats = self.stats
        stats.jobs += 1
        if record.reason:
            stats.failed += 1
            word = record.reason.split(":", 1)[0]
            stats.reasons[word] = stats.reasons.get(word, 0) + 1
        elif record.job.kind == "store":
            stats.stored_bytes += record.nbytes
        else:
            stats.loaded_bytes += record.nbytes
