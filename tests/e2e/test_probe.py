"""probe against what a real engine start has: the same groups, block sizes and page bytes."""

import json
from typing import Any

import pytest

from lmcache_shm.cli import probe
from tests.e2e.lab import LONG
from tests.unit.vllm_connector.resolved import CASES
from tools.tiny_models import load
from tools.tiny_models.process import Engine

FAMILIES = ["qwen3_5", "deepseek_v4"]
MORE = [
    "llama",
    "gemma3",
    "gemma3n",
    "gemma4_shared",
    "falcon_h1",
    "lfm2",
    "llama4",
    "gpt_oss",
    "deepseek_v3",
]  # twenty seconds each, so not every time

# The real engine's KVCacheConfig, with the keys of lmcache_shm.vllm.probe.resolve.facts.
REAL = """
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
config = scheduler.kv_cache_config
core = llm.llm_engine.engine_core.engine_core
runner = core.model_executor.driver_worker.worker.model_runner
worker = runner.kv_cache_config
groups = []
for index, group in enumerate(config.kv_cache_groups):
    spec = worker.kv_cache_groups[index].kv_cache_spec
    own = getattr(spec, "kv_cache_specs", None)
    specs = list(own.values()) if own else [spec] * len(group.layer_names)
    groups.append({
        "kind": get_kv_cache_spec_kind(spec).value,
        "window": getattr(group.kv_cache_spec, "sliding_window", None),
        "block_size": group.kv_cache_spec.block_size,
        "layers": group.layer_names,
        "page_bytes": sum(s.page_size_bytes for s in specs),
        "cacheable": index in config.prefix_cacheable_group_ids,
    })
result = {
    "block_size": core.vllm_config.cache_config.block_size,
    "hash_block_size": config.hash_block_size,
    "hit_alignment": config.cache_hit_alignment_tokens,
    "layout": config.kv_cache_layout,
    "mamba_cache_mode": core.vllm_config.cache_config.mamba_cache_mode,
    "groups": groups,
}
"""


def flags(args: dict[str, Any]) -> list[str]:
    """Engine arguments as `vllm serve` would be given them."""
    words = []
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, str(value)]
    return words


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=LONG) for name in MORE)])
def test_probe_agrees_with_a_real_engine_start(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = load(name)
    with Engine(name) as engine:
        real = engine.ask("python", code=REAL)
    for variable, value in family.environment().items():
        monkeypatch.setenv(variable, value)

    facts = probe.resolve(str(family.write(tmp_path)), flags(family.engine_args()))

    told = {key: facts[key] for key in real if key != "groups"}
    assert {key: value for key, value in real.items() if key != "groups"} == told
    assert len(real["groups"]) == len(facts["groups"])
    for mine, theirs in zip(facts["groups"], real["groups"], strict=True):
        assert theirs == {key: mine[key] for key in theirs}


def test_the_cuda_answer_needs_no_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform is vLLM's CUDA code with the device assumed; a block has 16 tokens there, not 128."""
    family = load("gemma3")
    for variable, value in family.environment().items():
        monkeypatch.setenv(variable, value)

    facts = probe.resolve(str(family.write(tmp_path)), ["--tensor-parallel-size", "2"], "cuda:9.0")

    assert (
        facts["platform"], facts["device_assumed"], facts["backends"],
    ) == ("cuda", True, ["FLASH_ATTN"])  # fmt: skip
    assert [group["block_size"] for group in facts["groups"]] == [16, 16, 16]
    assert [group["page_bytes"] for group in facts["groups"]] == [
        4096,
        4096,
        4096,
    ]  # one head of two


@pytest.mark.parametrize(
    ("name", "block", "layers", "content"),
    [
        pytest.param("glm5", 64, 6, 3 * 73728 + 3 * 8448, marks=LONG),
        ("minimax_m3", 128, 5, 3 * 262144 + 2 * 32768),
    ],
)
def test_models_that_no_cpu_can_run_are_resolved_without_a_gpu(
    name: str, block: int, layers: int, content: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse attention with its indexer: one group, the index lanes among its layers."""
    # MiniMax-M3 imports torchvision: the environment has the stand-in for it.
    for variable, value in load("qwen3_5").environment().items():
        monkeypatch.setenv(variable, value)
    model, args = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps(model))

    facts = probe.resolve(str(tmp_path), ["--skip-tokenizer-init", *args], "cuda:9.0")

    (group,) = facts["groups"]
    assert (facts["n"], facts["auto_chunk"], facts["refusal"]) == (block, 256, "")
    assert (len(group["layers"]), group["content_bytes"]) == (layers, content)


# What decides N in Qwen3-Next-80B-A3B's published config.json; depth and experts as published, too.
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "vocab_size": 151936, "max_position_embeddings": 262144, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_a_model_of_80_billion_parameters_takes_no_memory(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N = 544 on a GPU is what vLLM's users see for this model (vllm-project/vllm#32492)."""
    for variable, value in load("qwen3_5").environment().items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))

    facts = probe.resolve(str(tmp_path), [], "cuda:9.0")

    assert (facts["n"], facts["auto_chunk"]) == (544, 544)
    assert [len(group["layers"]) for group in facts["groups"]] == [12, 12, 12, 12]
    assert facts["peak_mib"] < 2048
