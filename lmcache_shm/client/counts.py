"""Counters of one side of an engine. They only grow; a name is ``family`` or ``family.reason``."""

import threading
from collections import Counter

FAMILIES = {
    "query_tokens": "Prompt tokens looked up in the arena beyond what the engine held itself.",
    "hit_tokens": "Prompt tokens found in the arena.",
    "misses": "Lookups that could not be served, by reason.",
    "stored_chunks": "Chunks (per object group) that were given to the workers to store.",
    "stores_skipped": "Chunks (per object group) that were not stored, by reason.",
    "requests_recomputed": "Requests whose load failed and that were computed instead.",
    "loads": "Loads that a worker ended well.",
    "loads_failed": "Loads that failed, by reason.",
    "loaded_bytes": "Bytes copied from the arena into KV cache blocks.",
    "load_seconds": "Time from submitting a load to its end, summed.",
    "stores": "Store jobs that a worker ended well.",
    "stores_failed": "Store jobs that failed, by reason.",
    "stored_bytes": "Bytes copied from KV cache blocks into the arena.",
    "store_seconds": "Time from submitting a store to its end, summed.",
    "errors": "Unexpected errors inside the connector.",
}
"""What each family counts."""


class Counts:
    """What happened since the last `take`. Thread-safe: copies end in threads of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: Counter[str] = Counter()
        self.total: Counter[str] = Counter()

    def add(self, name: str, n: float = 1) -> None:
        if n > 0:
            with self._lock:
                self._since[name] += n  # type: ignore[assignment]  # seconds are no whole numbers
                self.total[name] += n  # type: ignore[assignment]

    def lookup(self, asked: int, found: int) -> None:
        """A lookup for `asked` tokens found the first `found` of them."""
        self.add("query_tokens", asked)
        self.add("hit_tokens", found)

    def take(self) -> dict[str, float] | None:
        """The counts since the last call, None if there are none."""
        if not self._since:
            return None
        with self._lock:
            since, self._since = self._since, Counter()
        return dict(since)
