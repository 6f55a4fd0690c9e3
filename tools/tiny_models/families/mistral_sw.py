"""Every layer is sliding-window (Mistral-7B-v0.1 style)."""

from .common import cfg

CONFIG = cfg(
    "MistralForCausalLM",
    "mistral",
    num_hidden_layers=3,
    head_dim=32,
    rope_theta=10000.0,
    sliding_window=64,
)
