"""The packed fields of a request as arrays, checked: of one length, and within bounds."""

from typing import Any

import numpy as np

from lmcache_shm.protocol import messages as m
from lmcache_shm.server.session import Denied, Session

_SIZES = {"groups": 2, "parents": m.KEY, "chunks": 4, "digests": 16, "salts": 8}


def count(packed: bytes, size: int, name: str) -> int:
    """Entries of `size` bytes in a packed field. Raises Denied."""
    n, rest = divmod(len(packed), size)
    if rest:
        raise Denied("invalid", f"{name}: {len(packed)} bytes are no entries of {size} bytes")
    if n > m.MAX_KEYS:
        raise Denied("limit", f"{name}: {n} entries; at most {m.MAX_KEYS} are allowed")
    return n


def entries(session: Session, reserve: m.Reserve) -> dict[str, Any]:
    """The arrays of a Reserve, all of one length and within bounds (else Denied)."""
    n = count(reserve.keys, m.KEY, "keys")
    for name, size in _SIZES.items():
        if len(getattr(reserve, name)) != n * size:
            raise Denied("invalid", f"{name}: not {n} entries of {size} bytes, as there are keys")
    groups = np.frombuffer(reserve.groups, "<u2")
    group = max(groups.tolist(), default=0)
    if group >= session.groups:
        raise Denied("invalid", f"object group {group} of {session.groups}")
    return {
        "groups": groups,
        "keys": reserve.keys,
        "parents": reserve.parents,
        "chunks": np.frombuffer(reserve.chunks, "<u4"),
        "digests": reserve.digests,
        "salts": np.frombuffer(reserve.salts, "<u8"),
    }
