"""Copies between a device and pinned memory: every back end and page size beside one large plain copy.

Any `DeviceFixture` will do; the tests bring one without a GPU, where the times mean nothing but the program is the same.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.job import JobKind
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.cli.bench_results import samples
from lmcache_shm.cli.bench_transfer import KIB, MIB, BenchArena, bench_arena, whole_slots
from lmcache_shm.transfer.device import Device
from lmcache_shm.transfer.pages import Part, RawTensor, SlotLayout, group_pages
from lmcache_shm.transfer.plan import RequestedBackend
from lmcache_shm.transfer.streams import StreamEngine

PAGE_SIZES = tuple(kib * KIB for kib in (4, 8, 16, 32, 64, 256, 2048))
LAYERS = 32
KINDS: tuple[JobKind, JobKind] = ("store", "load")
Row = dict[str, Any]


class DeviceFixture(Protocol):
    """A device and memory on it."""

    device: Device

    def allocate(self, nbytes: int) -> int:
        """Address of fresh device memory, kept until ``release``."""

    def release(self) -> None: ...


class CudaFixture:
    """torch's current CUDA device."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415 - only with a GPU

        from lmcache_shm.transfer.cuda import CudaDevice  # noqa: PLC0415

        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        torch.cuda.init()
        self.device: Device = CudaDevice(torch.cuda.current_device())
        self.device.enter_thread()
        self._torch = torch
        self._held: list[Any] = []

    def allocate(self, nbytes: int) -> int:
        self._held.append(self._torch.ones(nbytes, dtype=self._torch.uint8, device="cuda"))
        self._torch.cuda.synchronize()
        return int(self._held[-1].data_ptr())

    def release(self) -> None:
        self._held.clear()
        self._torch.cuda.empty_cache()


def peak(fixture: DeviceFixture, nbytes: int, rounds: int) -> dict[str, float]:
    """GB/s of one plain copy of pinned memory: store, load, and both at the same time (sum)."""
    device = fixture.device
    gpu = {kind: fixture.allocate(nbytes) for kind in KINDS}
    with bench_arena(2 * nbytes, 1) as arena:
        base = arena.data_array.ctypes.data
        device.register(base, 2 * nbytes)
        host = {"store": base, "load": base + nbytes}

        def copy(*kinds: JobKind) -> None:
            ends = []
            for kind in kinds:
                device.copy(kind, gpu[kind], host[kind], nbytes)
                ends.append(device.mark(kind))
            while not all(device.reached(end) for end in ends):
                pass

        found: dict[str, float] = {
            kind: nbytes / _median(partial(copy, kind), rounds) / 1e9 for kind in KINDS
        }
        found["both"] = 2 * nbytes / _median(lambda: copy(*KINDS), rounds) / 1e9
        device.unregister(base)
    fixture.release()
    return found


def page_size_rows(
    fixture: DeviceFixture, page: int, backends: Sequence[RequestedBackend], total: int, rounds: int
) -> list[Row]:
    """GB/s for scattered pages of one size in slots of about 32 MiB: a row per back end that can be had."""
    pages = max(1, 32 * MIB // (LAYERS * page))
    slots = max(2, total // (pages * LAYERS * page))
    blocks = 2 * slots * pages
    base = fixture.allocate(blocks * page * LAYERS)
    tensors = [
        RawTensor(base + i * blocks * page, (blocks, page), (page, 1)) for i in range(LAYERS)
    ]
    layout = SlotLayout([Part(group_pages(tensors, blocks), pages)])
    ids = np.random.default_rng(0).permutation(blocks)[: slots * pages].reshape(slots, pages)
    rows = []
    with bench_arena(slots * layout.region_bytes, slots) as arena:
        for backend in backends:
            engine = StreamEngine(arena, [layout], fixture.device, backend=backend)
            try:
                if not engine.pinned.join(120.0):
                    raise RuntimeError("the arena could not be pinned (see the warning above)")
                row = _backend_row(engine, arena, layout, ids, backend, rounds)
                if backend == "auto" or backend in engine.used:  # or another took its place
                    rows.append(row | {"page_kib": page / KIB})
            finally:
                engine.close()
    fixture.release()
    return rows


def _backend_row(
    engine: StreamEngine,
    arena: BenchArena,
    layout: SlotLayout,
    ids: npt.NDArray[np.int64],
    backend: str,
    rounds: int,
) -> Row:
    moved = ids.size * layout.parts[0].pages.page_bytes
    half = len(ids) // 2
    # Stores write slots of the first half of the rows, loads read the second, so both may run at once.
    state = {"store": SlotState.RESERVED, "load": SlotState.COMMITTED}

    def copy(parts: dict[JobKind, slice]) -> None:
        for number, (kind, rows) in enumerate(parts.items()):
            arena.hot["state"][rows] = state[kind]
            slots = np.arange(len(ids))[rows]
            job = whole_slots(number, kind, slots, layout.region_bytes, ids[rows])
            engine.submit(job, job.offsets, deadline_s=300.0)
        engine.drain(300.0)
        for result in engine.poll():
            if not result.ok:
                raise RuntimeError(f"{result.kind} by {backend} failed: {result.reason}")

    row: Row = {"backend": backend}
    for kind in KINDS:
        seconds = _median(partial(copy, {kind: slice(None)}), rounds)
        row[f"{kind}_gbs"] = moved / seconds / 1e9
    both: dict[JobKind, slice] = {"store": slice(0, half), "load": slice(half, None)}
    row["both_gbs"] = moved / _median(lambda: copy(both), rounds) / 1e9
    return row


def crossover(rows: Sequence[Row]) -> dict[str, int]:
    """Per direction: page bytes below which the kernel beat the batch at every measured size."""
    found: dict[str, int] = {}
    for kind in KINDS:
        by_size: dict[float, dict[str, float]] = {}
        for row in rows:
            by_size.setdefault(row["page_kib"], {})[row["backend"]] = row[f"{kind}_gbs"]
        limit = 0
        for kib, speeds in sorted(by_size.items()):
            if speeds.get("kernel", 0.0) <= speeds.get("batch", speeds.get("rows", 0.0)):
                break
            limit = int(kib * KIB) + 1
        found[kind] = limit
    return found


def backends_of(device: Device) -> list[RequestedBackend]:
    """What can be measured on this device; ``auto`` is what engines use by default."""
    found: list[RequestedBackend] = ["rows", "ranges", "auto"]
    if device.has_kernel:
        found.insert(0, "kernel")
    if device.has_batch:
        found.insert(0, "batch")
    return found


def run(
    fixture: DeviceFixture,
    rounds: int,
    step: Callable[[str], None],
    total: int = 512 * MIB,
    sizes: Sequence[int] = PAGE_SIZES,
) -> dict[str, Any]:
    """Everything; ``step`` is called with a label before each page size."""
    step("plain pinned copy")
    limits = peak(fixture, total // 2, rounds)
    rows: list[Row] = []
    for page in sizes:
        step(f"{page // KIB} KiB pages")
        rows += page_size_rows(fixture, page, backends_of(fixture.device), total, rounds)
    for row in rows:
        for kind in (*KINDS, "both"):
            row[f"{kind}_ratio"] = row[f"{kind}_gbs"] / limits[kind]
    return {
        "device": fixture.device.name,
        "peak_gbs": limits,
        "rows": rows,
        "kernel_below_bytes": crossover(rows),
    }


def _median(action: Callable[[], None], rounds: int) -> float:
    return statistics.median(samples(action, rounds + 1)[1:])
