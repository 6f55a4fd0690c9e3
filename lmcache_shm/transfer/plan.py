"""Pure planning for the stream engine: which bytes, in which registrations, by which back end."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import numpy as np

from lmcache_shm.transfer.device import Addresses, Ranges, Rows
from lmcache_shm.transfer.pages import SlotLayout
from lmcache_shm.transfer.strided import Ids, Run2D, consecutive

GIB = 1 << 30
LARGEST_REGISTRATION = 64 * GIB
"""A single registration of 512 GiB and more fails in today's drivers, and late; stay far below."""
REGISTRATION_ALIGN = 64 << 20
"""Slabs are powers of two up to this size, so a multiple of it never cuts one."""

Backend = Literal["batch", "kernel", "rows", "ranges"]
RequestedBackend = Literal["auto", "batch", "kernel", "rows", "ranges", "pageable"]
"""``pageable``: nothing is pinned, so every range is a copy of its own, and slow."""
REQUESTED_BACKENDS = get_args(RequestedBackend)

KERNEL_BELOW = {"load": 28 << 10, "store": 0}
"""Mean range size under which the kernel is chosen by itself. Published for H100 (vLLM): loads gain below
28 KiB, stores never do. ``lmcache-shm bench transfer --device cuda`` measures it for the GPU at hand, and
the engine options load_kernel_below and store_kernel_below, whose defaults these are, set it."""
KERNEL_MIN_RANGES = 16


def registration_ranges(
    nbytes: int, first: int = GIB // 4, largest: int = GIB, align: int = REGISTRATION_ALIGN
) -> list[tuple[int, int]]:
    """Cut ``nbytes`` of arena into (start, end) offsets to be registered one after the other.

    They double from ``first`` to ``largest``: the slabs that are used first are pinned within
    a second, and no call holds the driver, for which launches of kernels may wait, for long. All ends but
    the last are multiples of ``align``, so no slab is cut; a slot of several slabs may be, and its copies
    are (see ``split``).
    """
    if not 0 < first <= largest <= LARGEST_REGISTRATION or first % align or largest % align:
        raise ValueError(
            f"registrations of {first} to {largest} bytes: not ≤ 64 GiB or not aligned"
        )
    found, start, size = [], 0, first
    while start < nbytes:
        end = min(start + size, nbytes)
        found.append((start, end))
        start, size = end, min(size * 2, largest)
    return found


class RunTable(NamedTuple):
    """All runs of one part as columns ``[runs, 1]``, made once; see ``pages.StridedRun``."""

    base: Addresses
    stride: Addresses
    nbytes: Addresses
    segment: Addresses


def run_table(layout: SlotLayout, part: int) -> RunTable:
    """Of any runs, equally spaced or not."""
    runs = layout.parts[part].pages.runs
    rows = [
        (run.base_addr, run.block_stride, run.nbytes, segment)
        for run, segment in zip(runs, layout.segments[part], strict=True)
    ]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return RunTable(*(np.ascontiguousarray(column)[:, None] for column in columns))


def page_ranges(table: RunTable, region: int, first: int, ids: Ids) -> Ranges:
    """Every page of ``ids`` in every run, run by run; ``region`` is the host address of the region."""
    pages = np.arange(first, first + len(ids), dtype=np.int64)
    device = table.base + ids * table.stride
    host = region + table.segment + pages * table.nbytes
    nbytes = np.broadcast_to(table.nbytes, device.shape)
    return Ranges(device.ravel(), host.ravel(), nbytes.ravel())


def join(parts: list[Ranges]) -> Ranges:
    """One after the other."""
    if len(parts) == 1:
        return parts[0]
    return Ranges(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def merge(ranges: Ranges) -> Ranges:
    """Unite neighbours in the list that also touch on both sides."""
    device, host, nbytes = ranges
    if len(nbytes) < 2:
        return ranges
    cut = np.ones(len(nbytes), dtype=bool)
    cut[1:] = (device[1:] != device[:-1] + nbytes[:-1]) | (host[1:] != host[:-1] + nbytes[:-1])
    starts = np.flatnonzero(cut)
    sums = np.add.reduceat(nbytes, starts).astype(np.int64, copy=False)
    return Ranges(device[starts], host[starts], sums)


def split(ranges: Ranges, boundaries: Addresses) -> Ranges:
    """Cut ranges so that none crosses one of the sorted host addresses ``boundaries``.

    CUDA refuses a copy whose host memory lies in two registrations, or partly in one.
    """
    device, host, nbytes = ranges
    low = np.searchsorted(boundaries, host, side="right")
    high = np.searchsorted(boundaries, host + nbytes, side="left")
    parts = high - low + 1
    if not (parts > 1).any():
        return ranges
    owner = np.repeat(np.arange(len(host)), parts)
    number: Addresses = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    padded: Addresses = np.concatenate((boundaries, np.full(1, np.iinfo(np.int64).max)))
    before = boundaries[np.maximum(low[owner] + number - 1, 0)]
    start: Addresses = np.where(number == 0, host[owner], before)
    end: Addresses = np.minimum(padded[low[owner] + number], (host + nbytes)[owner])
    return Ranges(device[owner] + (start - host[owner]), start, end - start)


def page_rows(run: Run2D, region: int, first: int, ids: Ids, max_pitch: int) -> list[Rows]:
    """The same bytes as 2D copies: per run of neighbouring blocks one for all runs, where pitches allow."""
    b, found = run, []
    for at, block, count in consecutive(ids):
        device = b.base + block * b.block_stride
        host = region + b.segment + (first + at) * b.nbytes
        width = count * b.nbytes
        if count == 1 or b.block_stride == b.nbytes:
            if b.runs == 1 or (width <= b.spacing <= max_pitch >= b.segment_spacing):
                found.append(Rows(device, b.spacing, host, b.segment_spacing, width, b.runs))
            else:
                found += [
                    Rows(
                        device + i * b.spacing, width, host + i * b.segment_spacing, width, width, 1
                    )
                    for i in range(b.runs)
                ]
        else:
            # Blocks that lie too far apart for a pitch are copied one by one.
            height = count if b.block_stride <= max_pitch else 1
            found += [
                Rows(
                    device + i * b.spacing + j * b.block_stride,
                    b.block_stride,
                    host + i * b.segment_spacing + j * b.nbytes,
                    b.nbytes,
                    b.nbytes,
                    height,
                )
                for i in range(b.runs)
                for j in range(0, count, height)
            ]
    return found


def choose(
    requested: RequestedBackend,
    kind: str,
    ranges: Ranges,
    *,
    has_batch: bool,
    has_kernel: bool,
    kernel_below: Mapping[str, int] = KERNEL_BELOW,
) -> Backend:
    """The back end for pinned ranges; one that cannot be had falls back to the next best."""
    limit = kernel_below[kind]
    count = len(ranges.nbytes)
    if requested == "kernel" or (
        requested == "auto" and count >= KERNEL_MIN_RANGES and ranges.total < limit * count
    ):
        aligned = not ((ranges.device | ranges.host | ranges.nbytes) & 7).any()
        if has_kernel and aligned:
            return "kernel"
    if requested in {"ranges", "rows"}:
        return requested
    return "batch" if has_batch else "rows"
