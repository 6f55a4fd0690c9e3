"""Llama 4 (text): chunked local attention in three of four layers, full attention without rope in the fourth."""

from .common import cfg

CONFIG = cfg(
    "Llama4ForCausalLM",
    "llama4_text",
    num_hidden_layers=4,
    head_dim=32,
    intermediate_size=64,
    intermediate_size_mlp=256,
    num_local_experts=4,
    num_experts_per_tok=1,
    interleave_moe_layer_step=2,
    moe_layers=[1, 3],
    use_qk_norm=True,
    attention_chunk_size=128,
    no_rope_layers=[1, 1, 1, 0],
    no_rope_layer_interval=4,
    layer_types=["chunked_attention"] * 3 + ["full_attention"],
    attn_temperature_tuning=True,
    floor_scale=8192,
    attn_scale=0.1,
    rope_theta=500000.0,
)
ENV = {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1"}
