"""Real KVCacheConfigs of models that no CPU can run: vLLM's own code, for an assumed GPU.

Run as ``python resolved.py FOLDER``: for every case FOLDER/NAME.pickle receives the result of
:func:`resolved`, or FOLDER/NAME.error the reason. A program of its own because vLLM's platform is
one per process; a child for every model because the stand-ins for kernels must come after its
imports.

The models are the published ones with fewer layers, experts and a smaller hidden size. Whatever
decides about a KV cache page (ranks, head sizes, indexer, sparse pattern) is as published.
"""

import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BLOCKS = 12

# Published values: the defaults of transformers' GlmMoeDsaConfig.
GLM5 = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192,
    "v_head_dim": 256, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip

# GLM 5.2: some layers take over the choice of the layer before them and have no indexer ("S").
GLM5_SHARED = GLM5 | {"index_topk_pattern": "FSF"}

# vllm/transformers_utils/configs/minimax_m3.py has the published values. The first layers (one
# here, three of 60 there) are dense, the rest sparse with an index lane each.
MINIMAX_M3 = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
    "text_config": {
        "architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3_text",
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 64,
        "dense_intermediate_size": 128, "shared_intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 8192, "num_local_experts": 8, "moe_layer_freq": [0, 1, 1],
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_score_type": "max",
            "sparse_init_block": 0, "sparse_local_block": 1,
            "sparse_disable_index_value": [0, 1, 1], "sparse_attention_freq": [0, 1, 1],
        },
        "torch_dtype": "bfloat16",
    },
    "torch_dtype": "bfloat16",
}  # fmt: skip

# The language model alone: vision has no KV cache.
_TEXT = ["--hf-overrides", '{"architectures": ["MiniMaxM3SparseForCausalLM"]}']
_M3 = ["--block-size", "128", *_TEXT]
_MIXED = ["--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0"]

CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "glm5": (GLM5, []),
    "glm5_shared_index": (GLM5_SHARED, []),
    "glm5_fp8": (GLM5, ["--kv-cache-dtype", "fp8_ds_mla"]),
    "minimax_m3": (MINIMAX_M3, _M3),
    "minimax_m3_mixed": (MINIMAX_M3, [*_M3, *_MIXED]),
}


def resolved(model: Path, args: list[str]) -> dict[str, Any]:
    """The KVCacheConfig, and what a worker passes to ``allocate_kv_cache`` with it."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
    from vllm.v1.worker.utils import prepare_kernel_block_sizes

    from lmcache_shm.vllm.probe import resolve

    blocks = ["--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "512"]
    config = resolve.engine_config(str(model), [*args, *blocks, "--skip-tokenizer-init"])
    with resolve.process_groups(config):
        module = resolve.instantiate(config, assumed=True)
        current_platform.update_block_size_for_backend(config)
        kv = resolve.kv_cache_config(config, resolve.layer_specs(config))
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        backends = {name: layer.get_attn_backend() for name, layer in layers.items()}
        groups = []
        for group in kv.kv_cache_groups:
            spec = group.kv_cache_spec
            own = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
            groups.append([
                SimpleNamespace(backend=backends[name], kv_cache_spec=own.get(name, spec))
                for name in group.layer_names
            ])  # fmt: skip
        kernel_blocks = prepare_kernel_block_sizes(kv, groups)
        del module
    names = {name: backend.get_name() for name, backend in backends.items()}
    return {"config": kv, "kernel_blocks": kernel_blocks, "backends": names}


def _child(folder: Path, name: str) -> None:
    model, args = CASES[name]
    place = folder / name
    place.mkdir()
    (place / "config.json").write_text(json.dumps(model))
    try:
        answer = resolved(place, args)
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(answer))
    except Exception:  # noqa: BLE001 - the test shows it
        (folder / f"{name}.error").write_text(traceback.format_exc())


def main(folder: Path) -> None:
    from lmcache_shm.vllm.probe import assumed_platform, resolve

    assumed_platform.events_without_cuda()
    resolve.choose_platform("cuda:9.0")
    import vllm.engine.arg_utils
    import vllm.entrypoints.launchers.cli_args  # noqa: F401
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    children = []
    for name in CASES:
        if not (pid := os.fork()):
            _child(folder, name)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
