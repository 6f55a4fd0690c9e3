"""The socket that a server listens at: where, and whose it is."""

import errno
import os
import socket
import stat
from pathlib import Path

from lmcache_shm.arena.errors import RuntimeDirError

MAX_PATH = 107
"""Bytes that a sockaddr_un holds."""


def check_path(path: Path) -> None:
    """Raises RuntimeDirError when no socket can have this path."""
    if len(os.fsencode(path)) > MAX_PATH:
        raise RuntimeDirError(
            f"the socket's path is longer than {MAX_PATH} bytes: {path}; use a shorter --runtime-dir"
        )


def listen(path: Path, backlog: int) -> socket.socket:
    """A listening socket at `path`, mode 0600. The caller owns the instance: a socket that is there is stale.

    Raises RuntimeDirError.
    """
    check_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if identity(path) is not None:
            path.unlink()
        sock.setblocking(False)
        before = os.umask(0o177)
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(before)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        there = "something else is there" if error.errno == errno.EADDRINUSE else error.strerror
        raise RuntimeDirError(
            f"cannot listen at {path}: {there}; remove it (rm -r {path}), or choose another --runtime-dir"
        ) from None
    return sock


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the socket at `path`; None when there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISSOCK(found.st_mode) else None
