"""Prove the CUDA path on a machine with a GPU, in one command and less than eight minutes.

    python tools/gpu_check.py [--json out.json] [--device cuda|cpu]

Needs torch with CUDA, this package (``pip install .``), no vLLM, 1.1 GiB of /dev/shm (Docker:
``--shm-size=2g`` or ``--ipc=host``) and 2 GiB of GPU memory. It starts a real server with a real arena, and then
1. stores random KV blocks of seven real layouts, overwrites the device memory, loads them into other
   blocks, and compares every byte of the memory, content and padding, for each back end (2D copies give way to
   ``ranges`` for slots that lie in two registrations);
2. races kernels on the default stream against stores and loads, and makes sure that the race is real: a
   store that does not wait must come too early;
3. measures GB/s of each back end and page size beside one plain pinned copy: a table, and JSON.
``--device cpu`` runs the same program on a simulated device: it proves the program, not the speed.
"""

import argparse
import json
import logging
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `python tools/gpu_check.py`
from lmcache_shm.arena.job import CopyJob, JobKind, Pages
from lmcache_shm.cli import bench_device
from lmcache_shm.cli.bench_control import BenchEngine, PrivateServer, private_server
from lmcache_shm.protocol.messages import GroupInfo
from lmcache_shm.transfer.pages import Part, RawTensor, SlotLayout, group_pages
from lmcache_shm.transfer.plan import registration_ranges
from lmcache_shm.transfer.streams import StreamEngine
from tools.gpu_layouts import Layout, Placement, layouts
from tools.harness.simulated_device import Event, HostFixture

CHUNK, CHUNKS = 256, 3
PIECE = (16 << 20) + 4096
"""Bytes of a registration: small and odd, so that many slots lie in two."""
WAIT = 60.0
SLEEP_CYCLES = 400_000_000  # about a fifth of a second on a GPU
LATE_S = 0.3  # the same for the simulated device, on a machine that may be busy
Slots = dict[tuple[int, int], np.ndarray]  # (chunk, group) → block ids of the stored pages
Row = dict[str, Any]


class CudaMemory:
    """Device memory of one layout, and a default stream that computes."""

    def __init__(self, nbytes: int) -> None:
        import torch

        self._torch = torch
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self.address = int(self._bytes.data_ptr())

    def write(self, content: np.ndarray) -> None:
        self._bytes.copy_(self._torch.from_numpy(content))
        self._torch.cuda.synchronize()

    def read(self) -> np.ndarray:
        self._torch.cuda.synchronize()
        found: np.ndarray = self._bytes.cpu().numpy()
        return found

    def compute_late(self, content: np.ndarray) -> Any:
        """Kernels on the default stream that write ``content`` after a while (submit() marks them)."""
        ready = self._torch.from_numpy(content).cuda()
        self._torch.cuda._sleep(SLEEP_CYCLES)
        self._bytes.copy_(ready)

    def event_of_now(self) -> Any:
        event = self._torch.cuda.Event()
        event.record()
        return event

    def finish(self, event: Any) -> None:
        """Wait for what ``compute_late`` launched."""
        self._torch.cuda.synchronize()

    def snapshot_late(self) -> tuple[Any, Callable[[], np.ndarray]]:
        """Kernels on the default stream that read the memory after a while."""
        copy = self._torch.empty_like(self._bytes)  # now: to allocate may wait for what runs
        self._torch.cuda._sleep(SLEEP_CYCLES)
        copy.copy_(self._bytes)
        return None, lambda: copy.cpu().numpy()


class HostMemory:
    """The same for the simulated device: "kernels" run in a thread, a moment later."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.zeros(nbytes, dtype=np.uint8)
        self.address = self._bytes.ctypes.data

    def write(self, content: np.ndarray) -> None:
        self._bytes[:] = content

    def read(self) -> np.ndarray:
        return self._bytes.copy()

    def compute_late(self, content: np.ndarray) -> Event:
        return self._later(lambda: self.write(content))

    def event_of_now(self) -> Event:
        return Event(done=True)

    def finish(self, event: Event) -> None:
        while not event.done:
            time.sleep(0.001)

    def snapshot_late(self) -> tuple[Event, Callable[[], np.ndarray]]:
        found: list[np.ndarray] = []
        event = self._later(lambda: found.append(self.read()))

        def wait() -> np.ndarray:
            self.finish(event)
            return found[0]

        return event, wait

    @staticmethod
    def _later(action: Callable[[], Any]) -> Event:
        event = Event()

        def run() -> None:
            time.sleep(LATE_S)
            action()
            event.done = True

        threading.Thread(target=run).start()
        return event


class Case:
    """One layout on the device, an engine registered at the server, and a transfer engine."""

    def __init__(
        self, server: PrivateServer, fixture: bench_device.DeviceFixture, layout: Layout
    ) -> None:
        self.layout = layout
        simulated = isinstance(fixture, HostFixture)
        self.memory = (HostMemory if simulated else CudaMemory)(layout.nbytes)
        base = self.memory.address
        self.slots = []
        for g in layout.groups:
            raw = [RawTensor(base + at, shape, steps, item) for at, shape, steps, item in g.tensors]
            pages = group_pages(raw, layout.blocks)
            self.slots.append(SlotLayout([Part(pages, g.pages, g.first_page)]))
        groups = [GroupInfo(g.name, g.rule, g.param) for g in layout.groups]
        regions = [slot.region_bytes for slot in self.slots]
        self.control = BenchEngine(server, groups, regions, CHUNK, layout.name)
        arena = self.control.arena
        pieces = registration_ranges(arena.data_array.nbytes, PIECE, PIECE, align=PIECE)
        self._device = fixture.device
        self.engine = StreamEngine(arena, self.slots, fixture.device, registrations=pieces)
        if not self.engine.pinned.join(WAIT):
            raise RuntimeError("the arena could not be pinned; see the warning above")
        self.rng = np.random.default_rng(5)
        self._jobs = 0

    def random(self) -> np.ndarray:
        return self.rng.integers(0, 256, self.layout.nbytes, dtype=np.uint8)

    def scattered(self) -> Slots:
        """Blocks for every slot; a block belongs to one group at a time, block 0 to nobody."""
        ids = self.rng.permutation(np.arange(1, self.layout.blocks))
        found, at = {}, 0
        for chunk in range(CHUNKS):
            for group, slot in enumerate(self.slots):
                end = at + slot.parts[0].stored_pages
                found[chunk, group], at = ids[at:end], end
        if at > len(ids):
            raise RuntimeError(f"{self.layout.name}: {at} blocks needed, {len(ids)} there")
        return found

    def store(self, blocks: Slots, event: Any = None) -> None:
        """A fresh prompt of CHUNKS chunks: reserve, copy, commit."""
        self._tokens = self.rng.integers(0, 1 << 17, CHUNKS * CHUNK + 1).tolist()
        self._keys = self.control.keys(self._tokens)
        groups = range(len(self.slots))
        rows = self.control.reserve(self._keys, groups, 0, CHUNKS)
        if (rows < 0).any():
            raise RuntimeError(f"no slots: {rows}")
        self.control.write_tokens(self._keys, groups, 0, rows)
        self._copy("store", dict(zip(blocks, rows.tolist(), strict=True)), blocks, event)
        self.control.commit(rows)

    def load(self, blocks: Slots, event: Any = None) -> Slots:
        """Look the prompt up and load what its hit names; the blocks that were loaded."""
        hit = self.control.acquire(self._keys, len(self._tokens))
        if hit.n_chunks != CHUNKS:
            raise RuntimeError(f"a hit of {hit.n_chunks} chunks instead of {CHUNKS}")
        rows = {
            (hit.first[group] + i, group): row
            for group, packed in enumerate(hit.rows)
            for i, row in enumerate(np.frombuffer(packed, "<i4").tolist())
        }
        loaded = {place: blocks[place] for place in rows}
        self._copy("load", rows, loaded, event)
        self.control.release(hit.lease)
        return loaded

    def _copy(
        self, kind: JobKind, rows: dict[tuple[int, int], int], blocks: Slots, event: Any
    ) -> None:
        arena, registered = self.control.arena, self.control.registered
        groups = [group for _, group in rows]
        slots = list(rows.values())
        self._jobs += 1
        job = CopyJob.of(
            self._jobs,
            kind,
            bytes(arena.arena_id),
            slots,
            arena.cold["offset"][slots],
            arena.hot["generation"][slots],
            groups,
            [[Pages(0, 0, blocks[place])] for place in rows],
        )
        regions = job.offsets + [registered.region_offsets[group][0] for group in groups]
        checksums = job.offsets + [registered.checksum_offset[group] for group in groups]
        given = (
            nullcontext()
            if event is None
            else patch.object(self._device, "marker_here", lambda: event)
        )
        with given:  # what submit() waits for
            self.engine.submit(job, regions, checksums, WAIT)
        if not self.engine.drain(WAIT):
            raise RuntimeError(f"{kind} did not end within {WAIT:.0f} s")
        (result,) = self.engine.poll()
        if not result.ok:
            raise RuntimeError(f"{kind} failed: {result.reason}")

    def expected(
        self, now: np.ndarray, before: np.ndarray, source: Slots, target: Slots
    ) -> np.ndarray:
        """Oracle by strides: ``now``, with ``source`` blocks of ``before`` in the ``target`` blocks."""
        result = now.copy()
        for (chunk, group), ids in target.items():
            for tensor in self.layout.groups[group].tensors:
                old = blocks_view(before, tensor, self.layout.blocks)
                blocks_view(result, tensor, self.layout.blocks)[ids] = old[source[chunk, group]]
        return result

    def close(self) -> None:
        self.engine.close()
        self.control.close()


def blocks_view(memory: np.ndarray, tensor: Placement, blocks: int) -> np.ndarray:
    """``[blocks, kernel blocks per block, …]`` view of one tensor."""
    at, shape, strides, item = tensor
    split = shape[0] // blocks
    steps = (split * strides[0], *strides)
    dtype = np.dtype((np.void, item))
    return np.ndarray(
        (blocks, split, *shape[1:]), dtype, memory, at, tuple(step * item for step in steps)
    )


def bytes_come_back(case: Case) -> bool:
    """Store, overwrite, load into other blocks; every byte of the memory is compared."""
    before, after, source = case.random(), case.random(), case.scattered()
    case.memory.write(before)
    case.store(source)
    untouched = np.array_equal(case.memory.read(), before)
    case.memory.write(after)
    target = case.load(case.scattered())
    return untouched and same(case, case.expected(after, before, source, target))


def store_waits_for_compute(case: Case) -> bool:
    """A store submitted while the kernels that compute its blocks have not run yet."""
    computed, after, source = case.random(), case.random(), case.scattered()
    case.memory.write(case.random())
    case.store(source, case.memory.compute_late(computed))
    case.memory.write(after)
    target = case.load(case.scattered())
    return same(case, case.expected(after, computed, source, target))


def the_race_is_real(case: Case) -> bool:
    """Control: a store that waits for an older event than the kernels' reads their blocks too early."""
    stale, computed, source = case.random(), case.random(), case.scattered()
    case.memory.write(stale)
    early = case.memory.event_of_now()
    late = case.memory.compute_late(computed)
    case.store(source, early)
    case.memory.finish(late)
    after = case.random()
    case.memory.write(after)
    target = case.load(case.scattered())
    return not same(case, case.expected(after, computed, source, target))


def load_waits_for_readers(case: Case) -> bool:
    """A load into blocks that kernels launched before still have to read."""
    before, old, source = case.random(), case.random(), case.scattered()
    case.memory.write(before)
    case.store(source)
    case.memory.write(old)
    event, snapshot = case.memory.snapshot_late()
    target = case.load(case.scattered(), event)
    seen_old = np.array_equal(snapshot(), old)
    return seen_old and same(case, case.expected(old, before, source, target))


def same(case: Case, expected: np.ndarray) -> bool:
    return bool(np.array_equal(case.memory.read(), expected))


def check_layouts(fixture: bench_device.DeviceFixture, only: str = "") -> Iterator[Row]:
    """Every layout (whose name has ``only`` in it) with every back end, then the races."""
    backends = bench_device.backends_of(fixture.device)
    with private_server(1.0, CHUNK) as server:
        for layout in (one for one in layouts() if only in one.name):
            case = Case(server, fixture, layout)
            try:
                jobs: list[tuple[Any, Callable[[Case], bool]]] = [
                    *((backend, bytes_come_back) for backend in backends),
                    ("auto", store_waits_for_compute),
                    ("auto", load_waits_for_readers),
                    ("auto", the_race_is_real),
                ]
                for backend, check in jobs:
                    yield one_check(case, backend, check)
            finally:
                case.close()


def one_check(case: Case, backend: Any, check: Callable[[Case], bool]) -> Row:
    """A check that breaks off is a failed one: the others are still worth knowing."""
    engine, why = case.engine, ""
    engine.backend = backend
    engine.used.clear()
    try:
        ok = check(case)
    except Exception as error:  # noqa: BLE001 - whatever a first run on a GPU brings
        ok, why = False, f"{type(error).__name__}: {error}"
    used = "+".join(sorted(engine.used))
    name = check.__name__.replace("_", " ")
    row = {"layout": case.layout.name, "backend": backend, "check": name, "used": used, "ok": ok}
    return row | ({"why": why} if why else {})


def never_used(checks: list[Row], device: Any) -> list[str]:
    """Back ends that this device has, and for which another one stood in every time."""
    used = {name for row in checks for name in row["used"].split("+")}
    return [name for name in bench_device.backends_of(device) if name not in {*used, "auto"}]


def show_checks(rows: list[Row], console: Console) -> None:
    columns = "bytes come back with", "store waits", "load waits", "race is real"
    table = Table("layout", *columns, box=None)
    for name in dict.fromkeys(row["layout"] for row in rows):
        mine = [row for row in rows if row["layout"] == name]
        tried = [row for row in mine if row["check"] == "bytes come back" and row["ok"]]
        good = [
            row["backend"] if row["used"] == row["backend"] else f"{row['backend']} ({row['used']})"
            for row in tried
        ]
        races = ["yes" if row["ok"] else "NO" for row in mine if row["check"] != "bytes come back"]
        table.add_row(name, ", ".join(good) or "NOTHING", *races)
    console.print(table)


def show_speed(speed: Row, console: Console) -> None:
    limit = speed["peak_gbs"]
    large = [row for row in speed["rows"] if row["backend"] == "auto" and row["page_kib"] >= 32]
    console.print(
        f"\n{speed['device']}: one plain pinned copy stores {limit['store']:.1f}, loads "
        f"{limit['load']:.1f}, both together {limit['both']:.1f} GB/s"
    )
    table = Table("page", "back end", "store GB/s", "load GB/s", "both GB/s", box=None)
    for row in speed["rows"]:
        cells = [
            f"{row[f'{k}_gbs']:.1f} ({row[f'{k}_ratio']:.2f})" for k in ("store", "load", "both")
        ]
        table.add_row(f"{row['page_kib']:.0f} KiB", row["backend"], *cells)
    console.print(table)
    console.print(f"the kernel wins below (bytes a page): {speed['kernel_below_bytes']}")
    if large:
        worst = {k: min(row[f"{k}_ratio"] for row in large) for k in ("store", "load")}
        both = min(row["both_gbs"] for row in large)
        console.print(
            f"auto, pages from 32 KiB: at least {worst['store']:.2f} (store) and {worst['load']:.2f} "
            f"(load) of the plain copy (goal 0.90); both ways at least {both:.1f} GB/s (goal 80)"
        )


def torch_version() -> str:
    """With the CUDA version it was built for; empty where there is none (the simulated device needs none)."""
    try:
        import torch
    except ImportError:
        return ""
    return f"{torch.__version__} (CUDA {torch.version.cuda})"


def main() -> int:
    """Exit status 0 if every check passed, and every back end was used."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", help="write the results to this file, too")
    parser.add_argument("--only", default="", help="only layouts with this text in their name")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    console, began = Console(), time.monotonic()
    try:
        fixture = bench_device.CudaFixture() if given.device == "cuda" else HostFixture()
    except (ImportError, RuntimeError) as error:
        console.print(f"no usable GPU: {error}")
        return 2
    checks = []
    try:
        for row in check_layouts(fixture, given.only):
            checks.append(row)
            mark, why = "ok  " if row["ok"] else "FAIL", row.get("why", "")
            console.print(f"{mark} {row['layout']}: {row['check']} ({row['backend']}) {why}")
    except RuntimeError as error:  # no server (too little /dev/shm), or nothing can be pinned
        console.print(f"the checks cannot go on: {error}", markup=False)
        return 2
    small = {"total": 32 << 20, "sizes": (8192, 65536)} if given.device == "cpu" else {}
    speed = bench_device.run(
        fixture, given.rounds, lambda label: console.print(label, style="dim"), **small
    )
    show_checks(checks, console)
    show_speed(speed, console)
    failed = sum(not row["ok"] for row in checks)
    unused = never_used(checks, fixture.device)
    result = {
        "device": fixture.device.name,
        "python": platform.python_version(),
        "torch": torch_version(),
        "seconds": round(time.monotonic() - began, 1),
        "checks": checks,
        "failed": failed,
        "never_used": unused,
        "speed": speed,
    }
    console.print(f"\n{len(checks)} checks, {failed} failed, {result['seconds']:.0f} s")
    if unused:
        console.print(f"never used, though the device has them: {', '.join(unused)}")
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=1))
    return 1 if failed or unused else 0


if __name__ == "__main__":
    sys.exit(main())
