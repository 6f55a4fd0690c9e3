"""Let vLLM's own offloading connectors run on its CPU platform, as baselines.

Only what needs a GPU is replaced: streams and events do nothing (the copies are synchronous), copies
are torch copies or memmove. Scheduler side, policies and layouts are vLLM's own.
"""

import contextlib
import ctypes
import inspect
import time
import types
from typing import Any

import torch


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return max((other.at - self.at) * 1e3, 1e-6)


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Proxy:
    """An object of which some attributes are replaced."""

    def __init__(self, base: Any, **over: Any) -> None:
        self.__dict__.update(over)
        self._base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


class CopyBackend:
    """SimpleCPUOffloadConnector's copies, done at once."""

    def init(self, gpu: dict[str, Any], cpu: dict[str, Any], *_: Any) -> None:
        self.gpu, self.cpu = list(gpu.values()), list(cpu.values())

    def launch_copy(
        self, src_blocks: Any, dst_blocks: Any, is_store: Any, event_idx: int, events_list: list[Any],
        wait_event: Any = None,
    ) -> None:  # fmt: skip
        source, target = torch.tensor(src_blocks), torch.tensor(dst_blocks)
        for g, c in zip(self.gpu, self.cpu, strict=True):
            src, dst = (g, c) if is_store else (c, g)
            dst[target] = src[source]
        events_list.append((event_idx, Event()))

    def shutdown(self) -> None:
        pass


def simple() -> None:
    """For SimpleCPUOffloadConnector."""
    from vllm.v1.simple_kv_offload import worker

    cuda = types.SimpleNamespace(Stream=Stream, current_stream=lambda: None)
    worker.torch = Proxy(torch, cuda=cuda, Event=Event)
    worker.DmaCopyBackend = CopyBackend


def offloading() -> None:
    """For OffloadingConnector."""
    from vllm.v1.kv_offload.cpu import gpu_worker, spec

    source = inspect.getsource(gpu_worker).replace(
        "assert gpu_tensor.is_cuda or gpu_tensor.is_xpu", "pass"
    )
    exec(compile(source, gpu_worker.__file__, "exec"), gpu_worker.__dict__)  # noqa: S102
    gpu_worker.torch = Proxy(torch, Event=Event)
    gpu_worker.current_platform = Proxy(
        gpu_worker.current_platform, Stream=Stream,
        current_stream=lambda: None, stream=lambda _: contextlib.nullcontext(),
    )  # fmt: skip
    gpu_worker._select_swap_blocks_fn = lambda *_, **__: _memmove
    spec.CPUOffloadingWorker = gpu_worker.CPUOffloadingWorker

    def get_worker(self: Any, kv_caches: Any) -> Any:
        if not self._worker:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    spec.CPUOffloadingSpec.get_worker = get_worker


def _memmove(src: Any, dst: Any, sizes: Any, **_: Any) -> None:
    for s, d, n in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(d, s, n)
