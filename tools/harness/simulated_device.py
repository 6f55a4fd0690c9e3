"""A device that exists only in memory, to prove the stream engine without a GPU.

"Device memory" is host memory. Each stream is a queue of operations that run when the owner says so
(``advance``), or as soon as they are submitted (``eager``), or in a thread of its own (``Clock``): late and out of step
between streams, in order within one. It is as strict as a driver: a copy whose host memory lies partly in
a registration, a pitch that is too large, an unaligned kernel range are errors. Any call can be told to fail.
"""

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.job import JobKind
from lmcache_shm.transfer.device import Device, DeviceError, Ranges, Rows

INVALID_VALUE = 1


class Event:
    """Set by the stream that it was recorded on, or by hand."""

    def __init__(self, *, done: bool = False) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


class SimulatedDevice:
    """See the module. The n-th registration maps n times ``mapped_at`` above the host's addresses."""

    name = "simulated"

    def __init__(
        self,
        *,
        eager: bool = True,
        has_batch: bool = True,
        has_kernel: bool = True,
        max_pitch: int = (1 << 31) - 1,
        mapped_at: int = 0,
        pinned_limit: int | None = None,
    ) -> None:
        self.eager = eager
        self.has_batch = has_batch
        self.has_kernel = has_kernel
        self.max_pitch = max_pitch
        self.calls: Counter[str] = Counter()
        self.registered: dict[int, int] = {}
        self._mappings: dict[int, int] = {}
        self._fails: dict[str, set[int]] = {}
        self._code = 700
        self._mapped_at = mapped_at
        self._pinned_limit = pinned_limit
        self._lock = threading.RLock()
        self._streams: dict[str, deque[tuple[Any, Callable[[], object]]]] = {
            "store": deque(),
            "load": deque(),
        }

    def fail(self, call: str, *numbers: int, code: int = 700) -> None:
        """Let the given calls of a method fail, counted from 1; without numbers every call."""
        self._fails[call] = set(numbers)
        self._code = code

    def advance(self, kind: str, operations: int = 1 << 30) -> int:
        """Run up to so many operations of a stream; how many ran before it was empty or had to wait."""
        ran = 0
        with self._lock:
            stream = self._streams[kind]
            while stream and ran < operations:
                gate, operation = stream[0]
                if gate is not None and not gate.query():
                    break
                stream.popleft()
                operation()
                ran += 1
        return ran

    def enter_thread(self) -> None:
        self._count("enter_thread")

    def warm_up(self) -> None:
        self._count("warm_up")

    def register(self, address: int, nbytes: int) -> int:
        self._count("register")
        with self._lock:
            total = sum(self.registered.values()) + nbytes
            if self._pinned_limit is not None and total > self._pinned_limit:
                raise DeviceError("register", 2, "out of memory", "Raise the memlock limit.")
            self.registered[address] = nbytes
            mapped = address + self._mapped_at * self.calls["register"]
            self._mappings[address] = mapped
        return mapped

    def unregister(self, address: int) -> None:
        self._count("unregister")
        with self._lock:
            self._mappings.pop(address, None)
            if self.registered.pop(address, None) is None:
                raise DeviceError("unregister", INVALID_VALUE, f"{address:#x} is not registered")

    def marker_here(self) -> Event:
        self._count("marker_here")
        return Event(done=True)

    def wait(self, kind: JobKind, event: Event) -> None:
        self._count("wait")
        self._enqueue(kind, lambda: None, event)

    def mark(self, kind: JobKind) -> Event:
        self._count("mark")
        event = Event()
        self._enqueue(kind, lambda: setattr(event, "done", True))
        return event

    def reached(self, event: Event) -> bool:
        self._count("reached")
        if self.eager:
            for kind in self._streams:
                self.advance(kind)
        return event.done

    def synchronize(self, kind: JobKind) -> None:
        self._count("synchronize")
        self.advance(kind)

    def copy(self, kind: JobKind, device: int, host: int, nbytes: int) -> None:
        self._count("copy")
        self._check_host(host, nbytes)
        self._move(kind, device, host, nbytes)

    def copy_rows(self, kind: JobKind, rows: Rows) -> None:
        self._count("copy_rows")
        if rows.height > 1 and not (
            rows.width <= rows.device_pitch <= self.max_pitch
            and rows.width <= rows.host_pitch <= self.max_pitch
        ):
            raise DeviceError("copy_rows", INVALID_VALUE, f"pitch out of range: {rows}")
        self._check_host(rows.host, rows.host_pitch * (rows.height - 1) + rows.width)
        for i in range(rows.height):
            device, host = rows.device + i * rows.device_pitch, rows.host + i * rows.host_pitch
            self._move(kind, device, host, rows.width)

    def copy_batch(self, kind: JobKind, ranges: Ranges) -> None:
        self._count("copy_batch")
        self._mapped_copies(kind, ranges)

    def copy_kernel(self, kind: JobKind, ranges: Ranges) -> object:
        self._count("copy_kernel")
        if ((ranges.device | ranges.host | ranges.nbytes) & 7).any():
            raise DeviceError("copy_kernel", INVALID_VALUE, "misaligned address")
        self._mapped_copies(kind, ranges)
        return ranges

    def _mapped_copies(self, kind: JobKind, ranges: Ranges) -> None:
        for device, mapped, nbytes in zip(*(c.tolist() for c in ranges), strict=True):
            self._move(kind, device, self._host_address(mapped, nbytes), nbytes)

    def _host_address(self, mapped: int, nbytes: int) -> int:
        with self._lock:
            for host, start in self._mappings.items():
                if start <= mapped and mapped + nbytes <= start + self.registered.get(host, 0):
                    return host + mapped - start
        raise DeviceError("copy", INVALID_VALUE, f"{mapped:#x}+{nbytes} is not in one mapping")

    def _check_host(self, host: int, nbytes: int) -> bool:
        """Entirely in one registration (True), or in none (False)."""
        with self._lock:
            for start, size in self.registered.items():
                if host < start + size and start < host + nbytes:
                    if start <= host and host + nbytes <= start + size:
                        return True
                    raise DeviceError("copy", INVALID_VALUE, "partly registered host memory")
        return False

    def _move(self, kind: JobKind, device: int, host: int, nbytes: int) -> None:
        target, source = (host, device) if kind == "store" else (device, host)
        self._enqueue(kind, lambda: ctypes.memmove(target, source, nbytes))

    def _enqueue(self, kind: str, operation: Callable[[], object], gate: Any = None) -> None:
        with self._lock:
            self._streams[kind].append((gate, operation))
            if self.eager:
                self.advance(kind)

    def _count(self, call: str) -> None:
        with self._lock:
            self.calls[call] += 1
            numbers = self._fails.get(call)
            if numbers is not None and (not numbers or self.calls[call] in numbers):
                raise DeviceError(call, self._code, "told to fail", "Do not tell it to.")


class HostFixture:
    """The simulated device with host memory in place of device memory, for the benches."""

    def __init__(self) -> None:
        self.device: Device = SimulatedDevice()
        self._held: list[npt.NDArray[np.uint8]] = []

    def allocate(self, nbytes: int) -> int:
        self._held.append(np.ones(nbytes, dtype=np.uint8))
        return self._held[-1].ctypes.data

    def release(self) -> None:
        self._held.clear()
