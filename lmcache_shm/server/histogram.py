"""How long requests take, for metrics."""

from bisect import bisect_left
from typing import Any


class Histogram:
    """Durations in seconds, in buckets that double."""

    BOUNDS = tuple(1e-5 * 2**i for i in range(16))

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.buckets = [0] * (len(self.BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds
        self.buckets[bisect_left(self.BOUNDS, seconds)] += 1

    def snapshot(self) -> dict[str, Any]:
        """{"count", "sum_s", "buckets": {upper bound: how many at or below it}}."""
        below, cumulated = 0, {}
        for bound, n in zip((*map(str, self.BOUNDS), "+Inf"), self.buckets, strict=True):
            below += n
            cumulated[bound] = below
        return {"count": self.count, "sum_s": self.sum_s, "buckets": cumulated}
