"""Why two namespaces are two: what differs between the facts that identify them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Namespace = Mapping[str, Any]


def unshared(namespaces: Iterable[Namespace]) -> Iterator[tuple[str, int, int, list[str]]]:
    """(model, id, id of a later one, what differs) for namespaces of one model, each against the first."""
    first: dict[str, Namespace] = {}
    for namespace in namespaces:
        earlier = first.setdefault(namespace["name"], namespace)
        if earlier is not namespace:
            yield namespace["name"], earlier["id"], namespace["id"], differences(earlier, namespace)


def differences(one: Namespace, other: Namespace) -> list[str]:
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
