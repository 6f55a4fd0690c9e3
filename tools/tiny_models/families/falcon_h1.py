"""Every layer has attention AND mamba2 in parallel."""

from .common import ALIGN, cfg

CONFIG = cfg(
    "FalconH1ForCausalLM",
    "falcon_h1",
    num_hidden_layers=3,
    head_dim=32,
    mamba_d_ssm=256,
    mamba_n_heads=8,
    mamba_d_head=32,
    mamba_n_groups=1,
    mamba_d_state=32,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=64,
    mamba_conv_bias=True,
    mamba_proj_bias=False,
    mamba_norm_before_gate=True,
    mamba_rms_norm=False,
    rope_theta=10000.0,
    mlp_multipliers=[1.0, 1.0],
    ssm_multipliers=[1.0] * 5,
)
ENGINE = {**ALIGN, "max_num_batched_tokens": 176}
HOOKS = ["mamba2_cpu_checkpoint"]
