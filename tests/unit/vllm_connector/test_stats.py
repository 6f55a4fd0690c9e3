"""Counters: taken once, summed over ranks, shown as rates, never going down."""

from functools import partial
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lmcache_shm.client.counts import FAMILIES, Counts
from lmcache_shm.vllm.stats import PREFIX, ShmPromMetrics, ShmStats


def test_what_was_taken_is_not_taken_again() -> None:
    counts = Counts()
    counts.add("loads")
    counts.lookup(100, 64)

    first = counts.take()

    assert first is not None
    assert first == {"loads": 1, "query_tokens": 100, "hit_tokens": 64}
    assert counts.take() is None
    counts.add("loads", 2)
    second = counts.take()
    assert second is not None
    assert (second, counts.total["loads"]) == ({"loads": 2}, 3)


def test_counters_only_grow() -> None:
    counts = Counts()
    counts.add("hit_tokens", -5)
    counts.add("hit_tokens", 0)

    assert counts.take() is None


def test_ranks_and_sides_add_up() -> None:
    total = ShmStats(data={"counts": {"loads": 1}}).aggregate(
        ShmStats(data={"counts": {"loads": 2, "stores": 1}})
    )

    assert total.data == {"counts": {"loads": 3, "stores": 1}}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_the_log_line_has_rates() -> None:
    stats = ShmStats(
        data={"counts": {"loaded_bytes": 4e9, "load_seconds": 2.0, "misses.deadline": 1}}
    )

    assert stats.reduce() == {
        "load_seconds": 2.0, "loaded_bytes": 4e9, "misses.deadline": 1, "load_gb_per_s": 2.0,
    }  # fmt: skip


def test_prometheus_has_one_counter_per_family_with_the_reason_as_label() -> None:
    registry = CollectorRegistry()

    kinds = {Gauge: Gauge, Counter: partial(Counter, registry=registry), Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = ShmPromMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]})

    metrics.observe({"counts": {"misses.deadline": 2, "loads": 1, "unknown": 9, "stores": -1}}, 1)
    metrics.observe({"counts": {"misses.deadline": 3}}, 1)

    def value(family: str, reason: str = "") -> float | None:
        return registry.get_sample_value(
            f"{PREFIX}{family}_total", {"engine": "1", "reason": reason}
        )

    assert value("misses", "deadline") == 5
    assert value("loads") == 1
    assert value("stores") is None
    assert len(list(registry.collect())) == len(FAMILIES)
