"""The CUDA device: streams and events through torch, copies and registration through the driver.

``libcuda`` is called directly: numpy arrays go into ``cuMemcpyBatchAsync`` without a Python object per
range, and the driver API has no sticky "last error" that would surface in a later call of another library.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lmcache_shm.arena.job import JobKind
from lmcache_shm.transfer.device import DeviceError, Ranges, Rows

# Values and layouts from cuda.h, compared with the headers of CUDA 12.8 and 13.0 (and tests/unit/transfer/libcuda.py).
BATCH_VERSION = (
    12080  # the entry point of 12.8 has failIdx; asking for that version keeps its signature
)
MEMHOSTREGISTER_PORTABLE, MEMHOSTREGISTER_DEVICEMAP = 1, 2
MEMORYTYPE_HOST, MEMORYTYPE_DEVICE = 1, 2
SRC_ACCESS_ORDER_STREAM, SRC_ACCESS_ORDER_ANY = 1, 3
DEVICE_ATTRIBUTE_MAX_PITCH = 11
STREAM_CAPTURE_MODE_RELAXED = 2
STREAM_NON_BLOCKING = 1
OUT_OF_MEMORY, OPERATING_SYSTEM, NOT_FOUND = 2, 304, 500
ALREADY_REGISTERED, NOT_SUPPORTED = 712, 801

MEMLOCK = (
    "Raise the limit on locked memory: `ulimit -l unlimited`, in Docker `--ulimit memlock=-1`, in "
    "systemd `LimitMEMLOCK=infinity`."
)
FIXES = {
    OUT_OF_MEMORY: MEMLOCK,
    OPERATING_SYSTEM: MEMLOCK,  # some drivers' code for a limit
    ALREADY_REGISTERED: "Another component of this process has registered the same memory.",
    NOT_SUPPORTED: "This platform (WSL, some virtual machines) cannot register shared memory.",
}


class _Memcpy2D(ctypes.Structure):
    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("src_access_order", ctypes.c_uint),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """The calls of libcuda that are used, with errors as exceptions."""

    def __init__(self, library: Any = None) -> None:
        """``library`` stands in for libcuda in tests. Raises DeviceError where there is no driver."""
        try:
            self._lib = ctypes.CDLL("libcuda.so.1") if library is None else library
        except OSError as error:
            raise DeviceError("libcuda.so.1", 0, str(error)) from error
        self.call("cuInit", ctypes.c_uint(0))
        self.batch = self._find_batch()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library; every argument must be a ctypes object."""
        try:
            function = getattr(self._lib, name)
        except AttributeError:
            raise DeviceError(name, NOT_FOUND, "the driver is too old to have it") from None
        self._check(name, function(*arguments))

    def check_batch(self, code: int) -> None:
        self._check("cuMemcpyBatchAsync", code)

    def _check(self, name: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            words = (text.value or b"unknown error").decode()
            raise DeviceError(name, code, words, FIXES.get(code, ""))

    def _find_batch(self) -> Any:
        """The 12.8 form of cuMemcpyBatchAsync, or None with an older driver."""
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        if version.value < BATCH_VERSION:
            return None
        entry, status = ctypes.c_void_p(), ctypes.c_int()
        code = self._lib.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync",
            ctypes.byref(entry),
            ctypes.c_int(BATCH_VERSION),
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        if code or not entry.value:
            return None
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        # dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, hStream
        form = ctypes.CFUNCTYPE(
            ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
        )
        return form(entry.value)


class CudaDevice:
    """One GPU of this process; see Device for what each method does."""

    def __init__(self, index: int) -> None:
        import torch  # noqa: PLC0415 - a process without a GPU never pays for it

        self._torch = torch
        self._index = index
        self.name = str(torch.cuda.get_device_name(index))
        self._driver = Driver()
        self._context = ctypes.c_void_p()
        device = ctypes.c_int()
        self._driver.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        # The primary context is the one that torch uses, too; it is never released here.
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        pitch = ctypes.c_int()
        self._driver.call(
            "cuDeviceGetAttribute",
            ctypes.byref(pitch),
            ctypes.c_int(DEVICE_ATTRIBUTE_MAX_PITCH),
            device,
        )
        self.max_pitch = pitch.value
        self.has_batch = self._driver.batch is not None
        self._kernel = self._load_kernel()
        self.has_kernel = self._kernel is not None
        self._launching = threading.Lock()
        self._handles = self._create_streams()
        self._streams = {
            kind: torch.cuda.ExternalStream(handle.value, device=index)
            for kind, handle in self._handles.items()
        }
        # A store's source is written by kernels before it; a load's is committed and never changes.
        self._attributes = {
            "store": _CopyAttributes(src_access_order=SRC_ACCESS_ORDER_STREAM),
            "load": _CopyAttributes(src_access_order=SRC_ACCESS_ORDER_ANY),
        }

    def _create_streams(self) -> dict[str, ctypes.c_void_p]:
        """A stream of the lowest priority for each direction, ours alone.

        torch deals its streams out from a pool of 32, so another library may be given the same one:
        copies would wait for their kernels, or end up in their graph capture.
        """
        lowest, highest = ctypes.c_int(), ctypes.c_int()
        streams = {"store": ctypes.c_void_p(), "load": ctypes.c_void_p()}
        with self._inside():
            self._driver.call(
                "cuCtxGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest)
            )
            for handle in streams.values():
                self._driver.call(
                    "cuStreamCreateWithPriority",
                    ctypes.byref(handle),
                    ctypes.c_uint(STREAM_NON_BLOCKING),  # independent of the legacy default stream
                    lowest,
                )
        return streams

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """For driver calls from a thread of the engine: its context and capture mode are restored."""
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        mode = ctypes.c_int(STREAM_CAPTURE_MODE_RELAXED)  # see enter_thread
        try:
            self._driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                self._driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def enter_thread(self) -> None:
        self._guarded("cudaSetDevice", lambda: self._torch.cuda.set_device(self._index))
        self._driver.call("cuCtxSetCurrent", self._context)
        # While the engine captures CUDA graphs, other threads' calls (registration, event queries) would
        # fail and spoil the capture. Ours never touch a capturing stream, so they may opt out.
        mode = ctypes.c_int(STREAM_CAPTURE_MODE_RELAXED)
        self._driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def warm_up(self) -> None:
        if self._kernel is not None:
            nothing = np.zeros(1, dtype=np.int64)
            self.copy_kernel("load", Ranges(nothing, nothing, nothing))

    def register(self, address: int, nbytes: int) -> int:
        flags = MEMHOSTREGISTER_PORTABLE | MEMHOSTREGISTER_DEVICEMAP
        self._driver.call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_uint(flags),
        )
        mapped = ctypes.c_uint64()
        try:
            self._driver.call(
                "cuMemHostGetDevicePointer_v2",
                ctypes.byref(mapped),
                ctypes.c_void_p(address),
                ctypes.c_uint(0),
            )
        except DeviceError:
            self.unregister(address)
            raise
        return mapped.value

    def unregister(self, address: int) -> None:
        # Called by the thread that closes the engine, which may have no context.
        with self._inside():
            self._driver.call("cuMemHostUnregister", ctypes.c_void_p(address))

    def marker_here(self) -> Any:
        return self._record(self._torch.cuda.current_stream(self._index))

    def wait(self, kind: JobKind, event: Any) -> None:
        self._guarded("cudaStreamWaitEvent", lambda: self._streams[kind].wait_event(event))

    def mark(self, kind: JobKind) -> Any:
        return self._record(self._streams[kind])

    def reached(self, event: Any) -> bool:
        return bool(self._guarded("cudaEventQuery", event.query))

    def synchronize(self, kind: JobKind) -> None:
        self._guarded("cudaStreamSynchronize", self._streams[kind].synchronize)

    def copy(self, kind: JobKind, device: int, host: int, nbytes: int) -> None:
        size, stream = ctypes.c_size_t(nbytes), self._handles[kind]
        gpu, cpu = ctypes.c_uint64(device), ctypes.c_void_p(host)
        if kind == "store":
            self._driver.call("cuMemcpyDtoHAsync_v2", cpu, gpu, size, stream)
        else:
            self._driver.call("cuMemcpyHtoDAsync_v2", gpu, cpu, size, stream)

    def copy_rows(self, kind: JobKind, rows: Rows) -> None:
        copy = _Memcpy2D(width=rows.width, height=rows.height)
        # A single row has no use for a pitch, but the driver checks it.
        device_pitch = rows.device_pitch if rows.height > 1 else rows.width
        host_pitch = rows.host_pitch if rows.height > 1 else rows.width
        if kind == "store":
            copy.src_type, copy.src_device, copy.src_pitch = (
                MEMORYTYPE_DEVICE,
                rows.device,
                device_pitch,
            )
            copy.dst_type, copy.dst_host, copy.dst_pitch = MEMORYTYPE_HOST, rows.host, host_pitch
        else:
            copy.src_type, copy.src_host, copy.src_pitch = MEMORYTYPE_HOST, rows.host, host_pitch
            copy.dst_type, copy.dst_device, copy.dst_pitch = (
                MEMORYTYPE_DEVICE,
                rows.device,
                device_pitch,
            )
        self._driver.call("cuMemcpy2DAsync_v2", ctypes.byref(copy), self._handles[kind])

    def copy_batch(self, kind: JobKind, ranges: Ranges) -> None:
        sources, targets, sizes = self._directed(kind, ranges)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._driver.check_batch(
            self._driver.batch(
                targets.ctypes.data,
                sources.ctypes.data,
                sizes.ctypes.data,
                len(sizes),
                ctypes.addressof(self._attributes[kind]),
                ctypes.addressof(first),
                1,
                ctypes.addressof(failed),
                self._handles[kind],
            )
        )

    def copy_kernel(self, kind: JobKind, ranges: Ranges) -> Any:
        torch, kernel = self._torch, self._kernel
        count = len(ranges.nbytes)
        # Every row begins at a multiple of 16 bytes: Triton compiles again for pointers that do not.
        table = np.zeros((3, count + count % 2), dtype=np.int64)
        table[:, :count] = self._directed(kind, ranges)

        def launch() -> Any:
            stream = self._streams[kind]
            # One at a time: or else both threads would compile the kernel when it is new.
            with self._launching, torch.cuda.device(self._index), torch.cuda.stream(stream):
                # Pinned, or else torch would wait for the whole stream before it went on.
                pinned = torch.from_numpy(table).pin_memory()
                on_gpu = pinned.to(f"cuda:{self._index}", non_blocking=True)
                grid = (min(kernel.PROGRAMS, count),)
                kernel.copy_ranges[grid](*on_gpu, count, WORDS=kernel.WORDS)
            return pinned, on_gpu

        return self._guarded("kernel launch", launch)

    @staticmethod
    def _directed(kind: JobKind, ranges: Ranges) -> tuple[Any, Any, Any]:
        """Contiguous (sources, targets, sizes)."""
        device, host, nbytes = (np.ascontiguousarray(column) for column in ranges)
        return (device, host, nbytes) if kind == "store" else (host, device, nbytes)

    def _record(self, stream: Any) -> Any:
        def record() -> Any:
            event = self._torch.cuda.Event()
            event.record(stream)
            return event

        return self._guarded("cudaEventRecord", record)

    @staticmethod
    def _guarded(call: str, action: Any) -> Any:
        """Call something of torch, which reports CUDA's errors as RuntimeError."""
        try:
            return action()
        except DeviceError:
            raise
        except RuntimeError as error:
            raise DeviceError(call, -1, str(error).split("\n", 1)[0]) from error

    @staticmethod
    def _load_kernel() -> Any:
        """The kernel's module, compiled at its first launch; None without a Triton that works."""
        try:
            from lmcache_shm.transfer import kernel  # noqa: PLC0415
        except Exception:  # noqa: BLE001 - a broken Triton raises whatever it likes
            return None
        return kernel
