"""Real servers, and engines that are nothing but their control traffic."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lmcache_shm.arena.check import check
from lmcache_shm.arena.segment import attach
from lmcache_shm.client.connection import Connection
from lmcache_shm.config import Config
from lmcache_shm.protocol.keys import ChunkKeys, seed
from lmcache_shm.protocol.messages import (
    LENGTH,
    PROTOCOL,
    Acquire,
    Acquired,
    Attached,
    AttachWorker,
    GroupInfo,
    Hello,
    Message,
    Register,
    Registered,
    Reserve,
    Step,
    Stepped,
    decode_reply,
    frame,
)
from tools.harness.wait import until
from tools.server_process import Server

CHUNK = 16
REGION = 3333  # nasty, to expose rounding
WAIT_S = 10.0


class ServerProcess(Server):
    """A small server, started with the command that users type; ready when the constructor returns."""

    def __init__(
        self, instance: str, *flags: str, wrap: Sequence[str] = (), **environment: str
    ) -> None:
        command = ("-m", "lmcache_shm")
        super().__init__(
            instance, size_mb=64, flags=flags, env=environment, program=command, wrap=wrap
        )
        self.path = str(self.socket)

    def tool(self) -> Connection:
        return Connection.open(self.path, Hello(PROTOCOL, "tool"), WAIT_S)

    def findings(self) -> list[str]:
        """What the server and an onlooker find wrong with the table."""
        told = self.check()
        arena = attach(self.instance, writable_data=False)
        try:
            return told + check(arena, live=True)
        finally:
            arena.close()

    def raw(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(self.path)  # blocking: waits while the backlog is full
        sock.settimeout(WAIT_S)
        return sock

    def config(self, **options: object) -> Config:
        return Config(instance=self.instance, runtime_dir=str(Path(self.path).parent), **options)


def assert_clean(server: ServerProcess) -> None:
    """No pins, no reservations, no quarantine, and the table is consistent."""

    def idle() -> bool:
        slots = server.status()["arena"]["slots"]
        return slots["pinned"] == slots["reserved"] == slots["quarantined"] == 0

    until(idle, "pins, reservations and quarantine drained")
    assert server.findings() == []


# ------------------------------------------------------------------------------------------ frames
def exchange(sock: socket.socket, message: Message) -> Message:
    sock.sendall(frame(message))
    return receive(sock)


def receive(sock: socket.socket) -> Message:
    body = LENGTH.unpack(_exactly(sock, LENGTH.size))[0]
    return decode_reply(_exactly(sock, body))


def _exactly(sock: socket.socket, n: int) -> bytes:
    got = bytearray()
    while len(got) < n:
        more = sock.recv(n - len(got))
        if not more:
            raise ConnectionResetError("closed")
        got += more
    return bytes(got)


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed this connection, after all that it had to say."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


# ----------------------------------------------------------------------------------------- engines
GROUPS = [
    GroupInfo("full", "full", 0, [0], 2, [16]),
    GroupInfo("window", "window", 40, [1], 2, [16]),
]


class Prefix:
    """The chunks of one made-up prompt."""

    def __init__(self, number: int, chunks: int, descriptor: bytes = b"{}") -> None:
        self.number = number
        hashed = ChunkKeys(seed(descriptor), CHUNK)
        hashed.extend([number * 100_000 + t for t in range(chunks * CHUNK)])
        self.encoded = [bytes(hashed.token_bytes(i)) for i in range(chunks)]
        self.keys = bytes(hashed.keys)
        self.parents = seed(descriptor) + self.keys[:-16]
        self.chunks = chunks
        self.tokens = chunks * CHUNK

    def reserve(self, groups: int = len(GROUPS)) -> Reserve:
        """All chunks in all groups; group after group."""
        n = self.chunks
        return Reserve(
            groups=np.repeat(np.arange(groups, dtype="<u2"), n).tobytes(),
            keys=self.keys * groups,
            parents=self.parents * groups,
            chunks=np.tile(np.arange(n, dtype="<u4"), groups).tobytes(),
            digests=bytes(16 * n * groups),
            salts=bytes(8 * n * groups),
        )

    def acquire(self, local_tokens: int = 0, replaces: int = 0) -> Acquire:
        return Acquire(self.keys, local_tokens, self.tokens + 1, replaces)


def rows_of(packed: bytes) -> list[int]:
    return np.frombuffer(packed, "<i4").tolist()


def registration(engine_id: str, world: int = 1, **changes: object) -> Register:
    request = Register(engine_id, world, 1, CHUNK, b"{}", list(GROUPS), name="made-up")
    for name, value in changes.items():
        setattr(request, name, value)
    return request


class Engine:
    """An engine with one worker, both in this process, on plain connections."""

    def __init__(self, server: ServerProcess, engine_id: str = "engine", **changes: object) -> None:
        self.engine_id = engine_id
        with contextlib.ExitStack() as undo:
            self.worker = Connection.open(server.path, Hello(PROTOCOL, "worker", engine_id), WAIT_S)
            undo.callback(self.worker.close)
            request = AttachWorker(engine_id, 0, 1, 1, [REGION] * len(GROUPS))
            self.attached = self.worker.call(request, Attached)
            hello = Hello(PROTOCOL, "scheduler", engine_id)
            self.scheduler = Connection.open(server.path, hello, WAIT_S)
            undo.callback(self.scheduler.close)
            self.registered = self.scheduler.call(registration(engine_id, **changes), Registered)
            undo.pop_all()

    def step(self, reserve: Reserve | None = None, **fields: object) -> list[int]:
        return rows_of(self.scheduler.call(Step(reserve, **fields), Stepped).rows)

    def acquire(self, prefix: Prefix, **fields: object) -> Acquired:
        return self.scheduler.call(prefix.acquire(**fields), Acquired)

    def store(self, prefix: Prefix) -> list[int]:
        """Reserve and commit all of a prefix."""
        rows = self.step(prefix.reserve())
        new = np.array([row for row in rows if row >= 0], "<i4")
        self.step(commit=new.tobytes())
        return rows

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


@contextlib.contextmanager
def engine(server: ServerProcess, engine_id: str = "engine", **changes: object) -> Iterator[Engine]:
    made = Engine(server, engine_id, **changes)
    try:
        yield made
    finally:
        made.close()


class WorkerProcess:
    """A worker in a process of its own, which does nothing but hold its connection (and live)."""

    PROGRAM = """
import sys
from lmcache_shm.client.connection import Connection
from lmcache_shm.protocol.messages import *
path, engine_id, rank, world, region = sys.argv[1:]
c = Connection.open(path, Hello(PROTOCOL, "worker", engine_id), 10.0)
c.call(AttachWorker(engine_id, int(rank), int(world), 1, [int(region)] * 2), Attached)
print("attached", flush=True)
for line in sys.stdin:
    if line == "close\\n":
        c.close()
        print("closed", flush=True)
"""

    def __init__(
        self, server: ServerProcess, engine_id: str, rank: int = 0, world: int = 1
    ) -> None:
        arguments = [server.path, engine_id, str(rank), str(world), str(REGION)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        if self._says() != "attached":
            self.end()
            raise AssertionError("the worker was not let in")

    def _says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def drop_connection(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("close\n")
        self.process.stdin.flush()
        assert self._says() == "closed"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
