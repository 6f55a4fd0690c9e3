"""Qwen3-Next: GDN + full attention (3:1), MoE with a shared expert."""

from .common import ALIGN, cfg

CONFIG = cfg(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    num_hidden_layers=4,
    head_dim=64,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    decoder_sparse_step=1,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    norm_topk_prob=True,
    mlp_only_layers=[],
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    partial_rotary_factor=0.25,
    rope_theta=10000.0,
)
ENGINE = {**ALIGN, "dtype": "bfloat16"}  # what the CPU kernel of GDN takes
STUBS = True
