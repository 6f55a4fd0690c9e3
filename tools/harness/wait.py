"""The one wait loop of tests and tools."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PAUSE_S = 0.005
LONG_S = 60.0
"""For what takes many processes, each of which may be stopped for a while."""


def until(condition: Callable[[], T], what: str = "", seconds: float = 10.0) -> T:
    """The condition's value once it is true; AssertionError with `what` after `seconds`.

    For changes that another process or thread makes and that send no event here.
    """
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {what or condition}"
        time.sleep(PAUSE_S)
    return value
