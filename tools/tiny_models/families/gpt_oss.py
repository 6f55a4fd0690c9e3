"""Sliding + full, attention sinks, MoE in bf16 (no quantization_config)."""

from .common import cfg

CONFIG = cfg(
    "GptOssForCausalLM",
    "gpt_oss",
    num_hidden_layers=4,
    head_dim=64,
    intermediate_size=128,
    sliding_window=64,
    attention_bias=True,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_local_experts=4,
    num_experts_per_tok=2,
    rope_theta=150000.0,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 2.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    swiglu_limit=7.0,
)
