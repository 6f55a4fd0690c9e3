"""KV caches of real model shapes in plain memory: what the benchmark copies.

Only what decides the cost of a copy is modelled: bytes per page, pages per slot, layers, strides.
"""

import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_shm.transfer.pages import Part, RawTensor, SlotLayout, group_pages

KIB, MIB = 1 << 10, 1 << 20


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


def page_sweep() -> list[Shape]:
    """The same 32 MiB slot of 32 layers cut into pages of different size and order.

    64 KiB is a block of 16 tokens of 8 KV heads of 128 bf16 with K and V in one run (HND, fused), 512 KiB one
    of 128 tokens; with K and V in tensors of their own (as with NHD) a page is two runs of half the size.
    """
    dense = [
        Shape(f"{kib} KiB pages", 256, (LayerGroup("full", 32, kib * KIB, MIB // (kib * KIB)),))
        for kib in (8, 16, 32, 64, 512)
    ]
    orders = {
        "64 KiB, K and V apart": LayerGroup(
            "full", 32, 64 * KIB, 16, order="heads outermost", heads=2
        ),
        "512 KiB, K and V apart": LayerGroup(
            "full", 32, 512 * KIB, 2, order="heads outermost", heads=2
        ),
        "64 KiB, blocks outermost": LayerGroup("full", 32, 64 * KIB, 16, order="blocks outermost"),
        "64 KiB, 8 heads outermost": LayerGroup(
            "full", 32, 64 * KIB, 16, order="heads outermost", heads=8
        ),
        "1 MiB padded states": LayerGroup("state", 32, MIB - 4160, 1, page_stride=MIB),
    }
    return dense + [Shape(name, 256, (group,)) for name, group in orders.items()]


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
