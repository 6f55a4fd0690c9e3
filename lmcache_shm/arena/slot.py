"""The bytes of one slot: the regions of the ranks, their checksums, the chunk's token ids.

    ┌──────────┬──────────┬─ ─ ─ ┬───────────┬─────────────┐
    │ region 0 │ region 1 │      │ checksums │ token bytes │
    └──────────┴──────────┴─ ─ ─ ┴───────────┴─────────────┘
      64 B aligned each            8 B × ranks   4 B × chunk_size

Ranks that hold the same bytes (`replicas` neighbours) share a region.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from lmcache_shm.protocol.keys import PIECE, TOKEN

ALIGN = 64
CHECKSUM_BYTES = 8
Bytes = npt.NDArray[np.uint8]
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
    """A 32-bit number for this layout of checksums (which bytes of a slot they cover); never 0."""
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


def checksum(region: Bytes) -> int:
    """The checksum of a region's bytes, u8[n] contiguous: 64-bit xxh3."""
    return xxhash.xxh3_64_intdigest(region.data)


def read_checksum(data: Bytes, at: int) -> int:
    """The checksum kept at byte `at` of the arena's data."""
    return int.from_bytes(data[at : at + CHECKSUM_BYTES].data, "little")


def write_checksum(data: Bytes, at: int, value: int) -> None:
    data[at : at + CHECKSUM_BYTES].view("<u8")[0] = value


def same_tokens(
    data: mmap.mmap, places: npt.NDArray[np.uint64], tokens: bytes | memoryview
) -> bool:
    """Whether slots hold the token bytes `tokens` of n chunks, packed. `places`: u64[n] byte offsets in `data`."""
    if not len(places):
        return not tokens
    nbytes = len(tokens) // len(places)
    starts = len(data) - nbytes + 1  # a slot's token bytes may start at any byte
    if int(places.max()) >= starts:
        return False
    slots = np.ndarray((starts,), f"V{nbytes}", data, strides=(1,))
    wanted = np.frombuffer(tokens, "<u4").reshape(len(places), -1)
    some = max(2 * PIECE * TOKEN // nbytes, 1)
    return all(
        np.array_equal(slots[places[at : at + some]].view("<u4"), wanted[at : at + some].ravel())
        for at in range(0, len(places), some)
    )
