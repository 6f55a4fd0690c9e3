"""How far an arena's memory is reserved, in words: for whoever shows an arena."""

from collections.abc import Mapping
from typing import Any

from lmcache_shm.arena.memory import SHM_DIR
from lmcache_shm.cli.figures import size

REMEDY = (
    f"make {SHM_DIR} larger (--shm-size, --ipc=host) or free some of it, and restart the server"
)


def told(backed: int, total: int, *, growing: bool) -> str:
    """One clause; "" when all of it is reserved, as it should be most of the time."""
    if backed >= total:
        return ""
    if growing:
        return f"{size(backed)} of {size(total)} reserved, the rest follows"
    return f"only {size(backed)} of {size(total)} could be reserved: {SHM_DIR} had no room for more"


def of_snapshot(arena: Mapping[str, Any]) -> str:
    """The same for the "arena" of a server's snapshot."""
    total = arena["data_bytes"]
    return told(arena.get("backed_bytes", total), total, growing=arena.get("growing", False))
