"""What stands where in a slot: the regions of the ranks, their checksums, the chunk's token ids.

    ┌──────────┬──────────┬─ ─ ─ ┬───────────┬─────────────┐
    │ region 0 │ region 1 │      │ checksums │ token bytes │
    └──────────┴──────────┴─ ─ ─ ┴───────────┴─────────────┘
      64 B aligned each            8 B × ranks   msgpack of chunk_size ids, at most

Ranks that hold the same bytes (`replicas` neighbours) share a region.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64
CHECKSUM_BYTES = 8


@dataclass(frozen=True)
class SlotGeometry:
    """Of one object group; offsets in bytes from the slot's start."""

    slot_bytes: int
    region_offsets: list[int]  # by rank
    checksum_offset: int
    token_offset: int


def token_area(chunk_size: int) -> int:
    """Most bytes that the msgpack encoding of `chunk_size` token ids below 2**32 takes."""
    return 5 * chunk_size + 16


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
    return SlotGeometry(tokens + token_area(chunk_size), offsets, checksums, tokens)
