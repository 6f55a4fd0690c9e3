"""A world, an arena and an engine, driven step by step."""

import numpy as np

from lmcache_shm.arena.layout import SlotState
from lmcache_shm.transfer.cpu import CpuEngine
from lmcache_shm.transfer.engine import JobResult

from .worlds import FakeArena, Slot, World, item, job

SLOT = 1 << 20
WAIT = 10.0
FILL = 0xEE


class Rig:
    """``engine_of(arena, layouts)`` makes the engine under test; one CPU thread if it is not given."""

    def __init__(self, world: World, layouts=None, engine_of=None) -> None:
        self.world = world
        self.layouts = layouts or world.layouts()
        self.arena = FakeArena(8 * SLOT)
        self.arena.data_array[:] = FILL
        self.engine = (engine_of or CpuEngine)(self.arena, self.layouts)
        self._jobs = 0

    def run(self, kind: str, items: list[Slot], **more) -> JobResult:
        """With the slots in the state that the job expects."""
        for one in items:
            state = SlotState.RESERVED if kind == "store" else SlotState.COMMITTED
            self.arena.set(one.row, state, one.generation)
        return self.submit(kind, items, **more)

    def submit(self, kind: str, items: list[Slot], **more) -> JobResult:
        """With the slots as they are; waits for the result."""
        self._jobs += 1
        self.engine.submit(*job(kind, items, self._jobs, **more))
        assert self.engine.drain(WAIT)
        (result,) = self.engine.poll()
        return result

    def content(self, group: int, blocks: np.ndarray) -> np.ndarray:
        """Oracle: offsets in memory of the blocks' content, block by block."""
        return np.concatenate([self.world.content(group, int(b)) for b in blocks])

    def round_trip(
        self, group: int, source: np.ndarray, target: np.ndarray, first: int = 0
    ) -> bool:
        """Store ``source`` blocks, overwrite everything, load into ``target`` blocks; True if exact.

        Exact: the content bytes arrived, and every other byte of the memory is what it was.
        """
        world = self.world
        before = world.memory.copy()
        stored = self.run("store", [item(self.layouts, group, 3, SLOT, source, first=first)])
        untouched = np.array_equal(before, world.memory)
        world.scramble()
        expected = world.memory.copy()
        expected[self.content(group, target)] = before[self.content(group, source)]
        loaded = self.run("load", [item(self.layouts, group, 3, SLOT, target, first=first)])
        assert (stored.ok, stored.reason) == (True, "")
        assert (loaded.ok, loaded.reason) == (True, "")
        page_bytes = self.layouts[group].parts[0].pages.page_bytes
        assert stored.nbytes == loaded.nbytes == len(source) * page_bytes
        return untouched and np.array_equal(expected, world.memory)
