"""What each request does: the catalog's verbs behind checks of who may do what to which rows."""

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from lmcache_shm import __version__
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.arena.processes import Process
from lmcache_shm.arena.segment import Arena
from lmcache_shm.config import Config
from lmcache_shm.protocol import messages as m
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.catalog.groups import CatalogError
from lmcache_shm.server.engines import Engines
from lmcache_shm.server.entries import count, entries
from lmcache_shm.server.events import Journal
from lmcache_shm.server.histogram import Histogram
from lmcache_shm.server.registration import register
from lmcache_shm.server.scrub import Scrub
from lmcache_shm.server.session import Denied, Rows, Session
from lmcache_shm.server.snapshot import TickClock, snapshot

log = logging.getLogger("lmcache_shm")

MAX_PINS = 16 << 20
"""Rows pinned by all leases together; beyond it a look-up is a miss."""
MAX_REPORTED = 64
"""Reasons of misses that clients may name."""
NO_ROWS: Rows = np.empty(0, np.int32)


class Service:
    """The one owner of the catalog. Used by the server's thread only."""

    def __init__(self, arena: Arena, catalog: Catalog, config: Config) -> None:
        self.arena = arena
        self.catalog = catalog
        self.config = config
        self.boot = os.urandom(8)
        self.started = time.monotonic()
        self.started_at = time.time()
        self.draining = False
        self.shutdown: bool | None = None
        """None: go on; True: end after draining; False: end at once."""
        self.engines = Engines(arena, catalog, config.quarantine_grace_s)
        self.sessions: dict[int, Session] = {}
        self.counters: Counter[str] = Counter()
        self.reported: Counter[str] = Counter()
        """Reasons of misses that only clients see."""
        self.latency = {"acquire": Histogram(), "step": Histogram()}
        self.clock = TickClock(catalog.tick, self.started)
        self.journal = Journal()
        self.events = self.journal.events
        verify = config.checksum == "verify"
        self.scrub = Scrub(arena, catalog, self.counters, self.journal) if verify else None
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
        self.counters["connections"] += 1
        session = Session(self._numbers, Process.of_peer(sock))
        self.sessions[session.number] = session
        return session

    def close_session(self, session: Session) -> None:
        """Its connection has ended: unpin what it read, quarantine what may still be written."""
        self.sessions.pop(session.number, None)
        if session.engine is not None:
            self.note(f"{session.title} left")
        self.retire(session)
        session.process.close()

    def retire(self, session: Session) -> None:
        """Take from a connection all that it holds. It may register again."""
        for lease in list(session.leases):
            self._unpin(session, lease)
        rows, session.reserved = sorted(session.reserved), set()
        session.in_doubt.clear()
        if session.namespace >= 0:
            self.catalog.leave(session.namespace)
            session.namespace = -1
        if session.engine is not None:
            self.engines.quarantine(session.engine, rows)
            self.engines.leave(session)

    def handle(self, session: Session, request: m.Message) -> m.Message:
        """The answer to a request; an Error when it did nothing."""
        if not session.role and type(request) is not m.Hello:
            session.hang_up = True
            return self._error("hello", "the first message must be Hello")
        try:
            return self._verbs[type(request)](session, request)
        except Denied as denied:
            self.counters["denied"] += 1
            return self._error(denied.code, str(denied))
        except CatalogError as error:
            self.counters["denied"] += 1
            return self._error("refused", str(error))
        except Exception as error:
            self.counters["failures"] += 1
            if self.journal.may_tell():
                log.exception("%s of %s failed", type(request).__name__, session.title)
            self._give_up_strays(session)
            return self._error("internal", f"{type(error).__name__}: {error}")

    def tick(self, now: float) -> None:
        self.engines.tick(now)
        self.clock.note(self.catalog.tick, now)

    def outstanding(self) -> int:
        """Leases and reservations that engines hold."""
        return sum(len(s.leases) + len(s.reserved) for s in self.sessions.values())

    def note(self, text: str) -> None:
        """An event: shown by status and top, and logged."""
        self.journal.tell(text)

    def _error(self, code: str, message: str) -> m.Error:
        return m.Error(self.boot, code, message)

    # -------------------------------------------------------------------------------- coming
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
        session.info = {
            k[:64]: v[:256] if isinstance(v, str) else v for k, v in request.info.items()
        }
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
        return register(self, session, request)

    # ------------------------------------------------------------------------------- serving
    def _namespace(self, session: Session) -> int:
        if session.namespace < 0:
            raise Denied("refused", "this connection has not registered an engine")
        return session.namespace

    def _acquire(self, session: Session, request: m.Acquire) -> m.Message:
        began = time.perf_counter()
        namespace = self._namespace(session)
        count(request.keys, m.KEY, "keys")
        if not 0 <= request.local_tokens <= request.num_tokens < 1 << 40:
            raise Denied("invalid", f"{request.local_tokens} of {request.num_tokens} tokens")
        if request.replaces:
            session.check_leases([request.replaces])
            self._unpin(session, request.replaces)
        if self.draining or self.pinned >= MAX_PINS:
            self.reported["draining" if self.draining else "lease_limit"] += 1
            return m.Acquired(self.boot, 0, 0, [], [])
        hit = self.catalog.acquire(
            namespace, request.keys, request.local_tokens, request.num_tokens
        )
        lease = 0
        if hit.n_chunks:
            lease = session.new_lease(hit.rows)
            self.pinned += sum(map(len, hit.rows))
        self.latency["acquire"].add(time.perf_counter() - began)
        return m.Acquired(
            self.boot, lease, hit.n_chunks, list(hit.first), [rows.tobytes() for rows in hit.rows]
        )

    def _step(self, session: Session, request: m.Step) -> m.Message:
        began = time.perf_counter()
        namespace = self._namespace(session)
        # Everything is checked before anything is done.
        session.check_leases(request.release)
        commit = session.own_rows(request.commit, "commit", doubtful=False)
        abort = session.own_rows(request.abort, "abort", doubtful=True)
        if len(commit) and len(abort) and not set(commit.tolist()).isdisjoint(abort.tolist()):
            raise Denied("invalid", "a row is both committed and aborted")
        wanted = None if request.reserve is None else entries(session, request.reserve)
        for lease in request.release:
            self._unpin(session, lease)
        if len(commit):
            self.catalog.commit(commit, session.checks)
            session.reserved.difference_update(commit.tolist())
        if len(abort):
            self._abort(session, abort)
        rows = NO_ROWS
        if wanted is not None:
            if self.draining:
                rows = np.full(len(wanted["groups"]), m.FULL, np.int32)
            else:
                rows = self.catalog.reserve(namespace, client=session.client, **wanted)
                session.reserved.update(rows[rows >= 0].tolist())
        self.latency["step"].add(time.perf_counter() - began)
        return m.Stepped(self.boot, rows.astype("<i4", copy=False).tobytes())

    def _abort(self, session: Session, rows: Rows) -> None:
        named = rows.tolist()
        self.catalog.abort(rows)
        if session.engine is not None:
            session.engine.quarantined -= len(session.in_doubt.intersection(named))
        session.reserved.difference_update(named)
        session.in_doubt.difference_update(named)

    def _give_up_strays(self, session: Session) -> None:
        """After a failure in the middle of a step: rows reserved for this engine that it was not told of."""
        if session.client < 0:
            return
        hot = self.arena.hot
        mine = (hot["state"] == SlotState.RESERVED) & (hot["client"] == session.client)
        strays = set(np.flatnonzero(mine).tolist()) - session.reserved
        if strays:
            self.catalog.abort(np.array(sorted(strays), np.int32))

    def _unpin(self, session: Session, lease: int) -> None:
        for rows in session.leases.pop(lease, ()):
            self.catalog.release(rows)
            self.pinned -= len(rows)

    # --------------------------------------------------------------------------------- tools
    def _report(self, session: Session, request: m.Report) -> m.Message:
        for reason, n in request.counts.items():
            if 0 < n < 1 << 48 and (reason in self.reported or len(self.reported) < MAX_REPORTED):
                self.reported[reason[:64]] += n
        return m.Done(self.boot)

    def _clear(self, session: Session, request: m.Clear) -> m.Message:
        namespace = None if request.namespace < 0 else request.namespace
        cleared = self.catalog.clear(namespace, request.salt)
        self.note(f"cleared {cleared} slots")
        return m.Done(self.boot, cleared)

    def _status(self, session: Session, request: m.Status) -> m.Message:
        return m.StatusReply(self.boot, snapshot(self))

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
