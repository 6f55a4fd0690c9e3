"""What `status` shows: the catalog's numbers, and the server's about itself and its clients."""

import time
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_shm import __version__
from lmcache_shm.server.engines import Engine

if TYPE_CHECKING:
    from lmcache_shm.server.handlers import Service


# Counters of the service, there from the start (a metric that appears late looks like a gap).
COUNTED = (
    "connections", "malformed_frames", "refused_uid", "refused_limit", "denied", "failures",
    "scrubbed_slots", "scrub_mismatches",
)  # fmt: skip
# What clients report that is no miss: counter's name → their words for it.
NO_MISS = {
    "loads_failed": ("load_failed",),
    "collisions": ("collision",),
    "commits_lost": ("commit_lost",),
}


class TickClock:
    """When the catalog's use counter (the tick) stood where: turns a slot's tick into an age.

    Notes one reading a second at most, and keeps MOST: of older ones every second goes when it is full.
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
        """Seconds since a slot with this tick was used; for slots of an earlier server since our start."""
        at = bisect_left(self._ticks, tick)
        return 0.0 if at == len(self._ticks) else max(now - self._times[at], 0.0)


def snapshot(service: "Service") -> dict[str, Any]:
    """Plain dicts and lists of numbers and texts."""
    found = service.catalog.snapshot()
    arena = found["arena"]
    coldest, tick = arena.pop("coldest_tick"), arena.pop("tick")
    now = time.monotonic()
    service.clock.note(tick, now)
    arena["coldest_age_s"] = None if coldest is None else service.clock.age(coldest, now)
    reported = Counter(service.reported)
    moved = {name: sum(reported.pop(word, 0) for word in words) for name, words in NO_MISS.items()}
    counted = dict.fromkeys(COUNTED, 0)
    return {
        "server": _server(service, found.pop("adopted")),
        "arena": arena,
        "counters": {**found["counters"], **counted, **moved, **service.counters},
        "misses": {**found["misses"], **reported},
        "latency": {name: histogram.snapshot() for name, histogram in service.latency.items()},
        "namespaces": found["namespaces"],
        "clients": [_client(engine) for engine in service.engines],
        "slab_map": found["slab_map"],
        "events": [{"t": t, "text": text} for t, text in service.events],
    }


def _server(service: "Service", adopted: dict[str, int]) -> dict[str, Any]:
    arena, config = service.arena, service.config
    return {
        "version": __version__,
        "instance": config.instance,
        "pid": int(arena.live["pid"][0]),
        "boot": service.boot.hex(),
        "arena_id": bytes(arena.arena_id).hex(),
        "uptime_s": time.monotonic() - service.started,
        "started_at": service.started_at,
        "restarts": max(int(arena.live["starts"][0]) - 1, 0),
        "adopted": adopted,
        "checksum": config.checksum,
        "chunk_size": config.chunk_size,
        "separate": config.separate_object_groups,
        "draining": service.draining,
        "sessions": len(service.sessions),
        "rss_bytes": _private_bytes(),
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
            if rank >= 0  # the scheduler's process is watched as well
        ],
        "leases": len(scheduler.leases) if scheduler else 0,
        "pins": scheduler.pinned if scheduler else 0,
        "reservations": len(scheduler.reserved) if scheduler else 0,
        "quarantined": engine.quarantined,
        "last_activity_s": now - last,
    }
