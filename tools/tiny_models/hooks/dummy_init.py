"""Seeded dummy weights of a sane scale, in place of vLLM's U(−1e-3, 1e-3) with one seed for every tensor.

With the stock initialiser the logits hardly depend on the KV cache, and a wrong cache would go unnoticed. Only
the initialiser of one tensor is replaced; names, shapes and quantisation stay. What is drawn:

    matrices        N(0, gain² / fan_in), another stream for each tensor
    biases          N(0, 0.1²): a bias near one would drown what attention brings
    other vectors   1 + U(−0.5, 0.5) (norms)
    A, A_log        slow decay, with a small dt_bias: a recurrent state remembers hundreds of tokens
"""

from typing import Any

import torch

SEED = 7


def draw(name: str, shape: torch.Size, generator: torch.Generator, gain: float) -> torch.Tensor:
    """The values of the floating-point tensor called `name`."""
    uniform = torch.rand(shape, generator=generator)
    if name == "A":
        return -(0.02 + 0.48 * uniform)
    if name == "A_log":
        return torch.log(0.02 + 0.48 * uniform)
    if name == "dt_bias":
        return -4.0 + 2.0 * uniform
    if name.endswith("bias"):
        return torch.randn(shape, generator=generator) * 0.1
    if len(shape) >= 2:
        return torch.randn(shape, generator=generator) * (gain / max(1, shape[-1]) ** 0.5)
    return 0.5 + uniform


def install(gain: float = 1.0) -> None:
    """Replace the dummy loader's initialiser in this process."""
    from vllm.model_executor.model_loader import dummy_loader

    names: dict[int, str] = {}
    layer_tensors = dummy_loader.get_layer_tensors
    count = 0

    def get_layer_tensors(layer: Any) -> Any:
        tensors = layer_tensors(layer)
        names.clear()
        names.update({id(tensor): name for name, tensor in tensors.items()})
        return tensors

    def initialise(param: torch.Tensor, *_: Any, **__: Any) -> None:
        nonlocal count
        if param.device.type == "meta":
            return
        fixed = getattr(param, "dummy_weight_value", None)
        if fixed is not None:
            param.fill_(fixed)
            return
        count += 1
        generator = torch.Generator().manual_seed(SEED * 100003 + count)
        if param.dtype == torch.uint8:  # packed mxfp4 and its e8m0 scales
            param.data.copy_(
                torch.randint(118, 126, param.shape, generator=generator, dtype=torch.uint8)
            )
        elif torch.is_floating_point(
            param
        ):  # other integers (index tables) keep what the model put there
            values = draw(names.get(id(param), ""), param.shape, generator, gain)
            param.data.copy_(values.to(param.dtype))

    dummy_loader.get_layer_tensors = get_layer_tensors
    dummy_loader.initialize_single_dummy_weight = initialise
