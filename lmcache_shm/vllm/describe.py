"""The namespace: everything that must be equal for two engines to exchange bytes.

Two engines that differ in any of it never meet. Equal facts give equal bytes, in every process.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import vllm

from lmcache_shm.arena.layout import FORMAT_VERSION
from lmcache_shm.client.fingerprint import (
    Memory,
    Unidentified,
    default_memory,
    identity_on_disk,
    started,
)
from lmcache_shm.client.plan import CachePlan
from lmcache_shm.protocol.keys import canonical
from lmcache_shm.protocol.rules import rule_words
from lmcache_shm.vllm.layouts import WorkerFacts

# Facts of the loaded configuration object that say nothing about the model.
_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "_commit_hash"}
_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})/")
# Load formats whose bytes are those of files in the model's own folder or repository.
_FROM_FILES = {
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral", "gguf",
    "bitsandbytes", "sharded_state", "runai_streamer", "runai_streamer_sharded",
}  # fmt: skip
_DRAFTS_WITHOUT_A_MODEL = {"ngram", "ngram_gpu", "suffix"}
# Rotary embeddings whose angles depend on the longest sequence that the engine allows.
_LENGTH_DEPENDENT = {"longrope", "su", "dynamic"}


def descriptor(
    vllm_config: Any,
    kv_cache_config: Any,
    plan: CachePlan,
    workers: Sequence[WorkerFacts],
    weights: str,
) -> bytes:
    """Canonical bytes of the namespace; `workers` by rank (empty if the executor hands none over), `weights`:
    `client.weights.Weights.identity`."""
    return canonical(facts(vllm_config, kv_cache_config, plan, workers, weights))


def facts(
    vllm_config: Any,
    kv_cache_config: Any,
    plan: CachePlan,
    workers: Sequence[WorkerFacts],
    weights: str,
) -> dict[str, Any]:
    """The namespace as a tree of names, for `descriptor` and for people."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    return {
        "format": FORMAT_VERSION,
        "vllm": vllm.__version__,
        "model": model_facts(vllm_config, weights),
        "kv_cache": {
            "dtype": _cache_dtype(cache, workers),
            "layout": str(kv_cache_config.kv_cache_layout or cache.kv_cache_layout),
            "mamba_mode": str(cache.mamba_cache_mode),
            "chunk_size": plan.chunk_size,
            "object_groups": [group.name for group in plan.groups],
        },
        "groups": {
            str(part.group.index): _group_facts(kv_cache_config, part)
            for group in plan.groups
            for part in group.parts
        },
        "parallel": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "decode_context": parallel.decode_context_parallel_size,
            "prefill_context": parallel.prefill_context_parallel_size,
            "interleave": getattr(parallel, "cp_kv_cache_interleave_size", 1),
            "replicas": kv_cache_config.kv_tp_replicas,
        },
        "speculative": _speculative_facts(vllm_config),
        "workers": _worker_facts(workers),
    }


def _group_facts(kv_cache_config: Any, part: Any) -> dict[str, Any]:
    group = part.group
    word, tokens = rule_words(group.rule)
    spec = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
    return {
        "rule": word,
        "tokens": tokens,
        "kind": group.kind,
        "block_size": group.block_size,
        "layers": _digest("\n".join(kv_cache_config.kv_cache_groups[group.index].layer_names)),
        "pages": f"{part.first_page}-{part.pages_per_chunk}",
        "spec": _digest(repr(spec)),
    }


def _cache_dtype(cache: Any, workers: Sequence[WorkerFacts]) -> str:
    """As the workers' layers have it: a checkpoint, or the attention backend, may have had it changed there,
    and the scheduler's copy of the configuration does not know."""
    told = {t for worker in workers for group in worker.groups.values() for t in group["dtypes"]}
    return ",".join(sorted(told)) or str(cache.cache_dtype)


def _worker_facts(workers: Sequence[WorkerFacts]) -> dict[str, Any]:
    """Ranks that are alike are told once: their number is a fact of the parallel layout."""
    told: dict[str, Any] = {}
    for worker in workers:
        entry = {
            "device": worker.device,
            "groups": worker.groups,
            "environment": worker.environment,
        }
        if entry not in told.values():
            told[str(worker.rank)] = entry
    return told


def _speculative_facts(vllm_config: Any) -> dict[str, Any] | None:
    """The model that drafts, if one does: its layers may be in the KV cache groups, too."""
    draft, spec = _draft(vllm_config), vllm_config.speculative_config
    if spec is None or str(spec.method) in _DRAFTS_WITHOUT_A_MODEL:
        return None
    told: dict[str, Any] = {"method": str(spec.method), "tokens": spec.num_speculative_tokens}
    if draft is None:
        return told
    load = _draft_load_config(vllm_config)
    return (
        told | {"config": _config_digest(draft)} | _computation_facts(draft) | _loader_facts(load)
    )


# ------------------------------------------------------------------------------------- the model
def model_facts(vllm_config: Any, weights: str) -> dict[str, Any]:
    """Which weights, in which types, computing with which configuration."""
    model = vllm_config.model_config
    told = {
        **_computation_facts(model),
        **_loader_facts(vllm_config.load_config),
        "config": _config_digest(model),
        "weights": weights,
    }
    media = getattr(model, "multimodal_config", None)
    if media is not None:
        # An item's hash does not know them all, and a given uuid none of them.
        names = (
            "mm_processor_kwargs",
            "media_io_kwargs",
            "video_pruning_rate",
            "video_pruning_method",
        )
        told["media"] = _digest(repr([getattr(media, name, None) for name in names]))
    return told


def _computation_facts(model: Any) -> dict[str, Any]:
    """How a ModelConfig's weights are computed with, beside the model's own configuration."""
    told = {"dtype": str(model.dtype), "quantization": str(model.quantization)}
    for name in ("quantization_config", "model_impl", "code_revision"):
        value = getattr(model, name, None)
        if value and str(value) not in ("auto", "ModelImpl.AUTO"):
            told[name] = _digest(repr(value))
    if _depends_on_length(model.hf_config.to_dict()):
        told["max_model_len"] = model.max_model_len
    return told


def _depends_on_length(config: Any) -> bool:
    """Whether there is such a rotary embedding anywhere in it: of a text model inside, of one kind of layers."""
    if not isinstance(config, dict):
        return False
    types = {str(config.get(name)) for name in ("rope_type", "type")}
    return bool(types & _LENGTH_DEPENDENT) or any(map(_depends_on_length, config.values()))


def _loader_facts(load_config: Any) -> dict[str, Any]:
    told = {"load_format": _load_format(load_config)}
    extra = getattr(load_config, "model_loader_extra_config", None)
    if extra:  # it may say where the weights really are
        told["loader"] = _digest(repr(extra))
    return told


def _config_digest(model: Any) -> str:
    config = model.hf_config.to_dict()
    known = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
    return _digest(json.dumps(known, sort_keys=True, default=str))


def _load_format(load_config: Any) -> str:
    return str(getattr(load_config, "load_format", "auto")).rpartition(".")[2].lower()


def _draft_load_config(vllm_config: Any) -> Any:
    """How the draft model is loaded; as the model, unless it says otherwise."""
    own = getattr(vllm_config.speculative_config, "draft_load_config", None)
    return own or vllm_config.load_config


def _draft(vllm_config: Any) -> Any:
    """The ModelConfig of the model that drafts, if one with weights does."""
    spec = vllm_config.speculative_config
    if spec is None or str(spec.method) in _DRAFTS_WITHOUT_A_MODEL:
        return None
    return getattr(spec, "draft_model_config", None)


def loaded_weights(vllm_config: Any) -> str:
    """The fingerprint of what this engine's workers have loaded: the model and, if there is one, the draft model.

    Takes as long as reading the files, unless they were read before. Raises Unidentified and OSError.
    """
    memory = default_memory()
    found = [_loaded(vllm_config.model_config, vllm_config.load_config, memory)]
    draft = _draft(vllm_config)
    if draft is not None:
        found.append(_loaded(draft, _draft_load_config(vllm_config), memory))
    return " + ".join(found)


def _loaded(model: Any, load_config: Any, memory: Memory) -> str:
    load_format = _load_format(load_config)
    if load_format == "dummy":
        # Made up from the configuration and the seed; where the configuration lies does not matter.
        return f"dummy, seed {model.seed}"
    elsewhere = getattr(model, "model_weights", "")  # in an object store
    if load_format not in _FROM_FILES or elsewhere:
        raise Unidentified(f"weights of load format {load_format} may come from anywhere")
    commit = _commit(model)
    return identity_on_disk(model.model, model.revision, commit, started(), memory)


def _commit(model: Any) -> str | None:
    """The commit of a repository's local copy, if there is one."""
    of_config = getattr(model.hf_config, "_commit_hash", None)
    # The configuration may be asked for from somewhere else than the weights.
    if isinstance(of_config, str) and not getattr(model, "hf_config_path", None):
        return of_config
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  (slow to import)

        found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    except Exception:  # noqa: BLE001  (a name that is none, another hub, no cache: the revision has to do)
        return None
    match = _COMMIT.search(found) if isinstance(found, str) else None
    return match[1] if match else None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
