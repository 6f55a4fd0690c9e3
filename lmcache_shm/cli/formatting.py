"""How facts are put into words: numbers with units, an arena's reserved size, why two namespaces are two."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lmcache_shm.arena.memory import SHM_DIR

Facts = Mapping[str, Any]
"""A part of a server's snapshot."""


# ------------------------------------------------------------------------------------------- numbers
BARS = "▁▂▃▄▅▆▇█"


def size(nbytes: float) -> str:
    """``3.1 GiB``; binary units, at most 8 characters below 1 EiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"


def count(n: float) -> str:
    """``12345`` as ``12.3k``; at most 5 characters below 10**15."""
    value, unit = float(n), ""
    if abs(value) < 9999.5:
        return f"{value:.0f}" if value == int(value) or value >= 99.5 else f"{value:.1f}"
    for unit in ("k", "M", "G", "T"):  # noqa: B007  (used after the loop)
        value /= 1000
        if abs(value) < 999.5:
            break
    return f"{value:.0f}{unit}" if value >= 99.5 else f"{value:.1f}{unit}"


def duration(seconds: float) -> str:
    """``3 h 12 min``: the two largest units that matter."""
    s = max(0, round(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min" + (f" {s % 60} s" if s < 600 and s % 60 else "")
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60} min"
    return f"{s // 86400} d {s % 86400 // 3600} h"


def percent(part: float, whole: float) -> str:
    """``83 %``, or ``-`` where there is nothing to divide by. Only exact 0 and 100 are shown as such."""
    if whole <= 0:
        return "-"
    value = 100 * part / whole
    if value != 0 and value < 1:
        return "<1 %"
    return "99 %" if 99 < value < 100 else f"{value:.0f} %"


def sparkline(values: Sequence[float | None], top: float | None = None) -> str:
    """One character per value, scaled to `top` (else to the largest); a blank for None."""
    high = max((v for v in values if v is not None), default=0.0) if top is None else top
    drawn = []
    for value in values:
        if value is None:
            drawn.append(" ")
        elif high <= 0:
            drawn.append(BARS[0])
        else:
            level = round(min(max(value / high, 0.0), 1.0) * (len(BARS) - 1))
            drawn.append(BARS[max(level, 1) if value > 0 else 0])
    return "".join(drawn)


# -------------------------------------------------------------------------------------- reserved size
RESERVE_FIX = (
    f"make {SHM_DIR} larger (--shm-size, --ipc=host) or free some of it, and restart the server"
)


def reserved_size(backed: int, total: int, *, growing: bool) -> str:
    """How much of an arena is reserved, as one clause; "" when all of it is, which is the normal case."""
    if backed >= total:
        return ""
    if growing:
        return f"{size(backed)} of {size(total)} reserved, the rest follows"
    return f"only {size(backed)} of {size(total)} could be reserved: {SHM_DIR} had no room for more"


def reserved_of(arena: Facts) -> str:
    """`reserved_size` for the "arena" of a server's snapshot."""
    total = arena["data_bytes"]
    return reserved_size(
        arena.get("backed_bytes", total), total, growing=arena.get("growing", False)
    )


# ----------------------------------------------------------------------------------------- namespaces
def unshared(namespaces: Iterable[Facts]) -> Iterator[tuple[str, int, int, list[str]]]:
    """(model, id, id of a later one, what differs) for namespaces of one model, each against the first."""
    first: dict[str, Facts] = {}
    for namespace in namespaces:
        earlier = first.setdefault(namespace["name"], namespace)
        if earlier is not namespace:
            yield namespace["name"], earlier["id"], namespace["id"], differences(earlier, namespace)


def differences(one: Facts, other: Facts) -> list[str]:
    """``name (value / value)`` for each fact that differs."""
    a, b = (dict(flat(n.get("description") or {})) for n in (one, other))
    found = [
        f"{name} ({a.get(name, '-')} / {b.get(name, '-')})"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]
    if one.get("chunk_size") != other.get("chunk_size"):
        found.append(f"chunk size ({one.get('chunk_size')} / {other.get('chunk_size')})")
    return found


def flat(item: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A tree of facts as (dotted name, text)."""
    if isinstance(item, Mapping):
        for name, value in item.items():
            yield from flat(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(item, list) and any(isinstance(value, Mapping) for value in item):
        for k, value in enumerate(item):
            yield from flat(value, f"{prefix}[{k}]")
    else:
        yield prefix, re.sub(r"\s+", " ", str(item))[:60]
