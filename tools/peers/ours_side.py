"""Our side: a server process, and in this process what the connector's scheduler and worker do with it.

Everything is counted from the Python list of token ids: hashing, the round trip, the exact-match
confirmation, the copies by one thread, and the commit after which the next lookup finds the chunk.
"""

import gc
import math
import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.job import CopyJob, Pages
from lmcache_shm.arena.slot import same_tokens
from lmcache_shm.cli.bench_transfer import TORCH_OFFSET
from lmcache_shm.client.client import CacheClient, WorkerClient
from lmcache_shm.config import connector_config
from lmcache_shm.protocol.keys import ChunkKeys, seed
from lmcache_shm.protocol.messages import GroupInfo, HelloReply, Register, Reserve
from lmcache_shm.transfer.cpu import CpuEngine
from lmcache_shm.transfer.pages import Part, RawTensor, SlotLayout, group_pages
from tools.peers.side import CONTROL, Shape, block_order, cpu_seconds, serve, token_ids
from tools.server_process import Server

Int16 = npt.NDArray[np.int16]


def like_a_tensor(shape: tuple[int, ...]) -> Int16:
    """Ones in memory like that of a large torch tensor: small memory pages, and where in one it begins.

    numpy asks for huge pages, which torch does not; the other sides have tensors.
    """
    nbytes = 2 * math.prod(shape)
    mapped = mmap.mmap(-1, nbytes + TORCH_OFFSET, mmap.MAP_PRIVATE)
    memory = np.frombuffer(mapped, dtype=np.uint8)
    array = memory[TORCH_OFFSET:].view(np.int16).reshape(shape)
    array[:] = 1
    return array


class Cache:
    """One model's KV arrays, registered with the server as an engine of one worker."""

    def __init__(self, server: Server, shape: Shape, model: str) -> None:
        self.shape, self.descriptor = shape, f'{{"model":"{model}"}}'.encode()
        blocks = shape.tokens // shape.block
        page = (blocks, shape.heads, shape.block, 2 * shape.head_size)
        self.arrays = [like_a_tensor(page) for _ in range(shape.layers)]
        tensors = [
            RawTensor(a.ctypes.data, a.shape, tuple(s // 2 for s in a.strides), 2, a.ctypes.data)
            for a in self.arrays
        ]
        pages = group_pages(tensors, blocks)
        self.layout = SlotLayout([Part(pages, shape.chunk // shape.block, 0)])
        extra = {"lmcache_shm.instance": server.instance, "lmcache_shm.deadline_ms": 60000}
        config = connector_config(extra)
        self.worker = WorkerClient(config, model, 0, 1, 1, [self.layout.region_bytes])
        self.client = CacheClient(config, model, self._register)
        self.worker.start()
        self.client.start()
        if not self.client.wait(20) or not self.worker.wait(20):
            raise RuntimeError(f"no connection\n{server.log_tail()}")
        assert self.client.registration is not None
        assert self.client.arena is not None
        assert self.worker.arena is not None
        self.place, self.arena = self.client.registration, self.client.arena
        self.engine = CpuEngine(self.worker.arena, [self.layout], threads=1)
        self.blocks = np.array(block_order(blocks, 5), dtype=np.int64)
        self.data = memoryview(self.arena.data_array)
        self.job = 0

    def _register(self, hello: HelloReply) -> Register:
        group = GroupInfo("full", "full", 0, [0], self.shape.layers, [self.shape.block], [])
        return Register(
            self.worker.engine_id, 1, 1, self.shape.chunk, self.descriptor, [group], b"", "compare"
        )

    def keys(self) -> ChunkKeys:
        return ChunkKeys(seed(self.descriptor), self.shape.chunk)

    def store(self, ids: list[int], *, copies: bool = True) -> list[float]:
        """Store all of a prompt, a prefill step at a time; seconds of each, commit included."""
        seconds, keys = [], self.keys()
        for start in range(0, self.shape.tokens, self.shape.step):
            end = min(start + self.shape.step, self.shape.tokens)
            began = time.perf_counter()
            first, last = len(keys), keys.extend(ids, end // self.shape.chunk)
            rows = self._reserve(keys, first, last)
            if copies:
                self._copy("store", rows, first)
            assert self.client.step(commit=rows) is not None
            seconds.append(time.perf_counter() - began)
        return seconds

    def prefill(self, ids: list[int]) -> float:
        """The control messages of a prefill: each step reserves, and commits what the last one stored."""
        keys, rows = self.keys(), []
        began = time.perf_counter()
        for end in range(self.shape.step, self.shape.tokens + 1, self.shape.step):
            first, last = len(keys), keys.extend(ids, end // self.shape.chunk)
            rows = self._reserve(keys, first, last, commit=rows)
        assert self.client.step(commit=rows) is not None
        return time.perf_counter() - began

    def _reserve(
        self, keys: ChunkKeys, first: int, last: int, commit: list[int] | None = None
    ) -> list[int]:
        n = last - first
        request = Reserve(
            bytes(2 * n),
            bytes(keys.keys[16 * first : 16 * last]),
            keys.parents(first, last),
            np.arange(first, last, dtype=np.uint32).tobytes(),
            bytes(keys.digests[16 * first : 16 * last]),
            bytes(8 * n),
        )
        stepped = self.client.step(reserve=request, commit=commit or ())
        assert stepped is not None
        rows = np.frombuffer(stepped.rows, dtype=np.int32)
        assert (rows >= 0).all(), rows
        at = self.arena.cold["offset"][rows] + self.place.token_offset[0]
        for start, chunk in zip(at.tolist(), range(first, last), strict=True):
            self.data[start : start + keys.chunk_bytes] = keys.token_bytes(chunk)
        return rows.tolist()

    def _copy(self, kind: Any, rows: list[int], first: int) -> None:
        region = self.place.region_offsets[0][0]
        per_chunk = self.shape.chunk // self.shape.block
        blocks = self.blocks[first * per_chunk : (first + len(rows)) * per_chunk].reshape(
            len(rows), -1
        )
        self.job += 1
        job = CopyJob.of(
            self.job,
            kind,
            b"",
            rows,
            self.arena.cold["offset"][rows],
            self.arena.hot["generation"][rows],
            [0] * len(rows),
            [[Pages(0, 0, ids)] for ids in blocks.tolist()],
        )
        self.engine.submit(job, job.offsets + region, deadline_s=600.0)
        assert self.engine.drain(600)
        (result,) = self.engine.poll()
        assert result.ok, result

    def lookup(self, ids: list[int]) -> tuple[list[int], float, int]:
        """Rows of the usable chunks, seconds from the list of ids to their number, the lease."""
        began = time.perf_counter()
        keys = self.keys()
        keys.extend(ids)
        answer = self.client.acquire(bytes(keys.keys), 0, len(ids) + 1)
        assert answer is not None
        rows = (
            np.frombuffer(answer.rows[0], dtype=np.int32) if answer.rows else np.empty(0, np.int32)
        )
        at = self.arena.cold["offset"][rows] + self.place.token_offset[0]
        tokens = keys.token_bytes(0, answer.n_chunks)
        if not same_tokens(self.arena.data, at, tokens):
            return [], time.perf_counter() - began, answer.lease
        return rows.tolist(), time.perf_counter() - began, answer.lease

    def retrieve(self, ids: list[int]) -> float:
        """Lookup, copy and release; seconds."""
        began = time.perf_counter()
        rows, _, lease = self.lookup(ids)
        assert len(rows) == self.shape.tokens // self.shape.chunk
        self._copy("load", rows, 0)
        self.client.step(release=[lease])
        return time.perf_counter() - began

    def close(self) -> None:
        self.engine.close()
        self.client.close()
        self.worker.close()


class Subject:
    """The operations that tools/compare_lmcache.py asks for; the same names as on LMCache's side."""

    def __init__(self, l1_gb: float, shape: dict[str, int]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="lmcshm-cmp-")
        os.environ["LMCACHE_SHM_RUNTIME_DIR"] = self.folder.name
        self.shape = Shape(**shape)
        self.server = Server("compare", chunk_size=self.shape.chunk, size_mb=l1_gb * 1024)
        self.big = Cache(self.server, self.shape, "big")
        self.small = Cache(self.server, CONTROL, "small")
        self._wait_for_memory(l1_gb)
        self.info = {"page_bytes": self.shape.token_bytes // self.shape.layers * self.shape.block}
        gc.disable()  # both sides run short; a collection in one round would be noise

    def _wait_for_memory(self, l1_gb: float) -> None:
        """Prefaulting goes on behind serving; the steady state is what is measured here."""
        while self.server.status()["arena"].get("prefaulted_bytes", 1 << 62) < l1_gb * 2**30 * 0.99:
            time.sleep(0.05)

    def copy(self, seed: int) -> dict[str, Any]:
        """Store and retrieve one request; seconds, and whether the bytes came back."""
        self.server.clear()
        cache, ids = self.big, token_ids(self.shape.tokens + 1, seed)
        for i, array in enumerate(cache.arrays):
            flat = array.reshape(-1)
            flat[:] = (np.arange(flat.size, dtype=np.int32) + i * 7919 + seed).astype(np.int16)
        probes = cache.arrays[:: max(1, self.shape.layers // 4)]
        expected = [a.copy() for a in probes]
        before = self._cpu()
        store_s = sum(cache.store(ids))
        store_cpu_s = self._cpu() - before
        for array in cache.arrays:
            array[:] = 0
        before = self._cpu()
        retrieve_s = cache.retrieve(ids)
        retrieve_cpu_s = self._cpu() - before
        equal = all(np.array_equal(a, b) for a, b in zip(expected, probes, strict=True))
        return {
            "store_s": store_s,
            "retrieve_s": retrieve_s,
            "store_cpu_s": store_cpu_s,
            "retrieve_cpu_s": retrieve_cpu_s,
            "right": equal,
        }

    def _cpu(self) -> float:
        assert self.server.process is not None
        return cpu_seconds(self.server.process.pid)

    def control(self, seed: int) -> dict[str, Any]:
        """The control messages of a 128k-token prompt: seconds; also with its 8 MiB of copies."""
        self.ids = token_ids(CONTROL.tokens, seed)
        alone = self.small.prefill(token_ids(CONTROL.tokens, seed + 1))
        return {"prefill_s": alone, "with_copies_s": sum(self.small.store(self.ids))}

    def lookup(self, tokens: int) -> dict[str, Any]:
        """Look up the first `tokens` of the prompt that `control` stored."""
        rows, seconds, lease = self.small.lookup(self.ids[:tokens])
        self.small.client.step(release=[lease])
        return {"seconds": seconds, "right": len(rows) == tokens // CONTROL.chunk}

    def round_trips(self, count: int) -> dict[str, Any]:
        """The smallest request that reaches the server: a lookup of nothing."""
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            assert self.small.client.acquire(b"", 0, 0) is not None
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds}

    def start(self, l1_gb: float) -> dict[str, Any]:
        """Start another server of that size: seconds until it serves, resident MiB when idle."""
        began = time.perf_counter()
        with Server("compare-start", size_mb=l1_gb * 1024) as server:
            seconds = time.perf_counter() - began
            time.sleep(1)
            assert server.process is not None
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            own = sum(
                int(line.split()[1])
                for line in status.splitlines()
                if line.startswith(("RssAnon", "RssFile"))
            )
        return {"start_s": seconds, "rss_mib": own / 1024}

    def close(self) -> None:
        self.small.close()
        self.big.close()
        self.server.close()
        self.folder.cleanup()


if __name__ == "__main__":
    serve(Subject, Subject.close)
