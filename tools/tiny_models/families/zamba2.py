"""Zamba2: Mamba2 layers, and attention blocks with shared weights."""

from .common import ALIGN, cfg

CONFIG = cfg(
    "Zamba2ForCausalLM",
    "zamba2",
    num_hidden_layers=4,
    layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
    hybrid_layer_ids=[1, 3],
    num_attention_heads=4,
    num_key_value_heads=4,
    attention_head_dim=64,
    attention_hidden_size=256,
    num_mem_blocks=1,
    use_shared_attention_adapter=False,
    adapter_rank=16,
    use_mem_rope=False,
    use_long_context=False,
    add_bias_linear=False,
    hidden_act="gelu",
    mamba_d_state=32,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_ngroups=1,
    n_mamba_heads=8,
    mamba_headdim=32,
    chunk_size=64,
    use_conv_bias=True,
    tie_word_embeddings=True,
)
ENGINE = {**ALIGN, "block_size": 96, "max_num_batched_tokens": 176}
HOOKS = ["mamba2_cpu_checkpoint"]
