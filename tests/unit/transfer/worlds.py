"""KV caches in plain memory, in the layouts of real models (scaled down), with a byte oracle.

The oracle knows nothing of runs: it enumerates every element of every registered tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lmcache_shm.arena.job import CopyJob, Pages
from lmcache_shm.arena.layout import HOT_DTYPE, SlotState
from lmcache_shm.transfer.pages import Part, RawTensor, SlotLayout, group_pages


class FakeArena:
    """Payload memory and a slot table, without shared memory or a server."""

    def __init__(self, data_bytes: int, rows: int = 64) -> None:
        self.data_array = np.zeros(data_bytes, dtype=np.uint8)
        self.hot = np.zeros(rows, dtype=HOT_DTYPE)
        self.arena_id = b"arena-under-test"
        self.backed_bytes = data_bytes

    def set(self, row: int, state: SlotState, generation: int) -> None:
        self.hot["state"][row] = state
        self.hot["generation"][row] = generation


@dataclass
class Group:
    """One KV cache group: tensors as (byte offset in memory, shape, element strides, itemsize)."""

    tensors: list[tuple[int, tuple[int, ...], tuple[int, ...], int]]
    pages_per_chunk: int
    first_page: int = 0


@dataclass
class World:
    """One storage that all groups overlay, as vLLM 0.32 has it. Each group is an object group here."""

    name: str
    num_blocks: int
    groups: list[Group]
    size: int
    memory: np.ndarray = field(init=False)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(7)
        self.memory = np.zeros(self.size, dtype=np.uint8)
        self.scramble()

    def scramble(self) -> None:
        """New random bytes everywhere, in place."""
        self.memory[:] = self.rng.integers(0, 256, self.size, dtype=np.uint8)

    def tensors(self, group: int) -> list[RawTensor]:
        base = self.memory.ctypes.data
        return [
            RawTensor(base + offset, shape, strides, item)
            for offset, shape, strides, item in self.groups[group].tensors
        ]

    def part(self, group: int) -> Part:
        spec = self.groups[group]
        pages = group_pages(self.tensors(group), self.num_blocks)
        return Part(pages, spec.pages_per_chunk, spec.first_page)

    def layouts(self) -> list[SlotLayout]:
        return [SlotLayout([self.part(g)]) for g in range(len(self.groups))]

    def content(self, group: int, block: int) -> np.ndarray:
        """Oracle: sorted offsets in memory of every content byte of one block."""
        found = [np.empty(0, dtype=np.int64)]
        for offset, shape, strides, item in self.groups[group].tensors:
            split = shape[0] // self.num_blocks
            first = np.arange(block * split, (block + 1) * split) * strides[0]
            for size, stride in zip(shape[1:], strides[1:], strict=True):
                first = (first[:, None] + np.arange(size) * stride).ravel()
            found.append((offset + first[:, None] * item + np.arange(item)).ravel())
        return np.unique(np.concatenate(found))

    def scattered_blocks(self, count: int) -> np.ndarray:
        """``count`` different block ids, never the null block 0."""
        return self.rng.permutation(np.arange(1, self.num_blocks))[:count].astype(np.int64)


def permuted(
    order: str, sizes: dict[str, int], item: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a [B, H, N, C] view whose memory order is ``order``, outermost first."""
    strides, run = {}, 1
    for letter in reversed(order):
        strides[letter] = run
        run *= sizes[letter]
    return tuple(sizes[x] for x in "BHNC"), tuple(strides[x] for x in "BHNC")


def layered(
    order: str, layers: int, blocks: int, heads: int, tokens: int, content: int, item: int = 2
):
    """``layers`` tensors one behind the other."""
    shape, strides = permuted(order, {"B": blocks, "H": heads, "N": tokens, "C": content}, item)
    one = blocks * heads * tokens * content * item
    return [(layer * one, shape, strides, item) for layer in range(layers)], layers * one


def dense_hnd() -> World:
    tensors, size = layered("BHNC", 4, 24, 2, 16, 32)
    return World("dense HND", 24, [Group(tensors, 4)], size)


def dense_nhd() -> World:
    tensors, size = layered("BNHC", 3, 24, 2, 16, 24)
    return World("dense NHD", 24, [Group(tensors, 4)], size)


def head_outermost() -> World:
    tensors, size = layered("HBNC", 3, 20, 4, 16, 16)
    return World("head-outermost", 20, [Group(tensors, 2)], size)


def gemma4() -> World:
    """Full layers with blocks of 64 tokens, window layers with 32: same page bytes, kernel blocks of 16."""
    blocks, page = 30, 64 * 4 * 2
    full = [
        (layer * blocks * page, (blocks * 4, 1, 16, 4), (64, 64, 4, 1), 2) for layer in range(2)
    ]
    window = [
        (layer * blocks * page, (blocks * 2, 1, 16, 8), (128, 128, 8, 1), 2) for layer in range(2)
    ]
    return World(
        "gemma4", blocks, [Group(full, 4), Group(window, 8, first_page=5)], 2 * blocks * page
    )


def gdn() -> World:
    """State pages padded to the attention page, next to attention pages of the same storage."""
    blocks, page = 18, 4096
    state = [
        (layer * blocks * page, (blocks, 1, 1, 3333), (page, 3333, 3333, 1), 1)
        for layer in range(3)
    ]
    attn = [
        (layer * blocks * page, (blocks, 2, 16, 64), (2048, 1024, 64, 1), 2) for layer in range(3)
    ]
    return World("padded GDN", blocks, [Group(state, 1), Group(attn, 2)], 3 * blocks * page)


def mla() -> World:
    tensors, size = layered("BHNC", 5, 26, 1, 16, 36)
    return World("MLA", 26, [Group(tensors, 4)], size)


def deepseek_v4() -> World:
    """Block-outermost, five groups of different page sums over the same bytes."""
    blocks, stride = 21, 3912
    groups = []
    for pages, heads in (
        ((1040, 1040, 1040), 4),
        ((1560, 1560), 1),
        ((1304, 1304, 1304), 2),
        ((864, 864, 864, 864), 2),
        ((342, 1026), 1),
    ):
        at, tensors = 0, []
        for nbytes in pages:
            tensors.append((at, (blocks, 1, 1, nbytes), (stride, nbytes, nbytes, 1), 1))
            at += nbytes
        groups.append(Group(tensors, heads))
    # In the last group the second tensor leaves a hole behind the first.
    first, second = groups[4].tensors
    groups[4].tensors = [first, (600, *second[1:])]
    return World("DeepSeek-V4", blocks, groups, blocks * stride)


def minimax_m3() -> World:
    """Dense bf16 layers, sparse layers with fp8 KV and an index run of another page size."""
    blocks, at, tensors = 22, 0, []
    for layer in range(4):
        shape, strides, item = (blocks, 2, 16, 32), (1024, 512, 32, 1), 2 if layer < 2 else 1
        tensors.append((at, shape, strides, item))
        at += blocks * 1024 * item
        if layer >= 2:
            tensors.append((at, (blocks, 16, 33), (16 * 33, 33, 1), 1))
            at += blocks * 16 * 33
    return World("MiniMax-M3", blocks, [Group(tensors, 4)], at)


def padded_kernel_blocks() -> World:
    """Two kernel pages per block, each followed by padding; and the same bytes registered twice."""
    blocks = 16
    one = (0, (blocks * 2, 1, 16, 10), (200, 160, 10, 1), 2)
    two = (blocks * 800, (blocks * 2, 1, 16, 10), (200, 160, 10, 1), 2)
    return World("padded kernel blocks", blocks, [Group([one, two, one], 4)], blocks * 1600)


WORLDS: list[Callable[[], World]] = [
    dense_hnd, dense_nhd, head_outermost, gemma4, gdn, mla, deepseek_v4, minimax_m3,
    padded_kernel_blocks,
]  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """One slot of a job, and where this rank's checksum of it is."""

    row: int
    offset: int
    generation: int
    group: int
    pages: list[Pages]
    checksum_at: int = -1


def item(
    layouts: Sequence[SlotLayout],
    group: int,
    row: int,
    offset: int,
    blocks: np.ndarray,
    *,
    first: int = 0,
    generation: int = 5,
    checksum_at: int = -1,
) -> Slot:
    """Pages ``first…`` of one slot with one part."""
    return Slot(row, offset, generation, group, [Pages(0, first, blocks)], checksum_at)


def job(
    kind: str,
    slots: list[Slot],
    job_id: int = 1,
    *,
    arena_id: bytes = b"",
    deadline_s: float = 30.0,
) -> tuple[CopyJob, np.ndarray, np.ndarray, float]:
    """What ``submit`` takes: slots in which this rank's region comes first."""
    columns = [[getattr(s, c) for s in slots] for c in ("row", "offset", "generation", "group")]
    made = CopyJob.of(job_id, kind, arena_id, *columns, [s.pages for s in slots])
    checksums = np.array([s.checksum_at for s in slots], np.int64)
    return made, made.offsets, checksums, deadline_s
