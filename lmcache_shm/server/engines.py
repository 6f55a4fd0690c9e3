"""Engines and their connections: workers, leases, and the rows that they write or may still be writing.

A session is one connection. An engine is one scheduler side and `world` workers that share an `engine_id`. It has
an index (`client`): a row of the arena's client table and of its completion rings. The table lists its processes by
pid and start time, so that a later server knows who may still write.

Quarantine. When the scheduler's connection ends, a copy into slots that it had reserved may still be under way.
They are not used again before every process of the engine has ended, or the engine has come back and named those
that are still being written, or its processes were seen running (not stopped) for the grace time, within which a
copy that was under way has ended. A worker in another pid namespace cannot be seen running: there the grace time
alone counts if it is one of an earlier server, or on Linux before 6.5.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.allocator import NO_ROWS
from lmcache_shm.arena.clients import ClientRecord, erase_client, read_clients, write_client
from lmcache_shm.arena.layout import ENGINE_ID_BYTES, MAX_CLIENTS, MAX_RANKS, Rows, SlotState
from lmcache_shm.arena.processes import Process
from lmcache_shm.arena.segment import Arena
from lmcache_shm.protocol.messages import AttachWorker
from lmcache_shm.server.catalog.catalog import Catalog

log = logging.getLogger("lmcache_shm")

MAX_GROUPS = 64
MAX_FACTS = 64 << 10
"""Bytes of a worker's facts."""
SCHEDULER = -1
"""The scheduler's rank in the client table."""


class Denied(Exception):
    """A request that is answered by an Error and does nothing; `code` as in messages.Error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Session:
    """One connection; `number` is unique within a server's life and is the upper half of its leases."""

    def __init__(self, number: int, process: Process) -> None:
        self.number = number
        self.process = process
        self.role = ""  # until Hello
        self.engine_id = ""
        self.last_activity = time.monotonic()
        self.engine: Engine | None = None
        # Set when an engine registers.
        self.namespace = -1
        self.groups = 0
        self.checks: list[int] = []
        """By group, the layout of the checksums that its workers write; [] when they write none."""
        self.leases: dict[int, list[Rows]] = {}
        self.hang_up = False
        self._last_lease = 0

    @property
    def title(self) -> str:
        engine = f" of engine {self.engine_id}" if self.engine_id else ""
        return f"{self.role or 'client'}{engine} (pid {self.process.pid})"

    # ------------------------------------------------------------------------------------- leases
    def new_lease(self, rows: list[Rows]) -> int:
        self._last_lease += 1
        lease = self.number << 32 | self._last_lease
        self.leases[lease] = rows
        return lease

    def check_leases(self, leases: list[int]) -> None:
        """Raises Denied for a lease that this connection never got; one released before is allowed."""
        for lease in leases:
            if lease >> 32 != self.number or not 0 < lease & 0xFFFFFFFF <= self._last_lease:
                raise Denied("not_yours", f"lease {lease} is not of this connection")

    @property
    def pinned(self) -> int:
        return sum(len(rows) for lease in self.leases.values() for rows in lease)


class Ownership:
    """The rows of one engine that are being written: the only object that reserves, commits, aborts or quarantines.

    `reserved`: on its scheduler's connection, neither committed nor aborted yet. `quarantined`: reserved on a
    connection that ended (see the module); an engine that comes back may only abort them. Both are what the slot
    table has as RESERVED and QUARANTINED rows of this client.
    """

    def __init__(self, catalog: Catalog, client: int, quarantined: Iterable[int] = ()) -> None:
        self._catalog = catalog
        self._client = client
        self.reserved: set[int] = set()
        self.quarantined = set(quarantined)

    def named(self, packed: bytes, what: str, *, quarantined: bool = False) -> Rows:
        """Rows (i4) of a commit or abort, each one this engine's and named once (else Denied).

        `quarantined`: those count as its own, too.
        """
        if not packed:
            return NO_ROWS
        rows = _unpacked(packed, what)
        named = set(rows.tolist())
        if len(named) != len(rows):
            raise Denied("invalid", f"{what}: a row is named twice")
        strange = named - self.reserved
        if quarantined:
            strange -= self.quarantined
        if strange:
            raise Denied("not_yours", f"{what}: row {min(strange)} is not reserved by you")
        return rows

    def reserve(self, namespace: int, entries: dict[str, Any]) -> Rows:
        """As Catalog.reserve."""
        rows = self._catalog.reserve(namespace, client=self._client, **entries)
        self.reserved.update(rows[rows >= 0].tolist())
        return rows

    def commit(self, rows: Rows, checks: list[int]) -> None:
        """Publish reserved rows; `checks` as in Catalog.commit."""
        self._catalog.commit(rows, checks)
        self.reserved.difference_update(rows.tolist())

    def abort(self, rows: Rows) -> None:
        """Free reserved or quarantined rows."""
        self._catalog.abort(rows)
        self.reserved.difference_update(rows.tolist())
        self.quarantined.difference_update(rows.tolist())

    def abort_orphaned(self) -> None:
        """After a request failed half-way: free the reserved rows that the engine does not know of."""
        hot = self._catalog.arena.hot
        mine = (hot["state"] == SlotState.RESERVED) & (hot["client"] == self._client)
        orphaned = set(np.flatnonzero(mine).tolist()) - self.reserved
        if orphaned:
            self._catalog.abort(sorted(orphaned))

    def lose(self, *, writers: bool) -> int:
        """The scheduler's connection ended: quarantine its reserved rows if there may be `writers`, else free
        them. How many are new in quarantine."""
        rows, self.reserved = sorted(self.reserved), set()
        if not rows:
            return 0
        if not writers:
            self._catalog.abort(rows)
            return 0
        self._catalog.quarantine(rows)
        self.quarantined.update(rows)
        return len(rows)

    def register(self, busy_rows: bytes) -> None:
        """The engine is back: free its quarantined rows but those (i4) that it may still be writing."""
        idle = self.quarantined.difference(_unpacked(busy_rows, "busy_rows").tolist())
        if idle:
            self.abort(np.array(sorted(idle), np.int32))

    def end_quarantine(self) -> int:
        """Nobody can be writing any more: free all quarantined rows; how many there were."""
        self.quarantined.clear()
        return self._catalog.unquarantine(self._client)


def _unpacked(packed: bytes, what: str) -> npt.NDArray[np.int32]:
    if len(packed) % 4:
        raise Denied("invalid", f"{what}: {len(packed)} bytes are no rows of 4 bytes")
    return np.frombuffer(packed, "<i4")


def check_shape(world: int, replicas: int) -> None:
    """Raises Denied for a number of workers that no engine has."""
    if not 1 <= world <= MAX_RANKS:
        raise Denied("limit", f"{world} workers; an engine may have 1 to {MAX_RANKS}")
    if replicas < 1 or world % replicas:
        raise Denied("invalid", f"{replicas} replicas do not divide {world} workers")


class Worker:
    """A rank whose connection is open."""

    def __init__(self, session: Session, region_bytes: list[int], facts: bytes) -> None:
        self.session = session
        self.region_bytes = region_bytes
        self.facts = facts


class Engine:
    """See the module. `processes` are all that may have the arena mapped, until seen dead.

    The scheduler's process (rank SCHEDULER) writes token ids into slots that it reserved, so it is one of them.
    """

    def __init__(self, engine_id: str, index: int, rows: Ownership) -> None:
        self.engine_id = engine_id
        self.index = index
        self.rows = rows
        self.world = 0
        self.replicas = 1
        self.workers: dict[int, Worker] = {}
        self.scheduler: Session | None = None
        self.registered: list[list[int]] = []  # region bytes by rank, as the slots were laid out
        self.processes: dict[tuple[int, int], tuple[int, Process]] = {}  # its key → (rank, it)
        self.seen_running_s = 0.0

    @property
    def connected(self) -> bool:
        return self.scheduler is not None or bool(self.workers)

    def missing(self) -> list[int]:
        return [rank for rank in range(self.world) if rank not in self.workers]

    def drop_dead(self) -> bool:
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
            self._restore(index, record)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._by_id.values())

    # ---------------------------------------------------------------------------- connecting
    def attach(self, session: Session, request: AttachWorker) -> int:
        """A worker connects (again): the index of its engine. Raises Denied."""
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
            present.session.engine = None  # a connection half dead; this one replaces it
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
        """A scheduler connects (again): its engine. Raises Denied when another live process is that scheduler.

        The caller has to end the earlier connection, if `engine.scheduler` is one.
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

    def bind(self, engine: Engine, session: Session, world: int, replicas: int) -> None:
        """From now on `session` is the scheduler side of `engine`."""
        engine.world, engine.replicas = world, replicas
        engine.scheduler = session
        session.engine = engine
        self._watch(engine, session.process, SCHEDULER)

    def _watch(self, engine: Engine, process: Process, rank: int) -> None:
        # A new process of this rank replaces an earlier one whose end nobody would ever see.
        for key, (place, earlier) in list(engine.processes.items()):
            if place == rank and earlier.unwatchable:
                del engine.processes[key]
        if process.key not in engine.processes:
            copy = process.duplicate()
            engine.processes[copy.key] = rank, copy
        self._record(engine)

    def _new(self, engine_id: str) -> Engine:
        if not 0 < len(engine_id.encode(errors="replace")) <= ENGINE_ID_BYTES:
            raise Denied("invalid", f"an engine id has 1 to {ENGINE_ID_BYTES} bytes")
        taken = {engine.index for engine in self}
        index = next((i for i in range(MAX_CLIENTS) if i not in taken), None)
        if index is None:
            raise Denied(
                "busy", f"{MAX_CLIENTS} engines are connected or in quarantine; no more are taken"
            )
        rows = Ownership(self.catalog, index)
        engine = self._by_id[engine_id] = Engine(engine_id, index, rows)
        self.arena.boards[index] = 0  # completions of an earlier engine are none of this one
        self._record(engine)
        return engine

    # ------------------------------------------------------------------------- disconnecting
    def leave(self, session: Session) -> None:
        """A connection of an engine has ended; its leases are the caller's business."""
        engine, session.engine = session.engine, None
        if engine is None:
            return
        if engine.drop_dead():
            self._record(engine)
        if engine.scheduler is session:
            engine.scheduler = None
            engine.registered = []
            lost = engine.rows.lose(writers=bool(engine.processes))
            if lost:
                log.info(
                    "%d slots of engine %s in quarantine: its workers may still be writing",
                    lost, engine.engine_id,
                )  # fmt: skip
        for rank, worker in list(engine.workers.items()):
            if worker.session is session:
                del engine.workers[rank]
        engine.seen_running_s = 0.0
        self._check_end(engine)

    def tick(self, now: float) -> None:
        """Look at the processes; free slots that nobody can be writing any more."""
        passed, self._last_tick = now - self._last_tick, now
        for engine in list(self):
            if not engine.connected or engine.rows.quarantined:
                if all(p.running() for _, p in engine.processes.values()):
                    # A pause of this server proves nothing about the time in which they ran.
                    engine.seen_running_s += min(passed, 1.0)
                self._check_end(engine)

    def _check_end(self, engine: Engine) -> None:
        """End the quarantine, or the engine's record, when its time has come."""
        if engine.drop_dead():
            self._record(engine)
        over = not engine.processes or engine.seen_running_s >= self.grace_s
        if engine.rows.quarantined and over:
            freed = engine.rows.end_quarantine()
            log.info("%d slots of engine %s out of quarantine", freed, engine.engine_id)
        # A worker that runs without a connection may still write to its completion ring.
        if not engine.connected and not engine.rows.quarantined and over:
            for _, process in engine.processes.values():
                process.close()
            del self._by_id[engine.engine_id]
            erase_client(self.arena, engine.index)

    # -------------------------------------------------------------------------- across restarts
    def _restore(self, index: int, record: ClientRecord) -> None:
        """An engine of an earlier server: it may come back, or its slots wait for its end."""
        hot = self.arena.hot
        held = (hot["state"] == SlotState.QUARANTINED) & (hot["client"] == index)
        rows = Ownership(self.catalog, index, np.flatnonzero(held).tolist())
        engine = Engine(record.engine_id, index, rows)
        engine.world, engine.replicas = record.world, record.replicas
        for rank, pid, start in record.processes:
            process = Process.of_record(pid, start)
            engine.processes[process.key] = rank, process
        self._by_id[record.engine_id] = engine
        self._check_end(engine)

    def _record(self, engine: Engine) -> None:
        processes = [(rank, p.pid, p.start) for rank, p in engine.processes.values()]
        record = ClientRecord(engine.engine_id, engine.world, engine.replicas, processes)
        write_client(self.arena, engine.index, record)
