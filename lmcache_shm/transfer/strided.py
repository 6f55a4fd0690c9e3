"""2D runs: strided runs that are copied in one call, and their copies with numpy.

Equal pages, equally spaced, in memory and in the slot::

    blocks   run i, block b:  base + i·spacing + b·block_stride            (absolute address)
    slot     run i, page p:   segment + i·segment_spacing + p·nbytes       (offset in the region)

The layers of a uniform model form one 2D run, so a slot of hundreds of pages is one call on CPU
and a handful of 2D copies on a GPU.

Measured (see docs/performance.md): ``take`` and fancy assignment on a flat view whose *element is a whole
page* run at the speed of a memcpy loop in C, and one call serves all layers; the GIL is released while bytes
move. Neighbouring block ids are better copied as strided blocks, and so is everything with gaps between pages,
because ``take`` would first make a contiguous copy of its source.

Large pages go block by block, all layers at once, through ``positive``, numpy's identity: its loop moves
whole vector registers. memcpy, which is what an assignment ends in, takes ``rep movsb`` for such sizes with
the C libraries in use today, and on some AMD processors that is the slower the larger the memory pages are.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lmcache_shm.transfer.pages import SlotLayout, StridedRun

Ids = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

BATCH_PAGES = 512
"""At a time, at least. numpy's fancy assignment lets other threads run only from 501 elements on."""
MEMORY_PAGE = 4096
"""Bytes that share an entry of the page tables, at least."""
VECTOR_BYTES = 64 << 10
"""Pages from this size on are copied in vector registers; below, setting up each loop costs more."""
VECTOR_BLOCK_BYTES = 256 << 10
"""The least that one block must have in all runs for a call of its own, where block ids are scattered."""

PAGES_PER_RUN = 4
"""Scattered dense pages go through ``take`` unless runs of neighbours are at least this long."""
RUN_BYTES = 32 << 20
"""Upper bound for one 2D run's bytes in a slot. A copy can stop only between 2D runs (about 3 ms
at this size); smaller ones would ask for Python's GIL more often, and that costs up to 5 ms each when
the engine's own thread is busy in Python."""


@dataclass(frozen=True, slots=True)
class Run2D:
    """``runs`` strided runs of one part; see the module's map."""

    base: int
    spacing: int
    block_stride: int
    nbytes: int
    runs: int
    segment: int
    segment_spacing: int
    num_blocks: int
    stored_pages: int

    @property
    def dense(self) -> bool:
        """Pages follow each other without a gap, in the blocks and in the slot."""
        return (
            self.block_stride == self.nbytes
            and self.spacing % self.nbytes == 0
            and self.segment_spacing == self.stored_pages * self.nbytes
        )


def part_runs(layout: SlotLayout, part: int, max_bytes: int = RUN_BYTES) -> list[Run2D]:
    """One part's strided runs, in slot order, as few 2D runs of ≤ ``max_bytes`` as possible."""
    pages, stored = layout.parts[part].pages, layout.parts[part].stored_pages
    runs: list[Run2D] = []
    for run, segment in zip(pages.runs, layout.segments[part], strict=True):
        grown = _extend(runs[-1], run, segment, max_bytes) if runs else None
        if grown is not None:
            runs[-1] = grown
        else:
            runs.append(
                Run2D(
                    base=run.base_addr,
                    spacing=0,
                    block_stride=run.block_stride,
                    nbytes=run.nbytes,
                    runs=1,
                    segment=segment,
                    segment_spacing=stored * run.nbytes,
                    num_blocks=pages.num_blocks,
                    stored_pages=stored,
                )
            )
    return runs


def _extend(last: Run2D, run: StridedRun, segment: int, max_bytes: int) -> Run2D | None:
    """``last`` with one more strided run, or None where that does not continue its pattern."""
    if (run.nbytes, run.block_stride) != (last.nbytes, last.block_stride):
        return None
    if (last.runs + 1) * last.stored_pages * last.nbytes > max_bytes:
        return None
    first = last.runs == 1
    spacing = run.base_addr - last.base if first else last.spacing
    segment_spacing = segment - last.segment if first else last.segment_spacing
    if run.base_addr != last.base + last.runs * spacing:
        return None
    if segment != last.segment + last.runs * segment_spacing:
        return None
    return replace(last, spacing=spacing, runs=last.runs + 1, segment_spacing=segment_spacing)


def consecutive(ids: Ids) -> Iterator[tuple[int, int, int]]:
    """Maximal sequences of ascending neighbours in ``ids`` as (position, first block id, length)."""
    cuts = np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1
    starts = np.concatenate(([0], cuts)).tolist()
    ends = [*starts[1:], len(ids)]
    for start, end, block in zip(starts, ends, ids[starts].tolist(), strict=True):
        yield start, block, end - start


def count_runs(ids: Ids) -> int:
    """How many sequences ``consecutive`` yields, without making them."""
    return int(np.count_nonzero(ids[1:] - ids[:-1] != 1)) + 1


def memory_at(address: int, nbytes: int) -> Bytes:
    """A uint8 array over memory that the caller keeps alive; touches nothing."""
    owner = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memoryview(owner), dtype=np.uint8)


def is_scattered(ids: Ids) -> bool:
    """True where page by page is faster than run by run."""
    return count_runs(ids) * PAGES_PER_RUN > max(len(ids), PAGES_PER_RUN)


class RunCopier:
    """Moves pages of one 2D run between its blocks and any slot of ``arena_bytes``."""

    def __init__(self, run: Run2D, arena_bytes: Bytes) -> None:
        self.run = run
        self._arena = arena_bytes
        last_run = (run.runs - 1) * run.spacing
        low = run.base + min(0, last_run)
        span = abs(last_run) + (run.num_blocks - 1) * run.block_stride + run.nbytes
        self._memory = memory_at(low, span)
        self._base = run.base - low
        self._flat: npt.NDArray[np.void] | None = None
        if run.dense:
            self._page = np.dtype((np.void, run.nbytes))
            self._flat = self._memory.view(self._page)
            runs = np.arange(run.runs, dtype=np.int64) * run.spacing + self._base
            self._run_pages = (runs // run.nbytes)[:, None]
            self._memory_pages = np.arange(0, run.nbytes, MEMORY_PAGE)

    def store(self, region: int, first: int, ids: Ids) -> int:
        """Blocks ``ids`` → stored pages ``first…`` of the region at arena offset ``region``; bytes moved."""
        flat = self._by_page(ids)
        if flat is not None:
            for out, index in self._page_rows(region, first, ids):
                self._look_ahead(index)
                flat.take(index, axis=0, out=out, mode="clip")
        else:
            for at, block, count in consecutive(ids):
                self._move(self._blocks(block, count), self._slot(region, first + at, count))
        return self.run.runs * len(ids) * self.run.nbytes

    def load(self, region: int, first: int, ids: Ids) -> int:
        """Stored pages ``first…`` of the region at arena offset ``region`` → blocks ``ids``; bytes moved."""
        # numpy keeps the GIL for few pages: large ones are copied so that other threads can run.
        flat = self._by_page(ids, few=self.run.runs * len(ids) < BATCH_PAGES)
        if flat is not None:
            for source, index in self._page_rows(region, first, ids):
                self._look_ahead(index)
                flat[index] = source
        else:
            for at, block, count in consecutive(ids):
                self._move(self._slot(region, first + at, count), self._blocks(block, count))
        return self.run.runs * len(ids) * self.run.nbytes

    def _by_page(self, ids: Ids, *, few: bool = False) -> npt.NDArray[np.void] | None:
        """The pages by number, if these blocks are best copied page by page in a single call."""
        b = self.run
        large = VECTOR_BYTES // 2 if few else VECTOR_BYTES
        vectors = b.nbytes >= large and b.runs * b.nbytes >= VECTOR_BLOCK_BYTES
        return self._flat if is_scattered(ids) and not vectors else None

    def _move(self, source: Bytes, target: Bytes) -> None:
        """Between views of one shape, ``[runs, pages, bytes]``."""
        if self.run.nbytes >= VECTOR_BYTES // 2:
            for side in (source, target):
                side[..., ::MEMORY_PAGE].copy()  # see _look_ahead
            np.positive(source, out=target)
        else:
            target[...] = source

    def _look_ahead(self, index: Ids) -> None:
        """Touch what is copied next: one byte of every 4 KiB (of every page, where pages are small).

        The processor overlaps these misses (cache line and address translation), which in the copy
        it would meet one after the other. Worth 5 to 20 %.
        """
        b = self.run
        if b.nbytes < 4 * MEMORY_PAGE:
            self._memory.take(index * b.nbytes, mode="clip")
        else:
            self._memory.take(index[:, None] * b.nbytes + self._memory_pages, mode="clip")

    def _page_rows(
        self, region: int, first: int, ids: Ids
    ) -> Iterator[tuple[npt.NDArray[np.void], Ids]]:
        """Slot pages and the flat page numbers they belong to, in batches."""
        b = self.run
        index = self._run_pages + ids
        start = region + b.segment
        if len(ids) == b.stored_pages:
            # The slot side is whole: runs follow each other without a gap.
            rows = self._arena[start : start + b.runs * b.segment_spacing].view(self._page)
            flat = index.ravel()
            parts = max(1, len(flat) // BATCH_PAGES)
            for part in range(parts):
                at, end = part * len(flat) // parts, (part + 1) * len(flat) // parts
                yield rows[at:end], flat[at:end]
            return
        start += first * b.nbytes
        size = len(ids) * b.nbytes
        for run in range(b.runs):
            at = start + run * b.segment_spacing
            yield self._arena[at : at + size].view(self._page), index[run]

    def _slot(self, region: int, first: int, count: int) -> Bytes:
        """``[runs, count, nbytes]`` view of slot pages."""
        b = self.run
        return np.ndarray(
            (b.runs, count, b.nbytes),
            np.uint8,
            self._arena,
            region + b.segment + first * b.nbytes,
            (b.segment_spacing, b.nbytes, 1),
        )

    def _blocks(self, block: int, count: int) -> Bytes:
        """``[runs, count, nbytes]`` view of neighbouring blocks."""
        b = self.run
        return np.ndarray(
            (b.runs, count, b.nbytes),
            np.uint8,
            self._memory,
            self._base + block * b.block_stride,
            (b.spacing, b.block_stride, 1),
        )
