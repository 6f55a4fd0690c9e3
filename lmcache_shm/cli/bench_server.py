"""A private server for a measurement, and an engine that talks to it: a real process, a real arena.

Nothing of it outlives the context: the server is told to end and removes its segments; if this process
is killed, the server sees its parent's pipe close only when it writes, so it is also given a name that
``lmcache-shm purge`` recognises.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.segment import Arena, attach
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
)

Rows = npt.NDArray[np.int32]
CALL_S = 30.0
RUN = "from lmcache_shm.cli.app import main; main()"


@dataclass(frozen=True)
class PrivateServer:
    """A running server; ``ready_s`` from its start until it served."""

    instance: str
    socket: str
    pid: int
    ready_s: float
    arena_bytes: int


@contextmanager
def private_server(
    gib: float, chunk_size: int, *, prefault_threads: int = 2
) -> Iterator[PrivateServer]:
    """Start a server with ``gib`` GiB, and end it."""
    instance = f"bench-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="lmcache-shm-bench-") as folder:
        Path(folder).chmod(0o700)
        options = {
            "instance": instance,
            "runtime-dir": folder,
            "l1-size-gb": gib,
            "chunk-size": chunk_size,
            "log-format": "json",
            "prefault-threads": prefault_threads,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        began = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-c", RUN, "server", *words, "--fresh"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                ready = _await_ready(process)
                yield PrivateServer(
                    instance,
                    ready["socket"],
                    process.pid,
                    time.perf_counter() - began,
                    ready["arena_bytes"],
                )
            finally:
                process.terminate()
                process.communicate()


def _await_ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    if process.stdout is None:
        raise RuntimeError("the server has no output")
    for line in process.stdout:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("message") == "ready":
            return dict(record)
    errors = process.stderr.read() if process.stderr else ""
    raise RuntimeError(f"the server did not start: {errors.strip().splitlines()[-1:]}")


class BenchEngine:
    """Scheduler and one worker of an engine, as far as the server can tell."""

    def __init__(
        self,
        server: PrivateServer,
        groups: Sequence[GroupInfo],
        region_bytes: Sequence[int],
        chunk_size: int,
        name: str = "bench",
    ) -> None:
        self.chunk_size = chunk_size
        self._worker = self._connect(server, "worker", name)
        attach_worker = AttachWorker(name, 0, 1, 1, list(region_bytes))
        self._worker.call(attach_worker, Attached, CALL_S)
        self.scheduler = self._connect(server, "scheduler", name)
        self.descriptor = json.dumps({"bench": name}).encode()
        request = Register(name, 1, 1, chunk_size, self.descriptor, list(groups))
        self.registered = self.scheduler.call(request, Registered, CALL_S)
        if not self.registered.ready:
            raise RuntimeError(self.registered.message)
        self.arena: Arena = attach(server.instance, writable_data=True)

    @staticmethod
    def _connect(server: PrivateServer, role: str, name: str) -> Connection:
        return Connection.open(server.socket, Hello(PROTOCOL, role, name, os.getpid()), CALL_S)

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
        for i, row in enumerate(rows.tolist()):
            tokens = keys.token_bytes(first + i // len(groups))
            at = int(offsets[row]) + self.registered.token_offset[groups[i % len(groups)]]
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
