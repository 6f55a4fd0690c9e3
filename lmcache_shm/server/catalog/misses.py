"""Why a look-up found less than it asked for: memories of what once was here, in fixed space."""

from collections import Counter

import numpy as np

from lmcache_shm.arena.layout import U64

NEVER_SEEN = "never_seen"
EVICTED = "evicted"
OTHER_NAMESPACE = "other_namespace"
INCOMPLETE_GROUP = "incomplete_group"
IN_FLIGHT = "in_flight"
REASONS = (NEVER_SEEN, EVICTED, OTHER_NAMESPACE, INCOMPLETE_GROUP, IN_FLIGHT)


def no_misses() -> Counter[str]:
    return Counter(dict.fromkeys(REASONS, 0))


class Ghosts:
    """Fingerprints of evicted keys: one word per bucket, the latest wins. 2 MiB for 2^18 buckets.

    A key that was evicted long ago is forgotten when another takes its bucket. A false memory has odds
    of 2^-64.
    """

    def __init__(self, buckets: int = 1 << 18) -> None:
        self._words: U64 = np.zeros(buckets, np.uint64)

    def add(self, keys: U64) -> None:
        """Remember evicted keys, u64[n, 2]."""
        self._words[keys[:, 0] % np.uint64(len(self._words))] = keys[:, 1] | np.uint64(1)

    def __contains__(self, key: bytes) -> bool:
        low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        return int(self._words[low % len(self._words)]) == high | 1
