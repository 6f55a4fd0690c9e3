"""Fill this process's page tables for the arena ahead of use.

Every process that maps the arena has its own page tables. Where they are empty the first copy into a
slot takes a minor fault per 4 KiB, which costs more than the copy. ``MADV_POPULATE_READ`` fills them in
bulk; for a shared mapping of shared memory the entries are writable, and reading maps neighbouring
pages together, which makes it about five times cheaper than ``MADV_POPULATE_WRITE``.
"""

import ctypes
import logging
import os
import threading

from lmcache_shm.transfer.guard import ArenaView
from lmcache_shm.transfer.mark import wait_for

logger = logging.getLogger(__name__)

MADV_POPULATE_READ = 22
PIECE_BYTES = 16 << 20
PAGE = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PageTables:
    """Populates the mapping of an arena from its start to its end, in a background thread, as far as its memory
    is reserved: a page beyond would be allocated by touching it.

    ``need()`` does it at once for a range that the background has not reached. Without the kernel's
    support (before Linux 5.14) both do nothing. ``close()`` must come before the mapping goes.
    """

    def __init__(self, arena: ArenaView) -> None:
        self._arena = arena
        self._mapping = arena.data_array
        self._address = self._mapping.ctypes.data
        self._done = 0
        self._visited: set[int] = set()
        self._stop = threading.Event()
        self._supported = True
        self._thread = threading.Thread(
            target=self._run, name="lmcache-shm-page-tables", daemon=True
        )
        self._thread.start()

    @property
    def done_bytes(self) -> int:
        """How far the background has come."""
        return self._done

    def need(self, offset: int, nbytes: int) -> None:
        """Have ``[offset, offset + nbytes)`` populated now, the first time this offset is named."""
        if offset + nbytes <= self._done or not self._supported or offset in self._visited:
            return
        self._visited.add(offset)
        start = offset // PAGE * PAGE
        self._populate(start, min(offset + nbytes, len(self._mapping)) - start)

    def join(self, timeout: float) -> bool:
        """Wait for the background to reach the end; False if it had not by then."""
        self._thread.join(timeout)
        return self._done >= len(self._mapping)

    def close(self) -> None:
        """Stop and wait; the mapping may go afterwards."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        # The thread only makes page tables; whoever computes should win the core.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        size = len(self._mapping)
        while self._done < size and not self._stop.is_set():
            piece = min(PIECE_BYTES, size - self._done)
            if not wait_for(lambda: self._arena.backed_bytes, self._done + piece, self._stop):
                return
            if not self._populate(self._done, piece):
                return
            self._done += piece
        self._visited.clear()

    def _populate(self, offset: int, nbytes: int) -> bool:
        if _libc.madvise(self._address + offset, nbytes, MADV_POPULATE_READ) == 0:
            return True
        self._supported = False
        logger.debug("page tables are filled on demand: %s", os.strerror(ctypes.get_errno()))
        return False
