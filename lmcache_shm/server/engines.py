"""Engines: their workers, their slot geometry, and what they may still be writing after they are lost.

An engine is one scheduler side and `world` workers that share an `engine_id`. It has an index (`client`):
a row of the arena's client table and of its boards. Worker processes are written down there, by pid and
start time, so that a later server knows who may still write.

Quarantine. When the scheduler's connection ends, slots it had reserved may still be written by a copy that
is underway. They are not used again before every worker process of the engine has ended, or the engine has
come back and said which of them are still being written, or the workers were seen running (not stopped)
for the grace time, within which a copy that was underway has ended. A worker in another pid namespace
cannot be seen running: there the grace time alone counts for one of an earlier server, or on Linux before 6.5.
"""

import logging
from collections.abc import Iterator

import numpy as np

from lmcache_shm.arena.clients import ClientRecord, erase_client, read_clients, write_client
from lmcache_shm.arena.layout import ENGINE_ID_BYTES, MAX_CLIENTS, MAX_RANKS, SlotState
from lmcache_shm.arena.processes import Process
from lmcache_shm.arena.segment import Arena
from lmcache_shm.protocol.messages import AttachWorker
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.session import Denied, Session

log = logging.getLogger("lmcache_shm")

MAX_GROUPS = 64
MAX_FACTS = 64 << 10
"""Bytes that a worker may say of itself."""
SCHEDULER = -1
"""Rank under which the scheduler's process is written down."""


def check_shape(world: int, replicas: int) -> None:
    """Raises Denied for a number of workers that no engine has."""
    if not 1 <= world <= MAX_RANKS:
        raise Denied("limit", f"{world} workers; an engine may have 1 to {MAX_RANKS}")
    if replicas < 1 or world % replicas:
        raise Denied("invalid", f"{replicas} replicas do not divide {world} workers")


class Worker:
    """A rank that holds its connection open."""

    def __init__(self, session: Session, region_bytes: list[int], facts: bytes) -> None:
        self.session = session
        self.region_bytes = region_bytes
        self.facts = facts


class Engine:
    """See the module. `processes` are all that may have the arena mapped, until seen dead.

    The scheduler's process (rank SCHEDULER) writes token ids into what it reserved, so it counts, too.
    """

    def __init__(self, engine_id: str, index: int) -> None:
        self.engine_id = engine_id
        self.index = index
        self.world = 0
        self.replicas = 1
        self.workers: dict[int, Worker] = {}
        self.scheduler: Session | None = None
        self.registered: list[list[int]] = []  # region bytes by rank, as the slots were laid out
        self.processes: dict[tuple[int, int], tuple[int, Process]] = {}  # its key → (rank, it)
        self.quarantined = 0
        self.seen_running_s = 0.0

    @property
    def connected(self) -> bool:
        return self.scheduler is not None or bool(self.workers)

    def missing(self) -> list[int]:
        return [rank for rank in range(self.world) if rank not in self.workers]

    def forget_dead(self) -> bool:
        """Drop processes that have ended; True if there were any."""
        dead = [key for key, (_, process) in self.processes.items() if not process.alive()]
        for key in dead:
            self.processes.pop(key)[1].close()
        return bool(dead)


class Engines:
    """All engines that are connected or still have slots in quarantine."""

    def __init__(self, arena: Arena, catalog: Catalog, grace_s: float) -> None:
        self.arena = arena
        self.catalog = catalog
        self.grace_s = grace_s
        self._by_id: dict[str, Engine] = {}
        self._last_tick = 0.0
        for index, record in read_clients(arena).items():
            self._recall(index, record)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._by_id.values())

    # ------------------------------------------------------------------------------- coming
    def attach(self, session: Session, request: AttachWorker) -> int:
        """A worker comes (again): the index of its engine. Raises Denied."""
        check_shape(request.world, request.replicas)
        if not 0 <= request.rank < request.world:
            raise Denied("invalid", f"rank {request.rank} of {request.world} workers")
        if not 1 <= len(request.region_bytes) <= MAX_GROUPS:
            raise Denied(
                "limit", f"{len(request.region_bytes)} object groups; 1 to {MAX_GROUPS} are allowed"
            )
        if not all(0 <= n < 1 << 48 for n in request.region_bytes):
            raise Denied("invalid", "a region's bytes are negative or beyond any memory")
        if len(request.facts) > MAX_FACTS:
            raise Denied("limit", f"a worker may say {MAX_FACTS} bytes of itself")
        if session.engine is not None:
            raise Denied("invalid", "this connection has attached before")
        engine = self._by_id.get(request.engine_id) or self._new(request.engine_id)
        if engine.workers and (engine.world, engine.replicas) != (request.world, request.replicas):
            raise Denied(
                "refused",
                f"engine {engine.engine_id} has {engine.world} workers, not {request.world}",
            )
        present = engine.workers.get(request.rank)
        if present is not None:
            other = present.session.process
            if not other.same(session.process) and other.alive():
                raise Denied(
                    "busy", f"rank {request.rank} of engine {engine.engine_id} is pid {other.pid}"
                )
            present.session.engine = None  # its connection is half dead; this one follows it
        if engine.registered and engine.registered[request.rank] != request.region_bytes:
            raise Denied(
                "refused",
                f"rank {request.rank} of engine {engine.engine_id} had {engine.registered[request.rank]} "
                f"bytes a slot when the engine registered, not {request.region_bytes}",
            )
        engine.world, engine.replicas = request.world, request.replicas
        engine.workers[request.rank] = Worker(session, request.region_bytes, request.facts)
        session.engine = engine
        self._watch(engine, session.process, request.rank)
        return engine.index

    def find(self, session: Session, engine_id: str) -> Engine:
        """A scheduler comes (again): its engine. Raises Denied when another live process is that scheduler.

        The caller has to end what is left of the earlier connection, if `engine.scheduler` is one.
        """
        engine = self._by_id.get(engine_id) or self._new(engine_id)
        earlier = engine.scheduler
        if earlier is not None and earlier is not session:
            other = earlier.process
            if not other.same(session.process) and other.alive():
                raise Denied(
                    "busy",
                    f"engine id {engine_id} is in use by pid {other.pid}; give each engine its own",
                )
        return engine

    def seat(self, engine: Engine, session: Session, world: int, replicas: int) -> None:
        """From now on `session` is the scheduler side of `engine`."""
        engine.world, engine.replicas = world, replicas
        engine.scheduler = session
        session.engine = engine
        self._watch(engine, session.process, SCHEDULER)

    def _watch(self, engine: Engine, process: Process, rank: int) -> None:
        # Who holds this place now stands for an earlier one of which nobody would ever see the end.
        for key, (place, earlier) in list(engine.processes.items()):
            if place == rank and earlier.traceless:
                del engine.processes[key]
        if process.key not in engine.processes:
            copy = process.duplicate()
            engine.processes[copy.key] = rank, copy
        self._write_down(engine)

    def _new(self, engine_id: str) -> Engine:
        if not 0 < len(engine_id.encode(errors="replace")) <= ENGINE_ID_BYTES:
            raise Denied("invalid", f"an engine id has 1 to {ENGINE_ID_BYTES} bytes")
        taken = {engine.index for engine in self}
        index = next((i for i in range(MAX_CLIENTS) if i not in taken), None)
        if index is None:
            raise Denied(
                "busy", f"{MAX_CLIENTS} engines are connected or in quarantine; no more are taken"
            )
        engine = self._by_id[engine_id] = Engine(engine_id, index)
        self.arena.boards[index] = 0  # completions of an earlier engine must not speak for this one
        self._write_down(engine)
        return engine

    # -------------------------------------------------------------------------------- going
    def leave(self, session: Session) -> None:
        """A connection of an engine has ended; its reservations are the caller's business."""
        engine, session.engine = session.engine, None
        if engine is None:
            return
        if engine.scheduler is session:
            engine.scheduler = None
            engine.registered = []
        for rank, worker in list(engine.workers.items()):
            if worker.session is session:
                del engine.workers[rank]
        engine.seen_running_s = 0.0
        self._settle(engine)

    def quarantine(self, engine: Engine, rows: list[int]) -> None:
        """`rows` were reserved on a connection that ended: free if no worker process lives, else keep."""
        engine.forget_dead()
        if not rows:
            return
        if not engine.processes:
            self.catalog.abort(rows)
            return
        self.catalog.quarantine(rows)
        engine.quarantined += len(rows)
        engine.seen_running_s = 0.0
        log.info(
            "%d slots of engine %s in quarantine: its workers may still be writing",
            len(rows), engine.engine_id,
        )  # fmt: skip

    def tick(self, now: float) -> None:
        """Look at the worker processes; free what nobody can be writing any more."""
        passed, self._last_tick = now - self._last_tick, now
        for engine in list(self):
            if not engine.connected or engine.quarantined:
                if all(p.running() for _, p in engine.processes.values()):
                    engine.seen_running_s += min(passed, 1.0)  # a pause of ours proves nothing
                self._settle(engine)

    def _settle(self, engine: Engine) -> None:
        if engine.forget_dead():
            self._write_down(engine)
        over = not engine.processes or engine.seen_running_s >= self.grace_s
        if engine.quarantined and over:
            freed = self.catalog.unquarantine(engine.index)
            log.info("%d slots of engine %s out of quarantine", freed, engine.engine_id)
            engine.quarantined = 0
            if engine.scheduler is not None:
                engine.scheduler.in_doubt.clear()
        # A worker that lives on without a connection may still write to its boards.
        if not engine.connected and not engine.quarantined and over:
            for _, process in engine.processes.values():
                process.close()
            del self._by_id[engine.engine_id]
            erase_client(self.arena, engine.index)

    # -------------------------------------------------------------------------- across restarts
    def _recall(self, index: int, record: ClientRecord) -> None:
        """An engine that an earlier server wrote down; it may come back, or its slots wait for its end."""
        engine = Engine(record.engine_id, index)
        engine.world, engine.replicas = record.world, record.replicas
        for rank, pid, start in record.processes:
            process = Process.of_record(pid, start)
            engine.processes[process.key] = rank, process
        hot = self.arena.hot
        held = (hot["state"] == SlotState.QUARANTINED) & (hot["client"] == index)
        engine.quarantined = int(np.count_nonzero(held))
        self._by_id[record.engine_id] = engine
        self._settle(engine)

    def _write_down(self, engine: Engine) -> None:
        processes = [(rank, p.pid, p.start) for rank, p in engine.processes.values()]
        record = ClientRecord(engine.engine_id, engine.world, engine.replicas, processes)
        write_client(self.arena, engine.index, record)
