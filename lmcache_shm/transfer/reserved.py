"""The arena's memory made ready for copies, as far as the server has reserved it: page tables, and registration.

A page beyond the reserved size must not be touched, nor pinned: that would allocate it.

**Page tables** (CPU). Every process that maps the arena has its own. Where they are empty the first copy into a
slot takes a minor fault per 4 KiB, which costs more than the copy. ``MADV_POPULATE_READ`` fills them in
bulk; for a shared mapping of shared memory the entries are writable, and reading maps neighbouring
pages together, which makes it about five times cheaper than ``MADV_POPULATE_WRITE``.

**Registration** (CUDA). Only pinned memory is copied at full speed and without blocking. It is registered range by
range in the background.
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from lmcache_shm.transfer.device import Addresses, Device, DeviceError, Ranges
from lmcache_shm.transfer.guard import ArenaView

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between the first two looks at the reserved size."""
RARELY_S = 2.0
"""Between looks while it does not grow: it may have stopped for good, and only a new server would go on."""
MADV_POPULATE_READ = 22
POPULATED_BYTES = 16 << 20
"""Of one call."""
PAGE = 4096
PAUSE_S = 0.002
"""Between two registrations. The driver holds locks meanwhile, for which other threads may be waiting."""
USUAL_REASON = "The usual reason is a limit: on locked memory (`ulimit -l`), or the driver's own."

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def wait_reserved(reserved: Callable[[], int], end: int, stop: threading.Event) -> bool:
    """Wait until `reserved()` (bytes) has come to `end`, looking ever more rarely; False if stopped before."""
    pause = LOOK_S
    while reserved() < end:
        if stop.wait(pause):
            return False
        pause = min(2 * pause, RARELY_S)
    return True


class PageTables:
    """Populates the mapping of an arena from its start to its end, in a background thread.

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
        # Page tables can wait: threads that compute get the core first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        size = len(self._mapping)
        while self._done < size and not self._stop.is_set():
            nbytes = min(POPULATED_BYTES, size - self._done)
            end = self._done + nbytes
            if not wait_reserved(lambda: self._arena.backed_bytes, end, self._stop):
                return
            if not self._populate(self._done, nbytes):
                return
            self._done += nbytes
        self._visited.clear()

    def _populate(self, offset: int, nbytes: int) -> bool:
        if _libc.madvise(self._address + offset, nbytes, MADV_POPULATE_READ) == 0:
            return True
        self._supported = False
        logger.debug("page tables are filled on demand: %s", os.strerror(ctypes.get_errno()))
        return False


class PinnedMemory:
    """Registers ``[address + start, address + end)`` of every range, in order, in a background thread.

    What is pinned is always a prefix of the ranges. The first failure ends it: one warning with how to fix it,
    and the rest stays pageable. Copies are split at all ``boundaries`` from the start, so a copy that was planned
    just before a range was registered is valid either way. A range waits until ``reserved()`` (bytes from
    ``address``) has reached its end.
    """

    def __init__(
        self,
        device: Device,
        address: int,
        ranges: Sequence[tuple[int, int]],
        *,
        reserved: Callable[[], int] | None = None,
        start: bool = True,
    ) -> None:
        self._device = device
        self._address = address
        self._reserved = reserved
        self._ranges = [(address + low, address + high) for low, high in ranges]
        self.boundaries: Addresses = np.array([high for _, high in self._ranges], dtype=np.int64)
        self._shift = np.zeros(len(self._ranges), dtype=np.int64)
        self._upto = address
        self._registered = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if start and self._ranges:
            self._thread = threading.Thread(target=self.run, name="lmcache-shm-pin", daemon=True)
            self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        """How far registration has come."""
        return self._upto - self._ranges[0][0] if self._ranges else 0

    def run(self) -> None:
        """Register what is left; what the background thread does."""
        began = time.monotonic()
        try:
            self._device.enter_thread()
            while self._registered < len(self._ranges) and not self._stop.is_set():
                low, high = self._ranges[self._registered]
                end = high - self._address
                if self._reserved is not None and not wait_reserved(
                    self._reserved, end, self._stop
                ):
                    return
                self._shift[self._registered] = self._device.register(low, high - low) - low
                self._registered += 1
                self._upto = high  # last: from now on copies rely on it
                self._stop.wait(PAUSE_S)
        except Exception as error:  # noqa: BLE001 - any failure: copies go on without pinning
            logger.warning(
                "%.1f GiB of the arena stay unpinned and are copied as pageable memory, which is "
                "several times slower: %s. %s",
                (self._ranges[-1][1] - self._upto) / 2**30,
                error,
                getattr(error, "fix", "") or USUAL_REASON,
            )
            return
        logger.info(
            "pinned %.1f GiB of the arena in %.1f s",
            self.pinned_bytes / 2**30,
            time.monotonic() - began,
        )

    def join(self, timeout: float) -> bool:
        """Wait for the background thread; True if everything is pinned."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._registered == len(self._ranges)

    def is_pinned(self, ranges: Ranges) -> np.ndarray:
        """Mask of the ranges whose host memory is pinned; they must not cross ``boundaries``."""
        mask: np.ndarray = ranges.host + ranges.nbytes <= self._upto
        return mask

    def in_one_registration(self, ranges: Ranges) -> bool:
        """True if one registration holds all the host memory from the first range to the last."""
        low, high = ranges.host.min(), (ranges.host + ranges.nbytes).max()
        inside = self.boundaries[(self.boundaries > low) & (self.boundaries < high)]
        return len(inside) == 0

    def as_device_sees(self, ranges: Ranges) -> Ranges:
        """Pinned ranges with host addresses in the device's address space."""
        if not self._shift.any():
            return ranges
        found = np.searchsorted(self.boundaries, ranges.host, side="right")
        return ranges._replace(host=ranges.host + self._shift[found])

    def close(self) -> None:
        """Stop, then unregister everything; no copy may be under way. The mapping may go afterwards."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        while self._registered:
            self._registered -= 1
            low, _ = self._ranges[self._registered]
            self._upto = low
            try:
                self._device.unregister(low)
            except DeviceError as error:
                logger.warning("could not unpin a part of the arena: %s", error)
