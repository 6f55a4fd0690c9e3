"""Malformed frames by the million against a real server: it must neither end, nor stall, nor grow.

    python -m tools.fuzz_frames --frames 1000000 --seed 1
    python -m tools.fuzz_frames --guided 300        # coverage-guided (needs atheris), in this process

Frames are mutations of valid messages and random msgpack, framed rightly or wrongly, in pieces of any
size, on many connections at a time. Beside them an honest client stores and looks up all the time.
"""

import argparse
import contextlib
import itertools
import logging
import os
import random
import shutil
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from lmcache_shm.client.reconnect import socket_path
from lmcache_shm.config import Config
from lmcache_shm.protocol.messages import (
    LENGTH,
    PROTOCOL,
    Acquire,
    AttachWorker,
    Clear,
    GroupInfo,
    Hello,
    List,
    Message,
    Register,
    Report,
    Reserve,
    Status,
    Step,
    frame,
)
from tools.harness.cluster import Cluster

CONNECTIONS = 24
FRAMES = 24
"""At most, on one connection."""


def samples() -> list[bytes]:
    """Bodies of valid messages of every kind but Shutdown and Drain, which a server obeys."""
    groups = [GroupInfo("full", "full"), GroupInfo("window", "window", 64)]
    reserve = Reserve(b"\0\0" * 3, b"k" * 48, b"p" * 48, b"\1\0\0\0" * 3, b"d" * 48, bytes(24))
    messages: list[Message] = [
        Hello(PROTOCOL, "scheduler", "engine", 1, {"a": 1, "b": "c"}),
        AttachWorker("engine", 0, 1, 1, [1000, 2000]),
        Register("engine", 1, 1, 64, b"{}", groups, b"\1\0\0\0", "model"),
        Acquire(b"k" * 160, 5, 700, 77),
        Step(reserve, b"\0" * 8, b"\1\0\0\0", [1, 2, 1 << 40]),
        Report({"deadline": 3}),
        Clear(0, b"salt"),
        Status(),
        List(-1, 5),
    ]
    return [bytes(frame(message))[LENGTH.size :] for message in messages]


class Fuzzer:
    """Makes bodies."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.samples = samples()

    def body(self) -> bytes:
        """One that is not a Shutdown or Drain."""
        while True:
            kind = self.random.random()
            if kind < 0.75:
                body = self.mutated(self.random.choice(self.samples))
            elif kind < 0.9:
                body = msgspec.msgpack.encode([self.random.choice(NAMES), *self.values(9)])
            else:
                body = self.random.randbytes(self.random.randrange(64))
            if b"Shut" not in body and b"Drain" not in body:
                return body

    def mutated(self, body: bytes) -> bytes:
        data = bytearray(body)
        for _ in range(self.random.randint(0, 4)):
            kind, at = self.random.randrange(5), self.random.randrange(len(data) + 1)
            if kind == 0 and at < len(data):
                data[at] = self.random.randrange(256)
            elif kind == 1:
                data[at:at] = self.random.randbytes(self.random.randint(1, 8))
            elif kind == 2:
                del data[at : at + self.random.randint(1, 8)]
            elif kind == 3:
                data += data[: self.random.randint(0, 64)]
            elif at < len(data):
                data[at : at + 4] = struct.pack("<I", self.random.getrandbits(32))
        return bytes(data)

    def values(self, most: int, depth: int = 0) -> list[object]:
        return [self.value(depth) for _ in range(self.random.randrange(most + 1))]

    def value(self, depth: int) -> object:
        pick = self.random.randrange(8 if depth < 4 else 6)
        numbers = (0, 1, -1, 127, 1 << 31, (1 << 63) - 1, -(1 << 63), self.random.getrandbits(40))
        simple = (
            None, self.random.random() < 0.5, self.random.choice(numbers), self.random.random() * 1e300,
            self.random.randbytes(self.random.randrange(100)), "x" * self.random.randrange(40),
        )  # fmt: skip
        if pick < 6:
            return simple[pick]
        if pick == 6:
            return self.values(5, depth + 1)
        return {str(i): value for i, value in enumerate(self.values(5, depth + 1))}

    def stream(self, n: int) -> bytes:
        """`n` frames; now and then the last one announces another length than it has."""
        bodies = [self.body() for _ in range(n)]
        lengths = [len(body) for body in bodies]
        if self.random.random() < 0.05:
            lengths[-1] = self.random.choice([0, lengths[-1] + 1, 1 << 24, (1 << 32) - 1])
        pairs = zip(lengths, bodies, strict=True)
        return b"".join(LENGTH.pack(length) + body for length, body in pairs)


NAMES = [
    "AttachWorker",
    "Register",
    "Acquire",
    "Step",
    "Report",
    "Clear",
    "Status",
    "List",
    "Check",
    "",
]
GREETINGS = [
    bytes(frame(Hello(PROTOCOL, role, "fuzz"))) for role in ("scheduler", "worker", "tool")
]


class Flood:
    """Frames over many connections side by side, in pieces of any size."""

    def __init__(self, path: str, seed: int) -> None:
        self.path = path
        self.fuzzer = Fuzzer(seed)
        self.random = self.fuzzer.random
        self.looked_at = self.answered = 0
        """Frames that the server has read (what follows a malformed one it does not), and answered."""

    def round(self) -> None:
        """CONNECTIONS connections, each with a greeting and some frames; all answers are read."""
        sent = [(self._open(), self.random.randint(1, FRAMES)) for _ in range(CONNECTIONS)]
        for sock, n in sent:
            stream = self.random.choice(GREETINGS) + self.fuzzer.stream(n)
            with contextlib.suppress(ConnectionError):
                for piece in self._pieces(stream):
                    sock.sendall(piece)
                sock.shutdown(socket.SHUT_WR)
        for sock, n in sent:
            answers = self._answers(sock) - 1  # without that of the greeting
            self.answered += answers
            self.looked_at += min(n, answers + 1)  # one more, if that one ended it
            sock.close()

    def _open(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(30)
        sock.connect(self.path)
        return sock

    def _pieces(self, stream: bytes) -> list[bytes]:
        if self.random.random() < 0.7:
            return [stream]
        cuts = sorted(self.random.randrange(len(stream)) for _ in range(self.random.randint(1, 6)))
        return [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)]) if b > a]

    @staticmethod
    def _answers(sock: socket.socket) -> int:
        got = bytearray()
        with contextlib.suppress(ConnectionError):
            while more := sock.recv(1 << 16):
                got += more
        count = at = 0
        while at + LENGTH.size <= len(got):
            at += LENGTH.size + LENGTH.unpack_from(got, at)[0]
            count += 1
        return count


def private_bytes(pid: int) -> int:
    """Memory of the server that is its own (the arena is shared)."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def flood(frames: int, seed: int) -> dict[str, float]:
    """Send so many frames to a server of its own, with an honest engine beside; what was seen.

    Raises AssertionError when the server ended, grew by more than 32 MiB, or kept the engine waiting for
    more than a second, when the engine got wrong bytes, or when the tables do not agree afterwards.
    """
    with Cluster(f"test-{os.getpid()}-fuzz", "--log-level", "error") as cluster:
        cluster.start_server()
        (engine,) = cluster.add_engines({"world": 1})
        engine.ask(run=20, seconds=20.0)
        assert cluster.server is not None
        many = Flood(str(socket_path(Config(instance=cluster.instance))), seed)
        many.round()
        before = private_bytes(cluster.server.pid)
        began = said = time.monotonic()
        while many.looked_at < frames:
            many.round()
            cluster.collect(0.0)
            if not engine.asked:
                engine.tell(run=20, seconds=5.0)
            if time.monotonic() > said + 30:
                said = time.monotonic()
                print(f"{many.looked_at:,} frames in {said - began:.0f} s", flush=True)
        seconds = time.monotonic() - began
        grown = private_bytes(cluster.server.pid) - before
        status = cluster.status()
        assert status is not None, "the server does not answer"
        total = cluster.prove()
        assert grown < 32 << 20, f"the server has grown by {grown >> 20} MiB"
        assert cluster.restarts == 0, "the server has ended"
        assert total["late"] == 0, f"the engine was kept waiting: {dict(total)}"
        return {
            "frames looked at": many.looked_at,
            "frames a second": round(many.looked_at / seconds),
            "answered": many.answered,
            "malformed": status["counters"]["malformed_frames"],
            "denied": status["counters"]["denied"],
            "internal failures": status["counters"]["failures"],
            "server grown by, KiB": grown >> 10,
            "operations of the engine beside": total["operations"],
            "its misses of the deadline": total["unreachable"],
            "its wrong bytes": total["wrong"],
        }


def guided(seconds: int, folder: Path) -> None:
    """Coverage-guided, without returning: decoding, framing and every verb of a service without sockets."""
    import atheris

    with atheris.instrument_imports(include=["lmcache_shm"]):
        from lmcache_shm.arena.segment import create
        from lmcache_shm.protocol.messages import Drain, Shutdown, decode_request
        from lmcache_shm.server.catalog.catalog import Catalog
        from lmcache_shm.server.handlers import Service

    arena = create(f"test-{os.getpid()}-guided", 1 << 26, chunk_size=64, separate=True)
    arena.unlink()  # its mapping is enough
    service = Service(arena, Catalog(arena), Config(instance="guided"))
    ours, _theirs = socket.socketpair()

    def one(data: bytes) -> None:
        """A greeting, and the frames in `data`: u16 length | body."""
        session = service.open_session(ours)
        try:
            service.handle(session, Hello(PROTOCOL, "scheduler", "engine"))
            while len(data) > 2 and not session.hang_up:
                n = int.from_bytes(data[:2], "little")
                body, data = data[2 : 2 + n], data[2 + n :]
                try:
                    request = decode_request(body)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    break
                if not isinstance(request, Shutdown | Drain):
                    frame(service.handle(session, request))
        finally:
            service.close_session(session)
        if service.stats.counters["failures"]:  # its traceback was logged
            raise RuntimeError(f"a request failed inside the service: {data!r}")

    logging.disable(logging.WARNING)  # every connection that is denied something is an event
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, body in enumerate(samples()):
        (corpus / str(number)).write_bytes(len(body).to_bytes(2, "little") + body)
    flags = [f"-max_total_time={seconds}", "-max_len=4096", "-rss_limit_mb=8192"]
    atheris.Setup([sys.argv[0], *flags, f"-artifact_prefix={folder}/", str(corpus)], one)
    atheris.Fuzz()  # ends the process


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz_frames", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--guided", type=int, metavar="SECONDS", help="coverage-guided instead (needs atheris)"
    )
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix=f"lmcshm-test-{os.getpid()}-"))
    os.environ["LMCACHE_SHM_RUNTIME_DIR"] = str(folder)
    try:
        if options.guided:
            child = os.fork()
            if child == 0:
                guided(options.guided, folder)
            _, status = os.waitpid(child, 0)
            return os.waitstatus_to_exitcode(status)
        for what, n in flood(options.frames, options.seed).items():
            print(f"{what:34}{n:>12,}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
