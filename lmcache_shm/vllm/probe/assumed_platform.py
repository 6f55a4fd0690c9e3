# ruff: noqa: PLC0415, SLF001, ARG003  (an answer in place of a device: late imports, vLLM internals, its signatures)
"""Let vLLM resolve a configuration for an NVIDIA GPU that this machine does not have.

The block size, the attention backend and so N depend on the platform. vLLM's own CUDA platform
code can be asked, provided that what needs the device or its compiled kernels is answered for it:
the compute capability is *assumed*, kernels are stand-ins that say "not supported" (they decide
about matrix products, not about the KV cache), and nothing is ever run. For one process that does
nothing else; see :mod:`lmcache_shm.vllm.probe.resolve`.
"""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

KERNEL_MODULES = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)


class StandIn:
    """An event, stream or kernel: accepts everything, does nothing, answers False."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False


def events_without_cuda() -> None:
    """Some models make CUDA events when they are built, also on other platforms."""
    import torch

    if not torch.cuda._is_compiled():
        torch.cuda.Event = torch.cuda.Stream = StandIn


def assume_cuda(capability: tuple[int, int]) -> None:
    """Make vLLM's current platform CUDA with this compute capability. Call before other imports."""
    import torch

    for name in KERNEL_MODULES:
        sys.modules[name] = ModuleType(name)
    events_without_cuda()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    cuda.current_stream = StandIn
    cuda.get_device_capability = lambda *_: capability
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        name="assumed", major=capability[0], minor=capability[1], multi_processor_count=132
    )
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.empty_cache = lambda: None
    # With no visible device vLLM keeps Triton's decorators without asking for an active driver.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    from vllm import platforms

    platforms.vllm_version_matches_substr = lambda _: False  # "a CPU build": not for this question
    platforms._current_platform = platform(capability)

    import vllm._custom_ops as ops

    for name in dir(ops):
        if "support" in name:
            setattr(ops, name, StandIn())


def platform(capability: tuple[int, int]) -> Any:
    """VLLM's CUDA platform, answering for the absent device."""
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class AssumedCuda(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return f"assumed, compute capability {capability[0]}.{capability[1]}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def get_cuda_runtime_major(cls) -> int:
            return 13

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def device_count(cls) -> int:
            return 64  # any tensor-parallel layout may be asked about

        @classmethod
        def import_kernels(cls) -> None:
            pass

    return AssumedCuda()


def kernels_stand_in() -> None:
    """From now on a kernel that is missing is a stand-in, and DeepGEMM is there.

    Only after the model's module is imported: at import, ``hasattr(torch.ops._C, …)`` decides
    what is registered, and must stay truthful.
    """
    indexer: Any = sys.modules.get("vllm.model_executor.layers.sparse_attn_indexer")
    if indexer is not None:  # sparse attention is not even built without that library
        indexer.has_deep_gemm = lambda: True
    from torch._ops import _OpNamespace

    real = _OpNamespace.__getattr__

    def lookup(self: Any, name: str) -> Any:
        try:
            return real(self, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return StandIn()

    _OpNamespace.__getattr__ = lookup
