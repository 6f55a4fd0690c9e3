"""The tables of the live view: object groups, misses, clients, events. Each is a list of lines."""

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from lmcache_shm.cli.figures import count, duration, percent, size
from lmcache_shm.cli.top_lines import DIM, Cell, Columns, line
from lmcache_shm.cli.top_slabs import key, order

SORTS = ("slots", "hits", "misses", "evictions", "name")

# The catalog's and the clients' words for why a chunk was not served, as people say it.
REASONS = {
    "never_seen": "never seen",
    "evicted": "evicted",
    "other_namespace": "other namespace",
    "incomplete_group": "incomplete group",
    "identity": "identity differs",
    "no_server": "no server",
    "deadline": "server too slow",
    "draining": "draining",
    "in_flight": "being written",
    "lease_limit": "too many leases",
}

GROUPS = Columns(
    ("", 1, False),
    ("model / group", 0, False),
    ("kind", 11, False),
    ("window", 6, True),
    ("slots", 6, True),
    ("of", 8, True),
    ("hits", 6, True),
    ("misses", 6, True),
    ("hit", 5, True),
    ("evicted", 7, True),
    ("short", 6, True),
    ("block", 7, True),
    ("pinned", 6, True),
    ("writing", 7, True),
)
CLIENTS = Columns(
    ("engine", 0, False),
    ("pid", 8, True),
    ("workers", 7, True),
    ("leases", 6, True),
    ("pins", 6, True),
    ("writing", 7, True),
    ("last seen", 9, True),
    ("quarantine", 10, True),
)
Namespace = Mapping[str, Any]


def kind(name: str) -> str:
    return {"chunked_local": "chunk-local"}.get(name, name)


def groups(
    snapshot: Mapping[str, Any], width: int, *, sort: str, chosen: int | None, colour: bool
) -> list[Text]:
    """A head, then by namespace its name and a line for each object group."""
    ranks = order(snapshot)
    columns = GROUPS.fitting(width, 15)
    shown = [
        n for n in sorted_namespaces(snapshot["namespaces"], sort) if chosen in {None, n["id"]}
    ]
    if not shown:
        return [line(width, ("no engine has registered yet", DIM))]
    lines = [columns.head(width)]
    for namespace in shown:
        hits, misses = namespace["hits"], namespace["misses"]
        slots = sum(group["slots"] for group in namespace["groups"])
        evicted = sum(group["evictions"] for group in namespace["groups"])
        cells: list[Cell | None] = [
            "", (namespace["name"], "bold"), None, None, count(slots), "", count(hits), count(misses),
            percent(hits, hits + misses), count(evicted),
        ]  # fmt: skip
        lines.append(columns.row(width, cells))
        for index, group in sorted_groups(namespace["groups"], sort):
            mark = key((namespace["id"], index), ranks, colour=colour)
            lines.append(columns.row(width, list(_group(mark, group))))
    return lines


def _group(mark: Cell, group: Mapping[str, Any]) -> Iterator[Cell]:
    yield mark
    yield f" {group['name']}"
    yield kind(group["kind"])
    yield str(group["window"] or "-")
    yield count(group["slots"])
    yield size(group["slot_bytes"])
    yield count(group["served"])
    yield count(group["misses"])
    yield percent(group["served"], group["served"] + group["misses"])
    yield count(group["evictions"])
    yield count(group.get("short", 0))
    yield "/".join(
        map(str, dict.fromkeys(group.get("block_sizes") or [group.get("block_size") or "-"]))
    )
    yield (count(group["pinned"]), "bold" if group["pinned"] else DIM)
    yield (count(group["reserved"]), "bold" if group["reserved"] else DIM)


def _weight(group: Mapping[str, Any], sort: str) -> float:
    return -float(group.get("served" if sort == "hits" else sort, 0)) if sort != "name" else 0.0


def sorted_namespaces(namespaces: Sequence[Namespace], sort: str) -> list[Namespace]:
    def weight(namespace: Namespace) -> tuple[float, str, int]:
        total = sum(_weight(group, sort) for group in namespace["groups"])
        return total, namespace["name"], namespace["id"]

    return sorted(namespaces, key=weight)


def sorted_groups(
    found: Sequence[Mapping[str, Any]], sort: str
) -> list[tuple[int, Mapping[str, Any]]]:
    def weight(item: tuple[int, Mapping[str, Any]]) -> tuple[float, str, int]:
        return _weight(item[1], sort), item[1]["name"], item[0]

    return sorted(enumerate(found), key=weight)


def misses(snapshot: Mapping[str, Any], width: int) -> list[Text]:
    """Reasons with their counts, the most frequent first, on as many lines as they take."""
    found: dict[str, int] = {}
    for reason, n in snapshot["misses"].items():
        word = REASONS.get(reason, reason.replace("_", " "))
        found[word] = found.get(word, 0) + n
    ranked = sorted(((n, word) for word, n in found.items() if n), reverse=True)
    if not ranked:
        return [line(width, ("none", DIM))]
    lines, cells, used = [], list[Cell](), 0
    for n, word in ranked:
        item = f"{word} {count(n)}"
        if cells and used + 3 + len(item) > width:
            lines.append(line(width, *cells))
            cells, used = [], 0
        if cells:
            cells.append((" · ", DIM))
            used += 3
        cells += [f"{word} ", (count(n), "bold")]
        used += len(item)
    lines.append(line(width, *cells))
    return lines


def clients(snapshot: Mapping[str, Any], width: int) -> list[Text]:
    found = snapshot["clients"]
    if not found:
        return [line(width, ("none connected", DIM))]
    columns = CLIENTS.fitting(width, 16)
    lines = [columns.head(width)]
    for client in sorted(found, key=lambda c: (not c["connected"], c["engine_id"])):
        workers = client["workers"]
        alive = sum(1 for worker in workers if worker["alive"])
        style = "" if client["connected"] else "yellow"
        state = duration(client["last_activity_s"]) if client["connected"] else "gone"
        cells: list[Cell] = [
            (client["engine_id"], style), str(client["pid"] or "-"),
            (f"{alive}/{len(workers)}", "" if alive == len(workers) else "red"),
            count(client["leases"]), count(client["pins"]), count(client["reservations"]),
            (state, style), (count(client["quarantined"]), "red" if client["quarantined"] else DIM),
        ]  # fmt: skip
        lines.append(columns.row(width, cells))
    return lines


def events(snapshot: Mapping[str, Any], width: int) -> list[Text]:
    """The newest first, each on as many lines as it takes."""
    found = snapshot["events"]
    if not found:
        return [line(width, ("none yet", DIM))]
    lines = []
    for event in reversed(found):
        at = time.strftime("%H:%M:%S ", time.localtime(event["t"]))
        for text in textwrap.wrap(event["text"], max(width - len(at), 20)) or [""]:
            lines.append(line(width, (at, DIM), text))
            at = " " * len(at)
    return lines


def describe(namespace: Namespace, width: int) -> list[Text]:
    """What identifies a namespace, on one line of ``name=value``."""
    pairs = [f"{name}={value}" for name, value in _flat(namespace.get("description") or {})]
    return [line(width, (" ".join(pairs) or "-", DIM))]


def _flat(item: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in item.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield f"{prefix}{name}", str(value)
