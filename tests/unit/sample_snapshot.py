"""A status snapshot like a server's, with two models on it, and ways to change it."""

import copy
from typing import Any

SNAPSHOT: dict[str, Any] = {
    "server": {
        "version": "0.1.0", "instance": "default", "pid": 4711, "boot": "b0b0", "arena_id": "a1a1",
        "uptime_s": 11527.3, "started_at": 1_790_000_000.0, "restarts": 2,
        "adopted": {"slots": 1200, "bytes": 3 << 30, "dropped": 3, "quarantined": 0},
        "checksum": "off", "chunk_size": 0, "separate": True, "draining": False, "rss_bytes": 60 << 20,
    },
    "arena": {
        "data_bytes": 4 << 30, "slab_bytes": 4 << 20, "slabs": 1024, "slabs_free": 240,
        "bytes": {"free": 1 << 30, "used": (3 << 30) - (8 << 20), "reserved": 6 << 20, "quarantined": 2 << 20, "unbacked": 0, "unusable": 0},
        "slots": {"free": 100, "used": 2350, "reserved": 5, "quarantined": 2, "pinned": 44},
        "backed_bytes": 4 << 30, "growing": False, "prefaulted_bytes": 4 << 30, "coldest_age_s": 754.0,
    },
    "counters": {
        "evictions": 3411, "rebinds": 12, "stores_skipped_full": 0, "stores_skipped_busy": 7,
        "stores_exist": 120, "commits": 5765, "aborts": 4, "acquires": 9120, "hit_chunks": 7100,
        "hit_tokens": 1_817_600, "query_tokens": 2_190_000, "collisions": 0, "loads_failed": 0,
        "clears": 1, "bytes_committed": 41 << 30, "bytes_acquired": 212 << 30, "malformed_frames": 0,
        "connections": 9, "refused_uid": 0, "tokens_committed": 610_000,
        "scrubbed_slots": 812, "scrub_mismatches": 0,
    },
    "misses": {
        "never_seen": 1310, "evicted": 402, "other_namespace": 31, "incomplete_group": 12,
        "identity": 0, "no_server": 5, "deadline": 2,
    },
    "latency": {
        "acquire": {"count": 9120, "sum_s": 1.9, "buckets": {"0.0001": 1000, "0.001": 9100, "+Inf": 9120}},
        "step": {"count": 40211, "sum_s": 5.3, "buckets": {"0.0001": 30000, "0.001": 40200, "+Inf": 40211}},
    },
    "namespaces": [
        {
            "id": 0, "name": "Qwen/Qwen3.5-4B", "key": "0f" * 8, "description": {"model": "Qwen/Qwen3.5-4B", "tp": 1},
            "hits": 6100, "misses": 900,
            "groups": [
                {"name": "full", "kind": "full", "window": 0, "kv_groups": [3], "block_size": 160, "slot_bytes": 33 << 20, "slots": 60, "pinned": 2, "reserved": 1, "hits": 18300, "served": 6100, "misses": 900, "short": 0, "evictions": 100},
                {"name": "recurrent", "kind": "recurrent", "window": 0, "kv_groups": [0, 1, 2], "block_size": 160, "slot_bytes": 5 << 20, "slots": 55, "pinned": 1, "reserved": 1, "hits": 3090, "served": 1030, "misses": 12, "short": 31, "evictions": 130},
            ],
        },
        {
            "id": 1, "name": "openai/gpt-oss-20b", "key": "1e" * 8, "description": {"model": "openai/gpt-oss-20b", "tp": 2},
            "hits": 1000, "misses": 850,
            "groups": [
                {"name": "full", "kind": "full", "window": 0, "kv_groups": [1], "block_size": 16, "slot_bytes": 12 << 20, "slots": 1200, "pinned": 40, "reserved": 3, "hits": 3000, "served": 1000, "misses": 850, "short": 0, "evictions": 2000},
                {"name": "window128", "kind": "window", "window": 128, "kv_groups": [0], "block_size": 16, "slot_bytes": 6 << 20, "slots": 1035, "pinned": 1, "reserved": 0, "hits": 720, "served": 240, "misses": 0, "short": 7, "evictions": 1181},
            ],
        },
    ],
    "clients": [
        {"client": 0, "engine_id": "qwen-7f3a", "pid": 5001, "workers": [{"rank": 0, "pid": 5002, "alive": True}], "connected": True, "leases": 2, "pins": 3, "reservations": 2, "quarantined": 0, "last_activity_s": 0.2},
        {"client": 1, "engine_id": "gpt-oss-11c9", "pid": 6001, "workers": [{"rank": 0, "pid": 6002, "alive": True}, {"rank": 1, "pid": 6003, "alive": False}], "connected": False, "leases": 0, "pins": 0, "reservations": 0, "quarantined": 2, "last_activity_s": 61.0},
    ],
    "slab_map": [[0, 0, 1, 1, 0, 0, 9, 0]] * 59
    + [[0, 0, 1, 0, 0, 1, 9, 0], [0, 1, 4, 3, 1, 0, 5, 0]]
    + [[1, 0, 1, 1, 0, 0, 3, 0]] * 40 + [[1, 1, 2, 2, 1, 0, 3, 0]] * 20 + [[1, 1, 2, 0, 0, 0, 3, 2]]
    + [[-1, -1, 0, 0, 0, 0, 247, 0]],
    "events": [
        {"t": 1_790_000_000.0, "text": "adopted 1,200 slots (3.0 GiB), dropped 3 that were half written"},
        {"t": 1_790_000_004.0, "text": "rank 0 of engine qwen-7f3a attached (pid 5002)"},
        {"t": 1_790_000_005.0, "text": "engine qwen-7f3a registered (Qwen/Qwen3.5-4B, 1 worker, 2 object groups, chunks of 320 tokens)"},
        {"t": 1_790_000_100.0, "text": "2 slots of engine gpt-oss-11c9 in quarantine: its workers may still be writing"},
    ],
}  # fmt: skip


def snapshot(**changes: Any) -> dict[str, Any]:
    """A copy; ``server__pid=1`` sets one item of a part, ``clients=[]`` a whole part."""
    copied = copy.deepcopy(SNAPSHOT)
    for name, value in changes.items():
        *parts, last = name.split("__")
        target = copied
        for part in parts:
            target = target[part]
        target[last] = value
    return copied


def later(before: dict[str, Any], seconds: float, **gains: float) -> dict[str, Any]:
    """The same server some time after, with these counters raised."""
    copied = copy.deepcopy(before)
    copied["server"]["uptime_s"] += seconds
    for name, gain in gains.items():
        copied["counters"][name] += gain
    return copied
