"""Run inside the engine's process by a test: while a load copies, its slots are taken over by a writer that does not exist.

Names given: `meta` (the file of the slot table) and `runner`. After the check that a slot is still ours and before its first
bytes are copied, its generation is raised and its pages are changed. `runner.give_back()` undoes it and returns the rows.
"""

import mmap
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group

from lmcache_shm.arena.layout import COLD_DTYPE, HOT_DTYPE, PAGE, Header, Regions

meta: str
runner: Any

with open(meta, "r+b") as file:  # noqa: PTH123
    memory = mmap.mmap(file.fileno(), 0)
geometry = Header.unpack(bytes(memory[:PAGE])).geometry
regions = Regions.of(geometry)
hot = np.frombuffer(memory, HOT_DTYPE, geometry.max_slots, regions.hot)
cold = np.frombuffer(memory, COLD_DTYPE, geometry.max_slots, regions.cold)
(mount,) = get_kv_transfer_group().worker._mounts.values()
engine, data = mount.engine, mount.arena.data_array
taken: list[tuple[int, int, int]] = []


class Takeover:
    """In place of a copier of the group with this many bytes of pages."""

    def __init__(self, copier: Any, nbytes: int) -> None:
        self.copier = copier
        self.nbytes = nbytes

    def load(self, offset: int, *rest: Any) -> int:
        (row,) = np.flatnonzero((cold["offset"] == offset) & (hot["state"] == 3))
        if not any(row == one for one, _, _ in taken):
            hot["generation"][row] += 1
            data[offset + 1 : offset + self.nbytes : 2] ^= 0x80
            taken.append((int(row), offset, self.nbytes))
        return int(self.copier.load(offset, *rest))

    def store(self, *arguments: Any) -> int:
        return int(self.copier.store(*arguments))


before = engine._copiers
engine._copiers = [
    [[Takeover(copier, layout.region_bytes) for copier in copiers] for copiers in parts]
    for parts, layout in zip(before, engine._layouts, strict=True)
]


def give_back() -> list[int]:
    engine._copiers = before
    for row, offset, nbytes in taken:
        hot["generation"][row] -= 1
        data[offset + 1 : offset + nbytes : 2] ^= 0x80
    return [row for row, _, _ in taken]


runner.give_back = give_back
