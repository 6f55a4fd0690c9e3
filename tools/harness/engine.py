"""A simulated engine: the real client, keys and leases; its workers are processes of their own.

Reads one JSON order per line and answers each with one JSON line; counts are totals since the start:
{"run": n, "seconds": s} random requests; {"document": d, "chunks": n} one request, {"look": true} without storing;
{"arm": failpoint, "rank": r} in a worker, or in this process without a rank; {"reconnect": true}; {"clear": true};
{"wait_up": s}; {"quit": true}.
"""

import ctypes
import json
import multiprocessing.connection
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from lmcache_shm.arena.layout import RING
from lmcache_shm.client.client import CacheClient, unpack_rows
from lmcache_shm.config import Config
from lmcache_shm.protocol.keys import KEY, ChunkKeys, seed
from lmcache_shm.protocol.messages import GroupInfo, HelloReply, Register, Reserve
from tools.harness import failpoints
from tools.harness.payload import CHUNK, SHAPES, tokens

MAX_CHUNKS = 10
DOCUMENTS = 24
ANSWER_S = 90.0
"""A worker that does not answer within this time makes its request a stuck one."""
LATE_S = 1.0
"""The deadline of a call is 0.25 s; a loaded machine gets some slack."""


class WorkerProcess:
    """A worker and the pipe to it."""

    def __init__(self, options: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        options = options | {"fd": theirs.fileno()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.harness.worker", json.dumps(options)],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.pipe = multiprocessing.connection.Connection(ours.detach())


class Engine:
    """See the module. Options: instance, engine_id, seed, world, replicas, space, trusting, hasty."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.world = int(options["world"])
        self.replicas = int(options["replicas"])
        self.random = random.Random(options["seed"])
        space = {"model": "simulated", "space": options.get("space", "")}
        self.descriptor = json.dumps(space).encode()
        self.counts: Counter[str] = Counter()
        self.job = random.Random(os.getpid()).randrange(1, 1 << 40)
        self.hit = self.stored = 0
        """Chunks of the last request."""
        self.workers = [self._start_worker(rank) for rank in range(self.world)]
        self.client = CacheClient(
            Config(instance=options["instance"]), options["engine_id"], self._register
        )
        self.client.start()

    def _start_worker(self, rank: int) -> WorkerProcess:
        names = ("instance", "engine_id", "world", "replicas", "trusting")
        return WorkerProcess({k: self.options.get(k) for k in names} | {"rank": rank})

    def _register(self, hello: HelloReply) -> Register:
        groups = [GroupInfo("full", "full"), GroupInfo("recurrent", "recurrent")]
        return Register(
            self.options["engine_id"],
            self.world,
            self.replicas,
            CHUNK,
            self.descriptor,
            groups,
            name="sim",
        )

    # ---------------------------------------------------------------------------------- requests
    def run(self, operations: int, seconds: float) -> None:
        """Random requests until so many were done with a server, or the time is over."""
        end = time.monotonic() + seconds
        goal = self.counts["operations"] + operations
        while self.counts["operations"] < goal and time.monotonic() < end:
            if self.client.up:
                self.counts["operations"] += 1
            else:
                time.sleep(0.02)  # what an engine computes meanwhile
                self._replace_dead_workers()
            self.request(self.random.randrange(DOCUMENTS), self.random.randint(1, MAX_CHUNKS))
            if self.random.random() < 0.02:
                self.client.clear()

    def request(self, document: int, chunks: int, *, store: bool = True) -> None:
        """Load what is cached of a document's first chunks, store the rest."""
        self.hit = self.stored = 0
        keys = ChunkKeys(seed(self.descriptor), CHUNK)
        keys.extend(tokens(document, chunks), chunks)
        began = time.monotonic()
        answer = self.client.acquire(bytes(keys.keys), 0, chunks * CHUNK + 1)
        self._waited(began)
        if answer is None:
            self.counts["unreachable"] += 1
        elif answer.lease:
            self.hit = answer.n_chunks
            self._load(keys, answer)
            self.client.step(release=[answer.lease])
        if store:
            self._store(keys, self.hit, chunks)

    def _waited(self, began: float) -> None:
        if time.monotonic() - began > LATE_S:
            self.counts["late"] += 1

    def _load(self, keys: ChunkKeys, answer: Any) -> None:
        arena, registration = self.client.arena, self.client.registration
        if arena is None or registration is None:
            return
        items = []
        for group, (first, packed) in enumerate(zip(answer.first, answer.rows, strict=True)):
            for i, row in enumerate(unpack_rows(packed)):
                key = keys.key(first + i)
                generation = int(arena.hot["generation"][row])
                if arena.cold["key"][row].tobytes() != key:
                    self.counts["not_confirmed"] += 1
                    return
                items.append((row, generation, group, key))
        replies = self._order("load", items)
        self.counts["hits"] += 1
        self.counts["hit_chunks"] += answer.n_chunks
        for reply in replies:
            self.counts["wrong"] += reply["wrong"]
            self.counts["loads_ok" if reply["ok"] else f"loads_{reply['reason']}"] += 1

    def _store(self, keys: ChunkKeys, hit: int, chunks: int) -> None:
        wanted = [(g, c) for c in range(hit, chunks) for g in SHAPES]
        arena, registration = self.client.arena, self.client.registration
        if not wanted or arena is None or registration is None:
            return
        n = len(wanted)
        reserve = Reserve(
            np.array([g for g, _ in wanted], "<u2").tobytes(),
            b"".join(keys.key(c) for _, c in wanted),
            b"".join(keys.key(c - 1) if c else keys.seed for _, c in wanted),
            np.array([c for _, c in wanted], "<u4").tobytes(),
            bytes(KEY * n),
            bytes(8 * n),
        )
        began = time.monotonic()
        stepped = self.client.step(reserve)
        self._waited(began)
        if stepped is None:
            return
        answers = unpack_rows(stepped.rows)
        rows = [(row, g, c) for row, (g, c) in zip(answers, wanted, strict=True) if row >= 0]
        self.counts["full"] += answers.count(-3)
        if not rows:
            return
        items = []
        for row, g, c in rows:
            at = int(arena.cold["offset"][row]) + registration.token_offset[g]
            arena.data[at : at + keys.chunk_bytes] = keys.token_bytes(c)
            items.append((row, int(arena.hot["generation"][row]), g, keys.key(c)))
        finished = [row for row, _, _ in rows]
        if self.options.get("hasty"):  # negative control: commit before the copies are done
            self.client.step(commit=finished)
        self._order("store", items)
        ok = self._on_board(arena, registration.client)
        lost = self.client.counts["commit_lost"]
        done = self.client.step(commit=finished if ok else (), abort=() if ok else finished)
        if ok and done is not None and self.client.counts["commit_lost"] == lost:
            self.stored = len({c for _, _, c in rows})
        self.counts["stored" if ok else "stores_failed"] += len(rows)

    def _on_board(self, arena: Any, client: int) -> bool:
        cells = arena.boards[client, : self.world : self.replicas, self.job % RING]
        return bool((cells == (self.job << 1 | 1)).all())

    def _order(self, do: str, items: list[tuple[int, int, int, bytes]]) -> list[dict[str, Any]]:
        """Have all workers do it; their replies. A dead worker is started anew, as an engine would be."""
        arena, registration = self.client.arena, self.client.registration
        assert arena is not None
        assert registration is not None
        self.job += 1
        order = {
            "do": do,
            "job": self.job,
            "arena_id": self.client.arena_id,
            "client": registration.client,
            "region_offsets": registration.region_offsets,
            "items": [
                {
                    "row": row,
                    "offset": int(arena.cold["offset"][row]),
                    "generation": generation,
                    "group": group,
                    "key": key,
                }
                for row, generation, group, key in items
            ],
        }
        for worker in self.workers:
            self._send(worker, order)
        return [reply for rank in range(self.world) if (reply := self._reply(rank)) is not None]

    def _send(self, worker: WorkerProcess, order: dict[str, Any]) -> None:
        try:
            worker.pipe.send(order)
        except OSError:
            pass  # its end is noticed when the answer is read

    def _reply(self, rank: int) -> dict[str, Any] | None:
        end = time.monotonic() + ANSWER_S
        worker = self.workers[rank]
        try:
            while worker.pipe.poll(max(0.0, end - time.monotonic())):
                reply: dict[str, Any] = worker.pipe.recv()
                if reply["job"] == self.job:
                    return reply
        except (EOFError, OSError):
            self._replace(rank)
            return None
        self.counts["stuck"] += 1
        return None

    def _replace_dead_workers(self) -> None:
        for rank, worker in enumerate(self.workers):
            if worker.process.poll() is not None:
                self._replace(rank)

    def _replace(self, rank: int) -> None:
        self.workers[rank].pipe.close()
        self.workers[rank].process.wait()
        self.counts["workers_restarted"] += 1
        self.workers[rank] = self._start_worker(rank)

    # -------------------------------------------------------------------------------------- orders
    def command(self, order: dict[str, Any]) -> dict[str, Any]:
        if "run" in order:
            self.run(order["run"], order["seconds"])
        if "document" in order:
            self.request(order["document"], order["chunks"], store=not order.get("look"))
        if "arm" in order:
            if "rank" in order:
                self._send(self.workers[order["rank"]], {"do": "arm", "fault": order["arm"]})
            else:
                failpoints.arm(order["arm"])
        if "reconnect" in order:
            self._reconnect()
        if "clear" in order:
            self.client.clear()
        if "wait_up" in order:
            self.client.wait(order["wait_up"])
        return {
            "counts": dict(self.counts),
            "up": self.client.up,
            "hit": self.hit,
            "stored": self.stored,
            "workers": [worker.process.pid for worker in self.workers],
        }

    def _reconnect(self) -> None:
        """As if the network had hiccuped: all connections of this engine break."""
        for worker in self.workers:
            self._send(worker, {"do": "reconnect"})
        connection = self.client._connection
        if connection is not None:
            connection.shutdown()

    def close(self) -> None:
        self.client.close()
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.wait(30)


def main() -> None:
    ctypes.CDLL(None).prctl(1, 15)
    failpoints.install()
    engine = Engine(json.loads(sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        if "quit" in order:
            break
        print(json.dumps(engine.command(order)), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
