"""Stores in flight: from the reservation of their rows until every rank has reported and the rows are committed.

An active engine flushes in its own steps. When it falls idle, a thread notices the last completions on the completion
ring, commits them, and releases leases, so that a chunk can be found as soon as it is stored. Blocks are
only released by the scheduler's thread: vLLM's block pool is not thread-safe.

This object owns the reserved rows. What was reserved under one registration can be committed under no other: rows of a
store that outlives its registration are named as `busy` to the next one, and aborted there once their copies have ended.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmcache_shm.arena.job import CopyJob
from lmcache_shm.arena.layout import RING
from lmcache_shm.client.client import CacheClient, unpack_rows
from lmcache_shm.client.registration import Registration
from lmcache_shm.protocol.messages import Reserve, Stepped

RELEASE_S = 0.05
"""A lease release waits so long for a message that it can ride on: no round trip between a load and its first token."""
POLL_S = 0.005
IDLE_S = 0.02
"""After this time without a step the thread takes over."""


@dataclass(eq=False, slots=True)
class InFlightStore:
    """One request's stores of one step. `keys`: (object group, key) of each row.

    `everybody`: ranks that write nothing have to agree, too.
    """

    job: CopyJob
    registration: Registration
    keys: list[tuple[int, bytes]]
    blocks: list[Any]
    everybody: bool = False
    refused: set[int] = field(default_factory=set)
    """Ranks that did not begin the job."""


@dataclass(slots=True)
class Flush:
    """What is due to be sent under one registration."""

    commit: list[int] = field(default_factory=list)
    abort: list[int] = field(default_factory=list)
    release: list[int] = field(default_factory=list)
    """Leases."""
    since: float = 0.0
    """When the oldest of them was released, monotonic."""

    def __bool__(self) -> bool:
        return bool(self.commit or self.abort or self.release)

    @property
    def can_wait(self) -> bool:
        """Whether it is not worth a message of its own yet."""
        alone = self.release and not (self.commit or self.abort)
        return bool(alone) and time.monotonic() - self.since < RELEASE_S


class InFlightStores:
    """Thread-safe. `latest()` is the last registration there was, also while its server is away."""

    def __init__(self, client: CacheClient, latest: Callable[[], Registration | None]) -> None:
        self._client = client
        self._latest = latest
        # Held from the look at the ring until the answer is there: else a row could be reserved anew between
        # the look that finds it finished and the message that commits it.
        self._flushing = threading.RLock()
        self._lock = threading.Lock()
        self._stores: dict[int, InFlightStore] = {}
        self._loads: dict[int, Registration] = {}
        self._ended: deque[InFlightStore] = deque()
        self._next_id = 1
        self._granted: set[int] = set()
        """Rows that were reserved, and whose store is not entered yet."""
        self._leases: list[int] = []
        self._lease_since = 0.0
        self._stepped = 0.0
        self._closed = False
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------ state
    @property
    def storing(self) -> bool:
        """Whether a store is in flight."""
        return bool(self._stores)

    @property
    def loading(self) -> bool:
        """Whether a rank has yet to report a load on the completion ring; vLLM may hear of its end later."""
        with self._lock:
            return not all(
                _reported_by_all(registration, number)
                for number, registration in self._loads.items()
            )

    @property
    def ended(self) -> bool:
        """Whether there are blocks that no copy reads any more and that were not released yet."""
        return bool(self._ended)

    @property
    def due(self) -> bool:
        """Whether there is, or will be, something to send."""
        return bool(self._stores or self._leases)

    @property
    def next_id(self) -> int:
        """Id of the job that is added next."""
        return self._next_id

    def has_room(self, jobs: int) -> bool:
        """Whether so many more can be told apart on the completion ring from all that are in flight."""
        with self._lock:
            oldest = min((*self._stores, *self._loads), default=self._next_id)
            return self._next_id + jobs - oldest <= RING

    def held_alone(self) -> bool:
        """Whether a copy keeps a block from being free that nobody else uses."""
        with self._lock:
            return any(block.ref_cnt == 1 for s in self._stores.values() for block in s.blocks)

    def busy(self, arena_id: bytes) -> list[int]:
        """Rows of this arena that workers may still be writing. For a new registration: it must abort each of them."""
        with self._flushing, self._lock:
            stores = [s for s in self._stores.values() if s.job.arena_id == arena_id]
            rows = {row for s in stores for row in s.job.rows.tolist()}
            latest = self._latest()
            if latest is not None and latest.arena_id == arena_id:
                rows.update(self._granted)
            return sorted(rows)

    # ------------------------------------------------------------------------------------ changes
    def open_load(self, registration: Registration) -> int:
        """The id of a load, until `close_load`. It is reported on the same ring as stores."""
        with self._lock:
            number, self._next_id = self._next_id, self._next_id + 1
            self._loads[number] = registration
        return number

    def close_load(self, number: int) -> None:
        """vLLM has been told of its end."""
        with self._lock:
            del self._loads[number]

    def add(
        self,
        registration: Registration,
        job: CopyJob,
        keys: list[tuple[int, bytes]],
        blocks: list[Any],
        *,
        everybody: bool = False,
    ) -> None:
        """Enter the job `next_id`; its blocks must be held already. `everybody`: see InFlightStore."""
        with self._lock:
            store = InFlightStore(job, registration, keys, blocks, everybody)
            self._stores[job.id] = store
            self._next_id += 1
            self._granted.difference_update(job.rows.tolist())

    def refuse(self, ranks_by_job: dict[int, set[int]]) -> None:
        """Ranks did not begin these jobs, since their arena is not mapped any more."""
        with self._lock:
            for number, ranks in ranks_by_job.items():
                if number in self._stores:
                    self._stores[number].refused |= ranks

    def release(self, lease: int) -> None:
        """Release a lease with the next message, or after RELEASE_S by one of its own."""
        with self._lock:
            if not self._leases:
                self._lease_since = time.monotonic()
            self._leases.append(lease)

    def take_ended_blocks(self) -> list[Any]:
        """Blocks that no copy reads any more, in the order in which they should be evicted. Once each."""
        with self._lock:
            ended, self._ended = list(self._ended), deque()
        return [block for store in ended for block in reversed(store.blocks)]

    # ------------------------------------------------------------------------------------ flush
    def flush(
        self,
        reserve: Callable[[Registration | None], Reserve | None] = lambda _: None,
        *,
        defer: bool = False,
    ) -> Stepped | None:
        """Commit and abort what has ended and release leases, in one message. Any thread.

        `reserve(registration)`, called in between, may add a reservation under the registration in use: then the
        answer is returned (None: nothing was reserved). `defer`: leases alone may wait for the next message.
        """
        with self._flushing:
            registration = self._latest()
            message = self._collect(registration)
            wanted = reserve(registration)
            if registration is None or not (wanted or message):
                return None
            if defer and wanted is None and message.can_wait:
                self._defer(message)
                return None
            answer = self._client.step(
                wanted, message.commit, message.abort, message.release, registration.registered
            )
            if wanted is None or answer is None:
                return None
            self._granted = {row for row in unpack_rows(answer.rows) if row >= 0}
            return answer

    def stepped(self) -> None:
        """The scheduler flushes itself for now."""
        self._stepped = time.monotonic()

    def wake(self) -> None:
        """There may be something to flush. Scheduler's thread only."""
        if self._wanted.is_set() or not self.due:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lmcache-shm-flush", daemon=True)
            self._thread.start()
        self._wanted.set()

    def close(self) -> None:
        self._closed = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------------------------------ inside
    def _run(self) -> None:
        while True:
            self._wanted.wait()
            while not self._closed and self.due:
                if time.monotonic() - self._stepped > IDLE_S:
                    self.flush()
                time.sleep(POLL_S)
            self._wanted.clear()
            if self._closed:
                return
            if self.due:  # it came between the last look and clear()
                self._wanted.set()

    def _collect(self, registration: Registration | None) -> Flush:
        """Look at the completion rings; what is to be sent under `registration` now, each thing once."""
        message = Flush()
        with self._lock:
            for store, good in self._reported():
                del self._stores[store.job.id]
                self._ended.append(store)
                rows = store.job.rows.tolist()
                if store.registration is registration:
                    (message.commit if good else message.abort).extend(rows)
                    for group, key in store.keys if good else ():
                        registration.remember(group, key)
                elif good and registration and store.job.arena_id == registration.arena_id:
                    self._client.count("commit_lost", len(rows))
            if registration is not None and registration.busy:
                message.abort += self._no_longer_busy(registration)
            message.release, self._leases = self._leases, []
            message.since = self._lease_since
        return message

    def _no_longer_busy(self, registration: Registration) -> list[int]:
        """Rows that were busy when it registered, and whose copies have ended by now."""
        copying = {row for store in self._stores.values() for row in store.job.rows.tolist()}
        over = registration.busy - copying
        registration.busy -= over
        return sorted(over)

    def _defer(self, message: Flush) -> None:
        with self._lock:
            self._leases[:0] = message.release
            self._lease_since = message.since

    def _reported(self) -> Iterable[tuple[InFlightStore, bool]]:
        """Stores that every rank that has to has reported, and whether all of them succeeded."""
        alike: dict[tuple[Registration, bool], list[InFlightStore]] = {}
        for store in self._stores.values():
            alike.setdefault((store.registration, store.everybody), []).append(store)
        found: list[tuple[InFlightStore, bool]] = []
        for (registration, everybody), stores in alike.items():
            reporting = np.arange(registration.place.world) if everybody else registration.writers
            ids = np.array([store.job.id for store in stores], np.uint64)
            ring = registration.arena.boards[registration.place.client]
            cells = ring[np.ix_(reporting, (ids % np.uint64(RING)).astype(np.intp))]
            reported = cells >> np.uint64(1) == ids
            good = reported & (cells & np.uint64(1) == 1)
            for i, store in enumerate(stores):
                ranks = reported[:, i]
                if store.refused:
                    ranks = ranks | np.isin(reporting, list(store.refused))
                if ranks.all():
                    found.append((store, bool(good[:, i].all())))
        return found


def _reported_by_all(registration: Registration, number: int) -> bool:
    """Whether every rank has reported job `number`, in whichever way it ended."""
    cells = registration.arena.boards[
        registration.place.client, : registration.place.world, number % RING
    ]
    return bool((cells >> np.uint64(1) == np.uint64(number)).all())
