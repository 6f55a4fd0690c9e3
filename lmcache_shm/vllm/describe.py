"""The namespace: everything that must be equal for two engines to exchange bytes.

Two engines that differ in any of it never meet. Equal facts give equal bytes, in every process.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vllm

from lmcache_shm.arena.layout import FORMAT_VERSION
from lmcache_shm.client.plan import CachePlan
from lmcache_shm.protocol.keys import canonical
from lmcache_shm.protocol.rules import rule_words
from lmcache_shm.vllm.layouts import WorkerFacts

# Facts of the loaded configuration object that say nothing about the model.
_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "_commit_hash"}
_SNAPSHOT = re.compile(r"models--(.+?)--(.+?)/snapshots/([0-9a-f]{40})/?$")
_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})/")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_DRAFTS_WITHOUT_A_MODEL = {"ngram", "ngram_gpu", "suffix"}
# Rotary embeddings whose angles depend on the longest sequence that the engine allows.
_LENGTH_DEPENDENT = {"longrope", "su", "dynamic"}


def descriptor(
    vllm_config: Any, kv_cache_config: Any, plan: CachePlan, workers: Sequence[WorkerFacts]
) -> bytes:
    """Canonical bytes of the namespace; `workers` by rank (empty if the executor hands none over)."""
    return canonical(facts(vllm_config, kv_cache_config, plan, workers))


def facts(
    vllm_config: Any, kv_cache_config: Any, plan: CachePlan, workers: Sequence[WorkerFacts]
) -> dict[str, Any]:
    """The namespace as a tree of names, for `descriptor` and for people."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    return {
        "format": FORMAT_VERSION,
        "vllm": vllm.__version__,
        "model": model_facts(vllm_config),
        "kv_cache": {
            "dtype": str(cache.cache_dtype),
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
        "pages": f"{part.first_page}-{part.pages_per_chunk}",
        "spec": _digest(repr(spec)),
    }


def _worker_facts(workers: Sequence[WorkerFacts]) -> dict[str, Any]:
    """Ranks that are alike are told once: their number is a fact of the parallel layout."""
    told: dict[str, Any] = {}
    for worker in workers:
        entry = {"device": worker.device, "groups": worker.groups}
        if entry not in told.values():
            told[str(worker.rank)] = entry
    return told


def _speculative_facts(vllm_config: Any) -> dict[str, Any] | None:
    """The model that drafts, if one does: its layers may be in the KV cache groups, too."""
    spec = vllm_config.speculative_config
    if spec is None or str(spec.method) in _DRAFTS_WITHOUT_A_MODEL:
        return None
    draft = getattr(spec, "draft_model_config", None)
    told: dict[str, Any] = {"method": str(spec.method), "tokens": spec.num_speculative_tokens}
    return told | (_weights_facts(draft, vllm_config.load_config) if draft is not None else {})


# ------------------------------------------------------------------------------------- the model
def model_facts(vllm_config: Any) -> dict[str, Any]:
    """Which weights, in which types, computing with which configuration."""
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    told = {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        **_weights_facts(model, vllm_config.load_config),
    }
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if _LENGTH_DEPENDENT & {str(value) for value in rope.values() if isinstance(value, str)}:
        told["max_model_len"] = model.max_model_len
    return told


def _weights_facts(model: Any, load_config: Any) -> dict[str, Any]:
    """What a ModelConfig computes with."""
    config = model.hf_config.to_dict()
    known = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
    told = {"config": _digest(json.dumps(known, sort_keys=True, default=str))}
    load_format = str(getattr(load_config, "load_format", "auto")).rpartition(".")[2]
    if load_format.lower() == "dummy":
        # Made up from the configuration and the seed; where the configuration lies does not matter.
        return told | {"weights": "dummy", "seed": model.seed}
    return told | {"weights": identity_of(model.model, model.revision)}


def identity_of(model: str, revision: str | None) -> str:
    """What tells one set of weights from another, without reading them.

    A repository: its name and commit. A directory: its path, and name, size and time of every weights
    file, so that weights saved over older ones are not taken for these.
    """
    snapshot = _SNAPSHOT.search(model)
    if snapshot:
        return f"{snapshot[1]}/{snapshot[2]}@{snapshot[3]}"
    path = Path(model)
    if path.is_dir():
        return f"{path.resolve()}#{_fingerprint(path)}"
    if path.is_file():
        stat = path.stat()
        return f"{path.resolve()}#{stat.st_size}-{stat.st_mtime_ns}"
    return f"{model}@{_commit(model, revision) or revision or 'main'}"


def _fingerprint(folder: Path) -> str:
    files = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    stats = [(file.name, file.stat()) for file in files]
    return _digest(json.dumps([[name, s.st_size, s.st_mtime_ns] for name, s in stats]))


def _commit(model: str, revision: str | None) -> str:
    """The commit of a repository's local copy, if there is one."""
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  (slow to import)

        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except Exception:  # noqa: BLE001  (a name that is none, another hub, no cache: the revision has to do)
        return ""
    match = _COMMIT.search(found) if isinstance(found, str) else None
    return match[1] if match else ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
