"""How fast pages move between KV cache memory and the arena, beside plain memcpy in the same run.

Every round times memcpy, store and load one after the other, so that a noisy neighbour hits all
three; the ratio of a round is what is trusted, its median is reported. The same holds for one thread and two:
two are measured beside one, and beside memcpy in two threads, in every round. Payload memory is a memfd
mapped shared: the same kernel code as the arena, and nothing to clean up if the run is killed.
"""

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.job import PAGE_RUN, CopyJob, JobKind
from lmcache_shm.arena.layout import HOT_DTYPE, SlotState
from lmcache_shm.cli.bench_results import quiet
from lmcache_shm.transfer.cpu import CpuEngine
from lmcache_shm.transfer.pages import Part, RawTensor, SlotLayout, group_pages

KIB, MIB = 1 << 10, 1 << 20
Bytes = npt.NDArray[np.uint8]
Row = dict[str, Any]
Samples = dict[str, list[float]]
"""Seconds of each round, by what was copied."""
TARGET_BYTES = 256 * MIB
"""Moved per timed copy: far beyond any last-level cache share."""
GENERATION = 1


# ------------------------------------------------------------------------------- what is copied
# Only what decides the cost of a copy is modelled: bytes per page, pages per slot, layers, strides.
@dataclass(frozen=True, slots=True)
class LayerGroup:
    """One KV cache group: ``layers`` layers whose pages hold ``page_bytes`` at ``page_stride``."""

    name: str
    layers: int
    page_bytes: int
    pages_per_chunk: int
    page_stride: int = 0
    stored_pages: int = 0
    """0 = all pages of the chunk; a window keeps fewer."""
    order: str = "layers outermost"
    heads: int = 1
    """Runs that a page falls into where heads are outermost."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model: its groups, each of which is an object group of its own here."""

    name: str
    chunk: int
    groups: tuple[LayerGroup, ...]


def _attention(
    name: str, layers: int, token_bytes: int, block: int, chunk: int, window: int = 0
) -> LayerGroup:
    pages = chunk // block
    tail = min(pages, -(-(window - 1) // block)) if window else 0
    return LayerGroup(name, layers, token_bytes * block, pages, stored_pages=tail)


# Bytes per token and layer = 2 (K and V) · KV heads · head size · 2 (bf16), from the models' configurations.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-8b", 256, (_attention("full", 32, 4096, 16, 256),)),
        Shape(
            "gemma3-27b",
            256,
            (
                _attention("full", 10, 8192, 16, 256),
                _attention("window 1024", 52, 8192, 16, 256, 1024),
            ),
        ),
        Shape(
            "gpt-oss-120b",
            256,
            (
                _attention("full", 18, 2048, 16, 256),
                _attention("window 128", 18, 2048, 16, 256, 128),
            ),
        ),
        # Unified block of 784 tokens; a state page is padded to the attention page.
        Shape(
            "qwen3.5-27b",
            784,
            (
                _attention("full", 16, 4096, 784, 784),
                LayerGroup("GDN state", 48, 3_207_168, 1, page_stride=784 * 4096),
            ),
        ),
    )
}


TORCH_OFFSET = 64
"""Where torch's large tensors begin on a memory page: some processors copy slower where the two sides differ in it."""


class KvMemory:
    """Memory for ``slots`` slots' worth of scattered blocks of one group (twice as many blocks exist)."""

    def __init__(self, group: LayerGroup, slots: int) -> None:
        self.group = group
        self.pages = group.stored_pages or group.pages_per_chunk
        self.num_blocks = 2 * slots * self.pages
        stride = group.page_stride or group.page_bytes
        self.nbytes = group.layers * self.num_blocks * stride
        mapped = mmap.mmap(-1, self.nbytes + TORCH_OFFSET, mmap.MAP_PRIVATE)
        self.memory = np.frombuffer(mapped, dtype=np.uint8)[TORCH_OFFSET:]
        self.memory[:] = 1
        part = Part(
            group_pages(self._tensors(stride), self.num_blocks),
            group.pages_per_chunk,
            group.pages_per_chunk - self.pages,
        )
        self.layout = SlotLayout([part])
        ids = np.random.default_rng(0).permutation(self.num_blocks)[: slots * self.pages]
        self.block_ids: npt.NDArray[np.int64] = ids.reshape(slots, self.pages).astype(np.int64)

    def _tensors(self, stride: int) -> list[RawTensor]:
        g, blocks, base = self.group, self.num_blocks, self.memory.ctypes.data
        if g.order == "blocks outermost":
            block = g.layers * stride
            return [
                RawTensor(base + layer * stride, (blocks, g.page_bytes), (block, 1))
                for layer in range(g.layers)
            ]
        run = g.page_bytes // g.heads
        if g.heads > 1:
            shape, strides = (blocks, g.heads, run), (run, run * blocks, 1)
        else:
            shape, strides = (blocks, 1, run), (stride, run, 1)
        return [
            RawTensor(base + layer * blocks * stride, shape, strides) for layer in range(g.layers)
        ]


# ------------------------------------------------------------------------------------- the copies
class BenchArena:
    """Payload memory and a slot table without a server."""

    arena_id = b"bench"

    def __init__(self, fd: int, nbytes: int, slots: int) -> None:
        self.data_array: Bytes = np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
        self.hot: npt.NDArray[Any] = np.zeros(slots, dtype=HOT_DTYPE)
        self.hot["generation"] = GENERATION
        self.backed_bytes = nbytes
        self.fd = fd


@contextmanager
def bench_arena(nbytes: int, slots: int) -> Iterator[BenchArena]:
    """Fresh payload memory, touched as the server's prefault would have done."""
    fd = os.memfd_create("lmcache-shm-bench")
    try:
        os.posix_fallocate(fd, 0, nbytes)
        arena = BenchArena(fd, nbytes, slots)
        arena.data_array[:] = 0
        yield arena
    finally:
        os.close(fd)


def measure_group(group: LayerGroup, rounds: int, threads: Sequence[int]) -> list[Row]:
    """One row per thread count for one group's slots."""
    slot_bytes = group.layers * group.page_bytes * (group.stored_pages or group.pages_per_chunk)
    kv = KvMemory(group, max(2, min(64, TARGET_BYTES // slot_bytes)))
    slots, region = len(kv.block_ids), -(-kv.layout.region_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    with bench_arena(slots * region, slots) as arena:
        first = _first_store(arena.fd, kv, slots, region)
        rows = _measure(arena, kv, region, rounds, threads)
    for row in rows:
        row["slot_mib"] = slot_bytes / MIB
        row["page_kib"] = group.page_bytes / 1024
        row["lane_kib"] = kv.layout.parts[0].pages.runs[0].nbytes / 1024
        row["slots"] = slots
    rows[0].update(first)
    rows[0]["first_store_ratio"] = first["first_store_gbs"] / rows[0]["memcpy_gbs"]
    return rows


def _measure(
    arena: BenchArena, kv: KvMemory, region: int, rounds: int, threads: Sequence[int]
) -> list[Row]:
    """One row per thread count. All of a round's copies follow each other, so that ratios between thread counts
    are as little changed by a noisy neighbour as those to memcpy."""
    moved = kv.block_ids.size * kv.layout.parts[0].pages.page_bytes
    samples: dict[int, dict[str, list[float]]] = {
        n: {"memcpy": [], "store": [], "load": []} for n in threads
    }
    with ExitStack() as undo:
        undo.enter_context(quiet())
        engines = []
        for n in threads:
            engine = CpuEngine(arena, [kv.layout], n, populate=False)
            undo.callback(engine.close)
            engines.append((n, engine, undo.enter_context(ThreadPoolExecutor(n))))
        for round_ in range(rounds + 1):
            for n, engine, pool in engines:
                sample = {
                    "memcpy": _timed(partial(_memcpy, pool, arena.data_array, kv, region, n)),
                    "store": _timed(partial(_copy, engine, arena, kv, region, "store")),
                    "load": _timed(partial(_copy, engine, arena, kv, region, "load")),
                }
                if round_:  # the first round warms caches and page tables
                    for name, seconds in sample.items():
                        samples[n][name].append(seconds)
    return [_row(n, moved, samples[n], samples[threads[0]]) for n in threads]


def _row(threads: int, moved: int, samples: Samples, base: Samples) -> Row:
    """Medians over the rounds: GB/s, ratios to memcpy, and gains over the first thread count."""
    row: Row = {"threads": threads, "bytes": moved}
    for name, taken in samples.items():
        row[f"{name}_gbs"] = moved / statistics.median(taken) / 1e9
        row[f"{name}_gain"] = _median_ratio(base[name], taken)
        if name != "memcpy":
            row[f"{name}_ratio"] = _median_ratio(samples["memcpy"], taken)
    return row


def _median_ratio(base: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(b / o for b, o in zip(base, ours, strict=True))


def _timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _memcpy(
    pool: ThreadPoolExecutor, target: Bytes, kv: KvMemory, region: int, threads: int
) -> None:
    """The same number of bytes, slot by slot, both sides contiguous."""
    size = kv.pages * kv.layout.parts[0].pages.page_bytes

    def some(start: int) -> None:
        for slot in range(start, len(kv.block_ids), threads):
            source = kv.memory[2 * slot * size : (2 * slot + 1) * size]
            target[slot * region : slot * region + size] = source

    list(pool.map(some, range(threads)))


def whole_slots(
    number: int,
    kind: JobKind,
    rows: npt.NDArray[np.int64],
    region: int,
    block_ids: npt.NDArray[np.int64],
) -> CopyJob:
    """A job for whole slots of object group 0, one part each; `block_ids`: [slots, pages]."""
    runs = np.zeros(len(rows), PAGE_RUN)
    runs["slot"], runs["count"] = np.arange(len(rows)), block_ids.shape[1]
    generations = np.full(len(rows), GENERATION, np.uint64)
    groups = np.zeros(len(rows), np.int32)
    return CopyJob(
        number, kind, b"", rows.astype(np.int32), rows * region, generations, groups, runs, block_ids.ravel()
    )  # fmt: skip


def _copy(engine: CpuEngine, arena: BenchArena, kv: KvMemory, region: int, kind: JobKind) -> None:
    arena.hot["state"] = SlotState.RESERVED if kind == "store" else SlotState.COMMITTED
    job = whole_slots(1, kind, np.arange(len(kv.block_ids)), region, kv.block_ids)
    engine.submit(job, job.offsets)
    engine.drain(60.0)
    (result,) = engine.poll()
    if not result.ok:
        raise RuntimeError(f"{kind} failed: {result.reason}")


def _first_store(fd: int, kv: KvMemory, slots: int, region: int) -> Row:
    """A new process's first store into slots that the server has prefaulted, best of three."""
    moved = kv.block_ids.size * kv.layout.parts[0].pages.page_bytes
    stores, fills = [], []
    for _ in range(3):
        arena = BenchArena(fd, slots * region, slots)
        engine = CpuEngine(arena, [kv.layout])
        start = time.perf_counter()
        if engine.page_tables is not None:
            engine.page_tables.join(60.0)
        filled = time.perf_counter()
        _copy(engine, arena, kv, region, "store")
        fills.append(filled - start)
        stores.append(time.perf_counter() - filled)
        engine.close()
    return {
        "first_store_gbs": moved / min(stores) / 1e9,
        "page_tables_s_per_gb": min(fills) / (slots * region / 1e9),
    }


def run(shapes: Sequence[Shape], rounds: int, step: Callable[[str], None]) -> list[Row]:
    """All rows of all groups; ``step`` is called with a label before each group."""
    threads = [1, 2] if (os.cpu_count() or 1) > 1 else [1]
    rows = []
    for shape in shapes:
        for group in shape.groups:
            label = shape.name if len(shape.groups) == 1 else f"{shape.name}: {group.name}"
            step(label)
            rows += [{"case": label, **row} for row in measure_group(group, rounds, threads)]
    return rows
