"""KV caches of seven real layouts, as vLLM places them: one storage, groups overlaying each other.

Sizes of a page are those of the models; the number of layers and blocks is cut down.
"""

from dataclasses import dataclass, field

# byte offset in the storage, shape (blocks in dim 0), element strides, item size
Placement = tuple[int, tuple[int, ...], tuple[int, ...], int]


@dataclass
class Group:
    """One KV cache group; here also one object group."""

    name: str
    tensors: list[Placement]
    pages: int
    first_page: int = 0
    rule: str = "full"
    param: int = 0


@dataclass
class Layout:
    """All groups of a model; ``nbytes`` of storage."""

    name: str
    blocks: int
    nbytes: int
    groups: list[Group] = field(default_factory=list)


def dense(name: str, order: str) -> Layout:
    """Llama-8B's pages: 8 KV heads of 128, K and V, bf16, blocks of 16; 8 of its 32 layers."""
    blocks, sizes = 64, {"H": 8, "N": 16, "C": 256}
    strides, run = {}, 1
    for letter in reversed(order):
        strides[letter] = run
        run *= sizes[letter]
    page = run * 2
    shape = (blocks, 8, 16, 256)
    tensors = [(i * blocks * page, shape, (run, *(strides[x] for x in "HNC")), 2) for i in range(8)]
    return Layout(name, blocks, 8 * blocks * page, [Group("full", tensors, 16)])


def gemma4() -> Layout:
    """Full layers with blocks of 64 tokens in kernel blocks of 16; window layers with blocks of 32, tail only."""
    blocks, page = 40, 64 * 2048
    full = [
        (i * blocks * page, (blocks * 4, 2, 16, 512), (16384, 8192, 512, 1), 2) for i in range(4)
    ]
    window = [
        (i * blocks * page, (blocks * 2, 4, 16, 512), (32768, 8192, 512, 1), 2) for i in range(4)
    ]
    groups = [Group("full", full, 4), Group("window", window, 8, 4, "window", 128)]
    return Layout("Gemma 4, blocks of 64 and 32", blocks, 4 * blocks * page, groups)


def gdn() -> Layout:
    """Qwen3.5's states (3,207,168 bytes) padded to the attention page of 784 tokens, over the same storage."""
    blocks, page = 10, 784 * 4096
    state = [
        (i * blocks * page, (blocks, 1, 1, 3207168), (page, 3207168, 3207168, 1), 1)
        for i in range(3)
    ]
    full = [
        (i * blocks * page, (blocks, 4, 784, 512), (page // 2, 401408, 512, 1), 2) for i in range(3)
    ]
    groups = [Group("state", state, 1, rule="recurrent"), Group("full", full, 1)]
    return Layout("GDN, padded state pages", blocks, 3 * blocks * page, groups)


def mla() -> Layout:
    """DeepSeek-V3's latent: 576 values a token, bf16, blocks of 64."""
    blocks, page = 64, 64 * 576 * 2
    tensors = [
        (i * blocks * page, (blocks, 1, 64, 576), (64 * 576, 64 * 576, 576, 1), 2)
        for i in range(12)
    ]
    return Layout("MLA", blocks, 12 * blocks * page, [Group("full", tensors, 4)])


def deepseek_v4() -> Layout:
    """Block-outermost: five groups of different page sums inside the same block stride."""
    blocks, stride = 48, 93_888
    sums = (("a", [24_960] * 3, 4), ("b", [24_960] * 3, 4), ("c", [31_296] * 3, 2),
            ("d", [20_736] * 4, 2), ("e", [16_416] * 2, 1))  # fmt: skip
    groups = []
    for name, pages, count in sums:
        at, tensors = 0, []
        for nbytes in pages:
            tensors.append((at, (blocks, 1, 1, nbytes), (stride, nbytes, nbytes, 1), 1))
            at += nbytes
        groups.append(Group(name, tensors, count))
    return Layout("DeepSeek-V4, block-outermost", blocks, blocks * stride, groups)


def minimax_m3() -> Layout:
    """Dense bf16 layers, sparse fp8 layers, and the sparse layers' index lanes of 132 bytes a token."""
    blocks, at, tensors = 64, 0, []
    for layer in range(8):
        item = 2 if layer < 4 else 1
        tensors.append((at, (blocks, 4, 16, 256), (16384, 4096, 256, 1), item))
        at += blocks * 16384 * item
        if layer >= 4:
            tensors.append((at, (blocks, 16, 132), (16 * 132, 132, 1), 1))
            at += blocks * 16 * 132
    return Layout("MiniMax-M3, mixed formats", blocks, at, [Group("full", tensors, 16)])


def layouts() -> list[Layout]:
    hnd, nhd = dense("dense, HND", "HNC"), dense("dense, NHD", "NHC")
    return [hnd, nhd, gemma4(), gdn(), mla(), deepseek_v4(), minimax_m3()]
