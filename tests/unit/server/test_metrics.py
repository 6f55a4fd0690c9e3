"""Prometheus metrics: names with units, labels per namespace and group, and the dashboard that uses them."""

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lmcache_shm.server.counters import COUNTERS
from lmcache_shm.server.metrics import MetricsServer, SnapshotCollector, families
from tests.unit.sample_snapshot import snapshot

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "lmcache-shm.json"
UNITS = (
    "bytes", "seconds", "tokens", "chunks", "slots", "slabs", "engines", "workers", "leases", "reservations",
    "loads", "lookups", "commits", "aborts", "evictions", "hits", "misses", "short", "rebinds", "clears", "restarts", "full",
    "busy", "existing", "collisions", "failures", "connections", "frames", "peers", "requests", "draining", "info",
)  # fmt: skip


def samples(
    item: dict[str, Any] | None = None,
) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(name, labels) → value, as a Prometheus server reads them."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(lambda: item or snapshot()))
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(name: str, item: dict[str, Any] | None = None, **labels: str) -> float:
    return samples(item)["lmcache_shm_" + name, frozenset(labels.items())]


def test_numbers_are_those_of_the_snapshot():
    assert value("arena_size_bytes") == 4 << 30
    assert value("arena_bytes", state="used") == (3 << 30) - (8 << 20)
    assert value("arena_slots", state="pinned") == 44
    assert value("hit_tokens_total") == 1_817_600
    assert value("loaded_bytes_total") == 212 << 30
    assert value("misses_total", reason="evicted") == 402
    assert value("restarts_total") == 2
    assert value("coldest_age_seconds") == 754
    assert value("engines") == 1
    assert value("leases") == 2


def test_every_counter_of_a_snapshot_is_a_metric():
    assert set(snapshot()["counters"]) <= {name for name, c in COUNTERS.items() if c.metric}


def test_groups_carry_their_namespace_model_and_kind():
    labels = {
        "namespace": "1",
        "model": "openai/gpt-oss-20b",
        "group": "window128",
        "kind": "window",
    }

    assert value("group_hits_total", **labels) == 240
    assert value("group_short_total", **labels) == 7
    assert value("group_hit_chunks_total", **labels) == 720
    assert value("group_slots", **labels, state="used") == 1035
    assert value("group_slot_bytes", **labels) == 6 << 20


def test_latencies_are_histograms():
    assert value("lookup_duration_seconds_count") == 9120
    assert value("lookup_duration_seconds_bucket", le="0.001") == 9100
    assert value("lookup_duration_seconds_sum") == pytest.approx(1.9)


def test_names_end_in_a_unit():
    for family in families(snapshot()):
        last = family.name.removesuffix("_total").rpartition("_")[2]
        assert last in UNITS or family.type == "info", family.name
        assert family.documentation, family.name


def test_an_empty_arena_has_metrics_too():
    item = snapshot(namespaces=[], clients=[], misses={}, arena__coldest_age_s=None)

    assert value("arena_slots", item, state="used") == 2350
    assert value("coldest_age_seconds", item) != value("coldest_age_seconds", item)  # NaN


def test_the_dashboard_asks_only_for_metrics_that_exist():
    exist = {name for name, _ in samples()} | {
        "lmcache_shm_process_resident_memory_bytes",
        "lmcache_shm_process_cpu_seconds_total",
    }
    asked = set()
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            asked |= set(re.findall(r"\blmcache_shm_\w+", target["expr"]))
    for variable in board["templating"]["list"]:
        asked |= set(re.findall(r"\blmcache_shm_\w+", json.dumps(variable.get("query", ""))))

    assert asked
    assert asked <= exist


def test_the_dashboard_shows_every_kind_of_metric():
    text = DASHBOARD.read_text(encoding="utf-8")

    for name in (
        "hit_tokens",
        "loaded_bytes",
        "stored_bytes",
        "arena_bytes",
        "evictions",
        "misses",
        "coldest_age",
        "lookup_duration",
        "group_slots",
        "restarts",
        "leases",
    ):
        assert f"lmcache_shm_{name}" in text


# ------------------------------------------------------------------------------------------ over HTTP
class Loop:
    """A stand-in for the server: answers questions in a thread of its own, or does not."""

    service: object = None

    def __init__(self) -> None:
        self.asked: deque[Callable[[], None]] = deque()
        self.thread_names: list[str] = []

    def ask(self, question: Callable[[], None]) -> None:
        thread = threading.Thread(target=question, name="the server's")
        thread.start()
        thread.join()


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def serving(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A MetricsServer over a snapshot; yields the names of the threads in which snapshots were taken."""
    threads: list[str] = []

    def taken() -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        if len(threads) > 1:
            raise RuntimeError("out of order")
        return snapshot()

    loop = Loop()
    loop.service = SimpleNamespace(snapshot=taken)
    server = MetricsServer(loop, port)  # type: ignore[arg-type]
    yield threads
    server.close()


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return reply.read().decode()


def test_the_snapshot_is_taken_in_the_servers_thread(serving: list[str], port: int):
    text = fetch(port)

    assert "lmcache_shm_hit_tokens_total 1.8176e+06" in text
    assert "lmcache_shm_process_resident_memory_bytes" in text
    assert serving == ["the server's"]


def test_a_failing_snapshot_fails_the_scrape_and_nothing_else(serving: list[str], port: int):
    fetch(port)
    with pytest.raises(urllib.error.HTTPError):
        fetch(port)


def test_a_taken_port_is_one_clear_error(port: int):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        with pytest.raises(
            OSError, match=f"cannot serve metrics at 127.0.0.1:{port}.*--metrics-port"
        ):
            MetricsServer(Loop(), port)  # type: ignore[arg-type]
