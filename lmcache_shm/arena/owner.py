"""What an instance's files are called, which files are ours, and who owns an instance.

/dev/shm is one directory for all users of a host (and of all containers that share it), so the uid is part of
a segment's name, and what is found under a name is used only if it is a regular file of this user.
"""

import fcntl
import os
import re
import stat
import time
from pathlib import Path

from lmcache_shm.arena.errors import ArenaError, InstanceBusy, NotOurs, RuntimeDirError
from lmcache_shm.arena.memory import SHM_DIR

PREFIX = "lmcache_shm."
META_SUFFIX = ".meta"
_SEGMENT = re.compile(re.escape(PREFIX) + rf"(\d+)\.(.+?)({re.escape(META_SUFFIX)})?")
LOCK_SUFFIX = ".lock"
OURS = {LOCK_SUFFIX, ".sock", ".log", ".autostart"}
"""Suffixes of the files in a runtime directory."""
GLANCE_S = 0.2
"""A tool that removes leftovers owns what it removes for a moment."""
LOOK_S = 10.0
"""A tool that lists leftovers shares a lock for a moment, to see whether someone owns it; it may be stopped just then."""


# --------------------------------------------------------------------------------- names and ownership
def segment_names(instance: str) -> tuple[str, str]:
    """POSIX names of the data and the meta segment. Raises ArenaError for a name that cannot be one."""
    if not instance or "/" in instance or "\0" in instance or instance.endswith(META_SUFFIX):
        raise ArenaError(f"{instance!r} cannot be the name of an instance")
    data = f"/{PREFIX}{os.geteuid()}.{instance}"
    return data, data + META_SUFFIX


def segment_of(filename: str) -> tuple[int, str, bool] | None:
    """(uid, instance, whether it is the meta segment) of a file in /dev/shm; None if it is no segment's name."""
    found = _SEGMENT.fullmatch(filename)
    return (int(found[1]), found[2], bool(found[3])) if found else None


def shm_path(name: str) -> Path:
    return Path(SHM_DIR + name)


def foreign(facts: os.stat_result) -> str:
    """Why something is not a regular file of ours ("belongs to uid …", "is a symbolic link"); "" if it is one."""
    if facts.st_uid != os.geteuid():
        return f"belongs to uid {facts.st_uid}, not to uid {os.geteuid()}"
    if stat.S_ISREG(facts.st_mode):
        return ""
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link"}
    return f"is {kinds.get(stat.S_IFMT(facts.st_mode), 'a socket, pipe or device')}, not a file"


def open_ours(path: Path, flags: int, remedy: str) -> int:
    """A descriptor of a regular file of ours. Follows no link, and does not wait at a pipe.

    Raises NotOurs (with `remedy`) for anything else, OSError when there is nothing or it cannot be opened.
    """
    safe = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags | safe, 0o600)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:
        if why := foreign(path.lstat()):
            raise NotOurs(f"{path} {why}; {remedy}") from None
        raise
    if why := foreign(os.fstat(fd)):
        os.close(fd)
        raise NotOurs(f"{path} {why}; {remedy}")
    return fd


def remove_ours(path: Path, remedy: str) -> None:
    """Remove a regular file of ours, if there is one. Raises NotOurs (with `remedy`) for anything else."""
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return
    if why := foreign(facts):
        raise NotOurs(f"{path} {why}; {remedy}")
    path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------- runtime directory
def runtime_dir() -> Path:
    """The directory of sockets and locks, made if need be: 0700 and this user's own. Raises RuntimeDirError."""
    return safe_dir(runtime_path())


def runtime_path() -> Path:
    """Where it is, unseen: $LMCACHE_SHM_RUNTIME_DIR, else $XDG_RUNTIME_DIR/lmcache-shm, else /tmp/lmcache-shm-UID.

    `sudo` and `su` may leave another user's XDG_RUNTIME_DIR in the environment; it is passed over.
    """
    given = os.environ.get("LMCACHE_SHM_RUNTIME_DIR")
    base = os.environ.get("XDG_RUNTIME_DIR")
    if given:
        return Path(given)
    if base and _is_own_directory(base):
        return Path(base) / "lmcache-shm"
    return Path(f"/tmp/lmcache-shm-{os.geteuid()}")  # noqa: S108  (checked by safe_dir)


def _is_own_directory(path: str) -> bool:
    try:
        facts = os.stat(path)  # noqa: PTH116
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()


def safe_dir(path: Path) -> Path:
    """`path` as a 0700 directory of ours, made if it is missing. Raises RuntimeDirError.

    One that is open to others is closed, unless it holds more than sockets, locks and logs of ours: whoever
    names /run or a home directory by mistake must not find it shut to everybody else.
    """
    remedy = "set LMCACHE_SHM_RUNTIME_DIR (--runtime-dir) to a directory of your own"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            facts = path.lstat()
        except FileNotFoundError:
            path.mkdir(mode=0o700, exist_ok=True)
            facts = path.lstat()
    except OSError as error:
        raise RuntimeDirError(f"runtime directory {path}: {error.strerror}; {remedy}") from None
    if not stat.S_ISDIR(facts.st_mode):  # a symbolic link could be redirected by its owner
        raise RuntimeDirError(f"runtime directory {path} is not a directory; {remedy}")
    if facts.st_uid != os.geteuid():
        raise RuntimeDirError(
            f"runtime directory {path} belongs to uid {facts.st_uid}, not to uid {os.geteuid()}; {remedy}"
        )
    if facts.st_mode & 0o700 != 0o700:
        raise RuntimeDirError(
            f"runtime directory {path} has mode {facts.st_mode & 0o777:o}; chmod 700 {path}"
        )
    if facts.st_mode & 0o077:
        try:
            other = next((p.name for p in path.iterdir() if p.suffix not in OURS), "")
            if not other:
                path.chmod(0o700)
        except OSError:
            raise RuntimeDirError(
                f"runtime directory {path} is open to others; chmod 700 {path}"
            ) from None
        if other:
            raise RuntimeDirError(
                f"runtime directory {path} is open to others and holds more than a cache's files "
                f"({other}); chmod 700 {path} if it is the cache's alone, else {remedy}"
            )
    return path


class OwnerLock:
    """A lock that dies with its process: one server per instance and runtime directory.

    The file `INSTANCE.lock` tells people who holds it ("pid boot-id"). Segments are guarded by a lock of
    their own (see segment), so that servers with different runtime directories cannot share one either.
    """

    def __init__(self, directory: Path, instance: str) -> None:
        self.path = directory / (instance + LOCK_SUFFIX)
        self.instance = instance
        self._fd = -1

    def acquire(self, boot: bytes = b"") -> None:
        """Raises InstanceBusy with the owner's pid, NotOurs, or RuntimeDirError when the file cannot be made."""
        while True:
            try:
                fd = open_ours(self.path, os.O_RDWR | os.O_CREAT, f"remove it: rm -r {self.path}")
            except OSError as error:
                raise RuntimeDirError(
                    f"cannot write {self.path}: {error.strerror}; set LMCACHE_SHM_RUNTIME_DIR "
                    "(--runtime-dir) to a writable directory"
                ) from None
            if not try_lock(fd, GLANCE_S):
                pid = _pid_in(os.read(fd, 64))
                os.close(fd)
                raise InstanceBusy(self.instance, pid)
            if same_file(fd, self.path):
                break
            os.close(fd)  # its last owner removed it between our open and our lock
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()} {boot.hex()}\n".encode())
        self._fd = fd

    def release(self) -> None:
        """Give the instance up and remove the file. Idempotent."""
        if self._fd >= 0:
            if same_file(self._fd, self.path):
                self.path.unlink()
            os.close(self._fd)
            self._fd = -1


def try_lock(fd: int, patience_s: float = 0.0) -> bool:
    """Take the exclusive lock on an open file if nobody else owns it (any more, after `patience_s`).

    Whoever only looks (`is_owned`) is waited for: no owner may fail because of a look.
    """
    began = time.monotonic()
    while not _flock(fd, fcntl.LOCK_EX):
        waited = time.monotonic() - began
        if waited >= (patience_s if is_owned(fd) else LOOK_S):
            return False
        time.sleep(0.005)
    return True


def is_owned(fd: int) -> bool:
    """Whether another open file holds the exclusive lock. This one must not hold it."""
    if not _flock(fd, fcntl.LOCK_SH):
        return True
    unlock(fd)
    return False


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def same_file(fd: int, path: Path | str) -> bool:
    """Whether `path` still names the open file, by device and inode."""
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    ours = os.fstat(fd)
    return (facts.st_dev, facts.st_ino) == (ours.st_dev, ours.st_ino)


def _pid_in(content: bytes) -> int:
    word = content.split()[:1]
    return int(word[0]) if word and word[0].isdigit() else 0
