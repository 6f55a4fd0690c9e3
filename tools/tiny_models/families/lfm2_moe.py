"""LFM2-MoE: short convolutions and full attention, experts after a dense layer."""

from .common import ALIGN, cfg

CONFIG = cfg(
    "Lfm2MoeForCausalLM",
    "lfm2_moe",
    num_hidden_layers=4,
    norm_eps=1e-5,
    conv_bias=False,
    conv_L_cache=3,
    num_dense_layers=1,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    use_expert_bias=True,
    layer_types=["conv", "full_attention", "conv", "full_attention"],
    rope_theta=1000000.0,
    tie_word_embeddings=True,
)
ENGINE = {**ALIGN, "block_size": 128, "max_num_batched_tokens": 224}
