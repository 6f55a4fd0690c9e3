"""An index of one group: key → row. Many keys at a time; never a long pause.

One dict of a million keys stops everything for a tenth of a second when it grows, so a large index is cut
into dicts by the first byte of the key.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, repeat

import numpy as np

from lmcache_shm.arena.layout import Rows

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
        """What `find` finds, as i32[len(keys)]."""
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
        """Take keys out; those that are not there do not matter."""
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
