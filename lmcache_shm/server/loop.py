"""The server's loop: one thread, non-blocking sockets, one request per connection and turn."""

import errno
import logging
import os
import select
import signal
import socket
import stat
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from lmcache_shm.arena.errors import RuntimeDirError
from lmcache_shm.arena.processes import peer_credentials
from lmcache_shm.protocol.messages import Error, Message, decode_request, frame
from lmcache_shm.server.engines import Session
from lmcache_shm.server.frames import Budget, Malformed, Peer
from lmcache_shm.server.handlers import Service

log = logging.getLogger("lmcache_shm")

MAX_CONNECTIONS = 128
MAX_PATH = 107
"""Bytes that a sockaddr_un holds."""
OUTBOX_BUDGET = 64 << 20
"""Bytes of answers that peers have not taken, over all connections; beyond it the largest goes."""
TICK_S = 0.25
_BAD_FRAME = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError)


def check_path(path: Path) -> None:
    """Raises RuntimeDirError when no socket can have this path."""
    if len(os.fsencode(path)) > MAX_PATH:
        raise RuntimeDirError(
            f"the socket's path is longer than {MAX_PATH} bytes: {path}; use a shorter --runtime-dir"
        )


def listen(path: Path, backlog: int) -> socket.socket:
    """A listening socket at `path`, mode 0600. The caller owns the instance, so a socket found there is stale.

    Raises RuntimeDirError.
    """
    check_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if identity(path) is not None:
            path.unlink()
        sock.setblocking(False)
        before = os.umask(0o177)
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(before)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        there = "something else is there" if error.errno == errno.EADDRINUSE else error.strerror
        raise RuntimeDirError(
            f"cannot listen at {path}: {there}; remove it (rm -r {path}), or choose another --runtime-dir"
        ) from None
    return sock


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the socket at `path`; None when there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISSOCK(found.st_mode) else None


class Server:
    """Serves `service` on a Unix socket until `stop`. Everything happens in the thread that calls `run`;
    only `stop` and `ask` may be called from others."""

    def __init__(self, service: Service, path: Path) -> None:
        self.service = service
        self.path = path
        self._epoll = select.epoll()
        self._peers: dict[int, tuple[Peer, Session]] = {}
        self._ready: dict[int, None] = {}  # connections with a whole frame left over
        self._budget = Budget()
        self._questions: deque[Callable[[], None]] = deque()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._epoll.register(self._wake_out, select.EPOLLIN)
        self._listener = listen(path, MAX_CONNECTIONS)
        self._identity = identity(path)
        self._accepting = False
        self._accept(True)
        self._stop_at: float | None = None
        self._next_tick = time.monotonic() + TICK_S

    # ------------------------------------------------------------------------- from other threads
    def stop(self, drain_s: float) -> None:
        """End `run` as soon as no engine holds a lease, at the latest after `drain_s`."""
        self.ask(lambda: self._begin_stop(drain_s))

    def ask(self, question: Callable[[], None]) -> None:
        """Run `question` in the server's thread soon."""
        self._questions.append(question)
        self._wake()

    # -------------------------------------------------------------------------------------- loop
    def run(self) -> None:
        """Serve until stopped; SIGTERM and SIGINT stop, if this is the main thread."""
        try:
            while not self._over():
                self._turn()
        finally:
            self._close()

    def catch_signals(self) -> None:
        """From now on SIGTERM, SIGINT and SIGHUP end the server after its drain time, a second one at once."""

        def caught(_number: int, _frame: object) -> None:
            again = self._stop_at is not None
            self._begin_stop(0.0 if again else self.service.config.drain_s)

        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, caught)

    def _begin_stop(self, drain_s: float) -> None:
        at = time.monotonic() + drain_s
        self._stop_at = at if self._stop_at is None else min(at, self._stop_at)
        self.service.draining = True
        self._accept(False)

    def _over(self) -> bool:
        if self.service.shutdown is not None and self._stop_at is None:
            self._begin_stop(self.service.config.drain_s if self.service.shutdown else 0.0)
        if self._stop_at is None:
            return False
        return self.service.outstanding() == 0 or time.monotonic() >= self._stop_at

    def _turn(self) -> None:
        now = time.monotonic()
        timeout = 0.0 if self._ready else max(self._next_tick - now, 0.0)
        events = self._epoll.poll(timeout)
        now = time.monotonic()
        ready, self._ready = self._ready, {}
        for fd, mask in events:
            if fd in self._peers:
                self._attend(fd, mask, now)
            elif fd == self._listener.fileno():
                self._welcome()
            else:
                self._answer_questions()
        for fd in ready:
            if fd in self._peers:
                self._guard(fd, self._serve_one, now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._tick(now)

    def _answer_questions(self) -> None:
        try:
            while self._wake_out.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._questions:
            self._questions.popleft()()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"\0")
        except OSError:
            pass  # full: the loop wakes up anyway; closed: it has ended

    # ------------------------------------------------------------------------------- connections
    def _accept(self, on: bool) -> None:  # noqa: FBT001
        if on != self._accepting:
            self._accepting = on
            (self._epoll.register if on else self._epoll.unregister)(self._listener)

    def _welcome(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
                self._accept(False)  # until the next tick, or this would spin
                self.service.note("no file descriptor for a connection (see ulimit -n)")
            return
        sock.setblocking(False)
        pid, uid = peer_credentials(sock)
        if uid != os.geteuid():
            self.service.stats.counters["refused_uid"] += 1
            self.service.note(f"turned away uid {uid} (pid {pid})")
            self._turn_away(sock, f"this server belongs to uid {os.geteuid()}, not to uid {uid}")
        elif len(self._peers) >= MAX_CONNECTIONS:
            self.service.stats.counters["refused_limit"] += 1
            self._turn_away(sock, f"{MAX_CONNECTIONS} connections are open; no more are taken")
        else:
            peer = Peer(sock, self._budget)
            self._peers[peer.fd] = peer, self.service.open_session(sock)
            peer.events = select.EPOLLIN
            self._epoll.register(peer.fd, peer.events)

    def _turn_away(self, sock: socket.socket, reason: str) -> None:
        try:
            sock.send(frame(Error(self.service.boot, "refused", reason)))
        except OSError:
            pass
        sock.close()

    def _attend(self, fd: int, mask: int, now: float) -> None:
        peer = self._peers[fd][0]
        if mask & select.EPOLLOUT and peer.outbox:
            self._guard(fd, self._flush, now)
        elif mask & select.EPOLLIN:
            self._guard(fd, self._read, now)
        elif mask & (select.EPOLLHUP | select.EPOLLERR):
            self._drop(fd, "")

    def _guard(self, fd: int, act: Callable[[int, float], None], now: float) -> None:
        """Call `act`; an error that a connection causes ends only that connection."""
        try:
            act(fd, now)
        except Malformed as error:
            self.service.stats.counters["malformed_frames"] += 1
            self._drop(fd, str(error))
        except _BAD_FRAME as error:
            self.service.stats.counters["malformed_frames"] += 1
            self._drop(fd, f"not a message: {error}")
        except OSError:
            self._drop(fd, "")

    def _read(self, fd: int, now: float) -> None:
        peer = self._peers[fd][0]
        if peer.has_frame():
            self._ready[fd] = None
        elif peer.receive():
            self._serve_one(fd, now)
        else:
            self._drop(fd, "")

    def _serve_one(self, fd: int, now: float) -> None:
        peer, session = self._peers[fd]
        if not peer.outbox:
            body = peer.next_frame(now)
            if body is not None:
                session.last_activity = now
                self._reply(peer, self.service.handle(session, decode_request(body)), now)
                if session.hang_up:
                    self._drop(fd, "")
                    return
        self._await_next(peer)

    def _flush(self, fd: int, now: float) -> None:
        peer = self._peers[fd][0]
        peer.flush(now)
        self._await_next(peer)

    def _reply(self, peer: Peer, reply: Message, now: float) -> None:
        try:
            data = frame(reply)
        except ValueError as error:
            data = frame(Error(self.service.boot, "limit", f"the answer is too long: {error}"))
        peer.send(data, now)

    def _await_next(self, peer: Peer) -> None:
        """Choose the event to wait for next on this connection."""
        if peer.outbox:
            events = select.EPOLLOUT
        elif peer.waits_for_budget:
            events = 0
        else:
            events = select.EPOLLIN
            if len(peer.inbox) and peer.has_frame():
                self._ready[peer.fd] = None
        if events != peer.events:
            peer.events = events
            self._epoll.modify(peer.fd, events)

    def _drop(self, fd: int, reason: str) -> None:
        peer, session = self._peers.pop(fd)
        self._epoll.unregister(fd)
        peer.close()
        if reason:
            self.service.note(f"closed the connection of {session.title}: {reason}")
        self.service.close_session(session)

    # --------------------------------------------------------------------------------- every tick
    def _tick(self, now: float) -> None:
        if self._stop_at is None:
            self._accept(True)
        for fd, (peer, _) in list(self._peers.items()):
            reason = peer.overdue(now)
            if reason:
                self._drop(fd, reason)
            elif peer.waits_for_budget:
                self._guard(fd, self._serve_one, now)
        while sum(len(peer.outbox) for peer, _ in self._peers.values()) > OUTBOX_BUDGET:
            fd = max(self._peers, key=lambda fd: len(self._peers[fd][0].outbox))
            self._drop(fd, "left too much of its answers lying")
        self.service.tick(now)
        if self.service.scrub is not None and self._stop_at is None:
            self.service.scrub.run(self._idle)

    def _idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._ready and not self._epoll.poll(0, 1)

    def _close(self) -> None:
        for fd in list(self._peers):
            self._drop(fd, "")
        if identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        self._listener.close()
        self._epoll.close()
        self._wake_in.close()
        self._wake_out.close()
