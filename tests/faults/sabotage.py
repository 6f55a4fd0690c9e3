"""Negative controls: take one protection out of the server, and see the harness report wrong bytes."""

import os
from typing import Any


def install() -> None:
    """What SABOTAGE names is broken in this process."""
    what = os.environ.get("SABOTAGE", "")
    if what == "no-quarantine":
        from lmcache_shm.control.engines import Engines

        def at_once(self: Engines, engine: Any, rows: list[int]) -> None:
            self.catalog.abort(rows)

        Engines.quarantine = at_once  # type: ignore[method-assign]
    elif what:
        raise ValueError(f"unknown sabotage {what!r}")
