"""A server, a scheduler side and a worker side with real tensors, without an engine in between."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from vllm.v1.core.block_pool import BlockPool

from lmcache_shm.client.plan import ModelError
from lmcache_shm.config import connector_config
from lmcache_shm.transfer.engine import JobResult
from lmcache_shm.transfer.strided import RunCopier
from lmcache_shm.vllm import worker
from lmcache_shm.vllm.engine_api import StepMetadata
from lmcache_shm.vllm.scheduler import SchedulerSide
from lmcache_shm.vllm.start import Start
from lmcache_shm.vllm.worker import WorkerSide
from tests.scheduler.server import CacheServer
from tools.harness.wait import until

from .rig import Request
from .test_describe import engine as described
from .worlds import config, full, window

BLOCKS = 64
MIB = 1 << 20
PROMPT = list(range(1, 301))


def vllm_config(instance: str, **transfer: Any) -> Any:
    found = described()
    found.kv_transfer_config = SimpleNamespace(
        engine_id=f"engine-{instance}", is_kv_producer=True, is_kv_consumer=True, **transfer
    )
    found.scheduler_config = SimpleNamespace(
        max_num_batched_tokens=512, max_num_scheduled_tokens=None, max_num_seqs=8
    )
    found.instance_id = "1"
    found.num_speculative_tokens = found.num_lookahead_tokens = 0
    return found


class Pair:
    """One engine's two sides over the same tensors."""

    def __init__(self, instance: str, kv: Any, **options: Any) -> None:
        extra = {"lmcache_shm.instance": instance, "lmcache_shm.reconnect_max_s": 0.05}
        extra |= {f"lmcache_shm.{name}": value for name, value in options.items()}
        options_of = connector_config(extra)
        engine = vllm_config(instance)
        names = [name for group in kv.kv_cache_groups for name in group.layer_names]
        generator = torch.Generator().manual_seed(1)
        self.caches = {n: torch.rand(BLOCKS, 2, 32, 32, generator=generator) for n in names}
        self.worker = WorkerSide(engine, kv, options_of, 0, 1)
        self.start = Start(engine, kv, options_of)
        self.side = SchedulerSide(self.start)
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=32)
        self.freed: list[str] = []
        manager = SimpleNamespace(
            block_pool=self.pool,
            reset_prefix_cache=lambda: True,
            allocate_slots=lambda: None,
            free=lambda request: self.freed.append(request.request_id),
        )
        self.side.bind(manager)
        self.tables: dict[str, list[list[int]]] = {}

    def open(self) -> None:
        self.worker.register(self.caches, {})
        self.start.open()
        self.start.workers_are_up()

    def close(self) -> None:
        self.worker.close()
        self.side.close()

    def step(self, request: Request | None = None, n: int = 0) -> StepMetadata:
        """Plan, and let the worker do it."""
        output = SimpleNamespace(
            num_scheduled_tokens={request.request_id: n} if request else {},
            scheduled_spec_decode_tokens={},
            preempted_req_ids=set(),
            kv_connector_block_state=SimpleNamespace(
                boundary_state_offloads={}, get_block_ids=self.tables.get
            ),
        )
        meta = self.side.build_metadata(output)
        self.worker.start_loads(meta)
        self.worker.start_stores(meta)
        return meta

    def request(self, req_id: str, blocks: int = 10) -> Request:
        request = Request(
            request_id=req_id, all_token_ids=PROMPT, num_tokens=len(PROMPT), num_prompt_tokens=len(PROMPT),
            num_computed_tokens=0, lora_request=None, cache_salt=None, mm_features=[], prompt_embeds=None,
            prompt_is_token_ids=None, skip_reading_prefix_cache=False,
        )  # fmt: skip
        groups = len(self.start.groups)
        self.tables[req_id] = [
            [b.block_id for b in self.pool.get_new_blocks(blocks)] for _ in range(groups)
        ]
        self.side.on_new_request(request)
        return request

    def store(self, req_id: str) -> None:
        self.step(self.request(req_id), len(PROMPT))
        assert self.side.wait_flushed(5)

    def load(self, req_id: str) -> tuple[set[str], set[str]]:
        """Ask, allocate, load: requests received, and those of them that failed."""
        request = self.request(req_id)
        assert self.side.matched_tokens(request, 0) == (256, True)
        self.side.allocated(request, self.tables[req_id], 256)
        self.step()
        return self.received()

    def received(self) -> tuple[set[str], set[str]]:
        end = time.monotonic() + 5
        while True:
            got, failed = self.worker.results()
            if got or time.monotonic() > end:
                reply = SimpleNamespace(
                    finished_recving=got,
                    failed_recving=failed,
                    kv_connector_worker_meta=self.worker.report(),
                )
                self.side.output(reply)
                return got, failed

    def pages(self, req_id: str, group: int, first: int, last: int) -> np.ndarray:
        """Content of a request's blocks [first, last) in all layers of a group."""
        names = [n for n in self.caches if n.startswith(f"{group}.")]
        ids = self.tables[req_id][group][first:last]
        return np.stack([self.caches[name][ids].numpy() for name in names])


@contextmanager
def served(
    instance: str, *specs: Any, separate: bool = True, **options: Any
) -> Iterator[tuple[CacheServer, Pair]]:
    server = CacheServer(instance, 16 * MIB, separate=separate)
    pair = Pair(instance, config(*specs, num_blocks=BLOCKS, kv_cache_layout="LBHNC"), **options)
    try:
        pair.open()
        yield server, pair
    finally:
        pair.close()
        server.close()


# ----------------------------------------------------------------------------------- bytes
@pytest.mark.parametrize("separate", [True, False])
def test_what_was_stored_is_loaded_into_other_blocks(instance: str, separate: bool) -> None:
    """Full pages all, of the window its tail: byte by byte."""
    with served(instance, full(), window(64), separate=separate) as (server, pair):
        pair.store("a")

        assert pair.load("b") == ({"b"}, set())

        assert np.array_equal(pair.pages("b", 0, 0, 8), pair.pages("a", 0, 0, 8))
        assert np.array_equal(pair.pages("b", 1, 6, 8), pair.pages("a", 1, 6, 8))
        pair.step()
        assert server.pins == 0
        assert server.check() == []


def test_another_engine_finds_it_too(instance: str) -> None:
    with served(instance, full()) as (_, first):
        first.store("a")
        second = Pair(instance, config(full(), num_blocks=BLOCKS, kv_cache_layout="LBHNC"))
        second.start.client.engine_id = second.worker.connection.engine_id = "second"
        second.worker.connection._request.engine_id = "second"
        for tensor in second.caches.values():
            tensor.zero_()
        try:
            second.open()

            assert second.load("b") == ({"b"}, set())
            assert np.array_equal(second.pages("b", 0, 0, 8), first.pages("a", 0, 0, 8))
        finally:
            second.close()


def test_a_slot_that_changes_hands_fails_the_load(instance: str) -> None:
    with served(instance, full()) as (server, pair):
        pair.store("a")
        request = pair.request("b")
        pair.side.matched_tokens(request, 0)
        pair.side.allocated(request, pair.tables["b"], 256)
        server.steal(0)

        pair.step()

        assert pair.received() == ({"b"}, {"b"})
        assert pair.worker.counts.total["loads_failed.generation"] == 1


def test_a_backoff_ends_with_the_load_or_after_a_moment(
    instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, copy = threading.Event(), RunCopier.load
    with served(instance, full()) as (_, pair):
        pair.store("a")
        monkeypatch.setattr(RunCopier, "load", lambda *args: go.wait(10) and copy(*args))
        request = pair.request("b")
        assert pair.side.matched_tokens(request, 0) == (256, True)
        pair.side.allocated(request, pair.tables["b"], 256)
        pair.step()

        pair.worker.back_off()
        assert pair.worker.results() == (set(), set())

        monkeypatch.setattr(worker, "BACKOFF_S", 10)
        timer = threading.Timer(0.05, go.set)
        timer.start()
        pair.worker.back_off()
        assert pair.worker.results() == ({"b"}, set())
        timer.join()


def test_what_a_cancelled_load_has_brought_is_given_back_however_it_ends(instance: str) -> None:
    """The cache was reset while it was underway: vLLM must not go on from what it brought."""
    with served(instance, full()) as (_, pair):
        pair.store("a")
        request = pair.request("b")
        pair.side.matched_tokens(request, 0)
        pair.side.allocated(request, pair.tables["b"], 256)
        pair.side.reset()
        request.num_computed_tokens = 256

        pair.step()

        assert pair.received() == ({"b"}, set())
        assert (request.num_computed_tokens, pair.freed) == (0, ["b"])


# ------------------------------------------------------------------------------ servers come and go
def test_jobs_for_an_arena_that_was_replaced_are_refused(instance: str) -> None:
    """A store is refused and its blocks are released; a load fails and the request is computed."""
    with served(instance, full()) as (server, pair):
        pair.store("a")
        request = pair.request("b")
        pair.side.matched_tokens(request, 0)
        pair.side.allocated(request, pair.tables["b"], 256)
        other = pair.request("c")
        other.all_token_ids = PROMPT[::-1]
        free = pair.pool.get_num_free_blocks()
        plan = SimpleNamespace(
            num_scheduled_tokens={"c": 300}, scheduled_spec_decode_tokens={}, preempted_req_ids=set(),
            kv_connector_block_state=SimpleNamespace(
                boundary_state_offloads={}, get_block_ids=pair.tables.get
            ),
        )  # fmt: skip
        meta = pair.side.build_metadata(plan)
        assert (len(meta.loads), len(meta.stores)) == (1, 1)
        pair.worker._mapped.clear()  # as after another arena was mapped

        pair.worker.start_loads(meta)
        pair.worker.start_stores(meta)

        assert pair.received() == ({"b"}, {"b"})
        pair.step()
        assert pair.pool.get_num_free_blocks() == free
        assert not pair.side.has_pending_work()
        server.stop()
        server.restart()


class Stuck:
    """An engine whose copies go on until it is closed."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.results: list[JobResult] = []

    def submit(self, job: Any, *_: Any) -> None:
        self.jobs.append(job)

    def poll(self) -> list[JobResult]:
        found, self.results = self.results, []
        return found

    def drain(self, timeout: float) -> bool:
        time.sleep(timeout)
        return False

    def close(self) -> None:
        self.results = [JobResult(j.id, j.kind, ok=False, reason="closed") for j in self.jobs]


def test_an_arena_that_is_cut_differently_gets_another_engine(instance: str) -> None:
    """The first one is closed before: its threads would live on, and the arena would stay pinned.

    What it had underway is reported, and what was planned for it and comes later is not begun.
    """
    with served(instance, full()) as (_, pair):
        pair.store("a")
        worker, hello = pair.worker, pair.worker.connection.hello
        arena = worker.connection.arena
        assert hello is not None
        assert arena is not None
        (mapped,) = worker._mapped.values()
        plan, first = mapped.plan, mapped.engine
        assert worker._prepare(hello, arena) == mapped.region_bytes
        assert list(worker._mapped.values()) == [mapped]  # the same options: the same engine

        mapped.engine = stuck = Stuck()  # type: ignore[assignment]
        for name in ("b", "c"):
            request = pair.request(name)
            assert pair.side.matched_tokens(request, 0) == (256, True)
            pair.side.allocated(request, pair.tables[name], 256)
            if name == "b":
                pair.step()
        assert len(stuck.jobs) == 1
        assert worker._prepare(structs.replace(hello, chunk_size=512), arena)

        assert pair.received() == ({"b"}, {"b"})
        (second,) = worker._mapped.values()
        assert (second.plan.chunk_size, plan.chunk_size) == (512, 256)
        before = pair.pages("c", 0, 0, 10)
        pair.step()
        assert pair.received() == ({"c"}, {"c"})
        assert np.array_equal(pair.pages("c", 0, 0, 10), before)
        first.close()


def test_a_restarted_server_still_serves(instance: str) -> None:
    with served(instance, full()) as (server, pair):
        pair.store("a")
        server.stop()
        until(lambda: not pair.start.client.up, "the end is not noticed")
        assert pair.side.matched_tokens(pair.request("b"), 0) == (0, False)

        server.restart()
        until(lambda: pair.start.client.up, "the server is not found again")

        assert pair.load("c") == ({"c"}, set())


def test_a_replaced_arena_is_given_up_by_a_thread_that_the_engine_does_not_wait_for(
    instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To unpin hundreds of gigabytes takes many seconds, which no step may be long."""
    pair = Pair(instance, config(full(), num_blocks=BLOCKS, kv_cache_layout="LBHNC"))
    server = CacheServer(instance, 16 * MIB)
    try:
        pair.open()
        until(lambda: pair.start.client.up, "the server is not found")
        pair.store("a")
        (mapped,) = pair.worker._mapped.values()
        closed_by: list[str] = []
        close = mapped.engine.close
        monkeypatch.setattr(
            mapped.engine,
            "close",
            lambda: (close(), closed_by.append(threading.current_thread().name)),
        )
        server.close()
        server = CacheServer(instance, 16 * MIB)
        until(lambda: len(pair.worker._mapped) > 1 or closed_by, "the new arena is not mapped")
        until(lambda: pair.worker.results() and closed_by, "the old arena is not given up")

        assert closed_by == ["lmcache-shm-report"]
        assert mapped not in pair.worker._mapped.values()
        until(lambda: pair.start.client.up, "the new server is not found")
        pair.store("b")
        assert pair.load("c") == ({"c"}, set())
    finally:
        pair.close()
        server.close()


def test_without_a_server_nothing_is_waited_for(instance: str) -> None:
    pair = Pair(instance, config(full(), num_blocks=BLOCKS, kv_cache_layout="LBHNC"))
    begin = time.monotonic()
    try:
        pair.open()
        request = pair.request("a")
        assert pair.side.matched_tokens(request, 0) == (0, False)
        assert pair.step(request, 300).stores == []
        assert time.monotonic() - begin < 1
    finally:
        pair.close()


def test_a_server_that_comes_later_is_used(instance: str) -> None:
    pair = Pair(instance, config(full(), num_blocks=BLOCKS, kv_cache_layout="LBHNC"))
    pair.open()
    server = CacheServer(instance, 16 * MIB)
    try:
        until(lambda: pair.start.client.up, "the server is not found")
        pair.store("a")
        assert pair.load("b") == ({"b"}, set())
    finally:
        pair.close()
        server.close()


def test_a_model_that_the_servers_options_do_not_fit_is_refused_at_the_start(instance: str) -> None:
    server = CacheServer(instance, 16 * MIB)
    server.service.config = replace(server.service.config, chunk_size=100)
    pair = Pair(instance, config(full(), num_blocks=BLOCKS, kv_cache_layout="LBHNC"))
    try:
        with pytest.raises(ModelError, match="chunk size 100 does not fit this model"):
            pair.open()
    finally:
        pair.close()
        server.close()


def test_an_arena_too_small_for_a_chunk_is_refused_at_the_start(instance: str) -> None:
    server = CacheServer(instance, 1 << 16)
    pair = Pair(instance, config(full(), num_blocks=BLOCKS, kv_cache_layout="LBHNC"))
    try:
        with pytest.raises(
            ModelError, match=r"does not take this engine: one chunk of group full takes"
        ):
            pair.open()
    finally:
        pair.close()
        server.close()
