"""What dead instances left behind: segments, lock files, sockets. Found, told apart from the living, removed.

Living is what holds its lock: a server keeps one on its meta segment and one on its lock file. Looking takes
nothing from a server that starts just then (see owner). Removal happens under that lock and by identity
(device and inode), never by name alone. What is not a regular file (or socket) of this user is left alone, and
not believed either: another user's lock says nothing about our instance.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmcache_shm.arena import memory
from lmcache_shm.arena.errors import NotOurs
from lmcache_shm.arena.layout import PAGE, Header
from lmcache_shm.arena.owner import (
    LOCK_SUFFIX,
    META_SUFFIX,
    PREFIX,
    foreign,
    is_owned,
    open_ours,
    same_file,
    segment_of,
    try_lock,
)
from lmcache_shm.arena.segment import owner_pid, unlink_if

SOCKET_SUFFIX = ".sock"

Kind = Literal["data", "meta", "lock", "socket"]


@dataclass(frozen=True)
class Leftover:
    """One file of an instance. `live`: its server runs. `note`: for people (kept arena, damaged, …)."""

    kind: Kind
    instance: str
    path: Path
    nbytes: int
    device: int
    inode: int
    pid: int
    """Of the last owner that wrote itself down; 0: unknown."""
    live: bool
    note: str


@dataclass(frozen=True)
class Foreign:
    """A file in /dev/shm with a segment's name that is not ours. `why`: whose, or what it is."""

    path: Path
    nbytes: int
    why: str
    in_the_way_of: str
    """The instance of ours whose name it has taken; "": none."""


def leftovers(runtime_dir: Path) -> list[Leftover]:
    """Everything of ours (this uid) in /dev/shm and in the runtime directory, living or not."""
    found = list(_segments())
    live = {entry.instance for entry in found if entry.live}
    return found + list(_runtime_files(runtime_dir, live))


def foreigners() -> list[Foreign]:
    """Segments of other users, and whatever else has a segment's name."""
    found = []
    for path, facts in _in_dev_shm():
        if why := foreign(facts):
            uid, instance, _ = segment_of(path.name) or (-1, "", False)
            taken = instance if uid == os.geteuid() else ""
            found.append(Foreign(path, facts.st_size, why, taken))
    return found


def purge(entries: Iterable[Leftover]) -> list[Leftover]:
    """Remove the dead among `entries`; what was removed. One that came to life meanwhile stays."""
    ordered = sorted(
        entries, key=lambda entry: entry.kind == "meta"
    )  # meta last: its lock guards the data
    return [entry for entry in ordered if not entry.live and _remove(entry)]


def _in_dev_shm() -> Iterator[tuple[Path, os.stat_result]]:
    for path in sorted(Path(memory.SHM_DIR).glob(PREFIX + "*")):
        try:
            yield path, path.lstat()
        except OSError:
            continue


def _segments() -> Iterator[Leftover]:
    for path, facts in _in_dev_shm():
        uid, instance, is_meta = segment_of(path.name) or (-1, "", False)
        if uid != os.geteuid() or foreign(facts):
            continue
        meta = path if is_meta else path.with_name(path.name + META_SUFFIX)
        pid, live, note = _state_of(meta)
        yield Leftover(
            "meta" if is_meta else "data",
            instance,
            path,
            facts.st_size,
            facts.st_dev,
            facts.st_ino,
            pid,
            live,
            note,
        )


def _state_of(meta: Path) -> tuple[int, bool, str]:
    """(pid of the owner, whether it lives, what it is) of the instance with this meta segment."""
    try:
        fd = _open(meta)
    except OSError as error:
        return 0, True, f"cannot be looked at: {error.strerror}"
    if fd < 0:
        return 0, False, "data without a slot table"
    try:
        live = is_owned(fd)
        try:
            Header.unpack(os.pread(fd, PAGE, 0))
            note = "in use" if live else "arena of a dead server; a new one can adopt it"
        except ValueError as error:
            note = "being made" if live else f"damaged: {error}"
        return owner_pid(fd), live, note
    finally:
        os.close(fd)


def _runtime_files(folder: Path, live: set[str]) -> Iterator[Leftover]:
    kinds: dict[str, Kind] = {LOCK_SUFFIX: "lock", SOCKET_SUFFIX: "socket"}
    try:
        paths = sorted(folder.iterdir())
    except OSError:  # missing, or not ours to read
        return
    for path in paths:
        kind = kinds.get(path.suffix)
        if kind is None:
            continue
        try:
            facts = path.lstat()
        except OSError:
            continue
        right = stat.S_ISSOCK if kind == "socket" else stat.S_ISREG
        if facts.st_uid != os.geteuid() or not right(facts.st_mode):
            continue
        pid, held = _lock_state(path.with_suffix(LOCK_SUFFIX))
        alive = held or path.stem in live
        note = "in use" if alive else f"{kind} of a dead server"
        yield Leftover(
            kind, path.stem, path, facts.st_size, facts.st_dev, facts.st_ino, pid, alive, note
        )


def _lock_state(path: Path) -> tuple[int, bool]:
    """(pid, held) of a lock file."""
    try:
        fd = _open(path)
    except OSError:
        return 0, True
    if fd < 0:
        return 0, False
    try:
        word = os.pread(fd, 64, 0).split()[:1]
        return (int(word[0]) if word and word[0].isdigit() else 0), is_owned(fd)
    finally:
        os.close(fd)


def _remove(entry: Leftover) -> bool:
    """Remove one file if nobody owns its instance now. A socket goes by the lock beside it."""
    guard = {
        "data": entry.path.with_name(entry.path.name + META_SUFFIX),
        "meta": entry.path,
        "lock": entry.path,
        "socket": entry.path.with_suffix(LOCK_SUFFIX),
    }[entry.kind]
    try:
        fd = _open(guard)
    except OSError:
        return False
    try:
        if fd >= 0 and not (try_lock(fd) and same_file(fd, guard)):
            return False
        return unlink_if(entry.path, entry.device, entry.inode)
    finally:
        if fd >= 0:
            os.close(fd)


def _open(path: Path) -> int:
    """-1 when there is nothing of ours. Raises OSError when there is and it cannot be opened: it may be in use."""
    try:
        return open_ours(path, os.O_RDWR, "")
    except (FileNotFoundError, NotOurs):
        return -1
