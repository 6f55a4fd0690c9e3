"""Qwen 3: plain full attention."""

from .common import cfg

CONFIG = cfg("Qwen3ForCausalLM", "qwen3", num_hidden_layers=3, head_dim=64, rope_theta=1e6)
