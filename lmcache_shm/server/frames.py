"""Bytes of one connection on the server's side: whole frames out of a stream, bounded both ways.

For each peer the server holds at most one answer and one frame: of up to SMALL bytes, or a larger one when its
length fits into the budget that all connections share. Until that answer is taken no
further request of this peer is read, so neither a flood nor a reader that stopped grows anything.
"""

import socket

from lmcache_shm.protocol.messages import LENGTH, MAX_FRAME

SMALL = 64 << 10
LARGE_BUDGET = 48 << 20
"""Bytes of large frames that may be underway at once, over all connections."""
LARGE_S = 10.0
"""A large frame holds its share of the budget no longer than this."""
STALLED_S = 30.0
"""A peer that takes nothing of its answer for this long is dropped."""


class Malformed(Exception):
    """The peer sent bytes that are no frame, or sent them too slowly."""


class Budget:
    """Bytes that large frames may still take."""

    def __init__(self, total: int = LARGE_BUDGET) -> None:
        self.left = total

    def take(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True


class Peer:
    """One accepted connection, non-blocking."""

    def __init__(self, sock: socket.socket, budget: Budget) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.budget = budget
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.granted = 0  # bytes of the shared budget that the frame underway holds
        self.large_since = 0.0
        self.stalled_since = 0.0
        self.waits_for_budget = False
        self.events = 0  # those that the loop waits for

    # -------------------------------------------------------------------------------------- in
    def receive(self) -> bool:
        """Take the bytes that have arrived, up to one frame's worth. False: the peer has closed its end.

        Call only without a whole frame in the inbox. OSErrors of the socket pass through.
        """
        want = SMALL
        if self.granted:
            want = min(LENGTH.size + self.granted - len(self.inbox), 1 << 20)
        try:
            data = self.sock.recv(want)
        except BlockingIOError:
            return True
        if not data:
            return False
        self.inbox += data
        return True

    def next_frame(self, now: float) -> bytearray | memoryview | None:
        """The body of the first whole frame, None when there is none yet. Raises Malformed.

        Sets `waits_for_budget` when a large frame has to wait for others'.
        """
        have = len(self.inbox)
        if have < LENGTH.size:
            return None
        body = LENGTH.unpack_from(self.inbox)[0]
        if body > MAX_FRAME:
            raise Malformed(f"a frame of {body} bytes (at most {MAX_FRAME})")
        end = LENGTH.size + body
        if have < end:
            if body > SMALL and not self.granted:
                self.waits_for_budget = not self.budget.take(body)
                if not self.waits_for_budget:
                    self.granted = body
                    self.large_since = now
            return None
        if have == end:  # nearly always
            frame, self.inbox = self.inbox, bytearray()
        else:
            frame, self.inbox = self.inbox[:end], self.inbox[end:]
        self._release()
        return memoryview(frame)[LENGTH.size :]

    def has_frame(self) -> bool:
        """Whether `next_frame` has a result without more bytes: a whole frame, or a bad length."""
        have = len(self.inbox)
        if have < LENGTH.size:
            return False
        body: int = LENGTH.unpack_from(self.inbox)[0]
        return have >= LENGTH.size + body or body > MAX_FRAME

    # ------------------------------------------------------------------------------------- out
    def send(self, data: bytearray, now: float) -> None:
        """Hand an answer to the kernel; bytes that it does not take wait in the outbox (`flush`)."""
        if self.outbox:
            self.outbox += data
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self.outbox = data[sent:]
            self.stalled_since = now

    def flush(self, now: float) -> None:
        try:
            sent = self.sock.send(self.outbox)
        except BlockingIOError:
            return
        if sent:
            self.stalled_since = now
            del self.outbox[:sent]

    # ------------------------------------------------------------------------------------- end
    def overdue(self, now: float) -> str:
        """Why this peer has to go, or ""."""
        if self.outbox and now - self.stalled_since > STALLED_S:
            return f"took nothing of its answer for {STALLED_S:.0f} s"
        if self.granted and now - self.large_since > LARGE_S:
            return f"did not finish a large frame within {LARGE_S:.0f} s"
        return ""

    def close(self) -> None:
        self._release()
        self.sock.close()

    def _release(self) -> None:
        self.budget.left += self.granted
        self.granted = 0
