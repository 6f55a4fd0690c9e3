"""Processes: the peer of a socket, and whether that very process still runs (pids are reused).

A process in a pid namespace that we cannot see (a container beside ours) has pid 0 for us. From Linux 6.5 its
socket still gives a pidfd, which shows its end, but nothing shows whether it is stopped. On older kernels neither
can be seen.
"""

import itertools
import os
import select
import socket
import struct
from pathlib import Path

SO_PEERPIDFD = 77  # Linux 6.5; socket.SO_PEERPIDFD only in later Pythons
_UCRED = struct.Struct("3i")


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected; pid 0 when it lives in another pid namespace."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return pid, uid


def stat(pid: int) -> tuple[str, int]:
    """(state letter, start time in clock ticks since boot) from /proc; ("", 0) when there is none, ("?", 0)
    when it cannot be read (no file descriptor, or /proc hides it): then nothing is known of it."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ("?" if _is_hidden(pid) else ""), 0
    except OSError:
        return "?", 0
    fields = line.rpartition(")")[2].split()  # the command's name may hold anything
    return fields[0], int(fields[19])


def _is_hidden(pid: int) -> bool:
    """Whether a process that /proc does not show is there all the same, and this user's.

    Mounted with hidepid, /proc shows a process with more capabilities than ours only to root. (It hides all of
    other users, too; those are never peers of ours, so that one of them has a pid means: ours is gone.)
    """
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return pid > 0


def start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 when there is none, or nothing of it runs."""
    state, start = stat(pid)
    if state and state in "ZX":
        # The first thread may have ended before the others: then the process looks like a zombie.
        try:
            threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        except OSError:
            return 0
        return start if threads > 1 else 0
    return start


def process_alive(pid: int, start: int) -> bool:
    """Whether the process with this pid and start time (0: unknown) still runs.

    One that cannot be seen counts as running: pid ≤ 0 (another pid namespace), or no descriptor to look with.
    """
    if pid <= 0 or stat(pid)[0] == "?":
        return True
    now = start_time(pid)
    return now != 0 and start in {0, now}


class Process:
    """One process, by pid and start time, and by pidfd where the kernel has one.

    `start` 0 means unknown (the process is out of sight, in another pid namespace). `key` is equal for
    two of the same process; out of sight, and without a pidfd that can be compared, for no two.
    """

    _unknown = itertools.count(1)

    def __init__(self, pid: int, start: int, pidfd: int = -1) -> None:
        self.pid = pid
        self.start = start
        self._pidfd = pidfd
        self.key = (pid, start) if pid > 0 else (0, _inode(pidfd) or -next(self._unknown))

    @property
    def unwatchable(self) -> bool:
        """Whether its end cannot be seen."""
        return self.pid <= 0 and self._pidfd < 0

    @classmethod
    def of_peer(cls, sock: socket.socket) -> "Process":
        pid, _ = peer_credentials(sock)
        pidfd = -1
        try:  # from the socket: exact even if the pid was reused meanwhile, and across namespaces
            pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        except OSError:
            pidfd = _open(pid)
        return cls(pid, stat(pid)[1] if pid > 0 else 0, pidfd)

    @classmethod
    def of_record(cls, pid: int, start: int) -> "Process":
        """A process in the client table of an earlier server."""
        process = cls(pid, start, _open(pid))
        if not process.alive():
            process.close()
        return process

    def alive(self) -> bool:
        """False once it has ended and cannot write any more. One that cannot be seen counts as alive."""
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(0):  # ready when the last thread is gone
                return False
        if self.pid <= 0:
            return True
        state, start = stat(self.pid)
        if state == "?":
            return True
        # A dead leader ("Z") may have live threads; only the pidfd knows.
        gone = {""} if self._pidfd >= 0 else {"", "Z", "X"}
        return state not in gone and self.start in {0, start}

    def running(self) -> bool:
        """Alive and not stopped (SIGSTOP, debugger): its copies are making progress or are over.

        One that cannot be seen may be stopped. If its end can be seen, wait for that; else it counts as running.
        """
        if not self.alive():
            return False
        return self.unwatchable if self.pid <= 0 else stat(self.pid)[0] not in {"T", "t", "?"}

    def same(self, other: "Process") -> bool:
        return self.key == other.key

    def duplicate(self) -> "Process":
        """The same process, with a pidfd of its own to close."""
        pidfd = os.dup(self._pidfd) if self._pidfd >= 0 else -1
        return Process(self.pid, self.start, pidfd)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _open(pid: int) -> int:
    if pid > 0:
        try:
            return os.pidfd_open(pid)
        except (OSError, AttributeError):
            pass
    return -1


def _inode(pidfd: int) -> int:
    """A number of the process that a pidfd stands for (Linux 6.9); 0 when all pidfds have the same."""
    if pidfd < 0:
        return 0
    mine = _open(os.getpid())
    if mine < 0:
        return 0
    try:
        found = os.fstat(pidfd).st_ino
        return 0 if found == os.fstat(mine).st_ino else found
    finally:
        os.close(mine)
