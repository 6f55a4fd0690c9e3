# ruff: noqa: PLC0415  (vLLM is imported piece by piece, after the platform is chosen)
"""What there is to say about a resolved model: platform, N, chunk sizes, KV cache groups; ready for JSON."""

from typing import Any


def is_recurrent(config: Any) -> bool:
    """True for models with Mamba, GDN, short-conv or other recurrent layers."""
    model = config.model_config
    return bool(model.is_hybrid or model.is_attention_free)


def backends(config: Any) -> list[Any]:
    """Distinct attention backends of all layers, as the platform chose them."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    return list(get_current_attn_backends(config))


def group_facts(
    index: int, group: Any, *, cacheable: bool, context_parallel: int
) -> dict[str, Any]:
    """What a person or a test wants to know of one KV cache group (sizes in tokens and bytes)."""
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, iter_layer_specs

    specs = [*iter_layer_specs(group.kv_cache_spec)]
    per_layer = specs if len(specs) == len(group.layer_names) else specs * len(group.layer_names)
    windows = {getattr(s, "sliding_window", None) for s in specs}
    chunks = {getattr(s, "attention_chunk_size", None) for s in specs}
    return {
        "group": index,
        "kind": get_kv_cache_spec_kind(group.kv_cache_spec).value,
        "spec": type(group.kv_cache_spec).__name__,
        "window": windows.pop() if len(windows) == 1 else None,
        "attention_chunk": chunks.pop() if len(chunks) == 1 else None,
        "block_size": group.kv_cache_spec.block_size,
        # What a block id covers: context parallelism spreads a block's tokens over ranks.
        "tokens_per_block": resolve_dcp_kv_block_size(group.kv_cache_spec, context_parallel),
        "layers": list(group.layer_names),
        # Content bytes of one block in all layers; padding is not copied and not counted.
        "content_bytes": sum(
            getattr(s, "real_page_size_bytes", s.page_size_bytes) for s in per_layer
        ),
        "page_bytes": sum(s.page_size_bytes for s in per_layer),
        "cacheable": cacheable,
    }


def sizes(groups: Any, context_parallel: int) -> dict[str, Any]:
    """What the connector would make of these groups: N and chunk sizes, or why it refuses them."""
    from lmcache_shm.client.groups import ModelError, unified_block_size
    from lmcache_shm.client.plan import admissible_sizes, auto_chunk_size
    from lmcache_shm.vllm.groups import kv_groups

    found: dict[str, Any] = {"n": 0, "chunk_sizes": [], "auto_chunk": 0, "refusal": ""}
    try:
        cached, _ = kv_groups(groups, context_parallel)
        if not cached:
            raise ModelError("no KV cache group of this model can be cached")
        found["n"] = unified_block_size(cached)
        found["auto_chunk"] = auto_chunk_size(cached)
        found["chunk_sizes"] = admissible_sizes(cached)
    except ModelError as error:
        found["refusal"] = str(error)
    return found


def facts(config: Any, groups: Any, *, assumed: bool) -> dict[str, Any]:
    """The result of one resolution, ready for JSON."""
    import vllm
    from vllm.platforms import current_platform

    cache, parallel = config.cache_config, config.parallel_config
    cacheable = set(groups.prefix_cacheable_group_ids)
    return {
        "vllm": vllm.__version__,
        "platform": current_platform.device_type,
        "device": current_platform.get_device_name(),
        "device_assumed": assumed,
        "architecture": config.model_config.architecture,
        "recurrent": is_recurrent(config),
        "mamba_cache_mode": cache.mamba_cache_mode,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "block_size": cache.block_size,
        "hash_block_size": groups.hash_block_size,
        "hit_alignment": groups.cache_hit_alignment_tokens,
        "layout": groups.kv_cache_layout,
        "tensor_parallel": parallel.tensor_parallel_size,
        "context_parallel": parallel.decode_context_parallel_size,
        "kv_tp_replicas": groups.kv_tp_replicas,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_model_len": config.model_config.max_model_len,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": cache.cache_dtype,
        "backends": [b.get_name() for b in backends(config)],
        **sizes(groups, parallel.decode_context_parallel_size),
        "groups": [
            group_facts(
                i,
                g,
                cacheable=i in cacheable,
                context_parallel=parallel.decode_context_parallel_size,
            )
            for i, g in enumerate(groups.kv_cache_groups)
        ],
    }
