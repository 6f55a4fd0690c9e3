"""Does a running server help, and if not, why: read from its counters and reasons of misses."""

from collections.abc import Iterator, Mapping
from typing import Any

from lmcache_shm.cli.figures import count, duration, percent
from lmcache_shm.cli.findings import Finding, note, ok, problem
from lmcache_shm.cli.namespaces import unshared

SHORT_LIFE_S = 60.0
"""A cache whose coldest chunk is younger than this turns over too fast to be of use."""
ENOUGH_LOOKUPS = 3
Snapshot = Mapping[str, Any]


def examine_use(snapshot: Snapshot) -> Iterator[Finding]:
    """Does it help, and if not, why?"""
    counters, misses, arena = snapshot["counters"], snapshot["misses"], snapshot["arena"]
    area, asked, served = "use", counters["query_tokens"], counters["hit_tokens"]
    if asked:
        yield ok(
            area,
            f"{percent(served, asked)} of {count(asked)} looked-up tokens were served from the arena",
        )
    if counters["acquires"] >= ENOUGH_LOOKUPS and not served:
        ranked = sorted(((n, reason) for reason, n in misses.items() if n), reverse=True)
        reason = ranked[0][1] if ranked else "never_seen"
        text, remedy = WHY_NO_HITS.get(
            reason, (reason.replace("_", " "), "see docs/troubleshooting.md")
        )
        yield problem(area, f"{counters['acquires']} look-ups and no hit: {text}", remedy)
    for reason, (text, remedy) in ENGINE_SIDE.items():
        if misses.get(reason):
            yield note(area, f"{misses[reason]} times {text}", remedy)
    if counters["stores_skipped_full"] and not arena.get("growing"):  # more room is on its way
        yield problem(
            area,
            f"{counters['stores_skipped_full']} stores found no room that was not in use",
            _larger(arena["data_bytes"]),
        )
    age = arena.get("coldest_age_s")
    if counters["evictions"] and age is not None and age < SHORT_LIFE_S:
        yield problem(
            area,
            f"the oldest chunk was used {duration(age)} ago: the arena turns over too fast to serve much",
            _larger(arena["data_bytes"]),
        )


def _larger(data_bytes: int) -> str:
    return f"lmcache-shm server --l1-size-gb {data_bytes * 2 / 2**30:g}"


WHY_NO_HITS = {
    "never_seen": (
        "the prompts share no whole chunk with what was stored",
        "compare prompt lengths with the chunk size; send one prompt twice to test (docs/troubleshooting.md)",
    ),
    "evicted": (
        "chunks are evicted before they are asked for",
        "start the server with a larger --l1-size-gb",
    ),
    "other_namespace": (
        "the chunks were stored by an engine of other settings",
        "lmcache-shm status   (shows what differs between the namespaces)",
    ),
    "incomplete_group": (
        "one of the model's cache groups misses its part of each prefix",
        "probe the model: lmcache-shm probe MODEL, and use the step budget that it prints",
    ),
    "identity": (
        "the same tokens were stored under another cache salt, adapter or image",
        "use the same cache_salt if the users may share",
    ),
    "collision": (
        "the same tokens were stored under another cache salt, adapter or image",
        "use the same cache_salt if the users may share",
    ),
}
ENGINE_SIDE = {
    "no_server": ("an engine looked up while there was no server", "keep the server running"),
    "deadline": (
        "the server answered too late",
        'give it a free CPU, or raise "lmcache_shm.deadline_ms"',
    ),
    "lease_limit": ("too much was pinned at once", "lower --max-num-seqs of the engine"),
}


def compare_namespaces(snapshot: Snapshot) -> Iterator[Finding]:
    """One model in several namespaces: engines that could share, and do not."""
    for name, first, other, differing in unshared(snapshot["namespaces"]):
        yield note(
            "use",
            f"{name}: namespaces {first} and {other} share nothing: {'; '.join(differing[:4]) or 'see status'}",
            "start the engines with equal settings if they should share",
        )
