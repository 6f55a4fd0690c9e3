"""Which namespaces there are, and their copy in the meta segment.

A namespace without users and slots is dropped when its place is needed.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash

from lmcache_shm.arena.segment import Arena
from lmcache_shm.protocol.rules import rule_of, rule_words
from lmcache_shm.server.catalog.groups import CatalogError, Group, GroupSpec, Namespace
from lmcache_shm.server.catalog.slots import Slots

MAX_NAMESPACES = 4096


class Registry:
    def __init__(
        self, slots: Slots, evict_all: Callable[[Namespace], None], limit: int = MAX_NAMESPACES
    ) -> None:
        """`evict_all` empties a namespace without users, as far as it can."""
        self._slots = slots
        self._evict_all = evict_all
        self._limit = limit
        self._store = NamespaceStore(slots.arena)
        self._by_identity: dict[tuple[Any, ...], Namespace] = {}
        self._next_id = 1

    def load(self) -> None:
        """After a warm restart. Raises CatalogError when the table is damaged."""
        self._next_id, found = self._store.load()
        for space in found:
            self._add(space)

    def register(
        self, descriptor: bytes, groups: Sequence[GroupSpec], chunk_size: int
    ) -> Namespace:
        """The namespace with this identity, made if need be; one user more. Raises CatalogError."""
        self._check(groups, chunk_size)
        made = [Group(i, spec) for i, spec in enumerate(groups)]
        space = Namespace(self._next_id, descriptor, chunk_size, made)
        known = self._by_identity.get(space.identity)
        if known is None:
            known = self._create(space)
        else:
            for group, spec in zip(known.groups, groups, strict=True):
                group.spec = spec  # its `info` may have changed
        known.users += 1
        return known

    def leave(self, space: Namespace) -> None:
        """One user less."""
        space.users = max(space.users - 1, 0)

    def _create(self, space: Namespace) -> Namespace:
        if len(self._slots.spaces) >= self._limit:
            self._make_room()
        while True:
            self._add(space)
            self._next_id = space.id + 1
            try:
                self._store.save(self._next_id, list(self._slots.spaces.values()))
            except CatalogError:
                self._remove(space)
                if not self._drop_idle() and not self._drop_coldest():
                    raise
                continue
            return space

    def _make_room(self) -> None:
        if not self._drop_idle() and not self._drop_coldest():
            raise CatalogError(
                f"all {len(self._slots.spaces)} namespaces are in use by connected engines or have "
                "slots in flight; stop some engines"
            )

    def _drop_idle(self) -> bool:
        """Drop all namespaces that hold nothing and have no user."""
        idle = [space for space in self._slots.spaces.values() if not space.users and space.empty]
        for space in idle:
            self._remove(space)
        self._slots.counters["namespaces_dropped"] += len(idle)
        return bool(idle)

    def _drop_coldest(self) -> bool:
        """Empty and drop the namespace without users that was used least recently."""
        unused = [space for space in self._slots.spaces.values() if not space.users]
        for space in sorted(unused, key=lambda space: space.last_tick):
            self._evict_all(space)
            if space.empty:
                self._remove(space)
                self._slots.counters["namespaces_dropped"] += 1
                return True
        return False

    def _add(self, space: Namespace) -> None:
        self._slots.spaces[space.id] = space
        self._by_identity[space.identity] = space

    def _remove(self, space: Namespace) -> None:
        del self._slots.spaces[space.id]
        del self._by_identity[space.identity]

    def _check(self, groups: Sequence[GroupSpec], chunk_size: int) -> None:
        if chunk_size < 1:
            raise CatalogError(f"a chunk of {chunk_size} tokens; say how long a chunk is")
        if not 1 <= len(groups) <= 1 << 16:
            raise CatalogError(f"{len(groups)} object groups; 1 to 65536 are possible")
        allocator = self._slots.allocator
        for spec in groups:
            if spec.slot_bytes < 1:
                raise CatalogError(f"group {spec.name}: a slot of {spec.slot_bytes} bytes")
            if not allocator.fits(spec.slot_bytes):
                room = allocator.room_slabs() * allocator.slab_bytes
                raise CatalogError(
                    f"one chunk of group {spec.name} takes {spec.slot_bytes / 2**20:.1f} MiB, the "
                    f"arena has room for {room / 2**20:.1f} MiB; start the server with a larger "
                    "--l1-size-gb or a smaller --chunk-size"
                )


# ------------------------------------------------------------------------------- in the meta segment
class _Record(msgspec.Struct, array_like=True):
    id: int
    descriptor: bytes
    chunk_size: int
    groups: list[
        tuple[str, str, int, int, dict[str, Any]]
    ]  # name, rule, its parameter, bytes, info


class _Blob(msgspec.Struct, array_like=True):
    next_id: int
    namespaces: list[_Record]


_HEAD = struct.Struct("<QQQ")  # sequence number, length, xxh3 of both and the body


class NamespaceStore:
    """Two buffers in the meta segment; the one with the higher sequence number and a good sum counts.

    A server killed while it writes one leaves the other.
    """

    def __init__(self, arena: Arena) -> None:
        self._meta = arena.meta
        self._start = arena.regions.namespaces
        self._area = arena.regions.namespace_area
        self._sequence = 0

    def save(self, next_id: int, namespaces: list[Namespace]) -> None:
        """Raises CatalogError if they do not fit."""
        records = [
            _Record(ns.id, ns.descriptor, ns.chunk_size, [_words(g.spec) for g in ns.groups])
            for ns in namespaces
        ]
        body = msgspec.msgpack.encode(_Blob(next_id, records))
        if _HEAD.size + len(body) > self._area:
            raise CatalogError(
                f"the descriptors of {len(namespaces)} namespaces take {len(body)} bytes, there is "
                f"room for {self._area}; clear some, or start the server with a larger --l1-size-gb"
            )
        self._sequence += 1
        sequence = self._sequence
        at = self._start + sequence % 2 * self._area
        self._meta[at : at + _HEAD.size] = bytes(_HEAD.size)  # never a head with another body
        self._meta[at + _HEAD.size : at + _HEAD.size + len(body)] = body
        head = _HEAD.pack(sequence, len(body), _sum(sequence, body))
        self._meta[at : at + _HEAD.size] = head

    def load(self) -> tuple[int, list[Namespace]]:
        """(next id, namespaces) as last saved; (1, []) for a fresh arena. Raises CatalogError when damaged."""
        found = [entry for entry in (self._read(0), self._read(1)) if entry is not None]
        if not found:
            if any(self._meta[self._start : self._start + 2 * self._area]):
                raise CatalogError("the table of namespaces is damaged")
            return 1, []
        self._sequence, body = max(found)
        blob = msgspec.msgpack.decode(body, type=_Blob)
        return blob.next_id, [
            Namespace(r.id, r.descriptor, r.chunk_size, _groups(r)) for r in blob.namespaces
        ]

    def _read(self, i: int) -> tuple[int, bytes] | None:
        at = self._start + i * self._area
        sequence, length, check = _HEAD.unpack(self._meta[at : at + _HEAD.size])
        if not 0 < length <= self._area - _HEAD.size:
            return None
        body = self._meta[at + _HEAD.size : at + _HEAD.size + length]
        return (sequence, body) if check == _sum(sequence, body) else None


def _sum(sequence: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=sequence)


def _words(spec: GroupSpec) -> tuple[str, str, int, int, dict[str, Any]]:
    return (spec.name, *rule_words(spec.rule), spec.slot_bytes, dict(spec.info))


def _groups(record: _Record) -> list[Group]:
    return [
        Group(i, GroupSpec(name, rule_of(rule, parameter), nbytes, info))
        for i, (name, rule, parameter, nbytes, info) in enumerate(record.groups)
    ]
