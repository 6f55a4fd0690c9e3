"""What stands where in a slot: the regions of the ranks, their checksums, the chunk's token ids.

    ┌──────────┬──────────┬─ ─ ─ ┬───────────┬─────────────┐
    │ region 0 │ region 1 │      │ checksums │ token bytes │
    └──────────┴──────────┴─ ─ ─ ┴───────────┴─────────────┘
      64 B aligned each            8 B × ranks   4 B × chunk_size

Ranks that hold the same bytes (`replicas` neighbours) share a region.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from lmcache_shm.protocol.keys import TOKEN

ALIGN = 64
CHECKSUM_BYTES = 8
Checked = tuple[int, int, int]
"""A region with a checksum: its offset in the slot, its bytes, the offset of its checksum."""


@dataclass(frozen=True)
class SlotGeometry:
    """Of one object group; offsets in bytes from the slot's start."""

    slot_bytes: int
    region_offsets: list[int]  # by rank
    checksum_offset: int
    token_offset: int
    checked: list[Checked]  # one for each region that holds bytes


def checks_number(checked: Sequence[Checked]) -> int:
    """Says in 32 bits which bytes of a slot its checksums cover; never 0."""
    return xxhash.xxh3_64_intdigest(repr([tuple(c) for c in checked]).encode()) & 0xFFFFFFFF or 1


def token_area(chunk_size: int) -> int:
    """Bytes of the token ids of one chunk."""
    return TOKEN * chunk_size


def slot_geometry(region_bytes: Sequence[int], replicas: int, chunk_size: int) -> SlotGeometry:
    """Lay out one object group's slot; `region_bytes` by rank. Raises ValueError when replicas differ."""
    offsets: list[int] = []
    at = 0
    for rank, nbytes in enumerate(region_bytes):
        first = rank - rank % replicas
        if rank != first:
            if nbytes != region_bytes[first]:
                raise ValueError(
                    f"ranks {first} and {rank} are said to hold the same bytes, but one has "
                    f"{region_bytes[first]} and the other {nbytes}"
                )
            offsets.append(offsets[first])
            continue
        offsets.append(at)
        at += -(-nbytes // ALIGN) * ALIGN
    checksums = at
    tokens = checksums + CHECKSUM_BYTES * len(region_bytes)
    checked = [
        (offsets[rank], nbytes, checksums + CHECKSUM_BYTES * rank)
        for rank, nbytes in enumerate(region_bytes)
        if nbytes and rank % replicas == 0  # the first of the replicas writes
    ]
    return SlotGeometry(tokens + token_area(chunk_size), offsets, checksums, tokens, checked)
