"""Mamba1's selective scan and one-token update in torch.

vLLM 0.32 has the scan as a CUDA kernel only, and its CPU update wants Mamba2's head dimension. Slow, one token at a time.
"""

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import silu, softplus


def scan(
    u: torch.Tensor,
    ssm_states: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool = False,
    *,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    **_: Any,
) -> torch.Tensor:
    """u, delta, z: [dim, tokens]; A: [dim, state]; B, C: [state, tokens]; ssm_states: [blocks, dim, state], updated."""
    step = delta.float() + (0 if delta_bias is None else delta_bias.float()[:, None])
    step = softplus(step) if delta_softplus else step
    x, b, c = u.float(), B.float(), C.float()
    out = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for row, (first, last) in enumerate(pairwise(bounds)):
        block = int(cache_indices[row].flatten()[0])
        resumed = has_initial_state is not None and bool(has_initial_state[row])
        state = ssm_states[block].float().clone() if resumed else torch.zeros(A.shape)
        for t in range(first, last):
            state = (
                torch.exp(step[:, t, None] * A) * state
                + (step[:, t] * x[:, t])[:, None] * b[None, :, t]
            )
            out[:, t] = state @ c[:, t]
        if block:  # block 0 is the null block: padding
            ssm_states[block].copy_(state)
    return ((out + D[:, None] * x) * silu(z.float())).to(u.dtype)


def update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    z: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """One decoded token per sequence. x, dt, z, out: [batch, dim]; B, C: [batch, state]; state: [blocks, dim, state]."""
    step = softplus(dt.float() + dt_bias.float())
    for row, block in enumerate(state_batch_indices.flatten().tolist()):
        if not block:
            continue
        decay = torch.exp(step[row, :, None] * A)
        new = decay * state[block].float() + (step[row] * x[row].float())[:, None] * B[row].float()
        state[block].copy_(new)
        y = new @ C[row].float() + D * x[row].float()
        out[row] = (y * silu(z[row].float())).to(out.dtype)


def install() -> None:
    """Use both in the Mamba1 mixer."""
    from vllm.model_executor.layers.mamba import mamba_mixer

    mamba_mixer.selective_scan_fn = scan
    mamba_mixer.selective_state_update = update
