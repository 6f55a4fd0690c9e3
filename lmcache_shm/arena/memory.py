"""The arena's memory: check that there is room, reserve it, touch its pages ahead of use.

At the start the server checks that there is room for everything, and reserves the table and the first part of the
data. A thread reserves the remaining data (`reserve_rest`), in the order of the slabs. Only reserved memory is
used: if another process takes the room meanwhile, the arena stays smaller than planned, and no write ends in SIGBUS.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.errors import ArenaError
from lmcache_shm.arena.layout import PAGE, Table

SHM_DIR = "/dev/shm"  # noqa: S108  (where POSIX shared memory lives, not a scratch file)
PIECE = 256 << 20
"""Bytes reserved between two calls of `progress`."""
FIRST = 512 << 20
"""Bytes of data that a server reserves before it serves: a quarter of a second."""
STEP = 32 << 20
"""Bytes reserved in one call while the server serves; its end waits for at most one such call."""
PREFAULT_PIECE = 8 << 20
LOOK_S = 0.02
"""Seconds between two looks at a reserved size that is still too small."""
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_UNLIMITED = 1 << 62
_madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise keeps the GIL
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


class Reserved(Protocol):
    """An arena whose memory is reserved step by step (see mapping.Arena)."""

    data_fd: int
    data_array: npt.NDArray[np.uint8]
    live: Table

    @property
    def data_bytes(self) -> int: ...
    @property
    def backed_bytes(self) -> int: ...
    @property
    def growing(self) -> bool: ...


@dataclass(frozen=True)
class Limit:
    """A bound of new shared memory."""

    what: str
    free: int
    remedy: str


def limits() -> list[Limit]:
    """The bounds of new shared memory: /dev/shm itself, memory cgroups, the host's memory."""
    found = []
    try:
        fs = os.statvfs(SHM_DIR)
        room = Limit(
            SHM_DIR,
            fs.f_bavail * fs.f_frsize,
            "make it larger (container: --shm-size or --ipc=host; host: mount -o remount,size=…)",
        )
        if fs.f_blocks:  # a tmpfs mounted with size=0 has no limit and reports zeros
            found.append(room)
    except OSError:
        raise ArenaError(f"there is no {SHM_DIR}; mount a tmpfs there") from None
    for free in _cgroup_room():
        raise_it = "raise the memory limit of this container or unit (--memory, MemoryMax=)"
        found.append(Limit("the cgroup's memory limit", free, raise_it))
    available = _meminfo("MemAvailable")
    if available is not None:
        found.append(Limit("the host's available memory", available, "free some memory"))
    return found


def check_room(nbytes: int, bounds: Sequence[Limit] | None = None) -> None:
    """Raise ArenaError naming the remedy if `nbytes` more do not fit."""
    bounds = limits() if bounds is None else bounds
    if bounds and (tightest := min(bounds, key=lambda limit: limit.free)).free < nbytes:
        raise ArenaError(
            f"the arena and its table need {size(nbytes)}, but {tightest.what} leaves "
            f"{size(tightest.free)}; {tightest.remedy}, or choose a smaller --l1-size-gb"
        )


def reserve(
    fd: int, nbytes: int, progress: Progress | None = None, *, first: int | None = None
) -> None:
    """Give the file of `fd` its size, and memory to its `first` bytes (None: to all). Raises ArenaError.

    Afterwards no write into them can fail for want of space (and none can raise SIGBUS).
    """
    end = nbytes if first is None else min(first, nbytes)
    try:
        os.ftruncate(fd, nbytes)
        for at in range(0, end, PIECE):
            length = min(PIECE, end - at)
            os.posix_fallocate(fd, at, length)
            if progress is not None:
                progress(at + length, end)
    except OSError as error:
        if error.errno not in {errno.EFBIG, errno.ENOSPC, errno.ENOMEM}:
            raise ArenaError(f"cannot reserve {size(nbytes)}: {error.strerror}") from None
        raise ArenaError(
            f"cannot reserve {size(nbytes)} in {SHM_DIR}: {error.strerror}; "
            f"{remedy(error.errno)}, or choose a smaller --l1-size-gb"
        ) from None


def huge_pages(root: Path = Path("/")) -> str:
    """Huge pages in /dev/shm: never, advise, within_size or always.

    The mount's own option decides; shmem_enabled, which governs shared memory without a mount, only counts
    where it is "deny" or "force". With "within_size" and "always" reserving takes huge pages by itself;
    with "advise" it would have to touch them, which takes ten times as long, so there are none.
    """
    try:
        mounts = (root / "proc/self/mounts").read_text("utf-8", "replace")
        above = (root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text("ascii")
    except OSError:
        return "never"
    if "[deny]" in above or "[force]" in above:
        return "never" if "[deny]" in above else "always"
    mode = "never"
    for line in mounts.splitlines():
        _, place, _, options, *_ = line.split()
        if place == SHM_DIR:  # the last mount on a place hides the ones before
            found = [o for o in options.split(",") if o.startswith("huge=")]
            mode = found[0].removeprefix("huge=") if found else "never"
    return mode


def remedy(number: int) -> str:
    """How to fix the error with which reserving memory failed, given its errno."""
    if number == errno.EFBIG:
        return "raise the file size limit (ulimit -f)"
    return f"make {SHM_DIR} larger (--shm-size, --ipc=host)"


def whole(fd: int) -> bool:
    """Whether every byte of a segment is reserved (in memory or in swap)."""
    facts = os.fstat(fd)
    return facts.st_blocks * 512 >= facts.st_size


def secure(arena: Reserved) -> None:
    """Server, after a restart: reserve all bytes below the reserved size. Raises ArenaError.

    That size is a number that a dead server left, so its bytes are reserved again: 40 ms a GB where they are
    reserved already.
    """
    arena.live["stopped"] = 0
    if whole(arena.data_fd):
        arena.live["backed"] = arena.data_bytes
        return
    reserve(arena.data_fd, arena.data_bytes, first=arena.backed_bytes)
    arena.live["backed"] = arena.backed_bytes


def reserve_rest(
    arena: Reserved, stop: threading.Event, progress: Progress | None = None
) -> OSError | None:
    """Server: reserve the remaining data, raising the reserved size step by step, until `stop`.

    The server goes on serving meanwhile. Returns the error that ended it for good (``live["stopped"]``), if
    one did; the bytes reserved by then can be used.
    """
    total, at = arena.data_bytes, arena.backed_bytes
    while at < total and not stop.is_set():
        length = min(STEP, total - at)
        try:
            os.posix_fallocate(arena.data_fd, at, length)
        except OSError as error:
            arena.live["stopped"] = error.errno
            return error
        at += length
        arena.live["backed"] = at
        if progress is not None:
            progress(at, total)
    return None


def prefault(arena: Reserved, threads: int, stop: threading.Event) -> list[threading.Thread]:
    """Touch all reserved pages of the data segment in background threads, so that first use costs nothing.

    They follow the reserved size. Contents are not changed, so serving may go on. Set `stop` and join the threads
    before `arena.close()`. Progress is in ``arena.live["prefaulted"]`` (bytes).
    """
    total = arena.data_bytes
    pieces = iter(range(0, total, PREFAULT_PIECE))
    lock = threading.Lock()
    address = arena.data_array.ctypes.data
    arena.live["prefaulted"] = 0

    def work() -> None:
        while not stop.is_set():
            with lock:
                at = next(pieces, total)
            if at >= total:
                return
            length = min(PREFAULT_PIECE, total - at)
            while at + length > arena.backed_bytes:
                if not arena.growing or stop.wait(LOOK_S):
                    return
            if _madvise(address + at, length, _MADV_POPULATE_WRITE):
                # Old kernel. Reading is enough to allocate the page of a shared mapping.
                int(arena.data_array[at : at + length : PAGE].max())
            with lock:
                arena.live["prefaulted"] += length

    workers = [
        threading.Thread(target=work, name=f"lmcache-shm-prefault-{i}", daemon=True)
        for i in range(threads)
    ]
    for worker in workers:
        worker.start()
    return workers


def _cgroup_room() -> Iterator[int]:
    """Bytes left under each memory limit that applies to this process (cgroup v1 and v2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    root = Path("/sys/fs/cgroup")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, names = [root, root / "unified"], ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mounts, names = [root / "memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for mount in mounts:
            # In a container the path may be the host's; then only the mount's root is ours.
            place = mount / path.lstrip("/")
            for folder in (place, *place.parents):
                if not folder.is_relative_to(mount):
                    break
                room = _room_of(folder, *names)
                if room is not None:
                    yield room


def _room_of(folder: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = int((folder / limit_name).read_text())  # "max" is no number
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit >= _UNLIMITED:
        return None
    prefix = "total_" if "total_inactive_file" in stat else ""
    cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return max(limit - usage + cache, 0)


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return None


def size(nbytes: int) -> str:
    """Bytes for people: ``1.50 GiB``."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
