"""Copying bundles with numpy: one call for many pages, the GIL released while bytes move.

Measured (see docs/performance.md): ``take`` and fancy assignment on a flat view whose *element is a whole
page* run at the speed of a memcpy loop in C, and one call serves all layers. Neighbouring block ids
are better copied as strided blocks, and so is everything with gaps between pages, because ``take``
would first make a contiguous copy of its source.

Large pages go block by block, all layers at once, through ``positive``, numpy's identity: its loop moves
whole vector registers. memcpy, which is what an assignment ends in, takes ``rep movsb`` for such sizes with
the C libraries in use today, and on some AMD processors that is the slower the larger the memory pages are.
"""

import ctypes
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lmcache_shm.transfer.bundles import Bundle, Ids, consecutive, count_runs

Bytes = npt.NDArray[np.uint8]

BATCH_PAGES = 512
"""At a time, at least. numpy's fancy assignment lets other threads run only from 501 elements on."""
MEMORY_PAGE = 4096
"""Bytes that share an entry of the page tables, at least."""
VECTOR_BYTES = 64 << 10
"""Pages from this size on are copied in vector registers; below, setting up each loop costs more."""
VECTOR_BLOCK_BYTES = 256 << 10
"""The least that one block must have in all lanes for a call of its own, where block ids are scattered."""

PAGES_PER_RUN = 4
"""Scattered dense pages go through ``take`` unless runs of neighbours are at least this long."""


def memory_at(address: int, nbytes: int) -> Bytes:
    """A uint8 array over memory that somebody else owns and keeps alive; touches nothing."""
    owner = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memoryview(owner), dtype=np.uint8)


def is_scattered(ids: Ids) -> bool:
    """True where page by page is faster than run by run."""
    return count_runs(ids) * PAGES_PER_RUN > max(len(ids), PAGES_PER_RUN)


class BundleCopier:
    """Moves pages of one bundle between its blocks and any slot of ``arena_bytes``."""

    def __init__(self, bundle: Bundle, arena_bytes: Bytes) -> None:
        self.bundle = bundle
        self._arena = arena_bytes
        last_lane = (bundle.lanes - 1) * bundle.spacing
        low = bundle.base + min(0, last_lane)
        span = abs(last_lane) + (bundle.num_blocks - 1) * bundle.block_stride + bundle.nbytes
        self._memory = memory_at(low, span)
        self._base = bundle.base - low
        self._flat: npt.NDArray[np.void] | None = None
        if bundle.dense:
            self._page = np.dtype((np.void, bundle.nbytes))
            self._flat = self._memory.view(self._page)
            lanes = np.arange(bundle.lanes, dtype=np.int64) * bundle.spacing + self._base
            self._lane_pages = (lanes // bundle.nbytes)[:, None]
            self._memory_pages = np.arange(0, bundle.nbytes, MEMORY_PAGE)

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
        return self.bundle.lanes * len(ids) * self.bundle.nbytes

    def load(self, region: int, first: int, ids: Ids) -> int:
        """Stored pages ``first…`` of the region at arena offset ``region`` → blocks ``ids``; bytes moved."""
        # Where they are too few for numpy to let others run, large pages must not hold those up.
        flat = self._by_page(ids, few=self.bundle.lanes * len(ids) < BATCH_PAGES)
        if flat is not None:
            for source, index in self._page_rows(region, first, ids):
                self._look_ahead(index)
                flat[index] = source
        else:
            for at, block, count in consecutive(ids):
                self._move(self._slot(region, first + at, count), self._blocks(block, count))
        return self.bundle.lanes * len(ids) * self.bundle.nbytes

    def _by_page(self, ids: Ids, *, few: bool = False) -> npt.NDArray[np.void] | None:
        """The pages by number, if these blocks are best copied page by page in a single call."""
        b = self.bundle
        large = VECTOR_BYTES // 2 if few else VECTOR_BYTES
        vectors = b.nbytes >= large and b.lanes * b.nbytes >= VECTOR_BLOCK_BYTES
        return self._flat if is_scattered(ids) and not vectors else None

    def _move(self, source: Bytes, target: Bytes) -> None:
        """Between views of one shape, ``[lanes, pages, bytes]``."""
        if self.bundle.nbytes >= VECTOR_BYTES // 2:
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
        b = self.bundle
        if b.nbytes < 4 * MEMORY_PAGE:
            self._memory.take(index * b.nbytes, mode="clip")
        else:
            self._memory.take(index[:, None] * b.nbytes + self._memory_pages, mode="clip")

    def _page_rows(
        self, region: int, first: int, ids: Ids
    ) -> Iterator[tuple[npt.NDArray[np.void], Ids]]:
        """Slot pages and the flat page numbers they belong to, in batches."""
        b = self.bundle
        index = self._lane_pages + ids
        start = region + b.segment
        if len(ids) == b.stored_pages:
            # The slot side is whole: lanes follow each other without a gap.
            rows = self._arena[start : start + b.lanes * b.segment_spacing].view(self._page)
            flat = index.ravel()
            parts = max(1, len(flat) // BATCH_PAGES)
            for part in range(parts):
                at, end = part * len(flat) // parts, (part + 1) * len(flat) // parts
                yield rows[at:end], flat[at:end]
            return
        start += first * b.nbytes
        size = len(ids) * b.nbytes
        for lane in range(b.lanes):
            at = start + lane * b.segment_spacing
            yield self._arena[at : at + size].view(self._page), index[lane]

    def _slot(self, region: int, first: int, count: int) -> Bytes:
        """``[lanes, count, nbytes]`` view of slot pages."""
        b = self.bundle
        return np.ndarray(
            (b.lanes, count, b.nbytes),
            np.uint8,
            self._arena,
            region + b.segment + first * b.nbytes,
            (b.segment_spacing, b.nbytes, 1),
        )

    def _blocks(self, block: int, count: int) -> Bytes:
        """``[lanes, count, nbytes]`` view of neighbouring blocks."""
        b = self.bundle
        return np.ndarray(
            (b.lanes, count, b.nbytes),
            np.uint8,
            self._memory,
            self._base + block * b.block_stride,
            (b.spacing, b.block_stride, 1),
        )
