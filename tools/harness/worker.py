"""A simulated worker: the real client, arena and copy engine; pages filled and checked by the oracle.

Started by engine.py with one JSON argument and a socket to its scheduler side. It outlives a killed scheduler
for as long as its current job takes, as a real worker does.
"""

import ctypes
import json
import multiprocessing.connection
import sys
from typing import Any

import numpy as np

from lmcache_shm.arena.job import CopyJob, Pages
from lmcache_shm.arena.layout import RING
from lmcache_shm.client.client import WorkerClient
from lmcache_shm.config import Config
from lmcache_shm.transfer import guard
from lmcache_shm.transfer.cpu import CpuEngine
from lmcache_shm.transfer.pages import Part, RawTensor, SlotLayout, group_pages
from tools.harness import failpoints
from tools.harness.payload import N_BLOCKS, SHAPES, page

Blocks = dict[int, list[np.ndarray]]


class Worker:
    """One rank of one engine."""

    def __init__(
        self, options: dict[str, Any], pipe: multiprocessing.connection.Connection
    ) -> None:
        self.rank = int(options["rank"])
        self.pipe = pipe
        self.blocks: Blocks = {
            group: [np.zeros((N_BLOCKS, nbytes), np.uint8) for _ in range(layers)]
            for group, (_, nbytes, layers) in SHAPES.items()
        }
        self.layouts = [self._layout(group) for group in SHAPES]
        self.engines: dict[bytes, CpuEngine] = {}
        self.replicas = int(options["replicas"])
        self.region_of = self.rank - self.rank % self.replicas  # replicas hold the same bytes
        self.client = WorkerClient(
            Config(instance=options["instance"]),
            options["engine_id"],
            self.rank,
            options["world"],
            self.replicas,
            [layout.region_bytes for layout in self.layouts],
        )
        if options.get("trusting"):  # negative control: believe every load
            guard.SlotGuard.changed_hands = lambda *_: ""  # type: ignore[method-assign]
        self.client.start()

    def _layout(self, group: int) -> SlotLayout:
        pages, nbytes, _ = SHAPES[group]
        tensors = [
            RawTensor(t.ctypes.data, t.shape, (nbytes, 1), 1, i)
            for i, t in enumerate(self.blocks[group])
        ]
        return SlotLayout([Part(group_pages(tensors, N_BLOCKS), pages)])

    def serve(self) -> None:
        """Jobs until the scheduler side is gone."""
        while True:
            try:
                order = self.pipe.recv()
            except (EOFError, OSError):
                return
            if order["do"] == "arm":
                failpoints.arm(order["fault"])
                continue
            if order["do"] == "reconnect":
                if self.client._connection is not None:
                    self.client._connection.shutdown()
                continue
            reply = self.run(order)
            try:
                self.pipe.send(reply)
            except OSError:
                return

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """One store or load; the reply says what became of it and how many bytes were wrong."""
        engine = self._engine(order["arena_id"])
        if engine is None:
            return {"job": order["job"], "ok": False, "reason": "arena", "wrong": 0}
        placed = self._place(order["items"])
        store = order["do"] == "store"
        if store and self.rank != self.region_of:
            return {
                "job": order["job"],
                "ok": True,
                "reason": "",
                "wrong": 0,
            }  # another rank writes it
        for item, numbers in placed:
            self._fill(item, numbers, wipe=not store)
        job = CopyJob.of(
            order["job"],
            order["do"],
            order["arena_id"],
            *([item[c] for item, _ in placed] for c in ("row", "offset", "generation", "group")),
            [[Pages(0, 0, numbers)] for _, numbers in placed],
        )
        regions = np.array(order["region_offsets"])[job.groups, self.rank]
        engine.submit(job, job.offsets + regions, deadline_s=100.0)
        engine.drain(120.0)
        (result,) = engine.poll()
        if store:
            self._tick(order, ok=result.ok)
        wrong = 0
        if result.ok and not store:
            wrong = sum(self._wrong(item, numbers) for item, numbers in placed)
        return {"job": order["job"], "ok": result.ok, "reason": result.reason, "wrong": wrong}

    def _tick(self, order: dict[str, Any], *, ok: bool) -> None:
        """Say on the completion board that this rank's copies are over."""
        assert self.client.arena is not None
        cell = order["client"], self.rank, order["job"] % RING
        self.client.arena.boards[cell] = order["job"] << 1 | int(ok)

    def _engine(self, arena_id: bytes) -> CpuEngine | None:
        self.client.wait(1.0)
        arena = self.client.arena
        if arena is None or self.client.arena_id != arena_id:
            return None
        if arena_id not in self.engines:
            self.engines[arena_id] = CpuEngine(arena, self.layouts, populate=False)
        return self.engines[arena_id]

    def _place(self, items: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[int]]]:
        """Blocks for each item; a job's items never share any."""
        at = dict.fromkeys(SHAPES, 0)
        placed = []
        for item in items:
            pages = SHAPES[item["group"]][0]
            first = at[item["group"]]
            at[item["group"]] += pages
            placed.append((item, [(first + p) * 7 % N_BLOCKS for p in range(pages)]))
        return placed

    def _fill(self, item: dict[str, Any], numbers: list[int], *, wipe: bool) -> None:
        for layer, tensor in enumerate(self.blocks[item["group"]]):
            for p, block in enumerate(numbers):
                tensor[block] = 0xA5 if wipe else self._expected(item, layer, p)

    def _wrong(self, item: dict[str, Any], numbers: list[int]) -> int:
        return sum(
            int(np.count_nonzero(tensor[block] != self._expected(item, layer, p)))
            for layer, tensor in enumerate(self.blocks[item["group"]])
            for p, block in enumerate(numbers)
        )

    def _expected(self, item: dict[str, Any], layer: int, number: int) -> np.ndarray:
        return page(item["key"], item["group"], self.region_of, layer * 16 + number)


def main() -> None:
    # Ends some time after its scheduler side, by itself (end of file); a forgotten one ends with the test run.
    ctypes.CDLL(None).prctl(1, 0)
    failpoints.install()
    options = json.loads(sys.argv[1])
    Worker(options, multiprocessing.connection.Connection(options["fd"])).serve()


if __name__ == "__main__":
    main()
