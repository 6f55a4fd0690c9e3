"""Take one protection out of the server (negative controls: the harness must report wrong bytes), or something it may rely on."""

import os
import random
import time


def install() -> None:
    """What SABOTAGE names is broken in this process."""
    what = os.environ.get("SABOTAGE", "")
    if what == "no-quarantine":
        from lmcache_shm.server.engines import Ownership

        lose = Ownership.lose

        def at_once(self: Ownership, *, writers: bool) -> int:  # noqa: ARG001
            return lose(self, writers=False)

        Ownership.lose = at_once  # type: ignore[method-assign]
    elif what == "clock":
        # At every look it shows another time between 1970 and 2116.
        time.time = lambda: random.uniform(0, 1 << 32)
        time.time_ns = lambda: random.randrange(1 << 62)
    elif what:
        raise ValueError(f"unknown sabotage {what!r}")
