"""The two shared-memory segments of an instance: create, attach, adopt after a crash.

A server holds an exclusive flock on the meta segment as long as it lives. Whoever wants to adopt,
replace or purge an arena must get that lock first, so a name can never be pulled away from its owner.
"""

import os
import secrets
import time
from pathlib import Path

import numpy as np
import posix_ipc

from lmcache_shm.arena.errors import AdoptError, ArenaError, InstanceBusy, NotOurs, RuntimeDirError
from lmcache_shm.arena.layout import LIVE_AT, LIVE_DTYPE, Geometry, Header, Regions
from lmcache_shm.arena.mapping import Arena, unlink_if
from lmcache_shm.arena.memory import (
    SHM_DIR,
    Limit,
    Progress,
    check_room,
    prefault,
    reserve,
    reserve_rest,
    secure,
)
from lmcache_shm.arena.owner import (
    GLANCE_S,
    META_SUFFIX,
    PREFIX,
    OwnerLock,
    open_ours,
    remove_ours,
    runtime_dir,
    same_file,
    segment_names,
    shm_path,
    try_lock,
)

__all__ = [
    "META_SUFFIX",
    "PREFIX",
    "AdoptError",
    "Arena",
    "ArenaError",
    "Geometry",
    "InstanceBusy",
    "NotOurs",
    "OwnerLock",
    "RuntimeDirError",
    "adopt",
    "attach",
    "create",
    "prefault",
    "reserve_rest",
    "runtime_dir",
    "segment_names",
    "shm_path",
    "unlink_if",
]


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
    first: int | None = None,
) -> Arena:
    """Make an empty arena in place of a dead one of the same name.

    There is room for all of it or it is not made; `first` bytes of the data (None: all) are reserved now,
    the rest is left to `reserve_rest`.
    progress(done, total) is called as bytes are reserved. `bounds` replaces what memory.limits() finds.
    Raises InstanceBusy when a live server has the name, NotOurs when it belongs to another user, ArenaError
    (with the remedy) when there is no room.
    """
    geometry = Geometry.plan(data_bytes, chunk_size, separate, max_slots, slab_bytes)
    data_name, meta_name = names = segment_names(instance)
    _remove_dead(instance)
    check_room(geometry.data_bytes + Regions.of(geometry).total, bounds)
    meta_fd = _new_locked(instance, meta_name)
    data_fd = -1
    try:
        # Only the holder of the meta segment's lock makes or removes the data segment.
        _remove(data_name)
        data_fd = _make(data_name)
        meta_bytes = Regions.of(geometry).total
        reserve(meta_fd, meta_bytes)
        reserve(data_fd, geometry.data_bytes, progress, first=first)
        live = np.zeros(1, LIVE_DTYPE)
        live["pid"] = os.getpid()
        live["backed"] = geometry.data_bytes if first is None else first
        os.pwrite(meta_fd, live.tobytes(), LIVE_AT)
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
    return Arena(instance, names, data_fd, meta_fd, writable=True, server=True)


def attach(
    instance: str,
    *,
    writable_data: bool,
    server: bool = False,
    names: tuple[str, str] | None = None,
) -> Arena:
    """Map an existing arena as a client. Raises ArenaError when there is none or it is not sound.

    `names`: of its segments, as its server told them (in another user namespace our uid has another number);
    None: those that this user's server would take.
    `server` takes the owner's lock and maps everything writable (raises InstanceBusy); adopt() is the way
    to do that with a check of the geometry.
    """
    data_name, meta_name = names = names or segment_names(instance)
    writable = writable_data or server
    try:
        meta_fd = _open(meta_name, writable=writable)
    except FileNotFoundError:
        raise ArenaError(f"there is no arena of instance {instance}") from None
    try:
        if server:
            _own(instance, meta_fd)
        data_fd = _open(data_name, writable=writable)
    except FileNotFoundError:
        os.close(meta_fd)
        raise ArenaError(f"the data segment of instance {instance} is missing") from None
    except BaseException:
        os.close(meta_fd)
        raise
    return Arena(instance, names, data_fd, meta_fd, writable=writable, server=server)


def adopt(instance: str, wanted: Geometry) -> Arena:
    """Take over the arena that a dead server left. Raises AdoptError with the reason, InstanceBusy, or NotOurs.

    Checks the header and the geometry, and that there is memory up to the mark; the rows are checked by
    Catalog.recover(). If the dead server had not reserved all of it yet, `reserve_rest` goes on.
    """
    try:
        arena = attach(instance, writable_data=True, server=True)
    except (InstanceBusy, NotOurs):
        raise
    except ArenaError as error:
        raise AdoptError(str(error)) from None
    differences = arena.geometry.differences(wanted)
    if differences:
        arena.close()
        raise AdoptError(differences)
    try:
        secure(arena)
    except ArenaError as error:
        arena.close()
        raise AdoptError(str(error)) from None
    return arena


def owner_pid(meta_fd: int) -> int:
    """The pid that a meta segment's last server wrote down; 0 when there is none."""
    raw = os.pread(meta_fd, LIVE_DTYPE.itemsize, LIVE_AT)
    whole = len(raw) == LIVE_DTYPE.itemsize
    return int(np.frombuffer(raw, LIVE_DTYPE)["pid"][0]) if whole else 0


def _open(name: str, *, writable: bool = True) -> int:
    """A descriptor of a segment that is there. Raises FileNotFoundError, NotOurs, or ArenaError."""
    path = shm_path(name)
    try:
        return open_ours(path, os.O_RDWR if writable else os.O_RDONLY, _remedy(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ArenaError(
            f"cannot open {path}: {error.strerror}; chmod 600 it, or choose another --instance"
        ) from None


def _make(name: str) -> int:
    """A descriptor of a new segment. Raises ExistentialError when there is one, or ArenaError."""
    try:
        fd = int(posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd)
    except posix_ipc.PermissionsError:
        raise ArenaError(
            f"{SHM_DIR} is not writable for uid {os.geteuid()}; make it so: chmod 1777 {SHM_DIR}"
        ) from None
    os.fchmod(fd, 0o600)  # whatever the umask says
    return fd


def _remove(name: str) -> None:
    path = shm_path(name)
    remove_ours(path, _remedy(path))


def _remedy(path: Path) -> str:
    return f"choose another --instance, or have its owner remove it (rm -r {path})"


def _own(instance: str, meta_fd: int) -> None:
    """Take the owner's lock of an existing arena. Raises InstanceBusy."""
    if not try_lock(meta_fd, GLANCE_S):
        raise InstanceBusy(instance, owner_pid(meta_fd))
    if not same_file(meta_fd, shm_path(segment_names(instance)[1])):
        raise InstanceBusy(instance, 0)  # it was replaced between our open and our lock


def _new_locked(instance: str, meta_name: str) -> int:
    """A new meta segment with its lock held. Raises InstanceBusy if another server is faster."""
    try:
        fd = _make(meta_name)
    except posix_ipc.ExistentialError:
        raise InstanceBusy(instance, 0) from None
    if not (try_lock(fd, GLANCE_S) and same_file(fd, shm_path(meta_name))):
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
        fd = _open(meta_name)
    except FileNotFoundError:
        return
    try:
        if not try_lock(fd, GLANCE_S):
            raise InstanceBusy(instance, owner_pid(fd))
        if same_file(fd, shm_path(meta_name)):
            _remove(data_name)
            _remove(meta_name)
    finally:
        os.close(fd)
