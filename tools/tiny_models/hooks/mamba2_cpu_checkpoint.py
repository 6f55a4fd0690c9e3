"""Make Mamba2's prefix caching in `align` mode work on vLLM 0.32's CPU backend.

Its CPU scan ignores return_intermediate_states and returns one state per sequence, and store_prefill_checkpoint is a Triton
kernel; the mixer asks for both whenever a prefill holds an internal checkpoint. Here the scan kernel runs chunk by chunk, and
torch stores the state.
"""

from itertools import pairwise

import torch


def install():
    import vllm.model_executor.layers.mamba.mamba_mixer2 as mixer2
    import vllm.model_executor.layers.mamba.ops.ssd_combined as ssd

    base = ssd._mamba_chunk_scan_combined_fwd

    def scan(x, dt, A, B, C, chunk_size, out, **kw):
        if not kw.get("return_intermediate_states"):
            return base(x, dt, A, B, C, chunk_size, out, **kw)
        kw = dict(kw)
        kw.pop("return_intermediate_states")
        cu, init = kw.pop("cu_seqlens"), kw.pop("initial_states")
        kw.pop("last_chunk_indices")
        bounds = kw.pop("cu_chunk_seqlens").tolist()
        kw.pop("seq_idx", None)
        z = kw.pop("z", None)
        starts = set(cu.tolist())
        states, seq, state = [], -1, None
        for s, e in pairwise(bounds):
            if s in starts:
                seq += 1
                state = None if init is None else init[seq : seq + 1]
            state = base(
                x[s:e],
                dt[s:e],
                A,
                B[s:e],
                C[s:e],
                chunk_size,
                out[s:e],
                z=None if z is None else z[s:e],
                initial_states=state,
                cu_seqlens=torch.tensor([0, e - s], dtype=torch.int32),
                **kw,
            )
            states.append(state)
        return torch.cat(states)

    def store(
        ckpt, chunk_idx, x, conv_state, chunk_states, ssm_state, query_start_loc, *, state_len
    ):
        for row, off in enumerate(ckpt.checkpoint_offsets.tolist()):
            if off <= 0:
                continue
            dst = int(ckpt.state_indices[row])
            end = int(query_start_loc[row]) + off
            conv_state[dst][:, :state_len].copy_(x[:, end - state_len : end])
            ssm_state[dst].copy_(chunk_states[int(chunk_idx[row])])

    ssd._mamba_chunk_scan_combined_fwd = scan
    mixer2.store_prefill_checkpoint = store
