"""A connection that is kept up in the background: connect, greet, notice the loss, try again."""

import logging
import os
import select
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

from lmcache_shm import __version__
from lmcache_shm.arena.owner import runtime_dir, safe_dir
from lmcache_shm.arena.segment import Arena, ArenaError, RuntimeDirError, attach
from lmcache_shm.client.connection import (
    Connection,
    ControlError,
    ProtocolError,
    Refused,
    Unavailable,
)
from lmcache_shm.config import Config, ConfigError
from lmcache_shm.protocol.messages import PROTOCOL, Hello, HelloReply

log = logging.getLogger("lmcache_shm")

HELLO_S = 5.0
"""A stopped server still accepts; waiting here beats filling its backlog with dead connections."""
FIRST_PAUSE_S = 0.02
REFUSED_PAUSE_S = 5.0


def socket_path(config: Config) -> Path:
    """Where the server of this instance listens. Raises ConfigError when its directory cannot be trusted."""
    try:
        folder = safe_dir(Path(config.runtime_dir)) if config.runtime_dir else runtime_dir()
    except RuntimeDirError as error:
        raise ConfigError(str(error)) from None
    return folder / f"{config.instance}.sock"


class Link:
    """Base of CacheClient and WorkerClient. Thread-safe; `start` once, `close` once.

    A thread of its own connects and calls `_greet`; while the link is up that thread only waits for the
    connection's end. In a forked child the link is down for good (`forked`), without harm to the parent's.
    """

    role = "tool"

    def __init__(self, config: Config, engine_id: str) -> None:
        self.config = config
        self.engine_id = engine_id
        self.path = socket_path(config)
        self.counts: Counter[str] = Counter()
        """Reasons of misses that only this side sees; sent to the server when it can be reached."""
        self.arena: Arena | None = None
        """The arena last mapped; it stays mapped when the server goes, until another one replaces it."""
        self.hello: HelloReply | None = None
        """The greeting of the server last reached."""
        self.refusal: str | None = None
        """Why the server (or `_greet`) will not have us, while that is so."""
        self.busy = False
        """Whether the refusal is only for now: another has our name, or all places are taken."""
        self._connection: Connection | None = None  # the one in use; None while down
        self._dialling: Connection | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._state = threading.Condition()
        self._said: str | None = None
        self._thread = threading.Thread(target=self._run, name="lmcache-shm-link", daemon=True)
        _links.add(self)

    # ------------------------------------------------------------------------------------- public
    def start(self) -> None:
        self._thread.start()

    @property
    def up(self) -> bool:
        return self._connection is not None

    @property
    def arena_id(self) -> bytes:
        """Identity of the mapped arena; b"" before the first. A job planned for another one is void."""
        return bytes(self.arena.arena_id) if self.arena is not None else b""

    def wait(self, timeout_s: float) -> bool:
        """True once the link is up; False when refused, closed, or after the time."""
        with self._state:
            self._state.wait_for(
                lambda: self.up or self.refusal is not None or self._closed.is_set(), timeout_s
            )
        return self.up

    def wait_hello(self, timeout_s: float) -> HelloReply | None:
        """The server's greeting as soon as there is one (registration may take longer)."""
        with self._state:
            self._state.wait_for(
                lambda: self.hello is not None or self.refusal is not None or self._closed.is_set(),
                timeout_s,
            )
        return self.hello

    def renew(self) -> None:
        """Give up the connection in use and dial anew: what was registered on it is void. Also what a broken
        connection voids: leases, and rows that were reserved."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                self._lost()
                connection.shutdown()

    def close(self) -> None:
        """End the connection and the thread; the mapping stays as long as someone uses it."""
        self._closed.set()
        for connection in (self._connection, self._dialling):
            if connection is not None:
                connection.shutdown()
        with self._state:
            self._state.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(HELLO_S + 1)

    # -------------------------------------------------------------------------- for the subclasses
    def _greet(self, connection: Connection) -> None:
        """Make a fresh connection usable (attach, register). Raises ControlError or ValueError."""
        raise NotImplementedError

    def _lost(self) -> None:
        """Called with the lock held after a connection in use broke."""

    def _info(self) -> dict[str, Any]:
        return {"version": __version__, "host_pid": os.getpid()}

    def _break(self, connection: Connection, error: ControlError) -> None:
        """Give up `connection` (lock held): the thread will see its end and dial again."""
        if self._connection is connection:
            self._connection = None
            self._lost()
            connection.shutdown()
            self._say(f"lost the server ({error}); serving goes on without the cache", warn=True)

    def _pause(self, seconds: float) -> bool:
        """Sleep unless closed; False when closed."""
        return not self._closed.wait(seconds)

    def _map(self, hello: HelloReply) -> None:
        if self.arena is not None and bytes(self.arena.arena_id) == hello.arena_id:
            return
        try:
            arena = attach(hello.instance, writable_data=True, names=(hello.data, hello.meta))
        except (ArenaError, OSError) as error:
            raise Unavailable(
                f"cannot map the arena of instance {hello.instance}: {error} (in a container: "
                "share /dev/shm with the server, e.g. --ipc=host)"
            ) from None
        if bytes(arena.arena_id) != hello.arena_id:
            raise Unavailable("the arena was replaced while it was mapped")
        self.arena = arena

    # ------------------------------------------------------------------------------------ thread
    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self._once()
                pause = FIRST_PAUSE_S
            except (Refused, ProtocolError, ValueError) as error:
                self.busy = isinstance(error, Refused) and error.code == "busy"
                self._refuse(str(error))
                pause = max(pause, REFUSED_PAUSE_S)
            except ControlError as error:
                self._say(f"no cache: {error}", warn=True)
                pause = min(2 * pause, self.config.reconnect_max_s)
            except Exception:
                log.exception("lmcache_shm: unexpected trouble on the control connection")
                pause = self.config.reconnect_max_s
            if time.monotonic() - began < pause:
                self._pause(pause)

    def _once(self) -> None:
        """One life of a connection: dial, greet, be up, end."""
        hello = Hello(PROTOCOL, self.role, self.engine_id, os.getpid(), self._info())
        self._dialling = connection = Connection.open(str(self.path), hello, HELLO_S)
        try:
            if self._closed.is_set():
                return
            self._map(connection.hello)
            with self._state:
                self.hello = connection.hello
                self._state.notify_all()
            self._greet(connection)
            connection.deadline_s = self.config.deadline_ms / 1e3
            with self._lock:
                self._connection = connection
                self._dialling = None
            with self._state:
                self.refusal = None
                self._state.notify_all()
            self._say(
                f"cache in use: instance {connection.hello.instance}, server pid "
                f"{connection.hello.pid}"
            )
            self._until_end(connection)
        finally:
            self._dialling = None
            with self._lock:
                self._break(connection, Unavailable("the connection was closed"))
            connection.close()

    def _until_end(self, connection: Connection) -> None:
        poll = select.poll()
        poll.register(connection.sock, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        while not poll.poll(1000) and not self._closed.is_set():
            self._idle(connection)

    def _idle(self, connection: Connection) -> None:
        """About once a second while up."""

    def _refuse(self, message: str) -> None:
        with self._state:
            self.refusal = message
            self._state.notify_all()
        if self._said != message:
            self._said = message
            level, until = (
                (logging.WARNING, "is off for now") if self.busy else (logging.ERROR, "stays off")
            )
            log.log(level, "lmcache_shm: the cache %s: %s", until, message)

    def _say(self, message: str, *, warn: bool = False) -> None:
        """One line per change of state, however often it is tried."""
        kind = "down" if warn else "up"
        if self._closed.is_set() or self._said == kind:
            return
        self._said = kind
        log.log(logging.WARNING if warn else logging.INFO, "lmcache_shm: %s", message)

    def _forked(self) -> None:
        """In a forked child: the socket is the parent's. Close our copy of it, send nothing on it."""
        for connection in (self._connection, self._dialling):
            if connection is not None:
                connection.close()
        self._connection = self._dialling = None
        self._lock = threading.Lock()
        self._state = threading.Condition()
        self._closed = threading.Event()
        self._closed.set()
        self.refusal = "forked"


_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


def _after_fork() -> None:
    for link in list(_links):
        link._forked()  # noqa: SLF001


os.register_at_fork(after_in_child=_after_fork)
