"""Jamba: Mamba1 and attention layers, some with experts."""

from .common import ALIGN, cfg

CONFIG = cfg(
    "JambaForCausalLM",
    "jamba",
    num_hidden_layers=4,
    attn_layer_period=4,
    attn_layer_offset=2,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=2,
    num_experts_per_tok=1,
    mamba_d_state=16,
    mamba_d_conv=3,  # a width of 4 is packed for a CPU kernel that the Mamba1 mixer cannot use
    mamba_expand=2,
    mamba_dt_rank=8,
    mamba_conv_bias=True,
    mamba_proj_bias=False,
    use_mamba_kernels=False,
)
ENGINE = {**ALIGN, "max_num_batched_tokens": 112}
HOOKS = ["mamba1_cpu_scan"]
