"""A transfer engine whose copies happen when the test says: late, out of order, slot by slot, or never.

The bytes are moved by the real CpuEngine, one slot at a time.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_shm.arena.job import CopyJob
from lmcache_shm.transfer.cpu import CpuEngine
from lmcache_shm.transfer.engine import DEADLINE_S, JobResult, Offsets
from lmcache_shm.transfer.pages import SlotLayout
from lmcache_shm.vllm.worker import BACKOFF_S


@dataclass(eq=False)
class Pending:
    """A submitted job."""

    job: CopyJob
    regions: Offsets
    checksums: Offsets | None
    todo: list[int]
    """Slots of the job."""
    wait: int
    """Ticks before it may begin."""
    fail: str = ""
    """Ends with this reason, after some of its slots were copied."""
    nbytes: int = 0


@dataclass
class Pace:
    """How late copies are. `wait`: largest number of ticks before a copy begins; `go`: chance of a slot per tick."""

    wait: int = 0
    go: float = 1.0
    fail_loads: float = 0.0
    fail_stores: float = 0.0


Watch = Callable[[CopyJob, int, str], None]
"""Called with "before" and "after" around each slot's copy (or with the reason why there was none)."""


@dataclass
class LateEngine:
    """A TransferEngine for one rank."""

    arena: Any
    layouts: Sequence[SlotLayout]
    rng: random.Random
    pace: Pace
    watch: Watch
    refused: Watch
    """Called with the reason when a slot was not copied."""

    def __post_init__(self) -> None:
        self.pending: list[Pending] = []
        self._done: list[JobResult] = []
        self._real = CpuEngine(self.arena, self.layouts, 1, populate=False)
        self.closed = False

    # ---------------------------------------------------------------------------- TransferEngine
    def submit(
        self,
        job: CopyJob,
        regions: Offsets,
        checksums: Offsets | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        assert not self.closed
        chance = self.pace.fail_loads if job.kind == "load" else self.pace.fail_stores
        fail = "deadline" if self.rng.random() < chance else ""
        todo = list(range(len(job.rows)))
        if fail:
            del todo[self.rng.randint(0, len(todo)) :]
        wait = self.rng.randint(0, self.pace.wait)
        self.pending.append(Pending(job, regions, checksums, todo, wait, fail))
        if self.pace.wait == 0 and self.pace.go >= 1:
            self.finish()

    def poll(self) -> list[JobResult]:
        done, self._done = self._done, []
        return done

    def drain(self, timeout: float) -> bool:
        main = threading.current_thread() is threading.main_thread()
        if main and timeout <= BACKOFF_S:  # a step rests: how far copies come is the test's to say
            return not self.pending
        if main:
            self.finish()
        elif self.pending:  # a thread of the connector: only the test's thread moves bytes
            time.sleep(timeout)
        return not self.pending

    def close(self) -> None:
        if not self.closed:
            for pending in self.pending:
                pending.todo.clear()
                pending.fail = pending.fail or "closed"
            self.finish()
            self.closed = True
            self._real.close()

    # ---------------------------------------------------------------------------- the test's side
    def tick(self) -> None:
        """Time passes: some copies get on."""
        for pending in self.rng.sample(self.pending, len(self.pending)):
            if pending.wait > 0:
                pending.wait -= 1
            elif self.rng.random() < self.pace.go:
                self._advance(pending)

    def finish(self, kind: str = "", fail: str = "") -> None:
        """All copies (of this kind) come to their end now; with `fail` they move nothing and fail."""
        for pending in [p for p in self.pending if kind in ("", p.job.kind)]:
            if fail:
                pending.fail = fail
                pending.todo.clear()
            while pending in self.pending:
                self._advance(pending)

    def _advance(self, pending: Pending) -> None:
        if pending.todo:
            slot = pending.todo.pop(self.rng.randrange(len(pending.todo)))
            self.watch(pending.job, slot, "before")
            result = self._copy(pending, slot)
            pending.nbytes += result.nbytes
            if result.ok:
                self.watch(pending.job, slot, "after")
            else:
                self.refused(pending.job, slot, result.reason)
                pending.fail = pending.fail or result.reason
                pending.todo.clear()
        if not pending.todo:
            self.pending.remove(pending)
            job = pending.job
            self._done.append(
                JobResult(job.id, job.kind, not pending.fail, pending.fail, pending.nbytes)
            )

    def _copy(self, pending: Pending, slot: int) -> JobResult:
        job, one = pending.job, slice(slot, slot + 1)
        part = CopyJob.of(
            job.id,
            job.kind,
            job.arena_id,
            job.rows[one],
            job.offsets[one],
            job.generations[one],
            job.groups[one],
            job.pages()[one],
        )
        checksums = None if pending.checksums is None else pending.checksums[one]
        self._real.submit(part, pending.regions[one], checksums)
        assert self._real.drain(30)
        (result,) = self._real.poll()
        return result
