"""vLLM's KV cache groups as the cache sees them: which are kept, by which rule, in blocks of how many tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_shm.catalog.hits import ChunkedLocal, Full, Recurrent, Rule, Window

# Names of KVCacheSpec classes, most specific first: what a subclass is decides, not what it is called.
_KINDS = {
    "MambaSpec": "recurrent state",
    "SlidingWindowMLASpec": "sliding-window MLA",
    "SlidingWindowSpec": "sliding window",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "MLAAttentionSpec": "MLA",
    "FullAttentionSpec": "full attention",
}


class ModelError(ValueError):
    """This model, or the way it is started, cannot be cached; one line with what to change."""


@dataclass(frozen=True)
class KVGroup:
    """A KV cache group that is cached."""

    index: int
    """Its place in ``kv_cache_config.kv_cache_groups`` and in block tables."""
    rule: Rule
    block_size: int
    """Tokens that one block id covers (all ranks of context parallelism together)."""
    layers: tuple[str, ...]
    """Of this rank's pipeline stage; may be empty there."""
    kind: str

    @property
    def recurrent(self) -> bool:
        return isinstance(self.rule, Recurrent)

    def __str__(self) -> str:
        reach = {Window: "window ", ChunkedLocal: "span "}.get(type(self.rule), "")
        tokens = f", {reach}{getattr(self.rule, 'tokens', '')}" if reach else ""
        return f"{self.kind}{tokens}, block {self.block_size}, {len(self.layers)} layers"


@dataclass(frozen=True)
class IgnoredGroup:
    """A KV cache group that no later request could use, and why."""

    index: int
    layers: tuple[str, ...]
    why: str


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


def unified_block_size(groups: Sequence[KVGroup]) -> int:
    """N: the smallest number of tokens that ends a block in every group."""
    return math.lcm(*(group.block_size for group in groups))
