"""What a server's counters did over the last minutes: a ring of (time, counters)."""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEEP_S = 600.0


@dataclass(frozen=True)
class Sample:
    at: float
    """Seconds, of the caller's monotonic clock."""
    boot: str
    counters: Mapping[str, float]


class History:
    """Samples of one server, across its restarts: counters then begin again from 0, which is no loss."""

    def __init__(self, keep_s: float = KEEP_S) -> None:
        self._keep_s = keep_s
        self._samples: deque[Sample] = deque()
        self.restarts = 0
        """How often the boot id changed while we were looking."""

    def add(self, at: float, snapshot: Mapping[str, Any]) -> None:
        """Remember a snapshot's counters; `at` never goes back."""
        boot = str(snapshot["server"]["boot"])
        if self._samples and self._samples[-1].boot != boot:
            self.restarts += 1
        self._samples.append(Sample(at, boot, _flat(snapshot)))
        while self._samples[0].at < at - self._keep_s:
            self._samples.popleft()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def span_s(self) -> float:
        """Seconds between the first and the last sample."""
        return self._samples[-1].at - self._samples[0].at if self._samples else 0.0

    def gained(self, name: str, over_s: float) -> tuple[float, float]:
        """(what counter `name` gained, seconds it took) in the last `over_s`, at least one interval."""
        samples = list(self._samples)
        if len(samples) < 2:
            return 0.0, 0.0
        start = samples[-1].at - over_s
        gain = 0.0
        for k in range(len(samples) - 1, 0, -1):
            gain += _step(samples[k - 1], samples[k], name)
            if samples[k - 1].at <= start:
                break
        return gain, samples[-1].at - samples[k - 1].at

    def rate(self, name: str, over_s: float) -> float | None:
        """Per second over the last `over_s`; None before there are two samples."""
        gain, seconds = self.gained(name, over_s)
        return gain / seconds if seconds > 0 else None

    def ratio(self, part: str, whole: str, over_s: float) -> float | None:
        """Gain of one counter over another's; None when the other gained nothing."""
        of = self.gained(whole, over_s)[0]
        return self.gained(part, over_s)[0] / of if of > 0 else None

    def rates(self, name: str, points: int, over_s: float) -> list[float | None]:
        """Per second, in `points` equal intervals that end now; None where nobody was looking."""
        return [
            gain / seconds if seconds > 0 else None
            for gain, seconds in self._bins([name], points, over_s)[0]
        ]

    def ratios(self, part: str, whole: str, points: int, over_s: float) -> list[float | None]:
        """`part` over `whole` in `points` equal intervals that end now; None where `whole` stood still."""
        parts, wholes = self._bins([part, whole], points, over_s)
        return [a / b if b > 0 else None for (a, _), (b, _) in zip(parts, wholes, strict=True)]

    def _bins(
        self, names: Sequence[str], points: int, over_s: float
    ) -> list[list[tuple[float, float]]]:
        """By name and bin: (gain, seconds observed); a gain is spread evenly over its interval."""
        bins = [[(0.0, 0.0)] * points for _ in names]
        samples = list(self._samples)
        if len(samples) < 2 or points < 1:
            return bins
        # Bins are aligned to whole multiples of their width, so that a picture shifts and does not flicker.
        width = over_s / points
        first = int(samples[-1].at / width) - points + 1
        for before, after in itertools.pairwise(samples):
            gains = [_step(before, after, name) for name in names]
            length = after.at - before.at
            if length <= 0:
                continue
            for slot in range(int(before.at / width), int(after.at / width) + 1):
                overlap = min(after.at, (slot + 1) * width) - max(before.at, slot * width)
                if overlap <= 0 or not 0 <= slot - first < points:
                    continue
                for row, gain in zip(bins, gains, strict=True):
                    had, seconds = row[slot - first]
                    row[slot - first] = had + gain * overlap / length, seconds + overlap
        return bins


def _flat(snapshot: Mapping[str, Any]) -> dict[str, float]:
    """All counters; those of namespace 2's group 0 as ``2/0/hits``."""
    flat: dict[str, float] = dict(snapshot["counters"])
    for namespace in snapshot["namespaces"]:
        for index, group in enumerate(namespace["groups"]):
            for name in ("served", "misses", "evictions"):
                flat[f"{namespace['id']}/{index}/{name}"] = group.get(name, 0)
    return flat


def _step(before: Sample, after: Sample, name: str) -> float:
    now = after.counters.get(name, 0.0)
    if after.boot != before.boot:
        return now  # since the restart
    return max(now - before.counters.get(name, 0.0), 0.0)
