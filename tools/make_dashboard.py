"""Write docs/grafana/lmcache-shm.json: ``python -m tools.make_dashboard`` (``--check``: only compare)."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "docs" / "grafana" / "lmcache-shm.json"
P = "lmcache_shm_"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
BY = '{instance=~"$instance"}'


def rate(name: str, labels: str = BY) -> str:
    return f"rate({P}{name}_total{labels}[$__rate_interval])"


# (title, unit, kind, [(expression, legend)]), in rows of three.
PANELS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("Prompt tokens served from the arena", "percentunit", "stat", [
        (f"sum({rate('hit_tokens')}) / sum({rate('query_tokens')})", "hit rate"),
    ]),
    ("Arena in use", "percentunit", "gauge", [
        (f'sum({P}arena_bytes{{state="used",instance=~"$instance"}}) / sum({P}arena_size_bytes{BY})', "used"),
    ]),
    ("Engines and workers", "none", "stat", [
        (f"sum({P}engines{BY})", "engines"), (f"sum({P}workers{BY})", "workers"),
    ]),
    ("Hit rate", "percentunit", "timeseries", [
        (f"{rate('hit_tokens')} / {rate('query_tokens')}", "{{instance}}"),
    ]),
    ("Bytes moved", "binBps", "timeseries", [
        (f"sum({rate('loaded_bytes')})", "loaded"), (f"sum({rate('stored_bytes')})", "stored"),
    ]),
    ("Tokens", "short", "timeseries", [
        (f"sum({rate('query_tokens')})", "looked up"), (f"sum({rate('hit_tokens')})", "hit"),
        (f"sum({rate('stored_tokens')})", "stored"),
    ]),
    ("Misses by reason", "short", "timeseries", [
        (f"sum by (reason) ({rate('misses')})", "{{reason}}"),
    ]),
    ("Arena by state", "bytes", "timeseries", [
        (f"sum by (state) ({P}arena_bytes{BY})", "{{state}}"),
    ]),
    ("Evictions, and age of the coldest chunk", "short", "timeseries", [
        (f"sum({rate('evictions')})", "evicted slots per second"),
        (f"min({P}coldest_age_seconds{BY})", "coldest chunk, seconds"),
    ]),
    ("Slots by object group", "short", "timeseries", [
        (f'sum by (model, group) ({P}group_slots{{state="used",instance=~"$instance"}})', "{{model}} {{group}}"),
    ]),
    ("Hits by object group", "short", "timeseries", [
        (f"sum by (model, group) ({rate('group_hits')})", "{{model}} {{group}}"),
    ]),
    ("Look-ups missed or cut short for want of an object group", "short", "timeseries", [
        (f"sum by (model, group) ({rate('group_misses')})", "missed: {{model}} {{group}}"),
        (f"sum by (model, group) ({rate('group_short')})", "short: {{model}} {{group}}"),
    ]),
    ("Look-up in the server, 50 and 99 %", "s", "timeseries", [
        (f"histogram_quantile(0.5, sum by (le) (rate({P}lookup_duration_seconds_bucket{BY}[$__rate_interval])))", "50 %"),
        (f"histogram_quantile(0.99, sum by (le) (rate({P}lookup_duration_seconds_bucket{BY}[$__rate_interval])))", "99 %"),
    ]),
    ("Step in the server, 50 and 99 %", "s", "timeseries", [
        (f"histogram_quantile(0.5, sum by (le) (rate({P}step_duration_seconds_bucket{BY}[$__rate_interval])))", "50 %"),
        (f"histogram_quantile(0.99, sum by (le) (rate({P}step_duration_seconds_bucket{BY}[$__rate_interval])))", "99 %"),
    ]),
    ("Leases, reservations, quarantine", "short", "timeseries", [
        (f"sum({P}leases{BY})", "leases"), (f"sum({P}reservations{BY})", "slots being written"),
        (f'sum({P}arena_slots{{state="quarantined",instance=~"$instance"}})', "slots in quarantine"),
    ]),
    ("Stores that did not happen", "short", "timeseries", [
        (f"sum({rate('stores_full')})", "no room"), (f"sum({rate('stores_busy')})", "being written by another"),
        (f"sum({rate('aborts')})", "given up"),
    ]),
    ("Loads and requests refused", "short", "timeseries", [
        (f"sum({rate('failed_loads')})", "failed loads"), (f"sum({rate('collisions')})", "identity differs"),
        (f"sum({rate('denied_requests')})", "denied requests"),
        (f"sum({rate('scrub_mismatched_slots')})", "damaged slots"),
    ]),
    ("Restarts, memory of the server", "short", "timeseries", [
        (f"sum({P}restarts_total{BY})", "restarts"), (f"sum({P}process_resident_memory_bytes{BY})", "resident bytes"),
    ]),
]  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels = []
    for k, (title, unit, kind, targets) in enumerate(PANELS):
        panels.append({
            "id": k + 1,
            "title": title,
            "type": kind,
            "datasource": SOURCE,
            "gridPos": {"x": k % 3 * 8, "y": k // 3 * 8, "w": 8, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "options": {},
            "targets": [
                {"refId": chr(65 + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
                for i, (expr, legend) in enumerate(targets)
            ],
        })  # fmt: skip
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {
            "name": "instance", "type": "query", "label": "Server", "datasource": SOURCE, "refresh": 2,
            "query": f"label_values({P}arena_size_bytes, instance)", "multi": True, "includeAll": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]  # fmt: skip
    return {
        "uid": "lmcache-shm", "title": "lmcache-shm", "tags": ["vllm", "kv-cache"], "schemaVersion": 39,
        "version": 1, "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "timezone": "browser",
        "editable": True, "templating": {"list": variables}, "panels": panels,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if parser.parse_args().check:
        same = TARGET.exists() and TARGET.read_text(encoding="utf-8") == text
        print(
            f"{TARGET}: {'up to date' if same else 'differs; run python -m tools.make_dashboard'}"
        )
        return int(not same)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
