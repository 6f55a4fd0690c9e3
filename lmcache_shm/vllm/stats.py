"""The counters of both sides (`client.counts`) in vLLM's log line and in its Prometheus endpoint."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from lmcache_shm.client.counts import FAMILIES

PREFIX = "vllm:lmcache_shm_"


class ShmStats(KVConnectorStats):
    """``data["counts"]``: counter → increase."""

    data: dict[str, Any]

    @property
    def counts(self) -> dict[str, float]:
        found: dict[str, float] = self.data.setdefault("counts", {})
        return found

    def reset(self) -> None:
        self.data = {"counts": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, n in other.data.get("counts", {}).items():
            self.counts[name] = self.counts.get(name, 0) + n
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for the log: rates are made from sums."""
        counts = self.counts
        line: dict[str, int | float] = {name: round(counts[name], 3) for name in sorted(counts)}
        for kind, moved in (("load", "loaded_bytes"), ("store", "stored_bytes")):
            seconds = counts.get(f"{kind}_seconds", 0)
            if seconds > 0:
                line[f"{kind}_gb_per_s"] = round(counts.get(moved, 0) / seconds / 1e9, 2)
        return line

    def is_empty(self) -> bool:
        return not self.counts


class ShmPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter per family; the reason is a label ("" where there is none)."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = {
            family: self._counter_cls(
                name=PREFIX + family, documentation=text, labelnames=[*labelnames, "reason"]
            )
            for family, text in FAMILIES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, n in transfer_stats_data.get("counts", {}).items():
            family, _, reason = name.partition(".")
            metric = self._families.get(family)
            if metric is not None and n > 0:
                metric.labels(*self.per_engine_labelvalues[engine_idx], reason).inc(n)
