"""Sliding (head_dim 32) + full (head_dim 64) layers: different page sizes per group."""

from .common import cfg

CONFIG = cfg(
    "Gemma4ForCausalLM",
    "gemma4_text",
    num_hidden_layers=6,
    head_dim=32,
    global_head_dim=64,
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=64,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=1024,
    num_kv_shared_layers=0,
    attention_k_eq_v=False,
    enable_moe_block=False,
    final_logit_softcapping=30.0,
    tie_word_embeddings=True,
)
