"""Registering the arena with the driver, piece by piece, behind the engine's back."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from lmcache_shm.transfer.device import Addresses, Device, DeviceError, Ranges
from lmcache_shm.transfer.mark import wait_for

logger = logging.getLogger(__name__)

PAUSE_S = 0.002
"""Between two pieces. The driver holds locks while it registers, and others wait for them: let them pass."""
USUAL_REASON = "The usual reason is a limit: on locked memory (`ulimit -l`), or the driver's own."


class PinnedMemory:
    """Pins ``[address + start, address + end)`` of every piece, in order, in a background thread.

    What is pinned is always a prefix of the pieces. The first failure ends it: one warning with the
    remedy, and the rest stays pageable. All pieces are edges for copies from the start, so a copy
    that was planned just before a piece got registered is valid either way. A piece waits until ``reserved()``
    (bytes from ``address``) has reached its end: pinning allocates what is not there.
    """

    def __init__(
        self,
        device: Device,
        address: int,
        pieces: Sequence[tuple[int, int]],
        *,
        reserved: Callable[[], int] | None = None,
        start: bool = True,
    ) -> None:
        self._device = device
        self._address = address
        self._reserved = reserved
        self._pieces = [(address + low, address + high) for low, high in pieces]
        self.edges: Addresses = np.array([high for _, high in self._pieces], dtype=np.int64)
        self._shift = np.zeros(len(self._pieces), dtype=np.int64)
        self._upto = address
        self._registered = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if start and self._pieces:
            self._thread = threading.Thread(target=self.run, name="lmcache-shm-pin", daemon=True)
            self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        """How far registration has come."""
        return self._upto - self._pieces[0][0] if self._pieces else 0

    def run(self) -> None:
        """Register what is left; what the background thread does."""
        began = time.monotonic()
        try:
            self._device.enter_thread()
            while self._registered < len(self._pieces) and not self._stop.is_set():
                low, high = self._pieces[self._registered]
                end = high - self._address
                if self._reserved is not None and not wait_for(self._reserved, end, self._stop):
                    return
                self._shift[self._registered] = self._device.register(low, high - low) - low
                self._registered += 1
                self._upto = high  # last: from now on copies count on it
                self._stop.wait(PAUSE_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, copies go on without
            logger.warning(
                "%.1f GiB of the arena stay unpinned and are copied as pageable memory, which is "
                "several times slower: %s. %s",
                (self._pieces[-1][1] - self._upto) / 2**30,
                error,
                getattr(error, "remedy", "") or USUAL_REASON,
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
        return self._registered == len(self._pieces)

    def is_pinned(self, ranges: Ranges) -> np.ndarray:
        """Mask of the ranges whose host memory is pinned; they must not cross ``edges``."""
        mask: np.ndarray = ranges.host + ranges.nbytes <= self._upto
        return mask

    def in_one_piece(self, ranges: Ranges) -> bool:
        """True if one registration holds all the host memory from the first range to the last."""
        low, high = ranges.host.min(), (ranges.host + ranges.nbytes).max()
        inside = self.edges[(self.edges > low) & (self.edges < high)]
        return len(inside) == 0

    def as_device_sees(self, ranges: Ranges) -> Ranges:
        """Pinned ranges with host addresses in the device's address space."""
        if not self._shift.any():
            return ranges
        piece = np.searchsorted(self.edges, ranges.host, side="right")
        return ranges._replace(host=ranges.host + self._shift[piece])

    def close(self) -> None:
        """Stop, then unregister everything; no copy may be under way. The mapping may go afterwards."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        while self._registered:
            self._registered -= 1
            low, _ = self._pieces[self._registered]
            self._upto = low
            try:
                self._device.unregister(low)
            except DeviceError as error:
                logger.warning("could not unpin a piece of the arena: %s", error)
