"""What the families share."""

from typing import Any

BASE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def cfg(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    """A config.json: the base, then the fields."""
    return {"architectures": [architecture], "model_type": model_type, **BASE, **fields}


# Recurrent models. N is vLLM's unified block: 160 for GDN in bf16, 96 for Mamba2 in float32, 64 for Jamba. With a budget in
# [N, 2N) tokens a step ends on every boundary; a family with another N sets its own.
ALIGN: dict[str, Any] = {
    "mamba_cache_mode": "align",
    "max_num_batched_tokens": 288,
    "max_model_len": 4096,
}
