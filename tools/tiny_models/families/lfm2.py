"""LFM2: short convolutions and full attention."""

from .common import ALIGN, cfg

CONFIG = cfg(
    "Lfm2ForCausalLM",
    "lfm2",
    num_hidden_layers=4,
    norm_eps=1e-5,
    conv_dim=128,
    conv_bias=False,
    conv_L_cache=3,
    block_dim=128,
    block_ff_dim=256,
    block_multiple_of=32,
    block_ffn_dim_multiplier=1.0,
    block_auto_adjust_ff_dim=False,
    layer_types=["conv", "full_attention", "conv", "full_attention"],
    rope_theta=1000000.0,
    tie_word_embeddings=True,
)
ENGINE = {**ALIGN, "block_size": 128, "max_num_batched_tokens": 224}
