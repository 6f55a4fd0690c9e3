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

from lmcache_shm.arena.job import CopyJob
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.client.client import CacheClient, pack_rows, unpack_rows
from lmcache_shm.client.in_flight import InFlightStores
from lmcache_shm.client.plan import CachePlan, ObjectGroup
from lmcache_shm.client.registration import Registration
from lmcache_shm.config import Config
from lmcache_shm.protocol.keys import ChunkKeys, seed
from lmcache_shm.protocol.messages import KEY, GroupInfo, HelloReply, Register, Registered, Reserve
from lmcache_shm.protocol.rules import Full, Recurrent
from tools.harness import failpoints
from tools.harness.payload import CHUNK, SHAPES, tokens

PLAN = CachePlan(
    CHUNK, (ObjectGroup("full", Full(), ()), ObjectGroup("recurrent", Recurrent(), ()))
)
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
        self.loads = 0
        self.hit = self.stored = 0
        """Chunks of the last request."""
        self.workers = [self._start_worker(rank) for rank in range(self.world)]
        self.client = CacheClient(
            Config(instance=options["instance"]),
            options["engine_id"],
            self._register,
            self._registered,
        )
        self.latest: Registration | None = None
        self.stores = InFlightStores(self.client, lambda: self.latest)
        # Workers of an engine that was killed may still report its jobs.
        self.stores._next_id = random.Random(os.getpid()).randrange(1, 1 << 40)
        self.client.start()

    def _start_worker(self, rank: int) -> WorkerProcess:
        names = ("instance", "engine_id", "world", "replicas", "trusting")
        return WorkerProcess({k: self.options.get(k) for k in names} | {"rank": rank})

    def _register(self, hello: HelloReply) -> Register:
        groups = [GroupInfo("full", "full"), GroupInfo("recurrent", "recurrent")]
        self.register = Register(
            self.options["engine_id"],
            self.world,
            self.replicas,
            CHUNK,
            self.descriptor,
            groups,
            pack_rows(self.stores.busy(hello.arena_id)),
            name="sim",
        )
        return self.register

    def _registered(self, registered: Registered, hello: HelloReply) -> None:
        assert self.client.arena is not None
        self.latest = Registration.of(registered, hello, self.client.arena, PLAN, self.register)

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
        self.loads += 1
        replies = self._order(-self.loads, "load", items)
        self.counts["hits"] += 1
        self.counts["hit_chunks"] += answer.n_chunks
        for reply in replies:
            self.counts["wrong"] += reply["wrong"]
            self.counts["loads_ok" if reply["ok"] else f"loads_{reply['reason']}"] += 1

    def _store(self, keys: ChunkKeys, hit: int, chunks: int) -> None:
        wanted = [(g, c) for c in range(hit, chunks) for g in SHAPES]
        registration = self.latest
        if not wanted or registration is None:
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
        stepped = self.stores.flush(lambda _: reserve)
        self._waited(began)
        if stepped is None:
            return
        answers = unpack_rows(stepped.rows)
        granted = [(row, g, c) for row, (g, c) in zip(answers, wanted, strict=True) if row >= 0]
        self.counts["full"] += answers.count(-3)
        if not granted:
            return
        arena, rows, groups = (
            registration.arena,
            [row for row, _, _ in granted],
            [g for _, g, _ in granted],
        )
        offsets, generations = arena.cold["offset"][rows], arena.hot["generation"][rows]
        items = []
        for (row, g, c), offset, generation in zip(
            granted, offsets.tolist(), generations.tolist(), strict=True
        ):
            at = offset + registration.token_offset[g]
            arena.data[at : at + keys.chunk_bytes] = keys.token_bytes(c)
            items.append((row, generation, g, keys.key(c)))
        job = CopyJob.of(
            self.stores.next_id,
            "store",
            registration.arena_id,
            rows,
            offsets,
            generations,
            groups,
            [],
        )
        self.stores.add(registration, job, [(g, keys.key(c)) for _, g, c in granted], [])
        if self.options.get("hasty"):  # negative control: commit before the copies are done
            self.client.step(commit=rows)
        self._order(job.id, "store", items)
        ok = self._finish(job)
        if ok and (arena.hot["state"][rows] == SlotState.COMMITTED).all():
            self.stored = len({c for _, _, c in granted})
        self.counts["stored" if ok else "stores_failed"] += len(rows)

    def _finish(self, job: CopyJob) -> bool:
        """Commit or abort the rows of a store whose workers have answered, or died; whether all have reported it."""
        self.stores.flush()
        if not self.stores.storing:
            return True
        self.stores.refuse({job.id: set(range(self.world))})
        self.stores.flush()
        return False

    def _order(
        self, job: int, do: str, items: list[tuple[int, int, int, bytes]]
    ) -> list[dict[str, Any]]:
        """Have all workers do it; their replies. A dead worker is started anew, as an engine would be."""
        arena, registration = self.client.arena, self.client.registration
        assert arena is not None
        assert registration is not None
        order = {
            "do": do,
            "job": job,
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
        return [
            reply for rank in range(self.world) if (reply := self._reply(rank, job)) is not None
        ]

    def _send(self, worker: WorkerProcess, order: dict[str, Any]) -> None:
        try:
            worker.pipe.send(order)
        except OSError:
            pass  # its end is noticed when the answer is read

    def _reply(self, rank: int, job: int) -> dict[str, Any] | None:
        end = time.monotonic() + ANSWER_S
        worker = self.workers[rank]
        try:
            while worker.pipe.poll(max(0.0, end - time.monotonic())):
                reply: dict[str, Any] = worker.pipe.recv()
                if reply["job"] == job:
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
