"""Who owns an instance: the runtime directory and the owner lock in it."""

import fcntl
import os
import stat
import time
from pathlib import Path

from lmcache_shm.arena.errors import InstanceBusy, RuntimeDirError

LOCK_SUFFIX = ".lock"
OURS = {LOCK_SUFFIX, ".sock", ".log"}
"""Suffixes of the files in a runtime directory."""
GLANCE_S = 0.2
"""A tool that removes leftovers owns what it removes for a moment."""
LOOK_S = 10.0
"""A tool that lists leftovers shares a lock for a moment, to see whether someone owns it; it may be stopped just then."""


def runtime_dir() -> Path:
    """The directory of sockets and locks, made if need be: 0700 and this user's own. Raises RuntimeDirError."""
    return safe_dir(runtime_path())


def runtime_path() -> Path:
    """Where it is, unseen: $LMCACHE_SHM_RUNTIME_DIR, else $XDG_RUNTIME_DIR/lmcache-shm, else /tmp/lmcache-shm-UID."""
    given = os.environ.get("LMCACHE_SHM_RUNTIME_DIR")
    base = os.environ.get("XDG_RUNTIME_DIR")
    if given:
        return Path(given)
    if base and Path(base).is_dir():
        return Path(base) / "lmcache-shm"
    return Path(f"/tmp/lmcache-shm-{os.getuid()}")  # noqa: S108  (checked by safe_dir)


def safe_dir(path: Path) -> Path:
    """`path` as a 0700 directory of ours, made if it is missing. Raises RuntimeDirError.

    One that is open to others is closed, unless it holds more than sockets, locks and logs of ours: whoever
    names /run or a home directory by mistake must not find it shut to everybody else.
    """
    remedy = "set LMCACHE_SHM_RUNTIME_DIR (--runtime-dir) to a directory of your own"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        raise RuntimeDirError(f"runtime directory {path}: {error.strerror}; {remedy}") from None
    if not stat.S_ISDIR(facts.st_mode):  # a symbolic link could be redirected by its owner
        raise RuntimeDirError(f"runtime directory {path} is not a directory; {remedy}")
    if facts.st_uid != os.getuid():
        raise RuntimeDirError(f"runtime directory {path} belongs to uid {facts.st_uid}; {remedy}")
    if facts.st_mode & 0o077:
        foreign = next((p.name for p in path.iterdir() if p.suffix not in OURS), "")
        if foreign:
            raise RuntimeDirError(
                f"runtime directory {path} is open to others and holds more than a cache's files "
                f"({foreign}); chmod 700 {path} if it is the cache's alone, else {remedy}"
            )
        try:
            path.chmod(0o700)
        except OSError:
            raise RuntimeDirError(
                f"runtime directory {path} is open to others; chmod 700 it"
            ) from None
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
        """Raises InstanceBusy with the owner's pid, or RuntimeDirError when the file cannot be made."""
        while True:
            try:
                fd = os.open(
                    self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
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
