"""Olmo 3: sliding + full attention, through vLLM's Transformers backend."""

from .common import cfg

CONFIG = cfg(
    "Olmo3ForCausalLM",
    "olmo3",
    num_hidden_layers=4,
    head_dim=32,
    sliding_window=64,
    layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    rope_theta=500000.0,
)
