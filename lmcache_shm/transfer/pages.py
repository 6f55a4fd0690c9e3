"""Block ids → byte ranges: where the content bytes of a KV cache block lie, and where a slot keeps them.

vLLM registers one or more strided tensors per layer. All its placements reduce to *strided runs*::

    run = (base_addr, block_stride, nbytes)      bytes of block b: [base + b·stride, base + b·stride + nbytes)

    dense pages (L B H N C)      one run per layer, nbytes == stride
    padded state pages           one run per layer, nbytes <  stride (the padding is never touched)
    head-outermost (L H B N C)   one run per layer and head
    block-outermost (B L H N C)  neighbouring layers of a block merge into one run
    kernel blocks (k per block)  dim 0 has k·num_blocks entries; k dense ones are one run of bytes
    index or scale tensors       another tensor of the layer: another run, its own stride

A slot keeps, for every part (KV cache group), every run as one dense array ``[stored_pages, nbytes]``::

    region of one rank:  part 0: run 0 page 0, page 1, … | run 1 page 0, … | part 1: …     (64 B aligned)

Lanes are ordered by the order in which the tensors were given, never by address, and only bytes of one
storage are merged: two processes with the same configuration get the same slot layout, wherever their
allocator put things. ``GroupPages.signature`` is what must be equal for slots to be exchangeable.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

SEGMENT_ALIGN = 64


class PlacementError(ValueError):
    """A registered tensor cannot be described as strided runs of its blocks: the cache must refuse it."""


class TensorLike(Protocol):
    """The part of ``torch.Tensor`` that placement needs (strides in elements, like torch)."""

    @property
    def shape(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A strided tensor at an address, for callers without torch (benchmarks, tests)."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    itemsize: int = 1
    storage: int = 0
    """Identity of the allocation; bytes of different storages are never merged."""

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return self.itemsize


@dataclass(frozen=True, slots=True)
class StridedRun:
    """The bytes ``[base_addr + b·block_stride, … + nbytes)`` of every block b."""

    base_addr: int
    block_stride: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Unmerged:
    """A run before merging, with where it came from."""

    tensor: int
    offset: int
    """Bytes from the tensor's own address: with ``tensor`` the canonical place of the run."""
    storage: int
    run: StridedRun


@dataclass(frozen=True)
class GroupPages:
    """All content bytes of the blocks of one KV cache group on this rank."""

    runs: tuple[StridedRun, ...]
    num_blocks: int
    signature: str = ""
    """Canonical text of which tensor bytes each run holds; part of the namespace."""

    @cached_property
    def page_bytes(self) -> int:
        """Content bytes of one block over all runs."""
        return sum(run.nbytes for run in self.runs)


def group_pages(
    tensors: Iterable[TensorLike], num_blocks: int, expected_bytes: int | None = None
) -> GroupPages:
    """Lanes of every tensor that vLLM registered for one KV cache group, in the order given.

    ``tensors`` must come in an order that is the same in every process (layer order). The same bytes
    registered twice (KV sharing) become one run. ``expected_bytes`` is the content of one block by
    the group's spec, when the caller knows it. Raises PlacementError for anything that is not
    ``num_blocks`` disjoint blocks, or when the bytes do not add up.
    """
    found: list[_Unmerged] = []
    for index, tensor in enumerate(tensors):
        found += _tensor_runs(index, tensor, num_blocks)
    if not found:
        raise PlacementError("no KV cache tensor was registered for this group")
    merged = _merge(found, num_blocks)
    runs = tuple(run for run, _ in merged)
    _require_disjoint(runs, num_blocks)
    signature = ";".join(
        "+".join(f"{p.tensor}@{p.offset}:{p.run.nbytes}" for p in members) for _, members in merged
    )
    pages = GroupPages(runs, num_blocks, signature)
    if expected_bytes is not None and pages.page_bytes != expected_bytes:
        raise PlacementError(
            f"a block of this group holds {pages.page_bytes} bytes in the registered tensors, "
            f"but its spec says {expected_bytes}"
        )
    return pages


def _tensor_runs(index: int, tensor: TensorLike, num_blocks: int) -> list[_Unmerged]:
    """The maximal byte runs of block 0 of one tensor, each with the block stride."""
    item = tensor.element_size()
    shape = [int(n) for n in tensor.shape]
    strides = [int(s) * item for s in tensor.stride()]
    if num_blocks < 1 or not shape or shape[0] < 1 or shape[0] % num_blocks:
        raise PlacementError(
            f"tensor {index} of shape {tuple(shape)} does not hold {num_blocks} blocks in dim 0"
        )
    split = shape[0] // num_blocks
    block_stride = strides[0] * split
    dims = sorted(
        (stride, size)
        for stride, size in zip([strides[0], *strides[1:]], [split, *shape[1:]], strict=True)
        if size != 1
    )
    if any(size < 1 for _, size in dims):
        raise PlacementError(f"tensor {index} of shape {tuple(shape)} is empty")
    run, span = item, item
    outer: list[tuple[int, int]] = []
    for stride, size in dims:
        if stride < span:
            raise PlacementError(
                f"tensor {index} with shape {tuple(shape)}, byte strides {tuple(strides)}: "
                "elements overlap"
            )
        if stride == run and not outer:
            run *= size
        else:
            outer.append((stride, size))
        span = stride * (size - 1) + span
    if num_blocks > 1 and run > block_stride:
        raise PlacementError(
            f"tensor {index}: a run of {run} bytes per block exceeds the block stride {block_stride}"
        )
    offsets = np.zeros(1, dtype=np.int64)
    for stride, size in reversed(outer):
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    base, storage = tensor.data_ptr(), _storage_of(tensor)
    return [
        _Unmerged(index, int(off), storage, StridedRun(base + int(off), block_stride, run))
        for off in offsets
    ]


def _storage_of(tensor: TensorLike) -> int:
    if isinstance(tensor, RawTensor):
        return tensor.storage
    storage = getattr(tensor, "untyped_storage", None)
    return int(storage().data_ptr()) if storage is not None else tensor.data_ptr()


def _merge(found: list[_Unmerged], num_blocks: int) -> list[tuple[StridedRun, list[_Unmerged]]]:
    """Unite runs that touch or coincide in every block; result in canonical order."""

    def by_address(one: _Unmerged) -> tuple[int, ...]:
        run = one.run
        return (one.storage, run.block_stride, run.base_addr, -run.nbytes, one.tensor)

    merged: list[tuple[StridedRun, list[_Unmerged]]] = []
    for one in sorted(found, key=by_address):
        run = one.run
        if merged:
            last, members = merged[-1]
            end = last.base_addr + last.nbytes
            union = max(end, run.base_addr + run.nbytes) - last.base_addr
            same = (members[0].storage, last.block_stride) == (one.storage, run.block_stride)
            fits = num_blocks == 1 or union <= run.block_stride
            if same and run.base_addr <= end and fits:
                if union > last.nbytes:
                    members.append(one)
                    merged[-1] = (StridedRun(last.base_addr, last.block_stride, union), members)
                continue
        merged.append((run, [one]))
    return sorted(merged, key=lambda m: min((p.tensor, p.offset) for p in m[1]))


def _require_disjoint(runs: tuple[StridedRun, ...], num_blocks: int) -> None:
    """Two different blocks of one group must never share a byte."""
    if num_blocks == 1:
        return
    table = np.array([(x.base_addr, x.block_stride, x.nbytes) for x in runs], dtype=np.int64)
    base, stride, size = table[np.argsort(table[:, 0], kind="stable")].T
    end = base + stride * (num_blocks - 1) + size
    for i in range(len(base) - 1):
        # Lanes that start before this one's last block ends lie between its blocks: they must
        # repeat with the same stride and stay in the gap.
        later = slice(i + 1, int(np.searchsorted(base, end[i], side="left")))
        phase = (base[later] - base[i]) % stride[i]
        in_gap = (phase >= size[i]) & (phase + size[later] <= stride[i])
        bad = np.flatnonzero(~in_gap | (stride[later] != stride[i]))
        if len(bad):
            j = i + 1 + int(bad[0])
            raise PlacementError(
                f"different blocks overlap: {size[i]} bytes at {base[i]:#x} every {stride[i]} and "
                f"{size[j]} bytes at {base[j]:#x} every {stride[j]}, {num_blocks} blocks"
            )


@dataclass(frozen=True)
class Part:
    """What a slot holds of one KV cache group."""

    pages: GroupPages
    pages_per_chunk: int
    """Blocks of this group per chunk (1 for a recurrent state)."""
    first_page: int = 0
    """Index within the chunk of the first page that is stored; a window's tail starts late."""

    def __post_init__(self) -> None:
        if not 0 <= self.first_page < self.pages_per_chunk:
            raise ValueError(f"first_page {self.first_page} not in [0, {self.pages_per_chunk})")

    @property
    def stored_pages(self) -> int:
        """Pages the slot keeps: the chunk's last ``pages_per_chunk - first_page``."""
        return self.pages_per_chunk - self.first_page


class SlotLayout:
    """Byte layout of one rank's region in the slots of one object group (see the module's map)."""

    def __init__(self, parts: Sequence[Part]) -> None:
        if not parts:
            raise ValueError("a slot needs at least one part")
        self.parts = tuple(parts)
        segments: list[tuple[int, ...]] = []
        at = 0
        for part in self.parts:
            offsets = []
            for run in part.pages.runs:
                offsets.append(at)
                at = _align(at + run.nbytes * part.stored_pages)
            segments.append(tuple(offsets))
        self.segments: tuple[tuple[int, ...], ...] = tuple(segments)
        """Offset in the region of page 0 of ``[part][run]``."""
        self.region_bytes: int = at
        """Bytes of one rank's region, a multiple of 64."""

    @property
    def signature(self) -> str:
        """What must be equal for two processes to exchange slots; part of the namespace."""
        return "|".join(
            f"{p.first_page}/{p.pages_per_chunk}({p.pages.signature})" for p in self.parts
        )


def _align(nbytes: int) -> int:
    return (nbytes + SEGMENT_ALIGN - 1) // SEGMENT_ALIGN * SEGMENT_ALIGN
