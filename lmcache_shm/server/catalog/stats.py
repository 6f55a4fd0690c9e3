"""The catalog's part of `status`, `contents` and the metrics.

The server answers nobody while it counts, so that must stay within some milliseconds for a million rows:
columns are counted slab by slab instead of row by row, and owners give their own numbers where they have them.
"""

import bisect
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.layout import Numbers, SlotState
from lmcache_shm.protocol.keys import describe
from lmcache_shm.protocol.rules import rule_words
from lmcache_shm.server.catalog.groups import Namespace
from lmcache_shm.server.catalog.slots import Slots

STATES = {
    "free": SlotState.FREE,
    "used": SlotState.COMMITTED,
    "reserved": SlotState.RESERVED,
    "quarantined": SlotState.QUARANTINED,
}


class Tally:
    """Valid at the moment it was taken. A slot's owner is its (namespace, group)."""

    def __init__(self, slots: Slots) -> None:
        arena, allocator = slots.arena, slots.allocator
        self._slots = slots
        self.starts = allocator.extents()
        """First slabs of all extents, ascending."""
        self.lengths = arena.slabs["extent_slabs"][self.starts].astype(np.int64)
        """Slabs of each extent."""
        self.slots = arena.slabs["slots"][self.starts].astype(np.int64)
        """Slots of each extent."""
        self.slot_bytes = arena.slabs["slot_bytes"][self.starts].astype(np.int64)
        shape = (allocator.slabs, allocator.per_slab)
        # One strided pass each; everything below works on the compact copies.
        self._state: npt.NDArray[np.uint8] = np.ascontiguousarray(slots.state).reshape(shape)
        self._pinned: npt.NDArray[np.bool_] = (slots.pins > 0).reshape(shape)
        masks = {name: self._state == state for name, state in STATES.items()}
        masks["pinned"] = self._pinned
        self._by_extent = {name: self._sum(mask) for name, mask in masks.items()}

    def _sum(self, mask: npt.NDArray[np.bool_]) -> Numbers:
        """Rows of `mask` by extent. Slabs between extents have none that could be counted to the wrong one."""
        if not len(self.starts):
            return np.zeros(0, np.int64)
        by_slab = np.count_nonzero(mask, axis=1)
        counts: Numbers = np.add.reduceat(by_slab, self.starts).astype(np.int64)
        return counts

    def by_extent(self, name: str) -> Numbers:
        """Slots of each extent in a state of STATES, or "pinned"."""
        return self._by_extent[name]

    def total(self, name: str) -> int:
        return int(self._by_extent[name].sum())

    def nbytes(self, name: str) -> int:
        return int((self._by_extent[name] * self.slot_bytes).sum())

    def by_owner(self, name: str, spaces: Sequence[Namespace]) -> dict[int, int]:
        """namespace << 16 | group → its slots that are "used", "reserved" or "pinned" and not cleared."""
        groups = [
            (space.id << 16 | group.number, group) for space in spaces for group in space.groups
        ]
        if name == "used":
            return {owner: len(group.index) - group.reserved for owner, group in groups}
        if name == "reserved":
            return {owner: group.reserved for owner, group in groups}
        known = np.sort(np.array([owner for owner, _ in groups], np.uint64))
        owners = self._owners(np.flatnonzero(self._pinned))
        if not len(known) or not len(owners):
            return {}
        at = np.minimum(np.searchsorted(known, owners), len(known) - 1)
        counts = np.bincount(at[known[at] == owners], minlength=len(known))
        return dict(zip(known.tolist(), counts.tolist(), strict=True))

    def _owners(self, rows: Numbers) -> npt.NDArray[np.uint64]:
        hot = self._slots.arena.hot
        owners: npt.NDArray[np.uint64] = hot["namespace"][rows].astype(np.uint64) << np.uint64(16)
        owners |= hot["group"][rows]
        return owners

    def owners_of_extents(self) -> list[tuple[int, int]]:
        """(namespace, group) of each extent's first slot in use; (-1, -1) where none is."""
        found = [(-1, -1)] * len(self.starts)
        in_use = self._state >= SlotState.RESERVED
        filled = np.flatnonzero(in_use.any(axis=1))
        rows = filled * in_use.shape[1] + in_use[filled].argmax(axis=1)
        extents = np.searchsorted(self.starts, filled, side="right") - 1
        heads = np.flatnonzero(np.diff(extents, prepend=-1))
        for extent, owner in zip(
            extents[heads].tolist(), self._owners(rows[heads]).tolist(), strict=True
        ):
            found[extent] = (owner >> 16, owner & 0xFFFF)
        return found

    def coldest(self) -> tuple[int, int] | None:
        """(row, tick) of the committed slot that was used least recently."""
        committed = self._state.ravel() == SlotState.COMMITTED
        if not committed.any():
            return None
        ticks = np.where(committed, self._slots.ticks, np.iinfo(np.uint64).max)
        row = int(ticks.argmin())
        return row, int(ticks[row])


def snapshot(slots: Slots, misses: Counter[str], adopted: dict[str, int]) -> dict[str, Any]:
    """Plain dicts and lists of numbers and texts. Bytes of all states add up to the arena's size."""
    tally = Tally(slots)
    return {
        "arena": _arena(slots, tally),
        "counters": dict(slots.counters),
        "misses": dict(misses),
        "adopted": dict(adopted),
        "namespaces": _namespaces(slots, tally),
        "slab_map": _slab_map(slots, tally),
    }


def _arena(slots: Slots, tally: Tally) -> dict[str, Any]:
    arena, allocator = slots.arena, slots.allocator
    nbytes = {name: tally.nbytes(name) for name in STATES}
    slabs_free = allocator.slabs - int(tally.lengths.sum())
    waiting = allocator.slabs - allocator.usable_slabs()
    nbytes["free"] += (slabs_free - waiting) * allocator.slab_bytes
    nbytes["unbacked"] = waiting * allocator.slab_bytes
    nbytes["unusable"] = arena.data_bytes - sum(nbytes.values())
    coldest = tally.coldest()
    return {
        "data_bytes": arena.data_bytes,
        "meta_bytes": arena.meta_bytes,
        "slab_bytes": allocator.slab_bytes,
        "slabs": allocator.slabs,
        "slabs_free": slabs_free,
        "max_slots": arena.max_slots,
        "bytes": nbytes,
        "slots": {name: tally.total(name) for name in (*STATES, "pinned")},
        "backed_bytes": arena.backed_bytes,
        "growing": arena.growing,
        "prefaulted_bytes": int(arena.live["prefaulted"][0]),
        "coldest_tick": coldest[1] if coldest else None,
        "tick": slots.tick,
    }


def _namespaces(slots: Slots, tally: Tally) -> list[dict[str, Any]]:
    spaces = list(slots.spaces.values())
    states = {"slots": "used", "reserved": "reserved", "pinned": "pinned"}
    counted = {name: tally.by_owner(state, spaces) for name, state in states.items()}
    return [
        {
            "id": space.id,
            "key": space.key.hex(),
            "name": str(space.groups[0].spec.info.get("model") or f"namespace {space.id}"),
            "description": describe(space.descriptor),
            "chunk_size": space.chunk_size,
            "users": space.users,
            "hits": space.hits,
            "misses": space.misses,
            "groups": _groups(space, counted),
        }
        for space in spaces
    ]


def _groups(space: Namespace, counted: dict[str, dict[int, int]]) -> list[dict[str, Any]]:
    groups = []
    for group in space.groups:
        kind, parameter = rule_words(group.spec.rule)
        owner = space.id << 16 | group.number
        sizes = group.spec.info.get("block_sizes") or []
        groups.append(
            {
                **group.spec.info,
                "name": group.spec.name,
                "kind": kind,
                "window": parameter,
                "block_size": sizes[0] if len(set(sizes)) == 1 else 0,
                "slot_bytes": group.size,
                **{name: counts.get(owner, 0) for name, counts in counted.items()},
                "hits": group.hits,
                "served": group.served,
                "misses": group.misses,
                "short": group.short,
                "commits": group.commits,
                "evictions": group.evictions,
            }
        )
    return groups


def _slab_map(slots: Slots, tally: Tally) -> list[list[int]]:
    """In the arena's order, per extent or gap between extents: namespace and group of its slots (-1: of
    none), slots, used, pinned, reserved, slabs, quarantined."""
    columns = [
        tally.by_extent(name).tolist() for name in ("used", "pinned", "reserved", "quarantined")
    ]
    found = []
    for i, (owner, start) in enumerate(
        zip(tally.owners_of_extents(), tally.starts.tolist(), strict=True)
    ):
        used, pinned, reserved, quarantined = (column[i] for column in columns)
        slabs, n = int(tally.lengths[i]), int(tally.slots[i])
        found.append((start, [*owner, n, used, pinned, reserved, slabs, quarantined]))
    for start, length in slots.allocator.free_runs().tolist():
        found.append((start, [-1, -1, 0, 0, 0, 0, length, 0]))
    return [entry for _, entry in sorted(found)]


def tree(slots: Slots, ns: int | None, limit: int) -> list[dict[str, Any]]:
    """One dict per cached chunk; parents before children, the most recently used prefix first.

    {"namespace", "key", "parent" (hex), "chunk", "depth" (chunks above it in this listing), "groups" (numbers
    that hold it), "rows", "bytes", "pins", "hits", "created_s" (Unix time), "tick"}
    """
    hot, cold = slots.arena.hot, slots.arena.cold
    mine = slots.state == SlotState.COMMITTED
    if ns is not None and ns >= 0:
        mine &= hot["namespace"] == ns
    rows = np.flatnonzero(mine).astype(np.int32)
    most = limit * 8
    if len(rows) > most:  # sorting a million rows would keep engines waiting
        rows = rows[np.argpartition(slots.ticks[rows], len(rows) - most)[-most:]]
    rows = rows[np.argsort(slots.ticks[rows])[::-1]]
    nodes: dict[tuple[int, bytes], dict[str, Any]] = {}
    for row, key in zip(rows.tolist(), slots.keys_of(rows), strict=True):
        h, c = hot[row], cold[row]
        where = int(h["namespace"]), key
        if where not in nodes and len(nodes) == limit:
            continue
        node = nodes.setdefault(
            where,
            {
                "namespace": where[0],
                "key": key.hex(),
                "parent": slots.parent_of(row).hex(),
                "chunk": int(c["chunk"]),
                "depth": 0,
                "groups": [],
                "rows": [],
                "bytes": 0,
                "pins": 0,
                "hits": 0,
                "created_s": int(c["created_ns"]) / 1e9,
                "tick": int(h["tick"]),
            },
        )
        bisect.insort(node["groups"], int(h["group"]))
        node["rows"].append(row)
        node["bytes"] += int(c["slot_bytes"])
        node["pins"] += int(h["pins"])
        node["hits"] = max(node["hits"], int(h["hits"]))
    return _in_order(list(nodes.values()))


def _in_order(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    known = {(node["namespace"], node["key"]) for node in nodes}
    children: dict[tuple[int, str], list[dict[str, Any]]] = {}
    roots: list[dict[str, Any]] = []
    for node in nodes:
        above = node["namespace"], node["parent"]
        (children.setdefault(above, []) if above in known else roots).append(node)
    ordered: list[dict[str, Any]] = []
    stack = roots[::-1]
    while stack:
        node = stack.pop()
        ordered.append(node)
        below = children.get((node["namespace"], node["key"]), [])
        for child in below[::-1]:
            child["depth"] = node["depth"] + 1
            stack.append(child)
    return ordered
