"""Gemma 3n (text): sliding + full attention; the last layers share another layer's KV and own none."""

from .common import cfg

CONFIG = cfg(
    "Gemma3nForCausalLM",
    "gemma3n_text",
    num_hidden_layers=8,
    head_dim=32,
    intermediate_size=256,
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=64,
    layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    * 2,
    num_kv_shared_layers=4,
    vocab_size_per_layer_input=1024,
    hidden_size_per_layer_input=32,
    altup_active_idx=0,
    altup_coef_clip=120.0,
    altup_correct_scale=True,
    altup_num_inputs=2,
    laurel_rank=16,
    activation_sparsity_pattern=[0.0] * 8,
    final_logit_softcapping=30.0,
    rope_theta=1000000.0,
    rope_local_base_freq=10000.0,
    tie_word_embeddings=True,
)
