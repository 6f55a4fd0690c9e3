"""LMCache's multi-process mode, as a vLLM worker and scheduler use it. Runs in a venv with lmcache 0.5.6.

It starts `lmcache server` itself, registers CPU KV tensors through lmcache's own transfer context, and
sends the requests that its vLLM connector sends. Modes: `lmcache_driven` (the server maps the worker's
tensors and copies) and `engine_driven` (the worker copies into the server's shared-memory pool).
"""

import os

os.environ |= {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
}

import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from tools.peers.side import CONTROL, Shape, block_order, cpu_seconds, serve, token_ids

TIMEOUT = 600.0
# A finished store is not visible to a lookup at once: the server commits from a thread that polls.
SETTLE = 0.2


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class LMCacheServer:
    """`lmcache server` as a child process; `start_s` is the time until /healthcheck answers."""

    def __init__(self, mode: str, l1_gb: float, chunk: int) -> None:
        self.port, http = free_port(), free_port()
        command = [
            str(Path(sys.executable).with_name("lmcache")), "server", "--l1-size-gb", str(l1_gb),
            "--eviction-policy", "LRU", "--port", str(self.port), "--http-port", str(http),
            "--chunk-size", str(chunk), "--max-gpu-workers", "1", "--supported-transfer-mode", mode,
        ]  # fmt: skip
        if mode == "engine_driven":
            command += ["--no-l1-use-lazy", "--shm-name", f"lmcache-compare-{self.port}"]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the server)
        started = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        while True:
            if self.process.poll() is not None or time.perf_counter() - started > 180:
                self.stop()
                raise RuntimeError("lmcache server did not start")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{http}/healthcheck", timeout=1):
                    break
            except (OSError, urllib.error.URLError):
                time.sleep(0.01)
        self.start_s = time.perf_counter() - started

    def rss_mib(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        return 0.0

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Cache:
    """One model's KV tensors, registered with the server."""

    def __init__(self, client: Any, mode: str, shape: Shape, model: str, instance: int) -> None:
        self.client, self.shape, self.model = client, shape, model
        blocks = shape.tokens // shape.block
        self.tensors = {
            f"l{i}": torch.ones(
                blocks, shape.heads, shape.block, 2 * shape.head_size, dtype=torch.bfloat16
            )
            for i in range(shape.layers)
        }
        self.context = create_transfer_context(
            self.tensors, instance_id=instance, req_client=client, mode=mode
        )
        group = EngineGroupInfo(
            engine_group_id=0,
            layer_indices=tuple(range(shape.layers)),
            tokens_per_block=shape.block,
        )
        self.context.register(
            self.tensors, model, 1, shape.chunk // shape.block, TIMEOUT,
            layout_hints={"kv_layout": "HND"}, engine_group_infos=[group], engine_type=EngineType.VLLM,
        )  # fmt: skip
        self.blocks = block_order(blocks, 5)

    def key(self, ids: list[int], request: str, start: int, end: int) -> Any:
        return IPCCacheServerKey(
            model_name=self.model, world_size=1, worker_id=0, token_ids=tuple(ids),
            start=start, end=end, request_id=request, num_kv_readers=1,
        )  # fmt: skip

    def table(self, start: int, end: int) -> list[list[int]]:
        return [self.blocks[start // self.shape.block : end // self.shape.block]]

    def store(self, ids: list[int], request: str) -> list[float]:
        """Store all of a prompt, a prefill step at a time; seconds of each."""
        seconds, shape = [], self.shape
        for start in range(0, shape.tokens, shape.step):
            end = min(start + shape.step, shape.tokens)
            ready = self.context.create_recorded_event()
            began = time.perf_counter()
            # The whole prompt is known to the scheduler, and travels with every store.
            future = self.context.submit_store(
                request, self.key(ids, request, start, end), self.tensors, self.table(start, end),
                ready, shape.chunk // shape.block,
            )  # fmt: skip
            stored = future.result(timeout=TIMEOUT)
            seconds.append(time.perf_counter() - began)
            assert stored
        self.client.end_session(request).result(timeout=TIMEOUT)
        return seconds

    def lookup(self, ids: list[int], request: str) -> tuple[int, float, Any]:
        """Chunks found, seconds from the list of ids to that number, the key."""
        end = len(ids) // self.shape.chunk * self.shape.chunk
        began = time.perf_counter()
        key = self.key(ids, request, 0, end).no_worker_id_version()
        self.client.lookup(key, 1).result(timeout=TIMEOUT)
        while (found := self.client.query_prefetch_status(request).result(timeout=TIMEOUT)) is None:
            pass
        return int(found), time.perf_counter() - began, key

    def retrieve(self, ids: list[int], request: str) -> float:
        ready = self.context.create_recorded_event()
        began = time.perf_counter()
        future = self.context.submit_retrieve(
            request, self.key(ids, request, 0, self.shape.tokens), self.tensors,
            self.table(0, self.shape.tokens), ready, self.shape.chunk // self.shape.block,
            skip_first_n_tokens=0,
        )  # fmt: skip
        assert future.result(timeout=TIMEOUT)
        seconds = time.perf_counter() - began
        self.client.end_session(request).result(timeout=TIMEOUT)
        return seconds

    def close(self) -> None:
        future = self.context.unregister()
        if future is not None:
            future.result(timeout=TIMEOUT)
        self.context.close()


class Subject:
    """The operations that tools/compare_lmcache.py asks for."""

    def __init__(self, mode: str, l1_gb: float, shape: dict[str, int]) -> None:
        torch.set_num_threads(1)
        self.mode, self.shape = mode, Shape(**shape)
        self.server = LMCacheServer(mode, l1_gb, self.shape.chunk)
        self.client = RequestClientFactory.create(
            f"tcp://localhost:{self.server.port}", context=zmq.Context()
        )
        self.big = Cache(self.client, mode, self.shape, "big", 1001)
        self.small = Cache(self.client, mode, CONTROL, "small", 1002)
        self.requests = 0
        self.info = {
            "mode": mode,
            "page_bytes": self.shape.token_bytes // self.shape.layers * self.shape.block,
        }

    def _request(self) -> str:
        self.requests += 1
        return f"request-{self.requests}"

    def copy(self, seed: int) -> dict[str, Any]:
        """Store and retrieve one request; seconds, and whether the bytes came back."""
        self.client.clear(True).result(timeout=TIMEOUT)
        cache, ids = self.big, token_ids(self.shape.tokens + 1, seed)
        for i, tensor in enumerate(cache.tensors.values()):
            flat = tensor.view(torch.int16).view(-1)
            flat.copy_(
                torch.arange(flat.numel(), dtype=torch.int32).add_(i * 7919 + seed).to(torch.int16)
            )
        probes = list(cache.tensors.values())[:: max(1, self.shape.layers // 4)]
        expected = [t.view(torch.int16).clone() for t in probes]
        before = cpu_seconds(self.server.process.pid)
        store_s = sum(cache.store(ids, self._request()))
        store_cpu_s = cpu_seconds(self.server.process.pid) - before
        time.sleep(SETTLE)
        request = self._request()
        found, _, _ = cache.lookup(ids, request)
        for tensor in cache.tensors.values():
            tensor.zero_()
        before = cpu_seconds(self.server.process.pid)
        retrieve_s = cache.retrieve(ids, request)
        retrieve_cpu_s = cpu_seconds(self.server.process.pid) - before
        equal = all(
            torch.equal(want, got.view(torch.int16))
            for want, got in zip(expected, probes, strict=True)
        )
        complete = found == self.shape.tokens // self.shape.chunk
        return {
            "store_s": store_s,
            "retrieve_s": retrieve_s,
            "store_cpu_s": store_cpu_s,
            "retrieve_cpu_s": retrieve_cpu_s,
            "right": equal and complete,
        }

    def control(self, seed: int) -> dict[str, Any]:
        """All stores of a 128k-token prompt with almost nothing to copy: seconds."""
        self.ids = token_ids(CONTROL.tokens, seed)
        seconds = self.small.store(self.ids, self._request())
        time.sleep(SETTLE)
        return {"prefill_s": sum(seconds)}

    def lookup(self, tokens: int) -> dict[str, Any]:
        """Look up the first `tokens` of the prompt that `control` stored."""
        request = self._request()
        found, seconds, key = self.small.lookup(self.ids[:tokens], request)
        self.client.free_lookup_locks(key, 1).result(timeout=TIMEOUT)
        self.client.end_session(request).result(timeout=TIMEOUT)
        return {"seconds": seconds, "right": found == tokens // CONTROL.chunk}

    def round_trips(self, count: int) -> dict[str, Any]:
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self.client.ping(None).result(timeout=TIMEOUT)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds}

    def start(self, l1_gb: float) -> dict[str, Any]:
        """Start another server of that size: seconds until it serves, resident MiB when idle."""
        server = LMCacheServer(self.mode, l1_gb, self.shape.chunk)
        time.sleep(1)
        rss = server.rss_mib()
        server.stop()
        return {"start_s": server.start_s, "rss_mib": rss}

    def close(self) -> None:
        self.small.close()
        self.big.close()
        self.client.close()
        self.server.stop()
        from lmcache.v1.multiprocess import posix_shm

        posix_shm._atexit_cleanup()
        os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    serve(Subject, Subject.close)
