"""DeepSeek-V4(-Flash): SWA + C4A (compressed + indexer) + C128A layers. CPU top-k kernels exist only for 64/128/256/384 experts with top-k 6 or 8."""

from .common import cfg

CONFIG = cfg(
    "DeepseekV4ForCausalLM",
    "deepseek_v4",
    hidden_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=128,
    o_lora_rank=128,
    o_groups=2,
    sliding_window=128,
    compress_ratios=[1, 4, 128, 4],
    compress_rope_theta=160000.0,
    rope_theta=10000.0,
    rope_scaling={
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 65536,
    },
    index_n_heads=8,
    index_head_dim=128,
    index_topk=512,
    n_routed_experts=64,
    n_shared_experts=1,
    num_experts_per_tok=6,
    moe_intermediate_size=128,
    num_hash_layers=1,
    scoring_func="sqrtsoftplus",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=4,
    hc_eps=1e-6,
    num_nextn_predict_layers=0,
)
ENGINE = {"dtype": "bfloat16"}
HOOKS = ["triton_interpret", "mla_cpu_prefix_caching", "dsv4_cpu"]
ENV = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
