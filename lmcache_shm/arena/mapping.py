"""An arena as this process has it mapped."""

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.errors import ArenaError
from lmcache_shm.arena.layout import (
    CLIENT_DTYPE,
    COLD_DTYPE,
    HOT_DTYPE,
    LIVE_AT,
    LIVE_DTYPE,
    MAX_CLIENTS,
    MAX_RANKS,
    PAGE,
    RING,
    SLAB_DTYPE,
    U64,
    Header,
    Regions,
    Table,
)
from lmcache_shm.arena.owner import shm_path, unlock


class Arena:
    """Both segments, mapped. Views become invalid at `close`; a mapping lives as long as a view of it.

    data_array: u8[data_bytes]. hot, cold: [max_slots] and slabs: [n], clients: [MAX_CLIENTS] structured
    (see layout). boards: u64[MAX_CLIENTS, MAX_RANKS, RING]. live: the changing part of the header.
    All read-only for a client but the boards and, if asked for, the data.
    """

    def __init__(
        self,
        instance: str,
        names: tuple[str, str],
        data_fd: int,
        meta_fd: int,
        *,
        writable: bool,
        server: bool,
    ) -> None:
        """`names`: see `segment_names`. Map what the descriptors refer to and close them (a server keeps both: the table's holds its lock,
        through the data's it goes on reserving memory). Raises ArenaError."""
        self.instance = instance
        self.data_name, self.meta_name = names
        self._lock_fd = -1
        self.data_fd = -1
        try:
            self.header = _read_header(meta_fd)
            _check_sizes(self.header, data_fd, meta_fd)
            self.geometry = self.header.geometry
            self.regions = Regions.of(self.geometry)
            self._map(data_fd, meta_fd, writable=writable, server=server)
            facts = os.fstat(meta_fd)
            self._meta_identity = facts.st_dev, facts.st_ino
        finally:
            if server and hasattr(self, "_meta_identity"):
                self._lock_fd, self.data_fd = meta_fd, data_fd
            else:
                os.close(data_fd)
                os.close(meta_fd)

    def _map(self, data_fd: int, meta_fd: int, *, writable: bool, server: bool) -> None:
        read, both = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
        g, r = self.geometry, self.regions
        self.data = mmap.mmap(data_fd, g.data_bytes, prot=both if writable or server else read)
        self.meta = mmap.mmap(meta_fd, r.total, prot=both if server else read)
        boards = self.meta
        at = r.boards
        if writable and not server:
            # Workers report here; the rest of the meta segment stays out of their reach.
            self._boards_map = mmap.mmap(meta_fd, r.total - r.boards, prot=both, offset=r.boards)
            boards, at = self._boards_map, 0
        self.data_array: npt.NDArray[np.uint8] = np.frombuffer(self.data, np.uint8)
        self.live: Table = self._view(LIVE_DTYPE, 1, LIVE_AT)
        self.slabs: Table = self._view(SLAB_DTYPE, g.slabs, r.slabs)
        self.hot: Table = self._view(HOT_DTYPE, g.max_slots, r.hot)
        self.cold: Table = self._view(COLD_DTYPE, g.max_slots, r.cold)
        self.clients: Table = self._view(CLIENT_DTYPE, MAX_CLIENTS, r.clients)
        shape = (MAX_CLIENTS, MAX_RANKS, RING)
        self.boards: U64 = np.frombuffer(boards, "<u8", MAX_CLIENTS * MAX_RANKS * RING, at).reshape(
            shape
        )

    def _view(self, dtype: np.dtype[Any], count: int, offset: int) -> Table:
        return np.frombuffer(self.meta, dtype, count, offset)

    @property
    def arena_id(self) -> bytes:
        """16 random bytes of this arena's creation."""
        return self.header.arena_id

    @property
    def data_bytes(self) -> int:
        return self.geometry.data_bytes

    @property
    def backed_bytes(self) -> int:
        """The mark: so many bytes of the data have memory behind them, and may be used."""
        return min(int(self.live["backed"][0]), self.data_bytes)

    @property
    def growing(self) -> bool:
        """Whether the mark still rises (or will, when a server comes back)."""
        return self.backed_bytes < self.data_bytes and not int(self.live["stopped"][0])

    @property
    def meta_bytes(self) -> int:
        return self.regions.total

    @property
    def max_slots(self) -> int:
        return self.geometry.max_slots

    def set_owner(self, boot: bytes) -> None:
        """Server: write down who serves this arena now (pid, boot id), and count the start."""
        self.live["pid"], self.live["boot"] = os.getpid(), boot
        self.live["starts"] += 1

    def close(self) -> None:
        """Drop the views and the server's lock. Pages are unmapped once no other view is left. Idempotent."""
        for name in ("data_array", "live", "slabs", "hot", "cold", "clients", "boards"):
            self.__dict__.pop(name, None)
        for name in ("data", "meta", "_boards_map"):
            mapping = self.__dict__.pop(name, None)
            if mapping is not None:
                with contextlib.suppress(
                    BufferError
                ):  # someone still has a view; it ends with that
                    mapping.close()
        if self._lock_fd >= 0:
            unlock(self._lock_fd)  # a mapping that lives on holds a copy of the descriptor
            os.close(self._lock_fd)
            self._lock_fd = -1
        if self.data_fd >= 0:
            os.close(self.data_fd)
            self.data_fd = -1

    def unlink(self) -> bool:
        """Remove the names if they are still those of this arena (device and inode). True if they were."""
        header = self.header
        data, meta = shm_path(self.data_name), shm_path(self.meta_name)
        ours = unlink_if(data, header.data_device, header.data_inode)
        return unlink_if(meta, *self._meta_identity) and ours


def unlink_if(path: Path, device: int, inode: int) -> bool:
    """Remove a name if it still belongs to that device and inode."""
    try:
        facts = path.lstat()
        if (facts.st_dev, facts.st_ino) != (device, inode):
            return False
        path.unlink()
    except OSError:
        return False
    return True


def _read_header(meta_fd: int) -> Header:
    try:
        return Header.unpack(os.pread(meta_fd, PAGE, 0))
    except ValueError as error:
        raise ArenaError(str(error)) from None


def _check_sizes(header: Header, data_fd: int, meta_fd: int) -> None:
    """Segments must be what the header says, or a mapping could end in SIGBUS. Raises ArenaError."""
    data, meta = os.fstat(data_fd), os.fstat(meta_fd)
    if (data.st_dev, data.st_ino) != (header.data_device, header.data_inode):
        raise ArenaError("the data segment is not the one that the slot table describes")
    want = header.geometry.data_bytes, Regions.of(header.geometry).total
    if (data.st_size, meta.st_size) != want or header.meta_bytes != want[1]:
        raise ArenaError(
            f"segments of {data.st_size} and {meta.st_size} bytes, the header says {want}"
        )
