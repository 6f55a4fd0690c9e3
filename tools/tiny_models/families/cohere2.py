"""Cohere2 (Command R7B): sliding + full attention; vLLM reports the window as one more than the config."""

from .common import cfg

CONFIG = cfg(
    "Cohere2ForCausalLM",
    "cohere2",
    num_hidden_layers=4,
    head_dim=32,
    layer_norm_eps=1e-5,
    logit_scale=0.25,
    sliding_window=64,
    layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    rope_theta=50000.0,
    tie_word_embeddings=True,
)
