"""Run inside the engine's process: while a load copies, its slots are taken over by a writer that does not exist."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from lmcache_shm.arena.layout import COLD_DTYPE, HOT_DTYPE, PAGE, Header, Regions, SlotState


class Takeover:
    """Raises the generation and changes the pages of a slot after it was found to be ours, before its first bytes are copied."""

    def __init__(self, meta: str) -> None:
        """Begin; `meta` is the file of the slot table."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        with Path(meta).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        geometry = Header.unpack(bytes(memory[:PAGE])).geometry
        regions = Regions.of(geometry)
        self.hot = np.frombuffer(memory, HOT_DTYPE, geometry.max_slots, regions.hot)
        self.cold = np.frombuffer(memory, COLD_DTYPE, geometry.max_slots, regions.cold)
        (mapped,) = get_kv_transfer_group().worker._mapped.values()
        self.data = mapped.arena.data_array
        self.engine = mapped.engine
        self.copiers = self.engine._copiers
        self.taken: dict[int, tuple[int, int]] = {}
        self.engine._copiers = [
            [[Between(self, copier, layout.region_bytes) for copier in part] for part in parts]
            for parts, layout in zip(self.copiers, self.engine._layouts, strict=True)
        ]

    def take(self, offset: int, nbytes: int) -> None:
        committed = self.hot["state"] == SlotState.COMMITTED
        (row,) = np.flatnonzero((self.cold["offset"] == offset) & committed).tolist()
        if row not in self.taken:
            self.hot["generation"][row] += 1
            self.data[offset + 1 : offset + nbytes : 2] ^= 0x80
            self.taken[row] = offset, nbytes

    def give_back(self) -> list[int]:
        """Undo all of it; the rows."""
        self.engine._copiers = self.copiers
        for row, (offset, nbytes) in self.taken.items():
            self.hot["generation"][row] -= 1
            self.data[offset + 1 : offset + nbytes : 2] ^= 0x80
        return list(self.taken)


class Between:
    """In place of a copier of slots with that many bytes of pages."""

    def __init__(self, takeover: Takeover, copier: Any, nbytes: int) -> None:
        self.takeover = takeover
        self.copier = copier
        self.nbytes = nbytes

    def load(self, offset: int, *rest: Any) -> int:
        self.takeover.take(offset, self.nbytes)
        return int(self.copier.load(offset, *rest))

    def store(self, *arguments: Any) -> int:
        return int(self.copier.store(*arguments))
