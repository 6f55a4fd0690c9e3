"""Stores that are underway: which blocks they hold, which rows they fill, and when all ranks have reported.

Shared by the scheduler thread and the thread that settles stores while the engine is idle. Blocks are
only released by the scheduler thread: vLLM's block pool is not thread-safe.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmcache_shm.arena.layout import RING
from lmcache_shm.client.registration import Epoch

RELEASE_S = 0.05
"""A lease waits so long for a message that it can go with: no round trip between a load and its first token."""


@dataclass(eq=False, slots=True)
class StoreJob:
    """One request's stores of one step. `keys`: (object group, key) of each row.

    `everybody`: ranks that write nothing have to agree, too.
    """

    id: int
    epoch: Epoch
    rows: list[int]
    keys: list[tuple[int, bytes]]
    blocks: list[Any]
    everybody: bool = False
    refused: set[int] = field(default_factory=set)
    """Ranks that could not begin."""


@dataclass(slots=True)
class Settlement:
    """Messages for the server that can go with the next step: all of one epoch's."""

    commit: list[int] = field(default_factory=list)
    abort: list[int] = field(default_factory=list)
    release: list[int] = field(default_factory=list)
    """Leases."""
    since: float = 0.0
    """When the oldest of them was given back, monotonic."""

    def __bool__(self) -> bool:
        return bool(self.commit or self.abort or self.release)

    @property
    def can_wait(self) -> bool:
        """Whether it is not worth a message of its own yet."""
        alone = self.release and not (self.commit or self.abort)
        return bool(alone) and time.monotonic() - self.since < RELEASE_S


class StoreBook:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[int, StoreJob] = {}
        self._loads: dict[int, Epoch] = {}
        self._next_id = 1
        self.ended: deque[StoreJob] = deque()
        """No copy reads their blocks any more, but the block pool does not know yet."""
        self._released: list[int] = []  # leases to give back
        self._since = 0.0  # when the first of them came

    @property
    def busy(self) -> bool:
        """Whether a store is underway."""
        return bool(self._jobs)

    @property
    def loading(self) -> bool:
        """Whether a rank has yet to report a load on the board; vLLM may hear of its end later."""
        with self._lock:
            return not all(_reported_by_all(epoch, number) for number, epoch in self._loads.items())

    @property
    def holding(self) -> bool:
        """Whether blocks are held that the scheduler's thread will have to release."""
        return bool(self._jobs or self.ended)

    @property
    def untold(self) -> bool:
        """Whether there is, or will be, something to tell the server."""
        return bool(self._jobs or self._released)

    def has_room(self, jobs: int) -> bool:
        """Whether so many more can be told apart on the board from all that are underway."""
        with self._lock:
            oldest = min((*self._jobs, *self._loads), default=self._next_id)
            return self._next_id + jobs - oldest <= RING

    def open_load(self, epoch: Epoch) -> int:
        """The number of a load, until `close_load`. It is reported on the same board as stores."""
        with self._lock:
            number, self._next_id = self._next_id, self._next_id + 1
            self._loads[number] = epoch
        return number

    def close_load(self, number: int) -> None:
        """vLLM has been told of its end."""
        with self._lock:
            del self._loads[number]

    def open(
        self,
        epoch: Epoch,
        rows: list[int],
        keys: list[tuple[int, bytes]],
        blocks: list[Any],
        *,
        everybody: bool = False,
    ) -> StoreJob:
        """Enter a job; its blocks must be held already."""
        with self._lock:
            job = StoreJob(self._next_id, epoch, rows, keys, blocks, everybody)
            self._next_id += 1
            self._jobs[job.id] = job
        return job

    def refuse(self, ranks_by_job: dict[int, set[int]]) -> None:
        """Ranks say that they did not begin these jobs, since their arena is not mapped any more."""
        with self._lock:
            for number, ranks in ranks_by_job.items():
                if number in self._jobs:
                    self._jobs[number].refused |= ranks

    def give_back(self, lease: int) -> None:
        """Release a lease with the next message, or by one of its own after RELEASE_S."""
        with self._lock:
            if not self._released:
                self._since = time.monotonic()
            self._released.append(lease)

    def put_off(self, message: Settlement) -> None:
        """Its leases are released another time."""
        with self._lock:
            self._released[:0] = message.release
            self._since = message.since

    def settle(self, epoch: Epoch | None) -> Settlement:
        """Look at the boards; what is to be told to the server of `epoch` now, each thing once.

        Rows of jobs of another arena are forgotten. Rows of an earlier epoch in the same arena are
        still named: the client knows that they cannot be committed any more.
        """
        message = Settlement()
        with self._lock:
            for job, good in self._reported():
                del self._jobs[job.id]
                self.ended.append(job)
                if epoch is None or job.epoch.arena_id != epoch.arena_id:
                    continue
                (message.commit if good else message.abort).extend(job.rows)
                if good and job.epoch is epoch:
                    for group, key in job.keys:
                        epoch.remember(group, key)
            message.release, self._released = self._released, []
            message.since = self._since
        return message

    def ended_blocks(self) -> list[Any]:
        """Blocks that no copy reads any more, in the order in which they should be evicted. Once each."""
        with self._lock:
            ended, self.ended = list(self.ended), deque()
        return [block for job in ended for block in reversed(job.blocks)]

    def held_alone(self) -> bool:
        """Whether a copy keeps a block from being free that nobody else uses."""
        with self._lock:
            return any(block.ref_cnt == 1 for job in self._jobs.values() for block in job.blocks)

    def _reported(self) -> Iterable[tuple[StoreJob, bool]]:
        """Jobs that every rank that has to has reported, and whether all of them succeeded."""
        if not self._jobs:
            return []
        alike: dict[tuple[Epoch, bool], list[StoreJob]] = {}
        for job in self._jobs.values():
            alike.setdefault((job.epoch, job.everybody), []).append(job)
        found: list[tuple[StoreJob, bool]] = []
        for (epoch, everybody), jobs in alike.items():
            reporting = np.arange(epoch.place.world) if everybody else epoch.writers
            ids = np.array([job.id for job in jobs], np.uint64)
            board = epoch.arena.boards[epoch.place.client]
            cells = board[np.ix_(reporting, (ids % np.uint64(RING)).astype(np.intp))]
            told = cells >> np.uint64(1) == ids
            good = told & (cells & np.uint64(1) == 1)
            for i, job in enumerate(jobs):
                ranks = told[:, i]
                if job.refused:
                    ranks = ranks | np.isin(reporting, list(job.refused))
                if ranks.all():
                    found.append((job, bool(good[:, i].all())))
        return found


def _reported_by_all(epoch: Epoch, number: int) -> bool:
    """Whether every rank has reported job `number`, in whichever way it ended."""
    cells = epoch.arena.boards[epoch.place.client, : epoch.place.world, number % RING]
    return bool((cells >> np.uint64(1) == np.uint64(number)).all())
