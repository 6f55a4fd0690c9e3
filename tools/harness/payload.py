"""What every byte of the arena must be: a function of (namespace and prefix, group, rank, page, offset)."""

import numpy as np
import numpy.typing as npt
import xxhash

CHUNK = 64
BLOCK = 16
N_BLOCKS = 160
# Object group → (pages per chunk, bytes per page and layer, layers). Odd sizes, to expose rounding.
SHAPES = {0: (CHUNK // BLOCK, 15_000, 4), 1: (1, 90_008, 3)}
_WORDS = {
    n: np.arange(n // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) for n in (15_000, 90_008)
}


def page(key: bytes, group: int, rank: int, number: int) -> npt.NDArray[np.uint8]:
    """Bytes of one page; `number` counts pages over layers. Every 8-byte word tells where it belongs."""
    seed = xxhash.xxh3_64_intdigest(key + bytes([group, rank, number]))
    return (_WORDS[SHAPES[group][1]] + np.uint64(seed)).view(np.uint8)


def tokens(document: int, chunks: int) -> list[int]:
    """Token ids of a document's first chunks; documents of one family share their first two chunks."""
    family = document // 4
    shared = [family * 1000 + i for i in range(2 * CHUNK)]
    own = [1_000_000 + document * 10_000 + i for i in range(max(0, chunks - 2) * CHUNK)]
    return (shared + own)[: chunks * CHUNK]
