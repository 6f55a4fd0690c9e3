"""Lanes that can be copied in one call: equal pages, equally spaced, in memory and in the slot.

::

    blocks   lane i, block b:  base + i·spacing + b·block_stride            (absolute address)
    slot     lane i, page p:   segment + i·segment_spacing + p·nbytes       (offset in the region)

The layers of a uniform model form one bundle, so a slot of hundreds of pages is one call on CPU
and a handful of 2D copies on a GPU. Pure geometry; both engines build on it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_shm.transfer.pages import Lane, SlotLayout

Ids = npt.NDArray[np.int64]

BUNDLE_BYTES = 32 << 20
"""Upper bound for one bundle's bytes in a slot. A copy is cancelled only between bundles (about 3 ms
at this size); smaller ones would ask for Python's GIL more often, and that costs up to 5 ms each when
the engine's own thread is busy in Python."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """``lanes`` lanes of one part; see the module's map."""

    base: int
    spacing: int
    block_stride: int
    nbytes: int
    lanes: int
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


def part_bundles(layout: SlotLayout, part: int, max_bytes: int = BUNDLE_BYTES) -> list[Bundle]:
    """Split one part's lanes, in slot order, into as few bundles of ≤ ``max_bytes`` as possible."""
    pages, stored = layout.parts[part].pages, layout.parts[part].stored_pages
    bundles: list[Bundle] = []
    for lane, segment in zip(pages.lanes, layout.segments[part], strict=True):
        grown = _extend(bundles[-1], lane, segment, max_bytes) if bundles else None
        if grown is not None:
            bundles[-1] = grown
        else:
            bundles.append(
                Bundle(
                    base=lane.base_addr,
                    spacing=0,
                    block_stride=lane.block_stride,
                    nbytes=lane.nbytes,
                    lanes=1,
                    segment=segment,
                    segment_spacing=stored * lane.nbytes,
                    num_blocks=pages.num_blocks,
                    stored_pages=stored,
                )
            )
    return bundles


def _extend(last: Bundle, lane: Lane, segment: int, max_bytes: int) -> Bundle | None:
    """``last`` with one more lane, or None where the lane does not continue its pattern."""
    if (lane.nbytes, lane.block_stride) != (last.nbytes, last.block_stride):
        return None
    if (last.lanes + 1) * last.stored_pages * last.nbytes > max_bytes:
        return None
    first = last.lanes == 1
    spacing = lane.base_addr - last.base if first else last.spacing
    segment_spacing = segment - last.segment if first else last.segment_spacing
    if lane.base_addr != last.base + last.lanes * spacing:
        return None
    if segment != last.segment + last.lanes * segment_spacing:
        return None
    return Bundle(
        base=last.base,
        spacing=spacing,
        block_stride=last.block_stride,
        nbytes=last.nbytes,
        lanes=last.lanes + 1,
        segment=last.segment,
        segment_spacing=segment_spacing,
        num_blocks=last.num_blocks,
        stored_pages=last.stored_pages,
    )


def consecutive(ids: Ids) -> Iterator[tuple[int, int, int]]:
    """Maximal runs of ascending neighbours in ``ids`` as (position, first block id, length)."""
    cuts = np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1
    starts = np.concatenate(([0], cuts)).tolist()
    ends = [*starts[1:], len(ids)]
    for start, end, block in zip(starts, ends, ids[starts].tolist(), strict=True):
        yield start, block, end - start


def count_runs(ids: Ids) -> int:
    """How many runs ``consecutive`` yields, without making them."""
    return int(np.count_nonzero(ids[1:] - ids[:-1] != 1)) + 1
