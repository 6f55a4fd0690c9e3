"""Granite 4 hybrid: Mamba2 + attention without positions."""

from .common import ALIGN, cfg

CONFIG = cfg(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    num_hidden_layers=4,
    layer_types=["mamba", "mamba", "attention", "mamba"],
    num_local_experts=4,
    num_experts_per_tok=2,
    shared_intermediate_size=128,
    position_embedding_type="nope",
    attention_multiplier=0.17,
    mamba_n_heads=8,
    mamba_n_groups=1,
    mamba_d_state=32,
    mamba_d_head=32,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=64,
    mamba_conv_bias=True,
    mamba_proj_bias=False,
    rope_theta=10000.0,
)
ENGINE = {**ALIGN, "max_num_batched_tokens": 176}
HOOKS = ["mamba2_cpu_checkpoint"]
