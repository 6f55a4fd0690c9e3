"""Prometheus metrics of a server, made from its status snapshot at each scrape.

``families(snapshot)`` is pure: the same numbers as `status` and `top` show, with units in the names.
`MetricsServer` serves them over HTTP from a thread of its own; the snapshot is taken in the server's thread.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lmcache_shm.server.counters import COUNTERS
from lmcache_shm.server.loop import Server

log = logging.getLogger("lmcache_shm")

PREFIX = "lmcache_shm_"
ANSWER_S = 5.0
"""A scrape gives up on a server that is busy for longer."""

Snapshot = Mapping[str, Any]

GROUP_LABELS = ("namespace", "model", "group", "kind")


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """All metrics of one snapshot."""
    yield from _server(snapshot["server"])
    yield from _arena(snapshot["arena"])
    yield from _counters(snapshot)
    yield from _groups(snapshot["namespaces"])
    yield from _clients(snapshot["clients"])
    yield from _latency(snapshot["latency"])


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _server(server: Mapping[str, Any]) -> Iterator[Metric]:
    about = {name: str(server[name]) for name in ("version", "chunk_size", "checksum", "separate")}
    about["cache"] = server["instance"]  # Prometheus calls the scraped address "instance"
    yield InfoMetricFamily(PREFIX + "server", "The server and its settings", value=about)
    yield _gauge(
        "start_time_seconds", "When the server started, in seconds since 1970", server["started_at"]
    )
    restarts = "Starts of a server on this arena after the first"
    yield CounterMetricFamily(PREFIX + "restarts", restarts, value=server["restarts"])
    yield _gauge("draining", "1 while the server takes no new work", float(server["draining"]))
    adopted = server.get("adopted") or {}
    yield _gauge(
        "adopted_slots",
        "Slots that this server took over from an earlier one",
        adopted.get("slots", 0),
    )


def _arena(arena: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("arena_size_bytes", "Size of the arena", arena["data_bytes"])
    parts = GaugeMetricFamily(
        PREFIX + "arena_bytes", "Bytes of the arena by state", labels=["state"]
    )
    for state, nbytes in arena["bytes"].items():
        parts.add_metric([state], nbytes)
    yield parts
    slots = GaugeMetricFamily(PREFIX + "arena_slots", "Slots by state", labels=["state"])
    for state, n in arena["slots"].items():
        slots.add_metric([state], n)
    yield slots
    yield _gauge("arena_slabs", "Slabs of the arena", arena["slabs"])
    yield _gauge("arena_free_slabs", "Slabs that are bound to no slot size", arena["slabs_free"])
    behind = "Bytes of the arena that have memory behind them"
    yield _gauge("arena_backed_bytes", behind, arena["backed_bytes"])
    touched = "Bytes of the arena that were touched ahead of use"
    yield _gauge("arena_prefaulted_bytes", touched, arena["prefaulted_bytes"])
    age = arena["coldest_age_s"]
    coldest = "Time since the least recently used chunk was used; NaN for an empty arena"
    yield _gauge("coldest_age_seconds", coldest, float("nan") if age is None else age)


def _counters(snapshot: Snapshot) -> Iterator[Metric]:
    for item, counted in COUNTERS.items():
        if counted.metric:
            n = snapshot["counters"].get(item, 0)
            yield CounterMetricFamily(PREFIX + counted.metric, counted.text, value=n)
    text = "Look-ups that were served less than they asked for, by reason"
    missed = CounterMetricFamily(PREFIX + "misses", text, labels=["reason"])
    for reason, n in snapshot["misses"].items():
        missed.add_metric([reason], n)
    yield missed


def _groups(namespaces: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    def labelled(kind: type[Any], name: str, text: str, *more: str) -> Any:
        return kind(PREFIX + name, text, labels=[*GROUP_LABELS, *more])

    size = labelled(GaugeMetricFamily, "group_slot_bytes", "Bytes of one slot of the object group")
    slots = labelled(
        GaugeMetricFamily, "group_slots", "Slots of the object group by state", "state"
    )
    hits = labelled(CounterMetricFamily, "group_hits", "Look-ups to which this group gave chunks")
    chunks = labelled(CounterMetricFamily, "group_hit_chunks", "Chunks of the group that hits used")
    lacked = "Look-ups that found nothing for want of this group"
    misses = labelled(CounterMetricFamily, "group_misses", lacked)
    cut = "Look-ups that found something, and no more for want of this group"
    short = labelled(CounterMetricFamily, "group_short", cut)
    gone = labelled(CounterMetricFamily, "group_evictions", "Slots of the group that were evicted")
    for namespace in namespaces:
        for group in namespace["groups"]:
            labels = [str(namespace["id"]), namespace["name"], group["name"], group["kind"]]
            size.add_metric(labels, group["slot_bytes"])
            for state, item in (("used", "slots"), ("pinned", "pinned"), ("reserved", "reserved")):
                slots.add_metric([*labels, state], group[item])
            hits.add_metric(labels, group["served"])
            chunks.add_metric(labels, group["hits"])
            misses.add_metric(labels, group["misses"])
            short.add_metric(labels, group["short"])
            gone.add_metric(labels, group["evictions"])
    yield from (size, slots, hits, chunks, misses, short, gone)


def _clients(clients: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    found = list(clients)
    yield _gauge("engines", "Engines that are connected", sum(1 for c in found if c["connected"]))
    workers = sum(1 for c in found for worker in c["workers"] if worker["alive"])
    yield _gauge("workers", "Worker processes of engines that are alive", workers)
    yield _gauge(
        "leases", "Leases that engines hold on slots they read", sum(c["leases"] for c in found)
    )
    writing = "Slots that engines have reserved and are writing"
    yield _gauge("reservations", writing, sum(c["reservations"] for c in found))


def _latency(latency: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    texts = {
        "acquire": ("lookup_duration_seconds", "Time the server takes for a look-up"),
        "step": ("step_duration_seconds", "Time the server takes for an engine step's batch"),
    }
    for item, (name, text) in texts.items():
        seen = latency[item]
        buckets = [(bound, n) for bound, n in seen["buckets"].items()]
        yield HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=seen["sum_s"])


class SnapshotCollector(Collector):
    """Asks for a snapshot at each scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the first snapshot, and none is taken to register."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from families(self._snapshot())


class MetricsServer:
    """``http://HOST:PORT/metrics`` of a running `server`. Raises OSError when it cannot listen there."""

    def __init__(self, server: Server, port: int, host: str = "127.0.0.1") -> None:
        self._server = server
        registry = CollectorRegistry()
        registry.register(SnapshotCollector(self._ask))
        ProcessCollector(namespace="lmcache_shm", registry=registry)
        try:
            self._http, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot serve metrics at {host}:{port}: {error.strerror}; "
                "choose another --metrics-port",
            ) from None  # fmt: skip

    def _ask(self) -> Snapshot:
        """A snapshot, taken between two requests of the server's loop. Raises TimeoutError."""
        taken: list[Snapshot] = []
        done = threading.Event()

        def take() -> None:
            try:
                taken.append(self._server.service.snapshot())
            except Exception:  # no error here may end the server's loop
                log.exception("no metrics for this scrape")
            finally:
                done.set()

        self._server.ask(take)
        if not done.wait(ANSWER_S) or not taken:
            raise TimeoutError("the server gave no snapshot in time")
        return taken[0]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
