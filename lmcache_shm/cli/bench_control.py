"""How long a scheduler waits for the server, beside a bare Unix-socket echo in the same run.

The server is a private one in a process of its own with a real arena. The context ends it, and it removes
its segments; if this process is killed before, `lmcache-shm purge` finds them by their name.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.segment import Arena, attach
from lmcache_shm.arena.slot import same_tokens
from lmcache_shm.cli.bench_results import Row, quantiles, row, samples
from lmcache_shm.client.connection import Connection
from lmcache_shm.protocol.keys import ChunkKeys, seed
from lmcache_shm.protocol.messages import (
    PROTOCOL,
    Acquire,
    Acquired,
    Attached,
    AttachWorker,
    GroupInfo,
    Hello,
    Register,
    Registered,
    Reserve,
    Step,
    Stepped,
    frame,
)

Rows = npt.NDArray[np.int32]
CALL_S = 30.0
CHUNK, TOKENS, STEP_TOKENS = 256, 128 << 10, 2048
CHUNKS = TOKENS // CHUNK
PROMPTS = 5
"""Prompts whose prefill is measured."""
GROUPS = [
    GroupInfo("full", "full"),
    GroupInfo("window", "window", 1024),
    GroupInfo("state", "recurrent"),
]
REGION_BYTES = [2048, 1024, 512]  # small: this is about the catalog, not about bytes
ALL = range(len(GROUPS))
PREFAULTING = "prefaulting"

ECHO = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
peer, _ = listener.accept()
while data := peer.recv(65536):
    peer.sendall(data)
"""
"""A process that sends back what it gets, for one client: what a Unix socket costs without us."""


# ------------------------------------------------------------------------------ server, engine, echo
@dataclass(frozen=True)
class PrivateServer:
    """A running server; `ready_s` from its start until it served."""

    instance: str
    socket: str
    ready_s: float = 0.0


@contextmanager
def private_server(gib: float, chunk_size: int) -> Iterator[PrivateServer]:
    """Start a server with `gib` GiB, and end it. Raises RuntimeError with its last line when it does not start."""
    instance = f"bench-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="lmcache-shm-bench-") as folder:  # mode 0700
        command = [
            *(sys.executable, "-m", "lmcache_shm", "server", "--fresh", "--log-format", "json"),
            *("--instance", instance, "--runtime-dir", folder),
            *("--l1-size-gb", str(gib), "--chunk-size", str(chunk_size)),
        ]
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                ready = process.stdout.readline() if process.stdout else ""
                ready_s = time.perf_counter() - began
                if not ready:
                    errors = process.communicate()[1].strip().splitlines()
                    raise RuntimeError(f"the server did not start: {''.join(errors[-1:])}")
                yield PrivateServer(instance, json.loads(ready)["socket"], ready_s)
            finally:
                process.terminate()
                process.communicate()


class BenchEngine:
    """Scheduler and one worker of an engine, as the server sees them."""

    def __init__(
        self,
        server: PrivateServer,
        groups: Sequence[GroupInfo],
        region_bytes: Sequence[int],
        chunk_size: int,
        name: str = "bench",
        *,
        descriptor: bytes = b'{"bench": "bench"}',
        model: str = "",
    ) -> None:
        """`name`: the engine's id. Raises ControlError, or RuntimeError when the server is not ready for it."""
        self.chunk_size = chunk_size
        self._worker = self._connect(server.socket, "worker", name)
        attach_worker = AttachWorker(name, 0, 1, 1, list(region_bytes))
        self._worker.call(attach_worker, Attached, CALL_S)
        self.scheduler = self._connect(server.socket, "scheduler", name)
        self.descriptor = descriptor
        request = Register(name, 1, 1, chunk_size, descriptor, list(groups), name=model)
        self.registered = self.scheduler.call(request, Registered, CALL_S)
        if not self.registered.ready:
            raise RuntimeError(self.registered.message)
        self.arena: Arena = attach(server.instance, writable_data=True)

    @staticmethod
    def _connect(path: str, role: str, name: str) -> Connection:
        return Connection.open(path, Hello(PROTOCOL, role, name, os.getpid()), CALL_S)

    def keys(self, token_ids: list[int]) -> ChunkKeys:
        """Chain keys of all whole chunks."""
        keys = ChunkKeys(seed(self.descriptor), self.chunk_size)
        keys.extend(token_ids)
        return keys

    def wait_for_memory(self) -> None:
        """Until the server has prefaulted its arena: it does so behind serving, on the same cores."""
        give_up = time.monotonic() + CALL_S
        while self.arena.live["prefaulted"] < self.arena.data_bytes:
            if time.monotonic() > give_up:
                raise RuntimeError("the server does not come to an end with prefaulting")
            time.sleep(0.01)

    def reserve(self, keys: ChunkKeys, groups: Sequence[int], first: int, end: int) -> Rows:
        """Slots for chunks [first, end) of every group, chunk by chunk; negative where there is none."""
        answer = self.scheduler.call(
            Step(reserve=reservation(keys, groups, first, end)), Stepped, CALL_S
        )
        return np.frombuffer(answer.rows, "<i4").copy()

    def write_tokens(self, keys: ChunkKeys, groups: Sequence[int], first: int, rows: Rows) -> None:
        """Put the token bytes where a reader confirms them."""
        data, offsets = self.arena.data, self.arena.cold["offset"]
        for i, slot in enumerate(rows.tolist()):
            tokens = keys.token_bytes(first + i // len(groups))
            at = int(offsets[slot]) + self.registered.token_offset[groups[i % len(groups)]]
            data[at : at + len(tokens)] = tokens

    def commit(self, rows: Rows) -> None:
        self.scheduler.call(Step(commit=rows.astype("<i4").tobytes()), Stepped, CALL_S)

    def acquire(self, keys: ChunkKeys, num_tokens: int) -> Acquired:
        return self.scheduler.call(Acquire(bytes(keys.keys), 0, num_tokens), Acquired, CALL_S)

    def release(self, lease: int) -> None:
        self.scheduler.call(Step(release=[lease]), Stepped, CALL_S)

    def close(self) -> None:
        self.scheduler.close()
        self._worker.close()
        self.arena.close()


def reservation(keys: ChunkKeys, groups: Sequence[int], first: int, end: int) -> Reserve:
    """Entries for chunks [first, end), each of every group."""
    n, g = end - first, len(groups)

    def each(packed: bytes | bytearray) -> bytes:
        """16 bytes of every chunk, once a group."""
        return np.frombuffer(packed, "V16").repeat(g).tobytes()

    return Reserve(
        groups=np.array(groups, "<u2").tobytes() * n,
        keys=each(keys.keys[first * 16 : end * 16]),
        parents=each(keys.parents(first, end)),
        chunks=np.arange(first, end, dtype="<u4").repeat(g).tobytes(),
        digests=each(keys.digests[first * 16 : end * 16]),
        salts=bytes(8 * n * g),
    )


@contextmanager
def echo_peers(count: int = 1, program: str = ECHO) -> Iterator[list[socket.socket]]:
    """Connections to one process that runs `program` (its arguments: socket path, `count`)."""
    with tempfile.TemporaryDirectory(prefix="lmcache-shm-bench-") as folder:
        path = str(Path(folder) / "echo")
        command = [sys.executable, "-c", program, path, str(count)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            if process.stdout is not None:
                process.stdout.readline()
            peers = [socket.socket(socket.AF_UNIX) for _ in range(count)]
            try:
                for peer in peers:
                    peer.connect(path)
                yield peers
            finally:
                for peer in peers:
                    peer.close()
                process.terminate()


# -------------------------------------------------------------------------------------- measurements
Part = Callable[[PrivateServer, int, Callable[[str], None]], list[Row]]
"""(server, rounds, step) → rows."""


def run(rounds: int, step: Callable[[str], None], more: Sequence[Part] = ()) -> list[Row]:
    """All rows; `step` is called with a label before each part. `more` is measured on the same server."""
    step("socket echo")
    message = bytes(frame(Step()))
    with echo_peers() as (peer,):

        def bounce() -> None:
            peer.sendall(message)
            peer.recv(65536)

        samples(bounce, 500)
        echo = statistics.median(samples(bounce, 200 * rounds)) / 1e-6
    rows = [row("bare Unix-socket echo", echo, "µs")]
    with private_server(1.0, CHUNK) as server:
        rows.append(row("start to ready, 1 GiB arena", server.ready_s, "s", 1.0))
        engine = BenchEngine(server, GROUPS, REGION_BYTES, CHUNK)
        try:
            step(PREFAULTING)
            engine.wait_for_memory()
            step("empty round trip")
            rows += empty_round_trip(engine, echo, rounds)
            step("128k-token prefills, in steps")
            rows += prefills(engine)
            step("look-up of a 128k-token prompt")
            rows += look_up(engine, prompt(0), rounds)
            step("scheduler steps")
            rows += steps(engine, rounds)
            for part in more:
                rows += part(server, rounds, step)
        finally:
            engine.close()
    return rows


def empty_round_trip(engine: BenchEngine, echo_us: float, rounds: int) -> list[Row]:
    def empty() -> None:
        engine.scheduler.call(Step(), Stepped)

    samples(empty, 500)
    p50, p99 = quantiles(samples(empty, 200 * rounds), 1e-6)
    return [
        row("empty round trip", p50, "µs", p99=p99),
        row("empty round trip / echo", p50 / echo_us, "x", 3.0),
    ]


def prompt(number: int, tokens: int = TOKENS) -> list[int]:
    """Made-up token ids."""
    ids: list[int] = np.random.default_rng(number).integers(0, 150_000, tokens).tolist()
    return ids


def prefills(engine: BenchEngine) -> list[Row]:
    """The control of whole prefills; the first prompt finds everything cold and does not count."""
    hashing, control = zip(
        *[prefill(engine, prompt(i)) for i in range(PROMPTS + 1)][1:], strict=True
    )
    whole, worst = quantiles([a + b for a, b in zip(hashing, control, strict=True)], 1e-3)
    steps_made = TOKENS // STEP_TOKENS
    return [
        row("prefill of 128k tokens, per step", whole / steps_made, "ms", 1.0),
        row("prefill of 128k tokens, hashing and control in all", whole, "ms", 20.0, worst),
        row("  of it hashing", statistics.median(hashing) / 1e-3, "ms"),
    ]


def prefill(engine: BenchEngine, tokens: list[int]) -> tuple[float, float]:
    """Hash, commit the last step's chunks and reserve this one's, for every step of a long prompt.

    Seconds spent hashing, and asking.
    """
    keys = ChunkKeys(seed(engine.descriptor), CHUNK)
    committed, hashing, control = b"", 0.0, 0.0
    for end in range(STEP_TOKENS, TOKENS + 1, STEP_TOKENS):
        start = time.perf_counter()
        first = len(keys)
        last = keys.extend(tokens, end // CHUNK)
        hashed = time.perf_counter()
        request = Step(reserve=reservation(keys, ALL, first, last), commit=committed)
        committed = engine.scheduler.call(request, Stepped).rows
        hashing += hashed - start
        control += time.perf_counter() - hashed
        rows = np.frombuffer(committed, "<i4")
        if (rows < 0).any():
            raise RuntimeError("the arena of the benchmark has no room")
        engine.write_tokens(keys, ALL, first, rows)  # the worker's side, not the scheduler's
    start = time.perf_counter()
    engine.scheduler.call(Step(commit=committed), Stepped)
    return hashing, control + time.perf_counter() - start


def look_up(engine: BenchEngine, tokens: list[int], rounds: int) -> list[Row]:
    """From the list of token ids to the number of usable tokens: hash, ask, confirm."""
    data, cold, hot = engine.arena.data, engine.arena.cold, engine.arena.hot
    token_offset = engine.registered.token_offset[0]
    times: dict[str, list[float]] = {"hash": [], "ask": [], "confirm": [], "all": []}
    for _sample in range(10 * rounds):
        start = time.perf_counter()
        keys = engine.keys(tokens)
        hashed = time.perf_counter()
        hit = engine.acquire(keys, TOKENS + 1)
        answered = time.perf_counter()
        found = np.frombuffer(hit.rows[0], "<i4")
        if not same_tokens(data, cold["offset"][found] + token_offset, keys.token_bytes(0, CHUNKS)):
            raise RuntimeError("a chunk is not what was stored")
        if cold["extra_digest"][found].any() or not hot["pins"][found].all():
            raise RuntimeError("a chunk has another identity, or is not pinned")
        end = time.perf_counter()
        for name, a, b in (
            ("hash", start, hashed),
            ("ask", hashed, answered),
            ("confirm", answered, end),
            ("all", start, end),
        ):
            times[name].append(b - a)
        if hit.n_chunks != CHUNKS:
            raise RuntimeError(f"a hit of {hit.n_chunks} chunks instead of {CHUNKS}")
        engine.release(hit.lease)
    server_us = statistics.median(times["ask"]) / 1e-6
    whole, worst = quantiles(times["all"], 1e-3)
    return [
        row("hashing, per token", statistics.median(times["hash"]) / TOKENS / 1e-9, "ns", 12.0),
        row("look-up of 128k tokens, 3 groups: all", whole, "ms", 2.5, worst, 6.0),
        row("  of it asking the server", statistics.median(times["ask"]) / 1e-3, "ms"),
        row("  of it confirming token ids", statistics.median(times["confirm"]) / 1e-3, "ms"),
        row("asking, per key and group", server_us / CHUNKS / len(GROUPS), "µs", 0.5),
    ]


def steps(engine: BenchEngine, rounds: int) -> list[Row]:
    """One scheduler step that completes 8 chunks of 3 groups: commit, reserve, release in one message."""
    made = [engine.keys(prompt(1000 + i, 8 * CHUNK)) for i in range(10 * rounds)]
    times, committed = [], b""
    for keys in made:
        start = time.perf_counter()
        request = Step(reserve=reservation(keys, ALL, 0, 8), commit=committed)
        committed = engine.scheduler.call(request, Stepped).rows
        times.append(time.perf_counter() - start)
    engine.scheduler.call(Step(commit=committed), Stepped)
    p50, p99 = quantiles(times, 1e-3)
    return [row("step with 8 chunks completed, 3 groups", p50, "ms", 1.0, p99)]
