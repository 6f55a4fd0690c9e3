"""Look up a prefix: ask the server, and offer only what the slots themselves confirm."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.layout import SlotState
from lmcache_shm.arena.slot import same_tokens
from lmcache_shm.client.client import CacheClient
from lmcache_shm.client.registration import Registration
from lmcache_shm.protocol.keys import ChunkKeys
from lmcache_shm.protocol.messages import KEY, Acquired

Rows = npt.NDArray[np.int32]


@dataclass(slots=True)
class Hit:
    """A pinned prefix of `n_chunks` chunks. By object group: number of the first pinned chunk, rows, generations."""

    registration: Registration
    lease: int
    n_chunks: int
    local_tokens: int
    first: list[int]
    rows: list[Rows]
    generations: list[npt.NDArray[np.uint64]]

    @property
    def tokens(self) -> int:
        """Tokens of the whole prefix, local ones included."""
        return self.n_chunks * self.registration.plan.chunk_size


def look_up(
    client: CacheClient,
    registration: Registration,
    keys: ChunkKeys,
    local_tokens: int,
    num_tokens: int,
    replaces: int,
    release: Callable[[int], None],
) -> tuple[Hit | None, str]:
    """One round trip: a confirmed hit, or None and why it is a miss.

    The reason is "" for an ordinary miss. A lease that cannot be used is handed to `release`.
    """
    usable = (num_tokens - 1) // registration.plan.chunk_size
    answer = client.acquire(bytes(keys.keys[: usable * KEY]), local_tokens, num_tokens, replaces)
    if answer is None:
        return None, "unreachable"
    if not answer.lease:
        return None, ""
    if answer.boot != registration.boot:
        release(answer.lease)
        return None, "restarted"
    hit = _hit(registration, answer, local_tokens)
    if not confirm(hit, keys):
        release(hit.lease)
        return None, "collision"
    for group, (first, rows) in enumerate(zip(hit.first, hit.rows, strict=True)):
        registration.remember(group, *keys.split(first, first + len(rows)))
    return hit, ""


def _hit(registration: Registration, answer: Acquired, local_tokens: int) -> Hit:
    rows = [np.frombuffer(packed, "<i4") for packed in answer.rows]
    # Read before anything else of the rows: a row that changes hands afterwards has another generation.
    generations = [registration.arena.hot["generation"][r] for r in rows]
    return Hit(
        registration,
        answer.lease,
        answer.n_chunks,
        local_tokens,
        list(answer.first),
        rows,
        generations,
    )


def confirm(hit: Hit, keys: ChunkKeys) -> bool:
    """Whether every pinned slot holds exactly this prefix: namespace, key, token ids and extra identity."""
    registration = hit.registration
    arena = registration.arena
    all_keys = np.frombuffer(bytes(keys.keys), "<u8").reshape(-1, 2)
    digests = np.frombuffer(bytes(keys.digests), "<u8").reshape(-1, 2)
    for group, rows in enumerate(hit.rows):
        if not len(rows):
            continue
        chunks = slice(hit.first[group], hit.first[group] + len(rows))
        hot, cold = arena.hot[rows], arena.cold[rows]
        alike = (
            (hot["state"] == SlotState.COMMITTED).all()
            and (hot["namespace"] == registration.namespace).all()
            and (hot["group"] == group).all()
            and (cold["key"] == all_keys[chunks]).all()
            and (cold["extra_digest"] == digests[chunks]).all()
            and (cold["token_bytes"] == keys.chunk_bytes).all()
        )
        if not alike:
            return False
        tokens = keys.token_bytes(chunks.start, chunks.stop)
        if not same_tokens(arena.data, cold["offset"] + registration.token_offset[group], tokens):
            return False
    return True
