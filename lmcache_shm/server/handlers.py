"""The handler of each request: the catalog's verbs, behind checks that a client names only rows of its own."""

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lmcache_shm import __version__
from lmcache_shm.arena.allocator import NO_ROWS
from lmcache_shm.arena.processes import Process
from lmcache_shm.arena.segment import Arena
from lmcache_shm.arena.slot import checks_number
from lmcache_shm.config import Config
from lmcache_shm.protocol import messages as m
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.catalog.groups import CatalogError
from lmcache_shm.server.engines import Denied, Engines, Ownership, Session
from lmcache_shm.server.requests import check_register, count, entries, geometries, group_spec
from lmcache_shm.server.scrub import Scrub
from lmcache_shm.server.stats import Stats, snapshot

log = logging.getLogger("lmcache_shm")

MAX_PINS = 16 << 20
"""Rows pinned by all leases together; beyond it a look-up is a miss."""


class Service:
    """The one owner of the catalog. Used by the server's thread only."""

    def __init__(self, arena: Arena, catalog: Catalog, config: Config) -> None:
        self.arena = arena
        self.catalog = catalog
        self.config = config
        self.boot = os.urandom(8)
        self.draining = False
        self.shutdown: bool | None = None
        """None: go on; True: end after draining; False: end at once."""
        self.engines = Engines(arena, catalog, config.quarantine_grace_s)
        self.sessions: dict[int, Session] = {}
        self.stats = Stats(catalog.tick)
        verify = config.checksum == "verify"
        self.scrub = (
            Scrub(arena, catalog, self.stats.counters, self.stats.events) if verify else None
        )
        self.pinned = 0
        self._numbers = 0
        self._verbs: dict[type[m.Message], Callable[[Session, Any], m.Message]] = {
            m.Hello: self._hello,
            m.AttachWorker: self._attach,
            m.Register: self._register,
            m.Acquire: self._acquire,
            m.Step: self._step,
            m.Report: self._report,
            m.Clear: self._clear,
            m.Status: self._status,
            m.List: self._list,
            m.Check: self._check,
            m.Drain: self._drain,
            m.Shutdown: self._shutdown,
        }

    # ------------------------------------------------------------------------- for the server
    def open_session(self, sock: socket.socket) -> Session:
        self._numbers += 1
        self.stats.counters["connections"] += 1
        session = Session(self._numbers, Process.of_peer(sock))
        self.sessions[session.number] = session
        return session

    def close_session(self, session: Session) -> None:
        """Its connection has ended: unpin the rows it read, quarantine those that may still be written."""
        self.sessions.pop(session.number, None)
        if session.engine is not None:
            self.note(f"{session.title} left")
        self.retire(session)
        session.process.close()

    def retire(self, session: Session) -> None:
        """End all that a connection holds. It may register again."""
        for lease in list(session.leases):
            self._unpin(session, lease)
        if session.namespace >= 0:
            self.catalog.leave(session.namespace)
            session.namespace = -1
        self.engines.leave(session)

    def handle(self, session: Session, request: m.Message) -> m.Message:
        """The answer to a request; an Error when it did nothing."""
        if not session.role and type(request) is not m.Hello:
            session.hang_up = True
            return self._error("hello", "the first message must be Hello")
        try:
            return self._verbs[type(request)](session, request)
        except Denied as denied:
            self.stats.counters["denied"] += 1
            return self._error(denied.code, str(denied))
        except CatalogError as error:
            self.stats.counters["denied"] += 1
            return self._error("refused", str(error))
        except Exception as error:
            self.stats.counters["failures"] += 1
            if self.stats.events.allow():
                log.exception("%s of %s failed", type(request).__name__, session.title)
            if session.engine is not None:
                session.engine.rows.abort_orphaned()
            return self._error("internal", f"{type(error).__name__}: {error}")

    def tick(self, now: float) -> None:
        self.engines.tick(now)
        self.stats.ages.note(self.catalog.tick, now)

    def outstanding(self) -> int:
        """Leases and reservations that engines hold."""
        leases = sum(len(session.leases) for session in self.sessions.values())
        return leases + sum(len(engine.rows.reserved) for engine in self.engines)

    def snapshot(self) -> dict[str, Any]:
        """The state of everything, see stats.snapshot."""
        return snapshot(
            self.catalog, self.engines, self.stats, self.config,
            boot=self.boot, draining=self.draining, sessions=len(self.sessions),
        )  # fmt: skip

    def note(self, text: str) -> None:
        """An event: shown by status and top, and logged."""
        self.stats.events.add(text)

    def _error(self, code: str, message: str) -> m.Error:
        return m.Error(self.boot, code, message)

    # ---------------------------------------------------------------------------- connecting
    def _hello(self, session: Session, request: m.Hello) -> m.Message:
        if request.version != m.PROTOCOL:
            session.hang_up = True
            raise Denied(
                "version",
                f"this server (lmcache-shm {__version__}) speaks protocol {m.PROTOCOL}, not "
                f"{request.version}; install the same lmcache-shm on both sides",
            )
        if request.role not in {"scheduler", "worker", "tool"} or session.role:
            session.hang_up = True
            raise Denied("hello", f"a greeting as {request.role!r}, by {session.title}")
        if len(request.info) > 32 or len(request.engine_id) > 256:
            session.hang_up = True
            raise Denied("limit", "a greeting of that length")
        session.role = request.role
        session.engine_id = request.engine_id
        arena = self.arena
        return m.HelloReply(
            self.boot, m.PROTOCOL, bytes(arena.arena_id), self.config.instance, arena.data_name,
            arena.meta_name, self.config.chunk_size, self.config.separate_object_groups,
            self.config.checksum, __version__, os.getpid(),
        )  # fmt: skip

    def _attach(self, session: Session, request: m.AttachWorker) -> m.Message:
        if session.role != "worker" or request.engine_id != session.engine_id:
            raise Denied("refused", "only a worker attaches, and only to the engine it greeted for")
        index = self.engines.attach(session, request)
        self.note(
            f"rank {request.rank} of engine {request.engine_id} attached (pid {session.process.pid})"
        )
        return m.Attached(self.boot, index)

    def _register(self, session: Session, request: m.Register) -> m.Message:
        if session.role != "scheduler" or request.engine_id != session.engine_id:
            raise Denied(
                "refused", "only a scheduler registers, and only the engine it greeted for"
            )
        if session.namespace >= 0:
            raise Denied("invalid", "this connection has registered before")
        check_register(request, self.config)
        engine = self.engines.find(session, request.engine_id)
        if engine.scheduler is not None and engine.scheduler is not session:
            self.retire(engine.scheduler)  # the same process, back before its end was seen
            engine = self.engines.find(session, request.engine_id)
        if engine.workers and (engine.world, engine.replicas) != (request.world, request.replicas):
            raise Denied(
                "refused",
                f"the workers of engine {engine.engine_id} are {engine.world} with {engine.replicas} "
                f"replicas, its scheduler says {request.world} with {request.replicas}",
            )
        self.engines.bind(engine, session, request.world, request.replicas)
        engine.rows.register(request.busy_rows)
        arena_id = bytes(self.arena.arena_id)
        if missing := engine.missing():
            who = ", ".join(map(str, missing))
            message = f"waiting for rank {who} of {engine.world} to attach"
            return m.Registered(self.boot, arena_id, False, message)
        facts = [engine.workers[rank].facts for rank in range(engine.world)]
        if request.facts != m.facts_digest(facts):
            message = "the descriptor does not hold the facts of the workers"
            return m.Registered(self.boot, arena_id, False, message, facts=facts)
        slots = geometries(engine, request)
        specs = [
            group_spec(info, slot, request.name)
            for info, slot in zip(request.groups, slots, strict=True)
        ]
        session.namespace = self.catalog.register(request.descriptor, specs, request.chunk_size).id
        session.groups = len(specs)
        engine.registered = [engine.workers[rank].region_bytes for rank in range(engine.world)]
        if self.config.checksum != "off":
            session.checks = [checks_number(slot.checked) for slot in slots]
        if self.scrub is not None:
            for slot in slots:
                self.scrub.learn(slot.checked)
        self.note(
            f"engine {engine.engine_id} registered ({request.name or 'model'}, {engine.world} "
            f"worker{'s' * (engine.world > 1)}, {len(slots)} object group{'s' * (len(slots) > 1)}, "
            f"chunks of {request.chunk_size} tokens)"
        )
        return m.Registered(
            self.boot, arena_id, True, "", session.namespace, engine.index, request.chunk_size,
            [slot.slot_bytes for slot in slots], [slot.region_offsets for slot in slots],
            [slot.checksum_offset for slot in slots], [slot.token_offset for slot in slots],
        )  # fmt: skip

    # ------------------------------------------------------------------------------- serving
    @staticmethod
    def _registered(session: Session) -> tuple[int, Ownership]:
        """Namespace and rows of the engine of this connection (else Denied)."""
        if session.namespace < 0 or session.engine is None:
            raise Denied("refused", "this connection has not registered an engine")
        return session.namespace, session.engine.rows

    def _acquire(self, session: Session, request: m.Acquire) -> m.Message:
        began = time.perf_counter()
        namespace, _ = self._registered(session)
        count(request.keys, m.KEY, "keys")
        if not 0 <= request.local_tokens <= request.num_tokens < 1 << 40:
            raise Denied("invalid", f"{request.local_tokens} of {request.num_tokens} tokens")
        if request.replaces:
            session.check_leases([request.replaces])
            self._unpin(session, request.replaces)
        if self.draining or self.pinned >= MAX_PINS:
            self.stats.misses["draining" if self.draining else "lease_limit"] += 1
            return m.Acquired(self.boot, 0, 0, [], [])
        hit = self.catalog.acquire(
            namespace, request.keys, request.local_tokens, request.num_tokens
        )
        lease = 0
        if hit.n_chunks:
            lease = session.new_lease(hit.rows)
            self.pinned += sum(map(len, hit.rows))
        self.stats.latency["acquire"].add(time.perf_counter() - began)
        return m.Acquired(
            self.boot, lease, hit.n_chunks, list(hit.first), [rows.tobytes() for rows in hit.rows]
        )

    def _step(self, session: Session, request: m.Step) -> m.Message:
        began = time.perf_counter()
        namespace, own = self._registered(session)
        # Everything is checked before anything is done.
        session.check_leases(request.release)
        commit = own.named(request.commit, "commit")
        abort = own.named(request.abort, "abort", quarantined=True)
        if len(commit) and len(abort) and not set(commit.tolist()).isdisjoint(abort.tolist()):
            raise Denied("invalid", "a row is both committed and aborted")
        wanted = None if request.reserve is None else entries(request.reserve, session.groups)
        for lease in request.release:
            self._unpin(session, lease)
        if len(commit):
            own.commit(commit, session.checks)
        if len(abort):
            own.abort(abort)
        rows = NO_ROWS
        if wanted is not None:
            if self.draining:
                rows = np.full(len(wanted["groups"]), m.FULL, np.int32)
            else:
                rows = own.reserve(namespace, wanted)
        self.stats.latency["step"].add(time.perf_counter() - began)
        return m.Stepped(self.boot, rows.astype("<i4", copy=False).tobytes())

    def _unpin(self, session: Session, lease: int) -> None:
        for rows in session.leases.pop(lease, ()):
            self.catalog.release(rows)
            self.pinned -= len(rows)

    # --------------------------------------------------------------------------------- tools
    def _report(self, session: Session, request: m.Report) -> m.Message:
        self.stats.report(request.counts)
        return m.Done(self.boot)

    def _clear(self, session: Session, request: m.Clear) -> m.Message:
        namespace = None if request.namespace < 0 else request.namespace
        cleared = self.catalog.clear(namespace, request.salt)
        self.note(f"cleared {cleared} slots")
        return m.Done(self.boot, cleared)

    def _status(self, session: Session, request: m.Status) -> m.Message:
        return m.StatusReply(self.boot, self.snapshot())

    def _list(self, session: Session, request: m.List) -> m.Message:
        limit = min(max(request.limit, 1), 100_000)
        return m.ListReply(self.boot, self.catalog.tree(request.namespace, limit))

    def _check(self, session: Session, request: m.Check) -> m.Message:
        return m.CheckReply(self.boot, self.catalog.check())

    def _drain(self, session: Session, request: m.Drain) -> m.Message:
        if not self.draining:
            self.note("draining: no new leases from now on")
        self.draining = True
        return m.Done(self.boot, self.outstanding())

    def _shutdown(self, session: Session, request: m.Shutdown) -> m.Message:
        self.note(f"told to end by {session.title}")
        self.draining = True
        self.shutdown = request.drain
        return m.Done(self.boot, self.outstanding())
