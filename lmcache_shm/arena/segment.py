"""The two shared-memory segments of an instance: create, attach, adopt after a crash, unlink.

A server holds an exclusive flock on the meta segment as long as it lives. Whoever wants to adopt,
replace or purge an arena must get that lock first, so a name can never be pulled away from its owner.
"""

import contextlib
import mmap
import os
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import posix_ipc

from lmcache_shm.arena.errors import AdoptError, ArenaError, InstanceBusy, RuntimeDirError
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
    Geometry,
    Header,
    Regions,
    Table,
)
from lmcache_shm.arena.memory import SHM_DIR, Limit, Progress, check_room, prefault, reserve
from lmcache_shm.arena.owner import OwnerLock, runtime_dir, same_file, try_lock, unlock

__all__ = [
    "AdoptError",
    "Arena",
    "ArenaError",
    "Geometry",
    "InstanceBusy",
    "OwnerLock",
    "RuntimeDirError",
    "adopt",
    "attach",
    "create",
    "prefault",
    "runtime_dir",
    "segment_names",
]

PREFIX = "lmcache_shm."
META_SUFFIX = ".meta"


def segment_names(instance: str) -> tuple[str, str]:
    """POSIX names of the data and the meta segment. Raises ArenaError for a name that cannot be one."""
    if not instance or "/" in instance or "\0" in instance or instance.endswith(META_SUFFIX):
        raise ArenaError(f"{instance!r} cannot be the name of an instance")
    return f"/{PREFIX}{instance}", f"/{PREFIX}{instance}{META_SUFFIX}"


def shm_path(name: str) -> Path:
    return Path(SHM_DIR + name)


class Arena:
    """Both segments, mapped. Views become invalid at `close`; a mapping lives as long as a view of it.

    data_array: u8[data_bytes]. hot, cold: [max_slots] and slabs: [n], clients: [MAX_CLIENTS] structured
    (see layout). boards: u64[MAX_CLIENTS, MAX_RANKS, RING]. live: the changing part of the header.
    All read-only for a client but the boards and, if asked for, the data.
    """

    def __init__(
        self, instance: str, data_fd: int, meta_fd: int, *, writable: bool, server: bool
    ) -> None:
        """Map what the descriptors refer to and close them (a server keeps the lock's). Raises ArenaError."""
        self.instance = instance
        self.data_name, self.meta_name = segment_names(instance)
        self._lock_fd = -1
        try:
            self.header = _read_header(meta_fd)
            _check_sizes(self.header, data_fd, meta_fd)
            self.geometry = self.header.geometry
            self.regions = Regions.of(self.geometry)
            self._map(data_fd, meta_fd, writable=writable, server=server)
            facts = os.fstat(meta_fd)
            self._meta_identity = facts.st_dev, facts.st_ino
        finally:
            os.close(data_fd)
            if server and hasattr(self, "_meta_identity"):
                self._lock_fd = meta_fd
            else:
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

    def unlink(self) -> bool:
        """Remove the names if they are still those of this arena (device and inode). True if they were."""
        header = self.header
        data, meta = shm_path(self.data_name), shm_path(self.meta_name)
        ours = unlink_if(data, header.data_device, header.data_inode)
        return unlink_if(meta, *self._meta_identity) and ours


def create(
    instance: str,
    data_bytes: int,
    *,
    chunk_size: int = 0,
    separate: bool = True,
    max_slots: int | None = None,
    slab_bytes: int | None = None,
    progress: Progress | None = None,
    bounds: list[Limit] | None = None,
) -> Arena:
    """Make an empty arena with all its memory reserved, in place of a dead one of the same name.

    progress(done, total) is called as bytes are reserved. `bounds` replaces what memory.limits() finds.
    Raises InstanceBusy when a live server has the name, ArenaError (with the remedy) when there is no room.
    """
    geometry = Geometry.plan(data_bytes, chunk_size, separate, max_slots, slab_bytes)
    data_name, meta_name = segment_names(instance)
    _remove_dead(instance)
    check_room(geometry.data_bytes + Regions.of(geometry).total, bounds)
    meta_fd = _new_locked(instance, meta_name)
    data_fd = -1
    try:
        # Only the holder of the meta segment's lock makes or removes the data segment.
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(data_name)
        data_fd = _open(data_name, posix_ipc.O_CREX)
        meta_bytes = Regions.of(geometry).total
        reserve(meta_fd, meta_bytes)
        reserve(data_fd, geometry.data_bytes, progress)
        facts = os.fstat(data_fd)
        arena_id = secrets.token_bytes(16)
        header = Header(arena_id, facts.st_dev, facts.st_ino, time.time_ns(), geometry, meta_bytes)
        os.pwrite(meta_fd, header.pack(), 0)
    except BaseException:
        if data_fd >= 0:
            posix_ipc.unlink_shared_memory(data_name)
            os.close(data_fd)
        posix_ipc.unlink_shared_memory(meta_name)
        os.close(meta_fd)
        raise
    return Arena(instance, data_fd, meta_fd, writable=True, server=True)


def attach(instance: str, *, writable_data: bool, server: bool = False) -> Arena:
    """Map an existing arena as a client. Raises ArenaError when there is none or it is not sound.

    `server` takes the owner's lock and maps everything writable (raises InstanceBusy); adopt() is the way
    to do that with a check of the geometry.
    """
    data_name, meta_name = segment_names(instance)
    writable = writable_data or server
    try:
        meta_fd = _open(meta_name, 0, read_only=not writable)
    except (posix_ipc.ExistentialError, posix_ipc.PermissionsError) as error:
        raise ArenaError(f"no arena of instance {instance} that can be opened: {error}") from None
    if server and not try_lock(meta_fd):
        pid = owner_pid(meta_fd)
        os.close(meta_fd)
        raise InstanceBusy(instance, pid)
    try:
        data_fd = _open(data_name, 0, read_only=not writable)
    except (posix_ipc.ExistentialError, posix_ipc.PermissionsError) as error:
        os.close(meta_fd)
        raise ArenaError(f"the data segment of instance {instance} is missing: {error}") from None
    return Arena(instance, data_fd, meta_fd, writable=writable, server=server)


def adopt(instance: str, wanted: Geometry) -> Arena:
    """Take over the arena that a dead server left. Raises AdoptError with the reason, or InstanceBusy.

    Checks the header and the geometry; the rows are checked by Catalog.recover().
    """
    try:
        arena = attach(instance, writable_data=True, server=True)
    except InstanceBusy:
        raise
    except ArenaError as error:
        raise AdoptError(str(error)) from None
    differences = arena.geometry.differences(wanted)
    if differences:
        arena.close()
        raise AdoptError(differences)
    return arena


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


def owner_pid(meta_fd: int) -> int:
    """The pid that a meta segment's last server wrote down; 0 when there is none."""
    raw = os.pread(meta_fd, LIVE_DTYPE.itemsize, LIVE_AT)
    whole = len(raw) == LIVE_DTYPE.itemsize
    return int(np.frombuffer(raw, LIVE_DTYPE)["pid"][0]) if whole else 0


def _open(name: str, flags: int, *, read_only: bool = False) -> int:
    segment = posix_ipc.SharedMemory(name, flags, mode=0o600, read_only=read_only)
    return int(segment.fd)


def _new_locked(instance: str, meta_name: str) -> int:
    """A new meta segment with its lock held. Raises InstanceBusy if another server is faster."""
    try:
        fd = _open(meta_name, posix_ipc.O_CREX)
    except posix_ipc.ExistentialError:
        raise InstanceBusy(instance, 0) from None
    if not (try_lock(fd) and same_file(fd, shm_path(meta_name))):
        os.close(fd)
        raise InstanceBusy(instance, 0)
    live = np.zeros(1, LIVE_DTYPE)
    live["pid"] = os.getpid()
    os.pwrite(fd, live.tobytes(), LIVE_AT)
    return fd


def _remove_dead(instance: str) -> None:
    """Unlink both segments of an instance unless a live server holds them (InstanceBusy)."""
    data_name, meta_name = segment_names(instance)
    try:
        fd = _open(meta_name, 0)
    except posix_ipc.ExistentialError:
        return
    try:
        if not try_lock(fd):
            raise InstanceBusy(instance, owner_pid(fd))
        if same_file(fd, shm_path(meta_name)):
            shm_path(data_name).unlink(missing_ok=True)
            shm_path(meta_name).unlink(missing_ok=True)
    finally:
        os.close(fd)


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
