"""A server that has reserved a quarter of its memory and is held there until a file appears."""

import os
import threading
from pathlib import Path

from lmcache_shm.arena import memory
from lmcache_shm.arena.segment import Arena
from lmcache_shm.server import process

GO = "LMCACHE_SHM_TEST_GO"
"""Path of the file that lets it go on."""
FIRST, STEP = 16 << 20, 4 << 20


def install() -> None:
    """For the server's own process, before it starts."""
    go, rest = Path(os.environ[GO]), memory.reserve_rest

    def held(
        arena: Arena, stop: threading.Event, progress: memory.Progress | None = None
    ) -> OSError | None:
        while not go.exists():
            if stop.wait(0.01):
                return None
        return rest(arena, stop, progress)

    process.FIRST, memory.STEP = FIRST, STEP  # type: ignore[misc]
    process.reserve_rest = held


PROGRAM = "from tests.faults.held import install; install()\n"
"""To come first in the server's program."""
