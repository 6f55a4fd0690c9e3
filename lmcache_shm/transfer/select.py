"""The transfer engine for wherever the KV cache lives, and the device for where no other back end fits."""

import ctypes
import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmcache_shm.arena.job import JobKind
from lmcache_shm.transfer.cpu import CpuEngine
from lmcache_shm.transfer.device import Device, DeviceError, Ranges, Rows
from lmcache_shm.transfer.engine import TransferEngine
from lmcache_shm.transfer.guard import ArenaView
from lmcache_shm.transfer.pages import SlotLayout
from lmcache_shm.transfer.plan import KERNEL_BELOW, RequestedBackend

logger = logging.getLogger(__name__)

NOT_SUPPORTED = 801


def open_engine(
    arena: ArenaView,
    layouts: Sequence[SlotLayout],
    tensors: Sequence[Any],
    *,
    threads: int = 1,
    backend: RequestedBackend = "auto",
    kernel_below: Mapping[str, int] = KERNEL_BELOW,
) -> TransferEngine:
    """An engine for ``tensors`` (torch tensors of all groups, on one device).

    ``threads`` is for CPU, ``backend`` and ``kernel_below`` (bytes a page, by kind of job) for CUDA. Where
    CUDA cannot be used, the engine logs one warning and copies pageable memory through torch.
    """
    kind = tensors[0].device.type
    if kind == "cpu":
        return CpuEngine(arena, layouts, threads)
    from lmcache_shm.transfer.streams import StreamEngine  # noqa: PLC0415 - not needed on CPU

    device = _device(tensors)
    if isinstance(device, TorchDevice):
        backend = "pageable"  # warned already; trying to pin would be a second warning
    return StreamEngine(arena, layouts, device, backend=backend, kernel_below=kernel_below)


def _device(tensors: Sequence[Any]) -> Device:
    where = tensors[0].device
    if where.type == "cuda" and not _is_rocm():
        from lmcache_shm.transfer.cuda import CudaDevice  # noqa: PLC0415

        try:
            return CudaDevice(where.index or 0)
        except RuntimeError as error:  # the driver's (DeviceError) or torch's
            logger.warning("the CUDA driver cannot be used (%s): pageable copies", error)
            return TorchDevice(tensors)
    name = "ROCm" if where.type == "cuda" else where.type
    logger.warning("%s is not supported, using pageable copies, which are slow", name)
    return TorchDevice(tensors)


def _is_rocm() -> bool:
    import torch  # noqa: PLC0415

    return torch.version.hip is not None


class TorchDevice:
    """Pageable copies through torch: for accelerators without a back end of their own (ROCm, XPU), and a
    CUDA device whose driver cannot be reached. Correct and slow; nothing is pinned and every copy blocks its thread.

    It reaches device memory through the storages of the registered tensors.
    """

    has_batch = False
    has_kernel = False
    max_pitch = 0

    def __init__(self, tensors: Iterable[Any]) -> None:
        import torch  # noqa: PLC0415 - only where tensors come from torch

        self._torch = torch
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            storages[storage.data_ptr()] = whole
            self._device = tensor.device
        self._starts = sorted(storages)
        self._storages = [storages[start] for start in self._starts]
        self.name = str(self._device)

    def enter_thread(self) -> None:
        """Nothing to do: tensors know their device."""

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def register(self, address: int, nbytes: int) -> int:
        raise DeviceError(
            "pinning", NOT_SUPPORTED, f"not supported on {self.name}", "Using pageable copies."
        )

    def unregister(self, address: int) -> None:
        """Never reached: nothing gets registered."""

    def marker_here(self) -> Any:
        if self._device.type == "cpu":
            return None
        event = self._torch.Event(device=self._device)
        event.record()
        return event

    def wait(self, kind: JobKind, event: Any) -> None:
        """Block: the copies that follow are not on a stream of their own."""
        if event is not None:
            event.synchronize()

    def mark(self, kind: JobKind) -> Any:
        return True

    def reached(self, event: Any) -> bool:
        return True

    def synchronize(self, kind: JobKind) -> None:
        """Every copy has ended when its call returned."""

    def copy(self, kind: JobKind, device: int, host: int, nbytes: int) -> None:
        at = bisect_right(self._starts, device) - 1
        offset = device - self._starts[at]
        on_device = self._storages[at][offset : offset + nbytes]
        buffer = (ctypes.c_uint8 * nbytes).from_address(host)
        on_host = self._torch.frombuffer(buffer, dtype=self._torch.uint8)
        try:
            if kind == "store":
                on_host.copy_(on_device)
            else:
                on_device.copy_(on_host)
        except RuntimeError as error:
            raise DeviceError("copy_", -1, str(error).split("\n", 1)[0]) from error

    def copy_rows(self, kind: JobKind, rows: Rows) -> None:
        for i in range(rows.height):
            device, host = rows.device + i * rows.device_pitch, rows.host + i * rows.host_pitch
            self.copy(kind, device, host, rows.width)

    def copy_batch(self, kind: JobKind, ranges: Ranges) -> None:
        raise NotImplementedError

    def copy_kernel(self, kind: JobKind, ranges: Ranges) -> Any:
        raise NotImplementedError
