"""The transfer engine for wherever the KV cache lives."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_shm.transfer.cpu import CpuEngine
from lmcache_shm.transfer.device import Device
from lmcache_shm.transfer.engine import TransferEngine
from lmcache_shm.transfer.guard import ArenaView
from lmcache_shm.transfer.pages import SlotLayout
from lmcache_shm.transfer.plan import KERNEL_BELOW, Wish

logger = logging.getLogger(__name__)


def open_engine(
    arena: ArenaView,
    layouts: Sequence[SlotLayout],
    tensors: Sequence[Any],
    *,
    threads: int = 1,
    backend: Wish = "auto",
    kernel_below: Mapping[str, int] = KERNEL_BELOW,
) -> TransferEngine:
    """An engine for ``tensors`` (torch tensors of all groups, on one device).

    ``threads`` is for CPU, ``backend`` and ``kernel_below`` (bytes a page, by kind of job) for CUDA. Where
    CUDA cannot be used the engine copies pageable memory through torch, and says so once.
    """
    kind = tensors[0].device.type
    if kind == "cpu":
        return CpuEngine(arena, layouts, threads)
    from lmcache_shm.transfer.streams import StreamEngine  # noqa: PLC0415 - not needed on CPU
    from lmcache_shm.transfer.torch_device import TorchDevice  # noqa: PLC0415

    device = _device(tensors)
    if isinstance(device, TorchDevice):
        backend = "pageable"  # it has said so; trying to pin would be a second warning
    return StreamEngine(arena, layouts, device, backend=backend, kernel_below=kernel_below)


def _device(tensors: Sequence[Any]) -> Device:
    from lmcache_shm.transfer.torch_device import TorchDevice  # noqa: PLC0415

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
