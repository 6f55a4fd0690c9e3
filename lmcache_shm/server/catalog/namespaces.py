"""Namespaces and their object groups, and where they are written down."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from lmcache_shm.arena.allocator import slot_class
from lmcache_shm.arena.segment import Arena
from lmcache_shm.protocol.keys import seed
from lmcache_shm.protocol.rules import Full, Rule, rule_of, rule_words
from lmcache_shm.server.catalog.index import Index

MAX_NAMESPACES = 4096


class CatalogError(Exception):
    """A request that cannot be met; one line with what to change."""


@dataclass(frozen=True)
class GroupSpec:
    """One object group. `slot_bytes` of one chunk over all ranks; `info` is for people (kinds, layers, …)."""

    name: str
    rule: Rule
    slot_bytes: int
    info: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(eq=False)
class Group:
    """A group at work. `index` holds committed and reserved slots that were not cleared."""

    number: int
    spec: GroupSpec
    index: Index = field(default_factory=Index)
    size: int = 0
    """slot_bytes in whole pages: its class."""
    full: bool = False
    leading: int = 0
    """Tokens of a chunk in the one group of each namespace whose commits count them, else 0."""
    hits: int = 0
    """Chunks that hits used."""
    served: int = 0
    """Look-ups to which it gave chunks."""
    misses: int = 0
    """Look-ups that found nothing for want of it."""
    short: int = 0
    """Look-ups that found something, and no more for want of it."""
    commits: int = 0
    reserved: int = 0
    """Rows in the index that are not committed yet."""
    evictions: int = 0

    def __post_init__(self) -> None:
        self.size = slot_class(self.spec.slot_bytes)
        self.full = isinstance(self.spec.rule, Full)


@dataclass(eq=False)
class Namespace:
    """`id` is never used for another namespace in the same arena. `users`: sessions registered for it."""

    id: int
    descriptor: bytes
    chunk_size: int
    groups: list[Group]
    users: int = 0
    hits: int = 0
    misses: int = 0
    last_tick: int = 0
    full: list[Group] = field(init=False)
    """Those of `groups` that need every chunk of a prefix."""

    def __post_init__(self) -> None:
        self.full = [group for group in self.groups if group.full]
        (self.full or self.groups)[0].leading = self.chunk_size

    @property
    def key(self) -> bytes:
        """Parent key of its first chunks."""
        return seed(self.descriptor)

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.descriptor, self.chunk_size, tuple(group.spec for group in self.groups)

    @property
    def empty(self) -> bool:
        return not any(len(group.index) for group in self.groups)

    def forget_all(self) -> None:
        """Empty all indices (whatever becomes of the rows)."""
        for group in self.groups:
            group.index.clear()
            group.reserved = 0


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
