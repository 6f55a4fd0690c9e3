"""Qwen3.5 text-only dense: GDN + full attention (3:1)."""

from .common import ALIGN, cfg

CONFIG = cfg(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    num_hidden_layers=4,
    head_dim=64,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
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
