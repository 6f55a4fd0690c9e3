"""The engine's side of the control socket: never raises into the engine, never waits past the deadline.

CacheClient belongs to the scheduler side, WorkerClient to each worker. Both dial in the background,
map the arena, re-register after a server restart, and answer "miss" (None) while the link is down.
"""

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lmcache_shm.client.connection import (
    Connection,
    ControlError,
    DeadlineExceeded,
    ProtocolError,
    Refused,
    Unavailable,
)
from lmcache_shm.client.reconnect import HELLO_S, Link
from lmcache_shm.config import Config
from lmcache_shm.protocol.messages import (
    Acquire,
    Acquired,
    Attached,
    AttachWorker,
    Done,
    HelloReply,
    Message,
    Register,
    Registered,
    Report,
    Reserve,
    Step,
    Stepped,
    facts_digest,
)

__all__ = [
    "CacheClient",
    "Connection",
    "ControlError",
    "DeadlineExceeded",
    "ProtocolError",
    "Refused",
    "Unavailable",
    "WorkerClient",
]

R = TypeVar("R", bound=Message)
NOT_READY_S = 0.05
REPORT_S = 5.0


class CacheClient(Link):
    """Scheduler side. `on_connect(hello)` returns the Register of this engine; it is called in the client's
    thread at each (re)connection and raises ValueError (one line) when the model cannot be cached by this
    server: then `refusal` holds the line and the cache stays off until a server accepts. The descriptor has to hold
    `facts`: before the workers have said something of themselves it is empty, and when that has changed
    `on_connect` is called again.
    `on_registered(registered, hello)`, if given, runs there too, before the client is `up`.

    Rows that `step` reserved belong to its registration. Rows of a broken connection cannot be committed any more;
    those that are still being written are named in the next Register, and aborted under it (see `in_flight`).
    Leases of a broken connection are gone; releasing them is harmless.
    """

    role = "scheduler"

    def __init__(
        self,
        config: Config,
        engine_id: str,
        on_connect: Callable[[HelloReply], Register],
        on_registered: Callable[[Registered, HelloReply], None] | None = None,
    ) -> None:
        super().__init__(config, engine_id)
        self.registration: Registered | None = None
        """Of the current or last connection; `registration.ready` is True."""
        self.facts: list[bytes] = []
        """By rank, what the workers say of themselves."""
        self._on_connect = on_connect
        self._on_registered = on_registered
        self._leases: set[int] = set()
        self._reported = time.monotonic()

    # ------------------------------------------------------------------------------------ serving
    def acquire(
        self, keys: bytes, local_tokens: int, num_tokens: int, replaces: int = 0
    ) -> Acquired | None:
        """Look up and pin a prefix (see messages.Acquire). None: treat it as a miss."""

        def ask(connection: Connection, left_s: float | None) -> Acquired:
            known = replaces if replaces in self._leases else 0
            request = Acquire(keys, local_tokens, num_tokens, known)
            answer = connection.call(request, Acquired, left_s)
            self._leases.discard(known)
            if answer.lease:
                self._leases.add(answer.lease)
            return answer

        return self._serve(ask)

    def step(
        self,
        reserve: Reserve | None = None,
        commit: Iterable[int] = (),
        abort: Iterable[int] = (),
        release: Iterable[int] = (),
        registered: Registered | None = None,
    ) -> Stepped | None:
        """One batch of a scheduler step (see messages.Step). None: nothing was reserved or published, and
        what was to be released is released with the connection.

        `registered`: what the rows belong to. When another registration is in use by now, leases are released
        and nothing else is done (None: whichever it is).
        """
        good, bad = pack_rows(commit), pack_rows(abort)

        def ask(connection: Connection, left_s: float | None) -> Stepped | None:
            current = registered is None or registered is self.registration
            leases = [lease for lease in release if lease in self._leases]
            answer = Stepped(connection.hello.boot)
            if leases or (current and (reserve or good or bad)):
                step = Step(reserve, good, bad, leases) if current else Step(release=leases)
                answer = connection.call(step, Stepped, left_s)
                self._leases.difference_update(leases)
            return answer if current else None

        return self._serve(ask)

    def clear(self, salt: bytes | None = None) -> int | None:
        """Forget this engine's namespace (or one salt in it); the number of chunks, None on trouble."""
        from lmcache_shm.protocol.messages import Clear  # noqa: PLC0415  (rare)

        namespace = self.registration.namespace if self.registration else -1
        if namespace < 0:
            return None
        answer = self._serve(lambda c, left: c.call(Clear(namespace, salt), Done, left))
        return None if answer is None else answer.count

    def count(self, reason: str, n: int = 1) -> None:
        """Add to a counter that the server shows among the reasons of misses."""
        self.counts[reason] += n

    # ------------------------------------------------------------------------------------ inside
    def _serve(self, ask: Callable[[Connection, float | None], R | None]) -> R | None:
        """The result of `ask(connection, time left)`, within the deadline; None, counted, on any failure."""
        if not self.up:  # before the lock: a thread may be dialling or waiting
            self.counts["no_server"] += 1
            return None
        deadline = self.config.deadline_ms / 1e3
        began = time.monotonic()
        if not self._lock.acquire(timeout=deadline):
            self.counts["deadline"] += 1
            return None
        try:
            connection = self._connection
            if connection is None:
                self.counts["no_server"] += 1
                return None
            waited = time.monotonic() - began
            # None: the connection's own deadline, which is armed already.
            left = None if waited < 1e-3 else max(deadline - waited, 1e-3)
            try:
                return ask(connection, left)
            except ControlError as error:
                self.counts[error.reason] += 1
                self._break(connection, error)
            except ValueError as error:  # a request beyond the frame limit; nothing was sent
                self.counts["too_large"] += 1
                self._say(str(error), warn=True)
            return None
        finally:
            self._lock.release()

    def _lost(self) -> None:
        self._leases.clear()

    def _greet(self, connection: Connection) -> None:
        hello = connection.hello
        while True:
            request = self._on_connect(hello)
            request.facts = facts_digest(self.facts)
            answer = connection.call(request, Registered, HELLO_S)
            if answer.ready:
                break
            if answer.facts:
                self.facts = answer.facts
            elif not self._pause(NOT_READY_S):
                raise Unavailable("closed")
        self.registration = answer
        if self._on_registered is not None:
            self._on_registered(answer, hello)

    def _idle(self, connection: Connection) -> None:
        now = time.monotonic()
        if now - self._reported < REPORT_S or not self._lock.acquire(blocking=False):
            return
        self._reported = now
        try:
            counts = {k: v for k, v in self.counts.items() if v}
            if counts and self._connection is connection:
                connection.call(Report(counts), Done, self.config.deadline_ms / 1e3)
                for reason, n in counts.items():
                    self.counts[reason] -= n
        except ControlError as error:
            self._break(connection, error)
        finally:
            self._lock.release()


class WorkerClient(Link):
    """Worker side: registers this rank, with its `facts`, by holding a connection open, and maps the arena.

    `on_attached(hello)`, if given, runs in the client's thread at each attachment, before `up`.
    """

    role = "worker"

    def __init__(
        self,
        config: Config,
        engine_id: str,
        rank: int,
        world: int,
        replicas: int,
        region_bytes: Sequence[int],
        on_attached: Callable[[HelloReply], None] | None = None,
        facts: bytes = b"",
    ) -> None:
        super().__init__(config, engine_id)
        self.client = -1
        """Index of the engine in the arena's boards; -1 before the first attachment."""
        self._request = AttachWorker(engine_id, rank, world, replicas, list(region_bytes), facts)
        self._on_attached = on_attached

    def _greet(self, connection: Connection) -> None:
        self.client = connection.call(self._request, Attached, HELLO_S).client
        if self._on_attached is not None:
            self._on_attached(connection.hello)


def pack_rows(rows: Iterable[int]) -> bytes:
    rows = list(rows)
    return struct.pack(f"<{len(rows)}i", *rows)


def unpack_rows(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}i", packed)
