"""Nemotron-H: Mamba2, MLP and attention layers by a pattern."""

from .common import ALIGN, cfg

CONFIG = cfg(
    "NemotronHForCausalLM",
    "nemotron_h",
    num_hidden_layers=6,
    hybrid_override_pattern="M-M*M-",
    layers_block_type=["mamba", "mlp", "mamba", "attention", "mamba", "mlp"],
    head_dim=32,
    mlp_hidden_act="relu2",
    mlp_bias=False,
    ssm_state_size=32,
    mamba_num_heads=8,
    mamba_head_dim=32,
    n_groups=1,
    conv_kernel=4,
    expand=2,
    chunk_size=64,
    use_conv_bias=True,
    use_bias=False,
    mamba_proj_bias=False,
    layer_norm_epsilon=1e-5,
    mamba_hidden_act="silu",
)
ENGINE = {**ALIGN, "max_num_batched_tokens": 176}
HOOKS = ["mamba2_cpu_checkpoint"]
