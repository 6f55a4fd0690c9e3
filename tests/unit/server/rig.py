"""A catalog over a tiny arena, prefixes to put into it, and slow, obvious oracles."""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from lmcache_shm.arena import segment
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.protocol import keys as k
from lmcache_shm.protocol.rules import ChunkedLocal, Full, Recurrent, Rule, Window
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.catalog.groups import GroupSpec, Namespace

CHUNK = 16
SLAB = 64 << 10
_numbers = itertools.count()


@contextmanager
def arena_of(
    data_bytes: int,
    *,
    chunk_size: int = CHUNK,
    max_slots: int | None = None,
    slab_bytes: int = SLAB,
    first: int | None = None,
) -> Iterator[segment.Arena]:
    name = f"test-{os.getpid()}-rig{next(_numbers)}"
    arena = segment.create(
        name,
        data_bytes,
        chunk_size=chunk_size,
        max_slots=max_slots,
        slab_bytes=slab_bytes,
        first=first,
    )
    try:
        yield arena
    finally:
        arena.unlink()
        arena.close()


class Prefix:
    """Chunks of made-up tokens; those of the same name share keys."""

    def __init__(self, space: Namespace, name: str, chunks: int, salt: int = 0) -> None:
        self.salt = salt
        size = 1 + len(name.encode())
        hashed = k.ChunkKeys(space.key, size)
        hashed.extend([token for i in range(chunks) for token in (i, *name.encode())])
        self.encoded = [bytes(hashed.token_bytes(i)) for i in range(chunks)]
        self.keys = bytes(hashed.keys)
        self.parents = (space.key + self.keys[: -k.KEY]) if chunks else b""

    def key(self, chunk: int) -> bytes:
        return self.keys[chunk * k.KEY : (chunk + 1) * k.KEY]


def reserve(
    catalog: Catalog,
    space: Namespace,
    prefix: Prefix,
    chunks: Sequence[int],
    group: int = 0,
    client: int = 0,
) -> list[int]:
    """Reserve chunks of a prefix in one group."""
    return reserve_all(catalog, space, [(prefix, chunk, group) for chunk in chunks], client)


def reserve_all(
    catalog: Catalog, space: Namespace, entries: Sequence[tuple[Prefix, int, int]], client: int = 0
) -> list[int]:
    """Reserve (prefix, chunk, group) entries in one call."""
    rows = catalog.reserve(
        space.id,
        groups=np.array([group for _, _, group in entries], "<u2"),
        keys=b"".join(prefix.key(chunk) for prefix, chunk, _ in entries),
        parents=b"".join(
            prefix.parents[chunk * k.KEY : (chunk + 1) * k.KEY] for prefix, chunk, _ in entries
        ),
        chunks=np.array([chunk for _, chunk, _ in entries], "<u4"),
        digests=bytes(k.KEY * len(entries)),
        salts=np.array([prefix.salt for prefix, _, _ in entries], "<u8"),
        client=client,
    )
    return rows.tolist()


def store(
    catalog: Catalog, space: Namespace, prefix: Prefix, chunks: Sequence[int], group: int = 0
) -> list[int]:
    """Reserve and commit; the rows that were stored."""
    rows = [row for row in reserve(catalog, space, prefix, chunks, group) if row >= 0]
    catalog.commit(rows)
    return rows


def spec(rule: Rule, slot_bytes: int, name: str = "") -> GroupSpec:
    return GroupSpec(name or type(rule).__name__.lower(), rule, slot_bytes)


def visible(catalog: Catalog) -> dict[tuple[int, int, bytes], int]:
    """(namespace, group, key) → row of all committed slots that may be found, read from the table itself."""
    hot, cold = catalog.arena.hot, catalog.arena.cold
    found: dict[tuple[int, int, bytes], int] = {}
    for row in np.flatnonzero(hot["state"] == SlotState.COMMITTED).tolist():
        if not hot["flags"][row]:
            name = int(hot["namespace"][row]), int(hot["group"][row]), cold["key"][row].tobytes()
            found[name] = row
    return found


def tokens_needed(rule: Rule, position: int, chunk_size: int) -> set[int]:
    """Tokens before `position` whose KV (or state) the token at `position` depends on directly."""
    match rule:
        case Full():
            return set(range(position))
        case Window(tokens):
            return {t for t in range(position) if position - t < tokens}
        case ChunkedLocal(tokens):
            return {t for t in range(position) if t // tokens == position // tokens}
        case Recurrent():
            # The state at `position` stands in the chunk that ends there.
            return {position - 1} if position else set()
    raise AssertionError(rule)


def usable_by_force(
    chunk_size: int,
    num_tokens: int,
    local_tokens: int,
    rules: Sequence[Rule],
    present: Sequence[Any],
) -> int:
    """The largest hit, by trying all and looking at every single token."""
    best = 0
    for n in range(1, num_tokens // chunk_size + 1):
        position = n * chunk_size
        if not local_tokens < position < num_tokens:
            continue
        if all(
            t // chunk_size < len(have) and have[t // chunk_size]
            for rule, have in zip(rules, present, strict=True)
            for t in tokens_needed(rule, position, chunk_size)
            if t >= local_tokens
        ):
            best = n
    return best
