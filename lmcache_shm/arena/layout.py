"""The layout of both segments. Everything here is fixed for one FORMAT_VERSION.

::

    meta   HEADER | SLABS | HOT[max_slots] | COLD[max_slots] | NAMESPACES A | B | CLIENTS | BOARDS
           each region starts on a page; BOARDS is u64[MAX_CLIENTS, MAX_RANKS, RING]
    data   slab 0 | slab 1 | … | slab n-1 | tail (smaller than a slab: unusable)
           ├──── reserved ────┤→ (the reserved size rises while the server serves, until it is all)

    rows   slab i owns rows [i·q, (i+1)·q), q = max_slots / slabs. An *extent* is a run of m slabs bound
           to one slot size; its slots take the first rows of the m·q that its slabs own:

           slabs      i            i+1          i+2
           data   ├─ slot 0 ─┼─ slot 1 ─┼─ slot 2 ─┼─ slot 3 ─┤waste
           rows   iq  iq+1  iq+2  iq+3  (the rest is UNUSED)

HOT holds what eviction scans (32 B a row), COLD what identifies a slot. A row's number is its slot's
number everywhere. Little-endian; only the server writes, except the boards.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

FORMAT_VERSION = 3
MAGIC = b"LMCSHM01"
PAGE = 4096
RING = 1024
"""Jobs per (client, rank) on the completion board."""
MAX_CLIENTS = 64
MAX_RANKS = 16
MAX_PROCESSES = 64
"""Worker processes remembered per client: ranks, and earlier incarnations of them not yet seen dead."""
ENGINE_ID_BYTES = 256
MIN_SLAB, MAX_SLAB = 64 << 10, 64 << 20
MAX_SLOTS = 1 << 22

FLAG_DROP = 1
"""hot.flags: cleared while reserved or pinned; in no index, freed at commit, abort or last release."""


class SlotState(IntEnum):
    """State of a row. UNUSED: bound to no extent (a zeroed table is all UNUSED)."""

    UNUSED = 0
    FREE = 1
    RESERVED = 2
    COMMITTED = 3
    QUARANTINED = 4


# generation: raised whenever the slot changes hands (reserve, abort, evict, quarantine release), so at any
# time after which bytes may change. tick: a reading of the LRU clock, which counts uses, not time. client: index of the
# engine that reserved it, else -1. hits: times it was acquired, at most 65535.
HOT_DTYPE = np.dtype(
    [
        ("state", "<u1"),
        ("flags", "<u1"),
        ("group", "<u2"),
        ("pins", "<u4"),
        ("tick", "<u8"),
        ("generation", "<u8"),
        ("client", "<i2"),
        ("hits", "<u2"),
        ("namespace", "<u4"),
    ]
)
# key, parent, extra_digest: 16 bytes as two u8 words. token_bytes: length of the encoded token ids in the
# slot. chunk: number in its prefix. Then the place, which belongs to the extent: slab (its first), offset and
# slot_bytes in the data segment. seal: check word of a committed row (see seal()). checks: of a committed
# row, the number of the layout by which checksums of its content were written, 0: none were.
COLD_DTYPE = np.dtype(
    [
        ("key", "<u8", (2,)),
        ("parent", "<u8", (2,)),
        ("extra_digest", "<u8", (2,)),
        ("salt", "<u8"),
        ("created_ns", "<u8"),
        ("token_bytes", "<u4"),
        ("chunk", "<u4"),
        ("offset", "<u8"),
        ("slot_bytes", "<u8"),
        ("seal", "<u8"),
        ("slab", "<u4"),
        ("checks", "<u4"),
    ]
)
# A slab of an extent. slots, extent_slabs: of the whole extent, the same in each of its slabs.
# extent_slabs 0: the slab is free.
SLAB_DTYPE = np.dtype(
    [
        ("slot_bytes", "<u8"),
        ("first", "<u4"),
        ("extent_slabs", "<u4"),
        ("slots", "<u4"),
        ("spare", "<u4"),
    ]
)
CLIENT_DTYPE = np.dtype(
    [
        ("used", "<u4"),
        ("world", "<u4"),
        ("replicas", "<u4"),
        ("processes", "<u4"),
        ("engine_id", f"S{ENGINE_ID_BYTES}"),
        ("ranks", "<i4", (MAX_PROCESSES,)),
        ("pids", "<i4", (MAX_PROCESSES,)),
        ("starts", "<u8", (MAX_PROCESSES,)),
    ]
)
# The changing part of the header page. backed: the reserved size, bytes from the start of the data segment that
# have memory; nothing beyond is bound, read or written. It only rises. stopped: errno with which reserving ended
# for good, 0: it goes on, or is complete.
LIVE_DTYPE = np.dtype(
    [
        ("pid", "<i8"),
        ("boot", "S16"),
        ("starts", "<u8"),
        ("prefaulted", "<u8"),
        ("backed", "<u8"),
        ("stopped", "<u4"),
        ("spare", "<u4"),
    ]
)
LIVE_AT = 2048

Table = npt.NDArray[Any]
"""A structured array."""
Rows = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Geometry:
    """The shape of an arena; one is adopted only when its shape is the wanted one."""

    data_bytes: int
    chunk_size: int
    separate: bool
    slab_bytes: int
    max_slots: int

    @classmethod
    def plan(
        cls,
        data_bytes: int,
        chunk_size: int,
        separate: bool,  # noqa: FBT001  (a field)
        max_slots: int | None = None,
        slab_bytes: int | None = None,
    ) -> "Geometry":
        """Geometry of an arena of `data_bytes` (rounded up to a page). Raises ValueError below one page."""
        if data_bytes < PAGE:
            raise ValueError(f"an arena of {data_bytes} bytes; at least {PAGE} are needed")
        size = -(-data_bytes // PAGE) * PAGE
        if slab_bytes is None:
            slab_bytes = min(max(_floor_power(size // 1024), MIN_SLAB), MAX_SLAB)
        slab_bytes = min(slab_bytes, _floor_power(size))
        slabs = size // slab_bytes
        if max_slots is None:
            dense = min(max(size // (16 << 10), 1024), 1 << 20)
            max_slots = min(max(dense, size // (64 << 10)), MAX_SLOTS)
        per_slab = max(1, -(-max_slots // slabs))
        return cls(size, chunk_size, separate, slab_bytes, per_slab * slabs)

    @property
    def slabs(self) -> int:
        return self.data_bytes // self.slab_bytes

    @property
    def rows_per_slab(self) -> int:
        return self.max_slots // self.slabs

    def differences(self, wanted: "Geometry") -> str:
        """The differences from `wanted`, for people; "" when there are none."""
        words = {
            "data_bytes": "size in bytes",
            "chunk_size": "chunk size in tokens (0: auto)",
            "separate": "separate object groups",
            "slab_bytes": "slab size in bytes",
            "max_slots": "number of slots",
        }
        found = [
            f"{text} is {getattr(self, name)}, wanted {getattr(wanted, name)}"
            for name, text in words.items()
            if getattr(self, name) != getattr(wanted, name)
        ]
        return "; ".join(found)


@dataclass(frozen=True)
class Regions:
    """Byte offsets of the regions in the meta segment."""

    slabs: int
    hot: int
    cold: int
    namespaces: int
    namespace_area: int
    """Bytes of one of the two buffers."""
    clients: int
    boards: int
    total: int

    @classmethod
    def of(cls, geometry: Geometry) -> "Regions":
        at = PAGE

        def place(nbytes: int) -> int:
            nonlocal at
            start = at
            at += -(-nbytes // PAGE) * PAGE
            return start

        slabs = place(geometry.slabs * SLAB_DTYPE.itemsize)
        hot = place(geometry.max_slots * HOT_DTYPE.itemsize)
        cold = place(geometry.max_slots * COLD_DTYPE.itemsize)
        area = min(max(geometry.data_bytes // 64 // PAGE * PAGE, 1 << 18), 8 << 20)
        namespaces = place(2 * area)
        clients = place(MAX_CLIENTS * CLIENT_DTYPE.itemsize)
        boards = place(MAX_CLIENTS * MAX_RANKS * RING * 8)
        return cls(slabs, hot, cold, namespaces, area, clients, boards, at)


# magic, version, page, arena id, data device, data inode, created, five fields of Geometry, meta size
_HEADER = struct.Struct("<8sII16sQQQ5QQ")
_SUM = struct.Struct("<Q")


@dataclass(frozen=True)
class Header:
    """The immutable part of the header page."""

    arena_id: bytes
    data_device: int
    data_inode: int
    created_ns: int
    geometry: Geometry
    meta_bytes: int

    def pack(self) -> bytes:
        g = self.geometry
        body = _HEADER.pack(
            MAGIC, FORMAT_VERSION, PAGE, self.arena_id, self.data_device, self.data_inode,
            self.created_ns, g.data_bytes, g.chunk_size, int(g.separate), g.slab_bytes, g.max_slots,
            self.meta_bytes,
        )  # fmt: skip
        return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, page: bytes) -> "Header":
        """Read a header page. Raises ValueError when it is damaged or of another format."""
        if len(page) < PAGE:
            raise ValueError(f"the header has {len(page)} of {PAGE} bytes")
        fields = _HEADER.unpack_from(page)
        if fields[0] != MAGIC:
            raise ValueError("no arena header (wrong magic)")
        if fields[1] != FORMAT_VERSION:
            raise ValueError(f"format version {fields[1]}, this program has {FORMAT_VERSION}")
        if _SUM.unpack_from(page, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(
            page[: _HEADER.size]
        ):
            raise ValueError("damaged header (checksum)")
        arena_id, device, inode, created_ns = fields[3:7]
        data_bytes, chunk_size, separate, slab_bytes, max_slots = fields[7:12]
        geometry = Geometry(data_bytes, chunk_size, bool(separate), slab_bytes, max_slots)
        return cls(arena_id, device, inode, created_ns, geometry, fields[12])


def word(number: int) -> U64:
    """An operand for arrays of words: as an array of no dimensions, which is faster than a scalar."""
    return np.array(number, np.uint64)


def hot_words(hot: Table) -> U64:
    """The hot table as u64[n, 4]: state | flags | group | pins, tick, generation, client | hits | namespace."""
    return hot.view(np.uint64).reshape(-1, 4)


def cold_words(cold: Table) -> U64:
    """The cold table as u64[n, 13]: key, parent, digest (2 each), salt, created, token_bytes | chunk, place, …"""
    return cold.view(np.uint64).reshape(-1, 13)


def seal(hot: Table, cold: Table, rows: Rows) -> U64:
    """Check words over identity, place and generation of `rows`. u64[len(rows)].

    Written at commit; a row whose state, key, offset or owner was damaged afterwards does not fit it.
    """
    words = hot_words(hot)[rows]
    return seal_of(words[:, 2], owners_of(words), cold_words(cold)[rows])


def places(rows: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Numbers:
    """Rows as numpy indexes with them: else every gather and scatter would convert them anew."""
    return np.asarray(rows, np.intp)


def owners_of(hot: U64) -> U64:
    """Namespace (upper half) and group (from bit 16) of rows, given as their hot words."""
    owners: U64 = hot[:, 3] & NAMESPACE | hot[:, 0] & _GROUP
    return owners


def seal_of(generations: U64, owners: U64, cold: U64) -> U64:
    """seal() of rows that were read already: their generations, owners and cold words."""
    # All words at once, few calls: each is mixed by a bijection of its own (odd factors), so one that changed
    # always shows, as do two that changed places; then the sum.
    words = np.empty((_SEALED + 1, len(cold)), np.uint64)
    words[:_SEALED] = cold.T[:_SEALED]
    np.bitwise_xor(generations, owners, out=words[_SEALED])
    words *= _FACTORS
    words ^= words >> _HALF
    words *= _FACTORS
    check: U64 = np.add.reduce(words, 0)
    return check


NAMESPACE, _GROUP = word(0xFFFFFFFF00000000), word(0xFFFF0000)  # in words 3 and 0 of a hot row
_SEALED = 11  # words of a cold row: all but the seal and what follows it
_HALF = word(32)
_FACTORS = np.arange(1, 2 * _SEALED + 3, 2, np.uint64)[:, None] * word(0x9E3779B97F4A7C15)


def _floor_power(n: int) -> int:
    return 1 << max(n, 1).bit_length() - 1
