"""Run vLLM's Triton kernels on CPU through Triton's own interpreter.

The CUDA/ROCm `triton` wheel has no CPU backend, so vLLM's CPU build turns
Triton off. TRITON_INTERPRET=1 executes kernels with numpy on CPU tensors: slow
but enough for tiny models (DSv4 metadata, FLA/KDA kernels, ...).
Must be installed before vllm.triton_utils is imported.
"""

import os
import types


class _Driver:
    def is_active(self=None):
        return True

    def get_current_device(self):
        return 0

    def set_current_device(self, d):
        pass

    def get_current_stream(self, d=None):
        return 0

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_device_interface(self):
        import torch

        return torch.cpu

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    @property
    def utils(self):
        return types.SimpleNamespace(
            get_device_properties=lambda d: {
                "max_shared_mem": 1 << 20,
                "multiprocessor_count": 2,
                "warpSize": 32,
                "max_num_regs": 65536,
            }
        )


def install():
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor would ask the fake driver
    import triton.backends as tb
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner

    d = _Driver()
    tb.backends["cpu"] = types.SimpleNamespace(
        driver=d, compiler=types.SimpleNamespace(supports_target=lambda t: False)
    )
    driver.set_active(d)

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        cfg = (
            (self.prune_configs(kwargs) or self.configs)[0]
            if len(self.configs) > 1
            else self.configs[0]
        )
        if cfg.pre_hook is not None:
            cfg.pre_hook({**self.nargs, **kwargs, **cfg.all_kwargs()})
        try:
            return self.fn.run(*args, **kwargs, **cfg.all_kwargs())
        finally:
            self.nargs = None

    Autotuner.run = run
    # keep the fast C++ replacements (slot mapping etc.) that are only
    # registered when Triton is absent
    import vllm.triton_utils as tu
    from vllm.platforms.cpu import CpuPlatform

    orig = CpuPlatform.register_triton_kernel_overrides.__func__

    def register(cls):
        tu.HAS_TRITON = False
        try:
            return orig(cls)
        finally:
            tu.HAS_TRITON = True

    CpuPlatform.register_triton_kernel_overrides = classmethod(register)
