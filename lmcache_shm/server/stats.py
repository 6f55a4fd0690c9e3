"""The server's numbers about itself and its clients, and the snapshot that `status` and the metrics show."""

import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from pathlib import Path
from typing import Any

from lmcache_shm import __version__
from lmcache_shm.config import Config
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.counters import REPORTED, zeros
from lmcache_shm.server.engines import Engine, Engines

log = logging.getLogger("lmcache_shm")

MAX_REASONS = 64
"""Reasons of misses that clients may name."""
MAX_A_SECOND = 20
"""Events logged one by one in a second; more are only counted."""
KEPT = 50


class EventLog:
    """The latest events, for `status` and `top`, and in the log; a misbehaving peer must not fill that."""

    def __init__(self) -> None:
        self.latest: deque[tuple[float, str]] = deque(maxlen=KEPT)
        """(Unix time, text)"""
        self._second = 0
        self._count = 0

    def add(self, text: str, level: int = logging.INFO) -> None:
        if self.allow():
            self.latest.append((time.time(), text))
            log.log(level, "%s", text)

    def allow(self) -> bool:
        """Count one more event; whether it fits into this second."""
        now = int(time.time())
        if now != self._second:
            if self._count > MAX_A_SECOND:
                log.warning("%d more events in that second", self._count - MAX_A_SECOND)
            self._second, self._count = now, 0
        self._count += 1
        return self._count <= MAX_A_SECOND


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


class LruAges:
    """Readings of the catalog's LRU clock with their times: turns a slot's tick into an age.

    Takes one reading a second at most, and keeps MOST: when it is full, every second of them goes.
    """

    MOST = 4096

    def __init__(self, tick: int, now: float) -> None:
        self._ticks = [tick]
        self._times = [now]

    def note(self, tick: int, now: float) -> None:
        """`tick` is the latest at `now` (seconds, monotonic)."""
        if tick <= self._ticks[-1] or now - self._times[-1] < 1.0:
            return
        if len(self._ticks) >= self.MOST:
            self._ticks, self._times = self._ticks[::2], self._times[::2]
        self._ticks.append(tick)
        self._times.append(now)

    def age(self, tick: int, now: float) -> float:
        """Seconds since a slot with this tick was used; for slots of an earlier server: since this one's start."""
        at = bisect_left(self._ticks, tick)
        return 0.0 if at == len(self._ticks) else max(now - self._times[at], 0.0)


class Stats:
    """Used by the server's thread only."""

    def __init__(self, tick: int) -> None:
        """`tick`: the reading of the LRU clock now."""
        self.started = time.monotonic()
        self.started_at = time.time()
        self.counters: Counter[str] = Counter({**zeros("service"), **zeros("clients")})
        self.misses: Counter[str] = Counter()
        """Look-ups that the catalog was not asked for, by reason."""
        self.latency = {"acquire": Histogram(), "step": Histogram()}
        self.ages = LruAges(tick, self.started)
        self.events = EventLog()

    def report(self, counts: dict[str, int]) -> None:
        """Add what a client counted, by reason."""
        for reason, n in counts.items():
            if not 0 < n < 1 << 48:
                continue
            if reason in REPORTED:
                self.counters[REPORTED[reason]] += n
            elif reason in self.misses or len(self.misses) < MAX_REASONS:
                self.misses[reason[:64]] += n


def snapshot(
    catalog: Catalog,
    engines: Engines,
    stats: Stats,
    config: Config,
    *,
    boot: bytes,
    draining: bool,
    sessions: int,
) -> dict[str, Any]:
    """Plain dicts and lists of numbers and texts; `sessions`: open connections."""
    found = catalog.snapshot()
    arena, live = found["arena"], catalog.arena.live
    coldest, tick = arena.pop("coldest_tick"), arena.pop("tick")
    now = time.monotonic()
    stats.ages.note(tick, now)
    arena["coldest_age_s"] = None if coldest is None else stats.ages.age(coldest, now)
    return {
        "server": {
            "version": __version__,
            "instance": config.instance,
            "pid": int(live["pid"][0]),
            "boot": boot.hex(),
            "arena_id": bytes(catalog.arena.arena_id).hex(),
            "uptime_s": now - stats.started,
            "started_at": stats.started_at,
            "restarts": max(int(live["starts"][0]) - 1, 0),
            "adopted": found["adopted"],
            "checksum": config.checksum,
            "chunk_size": config.chunk_size,
            "separate": config.separate_object_groups,
            "draining": draining,
            "sessions": sessions,
            "rss_bytes": _private_bytes(),
        },
        "arena": arena,
        "counters": {**found["counters"], **stats.counters},
        "misses": {**found["misses"], **stats.misses},
        "latency": {name: histogram.snapshot() for name, histogram in stats.latency.items()},
        "namespaces": found["namespaces"],
        "clients": [_client(engine) for engine in engines],
        "slab_map": found["slab_map"],
        "events": [{"t": t, "text": text} for t, text in stats.events.latest],
    }


def _private_bytes() -> int:
    """Resident memory of this process without shared memory (the arena)."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    sizes = {line.split(":")[0]: line.split() for line in lines if line.startswith("Rss")}
    return sum(int(sizes[name][1]) << 10 for name in ("RssAnon", "RssFile") if name in sizes)


def _client(engine: Engine) -> dict[str, Any]:
    scheduler = engine.scheduler
    now = time.monotonic()
    sessions = [worker.session for worker in engine.workers.values()]
    if scheduler is not None:
        sessions.append(scheduler)
    last = max((session.last_activity for session in sessions), default=now)
    return {
        "client": engine.index,
        "engine_id": engine.engine_id,
        "pid": scheduler.process.pid if scheduler else 0,
        "namespace": scheduler.namespace if scheduler else -1,
        "connected": scheduler is not None,
        "world": engine.world,
        "workers": [
            {"rank": rank, "pid": process.pid, "alive": process.alive()}
            for rank, process in engine.processes.values()
            if rank >= 0  # not the scheduler's
        ],
        "leases": len(scheduler.leases) if scheduler else 0,
        "pins": scheduler.pinned if scheduler else 0,
        "reservations": len(engine.rows.reserved),
        "quarantined": len(engine.rows.quarantined),
        "last_activity_s": now - last,
    }
