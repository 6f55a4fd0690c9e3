"""vLLM's KV cache groups as the cache sees them: which are kept, by which rule, in blocks of how many tokens."""

from collections.abc import Sequence
from typing import Any

from lmcache_shm.client.plan import IgnoredGroup, KVGroup, ModelError, unified_block_size
from lmcache_shm.protocol.rules import ChunkedLocal, Full, Recurrent, Rule, Window

# Names of KVCacheSpec classes, most specific first: what a subclass is decides, not what it is called.
_KINDS = {
    "MambaSpec": "recurrent state",
    "SlidingWindowMLASpec": "sliding-window MLA",
    "SlidingWindowSpec": "sliding window",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "MLAAttentionSpec": "MLA",
    "FullAttentionSpec": "full attention",
}


def kv_groups(kv_cache_config: Any, dcp: int = 1) -> tuple[list[KVGroup], list[IgnoredGroup]]:
    """Split the groups of a ``KVCacheConfig``; `dcp` is the size of decode context parallelism.

    Raises ModelError for a kind of cache that no rule covers.
    """
    cached, ignored = [], []
    keep = set(kv_cache_config.prefix_cacheable_group_ids)
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        layers = tuple(group.layer_names)
        if index in keep:
            cached.append(_kv_group(index, group.kv_cache_spec, layers, dcp))
        elif not group.enable_kv_transfer:
            ignored.append(IgnoredGroup(index, layers, "the engine rebuilds it from another group"))
        else:
            ignored.append(
                IgnoredGroup(index, layers, "scratch memory of one request, not prefix-cacheable")
            )
    return cached, ignored


def layer_specs(spec: Any) -> list[Any]:
    """The per-layer specs that a group's spec stands for (one if all layers are alike)."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [spec]


def content_bytes(spec: Any, layers: Sequence[str]) -> int:
    """Bytes of one block over `layers` of a group, without the padding of pages."""
    inner = getattr(spec, "kv_cache_specs", None)
    of_layer = (inner[name] if inner else spec for name in layers)
    return sum(int(getattr(s, "real_page_size_bytes", s.page_size_bytes)) for s in of_layer)


def _kv_group(index: int, spec: Any, layers: tuple[str, ...], dcp: int) -> KVGroup:
    found = {_rule(index, s, layers) for s in layer_specs(spec)}
    rules = {rule for rule, _ in found}
    if len(rules) != 1:
        raise ModelError(
            f"KV cache group {index} mixes layers of different reach ({', '.join(map(str, rules))}); "
            "this cannot be cached"
        )
    block_size = int(spec.block_size) * (dcp if spec.dcp_sharded else 1)
    kinds = sorted({kind for _, kind in found})
    return KVGroup(index, rules.pop(), block_size, layers, " + ".join(kinds))


def _rule(index: int, spec: Any, layers: tuple[str, ...]) -> tuple[Rule, str]:
    ancestry = {cls.__name__ for cls in type(spec).__mro__}
    name = next((name for name in _KINDS if name in ancestry), "")
    match name:
        case "MambaSpec":
            mamba_type = getattr(spec, "mamba_type", "")
            kind = str(getattr(mamba_type, "name", mamba_type)).lower() or "mamba"
            return Recurrent(), f"{_KINDS[name]} ({kind})"
        case "SlidingWindowMLASpec" | "SlidingWindowSpec":
            # Blocks this far back are kept by vLLM, though not attended to.
            return Window(int(spec.sliding_window) + int(spec.extra_retained_tokens)), _KINDS[name]
        case "ChunkedLocalAttentionSpec":
            return ChunkedLocal(int(spec.attention_chunk_size)), _KINDS[name]
        case "MLAAttentionSpec" | "FullAttentionSpec":
            return Full(), _KINDS[name]
    raise ModelError(
        f"KV cache group {index} ({', '.join(layers[:2])}, …) is a {type(spec).__name__}; "
        "there is no rule for caching it"
    )


# ------------------------------------------------------------------------------- recurrent models
def check_recurrent(vllm_config: Any, groups: Sequence[KVGroup], mamba_steps: str) -> list[str]:
    """Whether vLLM is started so that recurrent states can be cached; notes for the log.

    Raises ModelError with what to type instead. Models without recurrent layers always pass.
    """
    if not any(group.recurrent for group in groups):
        return []
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise ModelError(
            "this model has recurrent layers (Mamba, GDN, short convolution, …), whose states vLLM keeps "
            "only with prefix caching on; start it with --enable-prefix-caching --mamba-cache-mode align"
        )
    if cache.mamba_cache_mode != "align":
        raise ModelError(
            f"this model has recurrent layers and runs with --mamba-cache-mode {cache.mamba_cache_mode}; "
            "their states can be cached only in mode align: start vLLM with "
            "--enable-prefix-caching --mamba-cache-mode align"
        )
    return _check_steps(vllm_config.scheduler_config, unified_block_size(groups), mamba_steps)


def _check_steps(scheduler: Any, unit: int, mamba_steps: str) -> list[str]:
    budget = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    if budget < unit:
        raise ModelError(
            f"max_num_batched_tokens is {budget}, but the unified block size of this recurrent model is "
            f"N = {unit}: a step has to hold at least one block; start vLLM with "
            f"--max-num-batched-tokens {2 * unit - 1}"
        )
    if budget >= 2 * unit and mamba_steps != "any":
        raise ModelError(
            f"max_num_batched_tokens is {budget}, but the unified block size of this recurrent model is "
            f"N = {unit}: steps of {unit} to {2 * unit - 1} tokens end on every block boundary, larger ones "
            f"skip some, and the states there are never seen. Either start vLLM with "
            f"--max-num-batched-tokens {2 * unit - 1}, or set "
            '"lmcache_shm.mamba_steps": "any" in kv_connector_extra_config to cache only the boundaries '
            "that vLLM snapshots"
        )
    if budget >= 2 * unit:
        note = (
            "recurrent states are cached only at boundaries that vLLM snapshots (mamba_steps any, steps of "
            f"up to {budget} tokens, N = {unit}): hits end on those"
        )
        return [note]
    room = budget - unit
    if room < scheduler.max_num_seqs - 1 and room < unit - 1:
        note = (
            f"a prefill step of this model takes N = {unit} tokens of the {budget} in a step, so prefills wait "
            f"while more than {room} other requests decode; --max-num-batched-tokens {2 * unit - 1} leaves "
            f"room for {unit - 1}"
        )
        return [note]
    return []
