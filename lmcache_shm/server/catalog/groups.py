"""Namespaces, their object groups, and each group's index: key → row. Many keys at a time, never a long pause.

One dict of a million keys stops the server for a tenth of a second when it grows, so a large index is split
into dicts by the first byte of the key.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import numpy as np

from lmcache_shm.arena.allocator import slot_class
from lmcache_shm.arena.layout import Rows
from lmcache_shm.protocol.keys import seed
from lmcache_shm.protocol.rules import Full, Rule

SHARDS = 64
CUT_AT = 16384
"""Keys from which on the index is cut into SHARDS dicts."""


class Index:
    """Keys are KEY uniformly distributed bytes, rows are ≥ 0."""

    __slots__ = ("_mask", "_shards")

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{}]
        self._mask = 0

    def get(self, key: bytes) -> int:
        """The row of a key, or -1."""
        return self._shards[key[0] & self._mask].get(key, -1)

    def find(self, keys: list[bytes]) -> list[int]:
        """Their rows, -1 where there is none."""
        shards, mask = self._shards, self._mask
        if not mask:
            return list(map(shards[0].get, keys, repeat(-1)))
        return [shards[k[0] & mask].get(k, -1) for k in keys]

    def rows(self, keys: list[bytes]) -> Rows:
        """As `find`, i32[len(keys)]."""
        return np.array(self.find(keys), np.int32)

    def add(self, keys: Iterable[bytes], rows: Iterable[int]) -> None:
        """Enter keys with their rows; superfluous keys are left out."""
        shards, mask = self._shards, self._mask
        if mask:
            for key, row in zip(keys, rows, strict=False):
                shards[key[0] & mask][key] = row
            return
        shards[0].update(zip(keys, rows, strict=False))
        if len(shards[0]) >= CUT_AT:
            self._cut()

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove keys; unknown ones are ignored."""
        shards, mask = self._shards, self._mask
        for key in keys:
            shards[key[0] & mask].pop(key, None)

    def clear(self) -> None:
        self._shards, self._mask = [{}], 0

    def all_rows(self) -> Rows:
        """All rows, in the order of `keys()`."""
        values = chain.from_iterable(shard.values() for shard in self._shards)
        return np.fromiter(values, np.int32, len(self))

    def keys(self) -> Iterator[bytes]:
        return chain.from_iterable(self._shards)

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __contains__(self, key: bytes) -> bool:
        return key in self._shards[key[0] & self._mask]

    def _cut(self) -> None:
        whole = self._shards[0]
        self._shards, self._mask = [{} for _ in range(SHARDS)], SHARDS - 1
        self.add(whole.keys(), whole.values())


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
