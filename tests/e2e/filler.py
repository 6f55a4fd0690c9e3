"""Another engine, as far as the server can see: it takes all the room there is and writes its own bytes there."""

import contextlib

import numpy as np

from lmcache_shm.arena.segment import attach
from lmcache_shm.client.connection import Connection
from lmcache_shm.protocol.messages import (
    PROTOCOL,
    Attached,
    AttachWorker,
    GroupInfo,
    Hello,
    Register,
    Registered,
    Step,
    Stepped,
)
from tests.protocol.harness import Prefix, rows_of
from tools.server_process import Server

WAIT_S = 10.0
CHUNKS = 16
"""Of one prompt."""
DESCRIPTOR = b'{"model": "filler"}'


class Filler:
    """Its slots stay in the arena when it is closed."""

    def __init__(self, server: Server, chunk: int, region: int) -> None:
        """`chunk`: tokens that the server takes; `region`: bytes of one chunk's pages."""
        with contextlib.ExitStack() as undo:
            worker, scheduler = (
                Connection.open(str(server.socket), Hello(PROTOCOL, role, "filler"), WAIT_S)
                for role in ("worker", "scheduler")
            )
            undo.callback(worker.close)
            undo.callback(scheduler.close)
            worker.call(AttachWorker("filler", 0, 1, 1, [region]), Attached)
            groups = [GroupInfo("full", "full", 0, [0], 1, [16])]
            request = Register("filler", 1, 1, chunk, DESCRIPTOR, groups, name="filler")
            answer = scheduler.call(request, Registered)
            assert answer.ready, answer.message
            self.slot_bytes = answer.slot_bytes[0]
            self._scheduler = scheduler
            self._arena = attach(server.instance, writable_data=True)
            undo.callback(self._arena.close)
            self.close = undo.pop_all().close

    def fill(self, rows: list[int]) -> list[int]:
        """Store several times what the arena holds; those of `rows` that nobody has taken all the same."""
        generations = self._arena.hot["generation"]
        before = generations[rows].copy()
        for number in range(3 * self._arena.data_bytes // (CHUNKS * self.slot_bytes)):
            self._store(Prefix(number, CHUNKS, DESCRIPTOR))
        kept = generations[rows] == before
        return [row for row, same in zip(rows, kept, strict=True) if same]

    def _store(self, prefix: Prefix) -> int:
        rows = [row for row in rows_of(self._step(prefix.reserve(1))) if row >= 0]
        for row in rows:
            start = int(self._arena.cold["offset"][row])
            self._arena.data_array[start : start + int(self._arena.cold["slot_bytes"][row])] = 0x3B
        self._step(commit=np.array(rows, "<i4").tobytes())
        return len(rows)

    def _step(self, *reserve: object, **fields: object) -> bytes:
        return self._scheduler.call(Step(*reserve, **fields), Stepped, WAIT_S).rows  # type: ignore[arg-type]
