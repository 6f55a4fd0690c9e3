"""Who owns each block, and what went wrong."""

from collections import deque
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Violation(AssertionError):
    """The cache broke a promise. `kind` names the promise; the message ends with what happened before."""

    def __init__(self, kind: str, message: str, trace: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([f"{kind}: {message}", *trace]))
        self.kind = kind


class Oracle:
    """Watches a BlockPool: `generation[b]` grows each time that block b is handed out."""

    def __init__(self) -> None:
        self.trace: deque[str] = deque(maxlen=60)
        self.generation: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.handed_out: list[int] = []
        """Blocks given to someone since the last call of `take_handed_out`."""
        self._pool: BlockPool | None = None

    def watch(self, pool: BlockPool) -> None:
        self._pool = pool
        self.generation = np.zeros(pool.num_gpu_blocks, np.int64)
        get_new_blocks = pool.get_new_blocks

        def recording(num_blocks: int) -> list[KVCacheBlock]:
            blocks: list[KVCacheBlock] = get_new_blocks(num_blocks)
            for block in blocks:
                self.generation[block.block_id] += 1
                self.handed_out.append(block.block_id)
            return blocks

        pool.get_new_blocks = recording

    @property
    def pool(self) -> BlockPool:
        assert self._pool is not None
        return self._pool

    def take_handed_out(self) -> list[int]:
        blocks, self.handed_out = self.handed_out, []
        return blocks

    def owned(self, block: int, generation: int) -> bool:
        """Still what it was: not given to anyone else, and somebody keeps it."""
        return bool(self.generation[block] == generation) and self.pool.blocks[block].ref_cnt > 0

    def note(self, text: str) -> None:
        self.trace.append(text)

    def fail(self, kind: str, message: str) -> NoReturn:
        raise Violation(kind, message, list(self.trace))

    def all_free(self) -> None:
        held = [b.block_id for b in self.pool.blocks if b.ref_cnt > 0 and not b.is_null]
        if held or self.pool.get_num_free_blocks() != self.pool.num_gpu_blocks - 1:
            self.fail("held_blocks", f"blocks {held[:20]} are held although nothing is running")
