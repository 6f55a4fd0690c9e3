"""Qwen3.5 MoE: GDN + full attention (3:1)."""

from .common import ALIGN, cfg

CONFIG = cfg(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    num_hidden_layers=4,
    head_dim=64,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
)
ENGINE = {**ALIGN, "dtype": "bfloat16"}  # what the CPU kernel of GDN takes
STUBS = True  # qwen3_5.py imports qwen3_vl -> HF qwen2_vl image processor -> torchvision
