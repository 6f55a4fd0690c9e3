"""Wait for the server to reserve the arena's memory."""

import threading
from collections.abc import Callable

LOOK_S = 0.1
"""Seconds between the first two looks at how far it has come."""
RARELY_S = 2.0
"""Between looks when it does not go on: it may have stopped for good, and only a new server would go on."""


def wait_for(mark: Callable[[], int], end: int, stop: threading.Event) -> bool:
    """Wait until the mark (bytes) is at `end`, looking ever more rarely; False if told to stop before."""
    pause = LOOK_S
    while mark() < end:
        if stop.wait(pause):
            return False
        pause = min(2 * pause, RARELY_S)
    return True
