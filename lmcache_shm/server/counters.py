"""Every counter of the server: who counts it, its Prometheus metric, and that metric's help text."""

from collections import Counter
from typing import Literal, NamedTuple

Side = Literal["catalog", "service", "clients"]


class Counted(NamedTuple):
    """`by`: who counts it. `metric`: name without prefix and ``_total``; "": shown by `status` alone."""

    by: Side
    metric: str = ""
    text: str = ""


COUNTERS = {
    "query_tokens": Counted("catalog", "query_tokens", "Prompt tokens that engines looked up"),
    "hit_tokens": Counted(
        "catalog", "hit_tokens", "Prompt tokens that a look-up found in the arena"
    ),
    "hit_chunks": Counted("catalog", "hit_chunks", "Chunks that a look-up found in the arena"),
    "tokens_committed": Counted("catalog", "stored_tokens", "Tokens whose chunks were committed"),
    "bytes_committed": Counted("catalog", "stored_bytes", "Bytes of committed slots"),
    "bytes_acquired": Counted(
        "catalog", "loaded_bytes", "Bytes of slots that were given to engines to load"
    ),
    "acquires": Counted("catalog", "lookups", "Look-ups"),
    "commits": Counted("catalog", "commits", "Slots committed"),
    "aborts": Counted("catalog", "aborts", "Reserved slots that were given back unwritten"),
    "evictions": Counted("catalog", "evictions", "Slots evicted"),
    "rebinds": Counted("catalog", "slab_rebinds", "Extents taken from one slot size for another"),
    "clears": Counted("catalog", "clears", "Requests to forget chunks"),
    "stores_exist": Counted(
        "catalog", "stores_existing", "Slots not stored because they were there already"
    ),
    "stores_skipped_busy": Counted(
        "catalog", "stores_busy", "Slots not stored because another engine was writing them"
    ),
    "stores_skipped_full": Counted(
        "catalog", "stores_full", "Slots not stored because everything was pinned or reserved"
    ),
    "collisions": Counted(
        "clients",
        "collisions",
        "Hits refused because tokens or identity differed from the stored ones",
    ),
    "loads_failed": Counted(
        "clients", "failed_loads", "Requests whose load failed, and that engines computed instead"
    ),
    "commits_lost": Counted(
        "clients",
        "lost_commits",
        "Stored slots that could not be committed because the connection broke",
    ),
    "connections": Counted("service", "connections", "Connections accepted"),
    "malformed_frames": Counted(
        "service", "malformed_frames", "Connections closed for sending what is no message"
    ),
    "refused_uid": Counted("service", "refused_peers", "Connections of other users turned away"),
    "denied": Counted("service", "denied_requests", "Requests answered with an error"),
    "scrubbed_slots": Counted(
        "service",
        "scrubbed_slots",
        "Slots whose content the background scrub compared with its checksums",
    ),
    "scrub_mismatches": Counted(
        "service",
        "scrub_mismatched_slots",
        "Slots that the scrub dropped because their content did not fit its checksums",
    ),
    "refused_limit": Counted("service"),
    "failures": Counted("service"),
    "dropped_at_commit": Counted("catalog"),
    "cleared_slots": Counted("catalog"),
    "bytes_evicted": Counted("catalog"),
    "wrong_releases": Counted("catalog"),
    "wrong_commits": Counted("catalog"),
    "namespaces_dropped": Counted("catalog"),
}

REPORTED = {"load_failed": "loads_failed", "collision": "collisions", "commit_lost": "commits_lost"}
"""Reasons in a client's Report that are no misses → their counter."""

# Reasons of misses that the catalog finds; clients report more (no_server, deadline, …).
NEVER_SEEN = "never_seen"
EVICTED = "evicted"
OTHER_NAMESPACE = "other_namespace"
INCOMPLETE_GROUP = "incomplete_group"
IN_FLIGHT = "in_flight"
MISSES = (NEVER_SEEN, EVICTED, OTHER_NAMESPACE, INCOMPLETE_GROUP, IN_FLIGHT)


def zeros(by: Side) -> Counter[str]:
    """All counters of one side at 0: a metric that appears late looks like a gap."""
    return Counter({name: 0 for name, counted in COUNTERS.items() if counted.by == by})
