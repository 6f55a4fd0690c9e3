"""Counters of one side of an engine. They only grow; a name is ``family`` or ``family.reason``."""

import threading
from collections import Counter


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
