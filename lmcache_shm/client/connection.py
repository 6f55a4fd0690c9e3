"""One blocking connection to a server: a request, its reply, and a deadline over both."""

import os
import socket
import struct
import time
from typing import TypeVar

import msgspec

from lmcache_shm.arena.processes import peer_credentials
from lmcache_shm.protocol.messages import (
    LENGTH,
    MAX_FRAME,
    PROTOCOL,
    Error,
    Hello,
    HelloReply,
    Message,
    decode_reply,
    frame,
)

R = TypeVar("R", bound=Message)
NOT_OURS = "not_ours"
"""Code of a Refused that this side says itself: what is at the socket's path is another user's."""
_TIMEVAL = struct.Struct("@ll")
_RECEIVE = 64 << 10


class ControlError(Exception):
    """Something is wrong between client and server; `reason` is a counter's name."""

    reason = "error"


class Unavailable(ControlError):
    """Nobody listens, or the connection is broken."""

    reason = "no_server"


class DeadlineExceeded(ControlError):
    """No answer in time. The connection is of no use afterwards: the answer may still come."""

    reason = "deadline"


class ProtocolError(ControlError):
    """The peer does not speak this protocol."""

    reason = "protocol"


class Refused(ControlError):
    """The server answered with an Error: it did nothing."""

    reason = "refused"

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Connection:
    """Not thread-safe. After Unavailable, DeadlineExceeded or ProtocolError only `close` makes sense."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self.sock = sock
        self.deadline_s = deadline_s
        self._armed = -1.0
        self._buffer = bytearray(_RECEIVE)
        self._pid = os.getpid()
        self.hello: HelloReply

    @classmethod
    def open(cls, path: str, hello: Hello, deadline_s: float = 5.0) -> "Connection":
        """Connect to the socket at `path` and greet. Raises any ControlError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection = cls(sock, deadline_s)
        try:
            connection._arm(deadline_s)  # bounds connect(), too: it waits when the backlog is full
            try:
                sock.connect(path)
            except PermissionError:
                raise Refused(
                    NOT_OURS, f"{path} belongs to another user, or is closed to this one"
                ) from None
            except OSError as error:
                raise Unavailable(f"no server at {path}: {error.strerror or error}") from None
            _, uid = peer_credentials(sock)
            if uid != os.geteuid():
                raise Refused(
                    NOT_OURS,
                    f"the server at {path} belongs to uid {uid}, not to uid {os.geteuid()}",
                )
            connection.hello = connection.call(hello, HelloReply)
            if connection.hello.version != PROTOCOL:
                raise ProtocolError(
                    f"the server speaks protocol {connection.hello.version}, this is {PROTOCOL};"
                    " install the same lmcache-shm on both sides"
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def call(self, request: Message, reply: type[R], deadline_s: float | None = None) -> R:
        """Send `request`, return the answer. Raises a ControlError; Refused leaves the connection usable."""
        if os.getpid() != self._pid:
            raise Unavailable("the connection belongs to the process that forked this one")
        budget = self.deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + budget
        if budget != self._armed:
            self._arm(budget)
        try:
            try:
                self._send(frame(request), end)
            except BrokenPipeError:
                pass  # refused before the greeting: the reason is in the receive buffer
            answer = decode_reply(self._receive(end))
        except BlockingIOError:
            raise DeadlineExceeded(f"no answer within {budget * 1e3:.0f} ms") from None
        except OSError as error:
            raise Unavailable(f"the connection broke: {error.strerror or error}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"an answer that is none: {error}") from None
        if isinstance(answer, reply):
            return answer
        if isinstance(answer, Error):
            raise Refused(answer.code, answer.message)
        raise ProtocolError(f"expected {reply.__name__}, got {type(answer).__name__}")

    def shutdown(self) -> None:
        """End it from any thread, which wakes up the one that waits on it. The owner still has to `close`."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # already

    def close(self) -> None:
        self.sock.close()

    # The kernel's timeouts on a blocking socket cost no poll() per call, Python's own would.
    def _arm(self, seconds: float) -> None:
        seconds = max(seconds, 1e-4)
        value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._armed = seconds

    def _rearm(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise BlockingIOError
        self._arm(left)

    def _send(self, data: bytearray, end: float) -> None:
        sent = self.sock.send(data)
        while sent < len(data):
            self._rearm(end)
            with memoryview(data) as view:
                sent += self.sock.send(view[sent:])

    def _receive(self, end: float) -> memoryview:
        """The body of the next frame; valid until the next call."""
        got = self.sock.recv_into(self._buffer)
        need = LENGTH.size
        while True:
            if got >= LENGTH.size and need == LENGTH.size:
                need += LENGTH.unpack_from(self._buffer)[0]
                if need > MAX_FRAME + LENGTH.size:
                    raise ProtocolError(f"an answer of {need} bytes")
                if need > len(self._buffer):
                    self._buffer = self._buffer.ljust(need, b"\0")
            if got == need:
                view = memoryview(self._buffer)[LENGTH.size : need]
                if len(self._buffer) > _RECEIVE:  # do not keep the size of the largest answer ever
                    self._buffer = bytearray(_RECEIVE)
                return view
            if got > need:
                raise ProtocolError("an answer to nothing")
            if got == 0:
                raise ConnectionResetError(0, "the server closed it")
            self._rearm(end)
            with memoryview(self._buffer) as view:
                more = self.sock.recv_into(view[got:])
            if more == 0:
                raise ConnectionResetError(0, "the server closed it")
            got += more
