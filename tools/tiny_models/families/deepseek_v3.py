"""DeepSeek-V3: MLA. Prefix caching and chunked prefill are put back on: the CPU platform turns them off without AMX."""

from .common import cfg

CONFIG = cfg(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    num_hidden_layers=3,
    num_key_value_heads=4,
    kv_lora_rank=512,
    q_lora_rank=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    qk_nope_head_dim=64,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    routed_scaling_factor=1.0,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    rope_theta=10000.0,
    # yarn, as every real checkpoint has: plain rope would use the CPU
    # rotary kernel, which is wrong for the strided k_pe slice (0.32 bug)
    rope_scaling={
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
)
ENGINE = {"block_size": 16}
HOOKS = ["mla_cpu_prefix_caching"]
