"""Gemma 4 with KV-sharing layers: the last layers read another layer's KV and are in no group."""

from .gemma4 import CONFIG as BASE

CONFIG = {
    **BASE,
    "num_hidden_layers": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
}
