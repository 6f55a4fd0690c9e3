"""Gemma 2: sliding + full attention."""

from .common import cfg

CONFIG = cfg(
    "Gemma2ForCausalLM",
    "gemma2",
    num_hidden_layers=4,
    head_dim=32,
    rope_theta=10000.0,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=32,
    sliding_window=64,
    layer_types=["sliding_attention", "full_attention"] * 2,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    tie_word_embeddings=True,
)
