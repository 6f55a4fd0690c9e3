"""The accelerator as the stream engine uses it; ``cuda.py`` implements it.

Addresses are plain integers. ``kind`` names the stream: stores run on one, loads on another; work on one
stream completes in the order in which it was given.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.job import JobKind

Addresses = npt.NDArray[np.int64]


class DeviceError(RuntimeError):
    """A call into the driver failed. ``fix``: what the user can do about it, "" if nothing."""

    def __init__(self, call: str, code: int, text: str, fix: str = "") -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.code = code
        self.fix = fix


class Ranges(NamedTuple):
    """n copies of contiguous bytes between device and host memory."""

    device: Addresses
    host: Addresses
    nbytes: Addresses

    @property
    def total(self) -> int:
        return int(self.nbytes.sum())

    def pick(self, which: npt.NDArray[Any]) -> "Ranges":
        """The copies that a mask or an index array selects."""
        return Ranges(self.device[which], self.host[which], self.nbytes[which])


class Rows(NamedTuple):
    """``height`` copies of ``width`` bytes, equally spaced on both sides: one 2D copy."""

    device: int
    device_pitch: int
    host: int
    host_pitch: int
    width: int
    height: int


class Device(Protocol):
    """An accelerator with two copy streams. Every method may raise DeviceError."""

    name: str
    has_batch: bool
    """Many ranges in one driver call."""
    has_kernel: bool
    """A kernel that reads and writes mapped host memory."""
    max_pitch: int

    def enter_thread(self) -> None:
        """Make the device usable from the calling thread; once per thread, before anything else."""

    def warm_up(self) -> None:
        """Do now what is slow the first time (compiling the kernel). Called by the thread that loads, if at all."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory and map it for the device; its address as the device sees it."""

    def unregister(self, address: int) -> None:
        """From any thread, also one that never entered."""

    def marker_here(self) -> Any:
        """An event behind everything submitted so far to the caller's current stream."""

    def wait(self, kind: JobKind, event: Any) -> None:
        """The stream goes on only after the event; does not block the caller."""

    def mark(self, kind: JobKind) -> Any:
        """An event behind everything submitted so far to the stream."""

    def reached(self, event: Any) -> bool:
        """Whether the device has passed the event. Does not block."""

    def synchronize(self, kind: JobKind) -> None:
        """Block until the stream is empty. Only for clearing up after a failure."""

    def copy(self, kind: JobKind, device: int, host: int, nbytes: int) -> None:
        """One range. With pageable host memory the call may block until it is done."""

    def copy_rows(self, kind: JobKind, rows: Rows) -> None:
        """One 2D copy; host memory in one registration or in none."""

    def copy_batch(self, kind: JobKind, ranges: Ranges) -> None:
        """All ranges in one call, in any order; host addresses as the device sees them."""

    def copy_kernel(self, kind: JobKind, ranges: Ranges) -> Any:
        """Like ``copy_batch``, by a kernel; 8-byte aligned. The caller keeps the result until the end event."""
