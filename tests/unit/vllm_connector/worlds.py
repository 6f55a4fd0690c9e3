"""Configurations of vLLM's own classes, as small as they can be."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_shm.client.plan import KVGroup
from lmcache_shm.vllm.groups import kv_groups


def full(block: int = 32, heads: int = 2, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=16, dtype=torch.float32, **more
    )


def window(tokens: int, block: int = 32, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=tokens,
        dcp_sharded=False, **more,
    )  # fmt: skip


def local(tokens: int, block: int = 32) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block,
        num_kv_heads=2,
        head_size=16,
        dtype=torch.float32,
        attention_chunk_size=tokens,
    )


def mla(block: int = 32) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)


def state(block: int = 160, padded: int | None = None) -> MambaSpec:
    return MambaSpec(
        block_size=block, shapes=((3, 8), (4, 4)), dtypes=(torch.float32, torch.float32),
        page_size_padded=padded, mamba_cache_mode="align",
    )  # fmt: skip


def uniform(**specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    """A group that keeps one spec per layer."""
    found = UniformTypeKVCacheSpecs.from_specs(specs)
    assert found is not None
    return found


def config(
    *specs: KVCacheSpec, num_blocks: int = 16, layers: int = 2, **more: Any
) -> KVCacheConfig:
    """One group per spec; the layers of group g are g.0, g.1, …"""
    groups = []
    for g, spec in enumerate(specs):
        names = list(getattr(spec, "kv_cache_specs", [f"{g}.{i}" for i in range(layers)]))
        groups.append(KVCacheGroupSpec(names, spec))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups, **more)


def groups_of(*specs: KVCacheSpec, dcp: int = 1) -> list[KVGroup]:
    return kv_groups(config(*specs), dcp)[0]


def engine(
    *,
    budget: int = 319,
    scheduled: int | None = None,
    mode: str = "align",
    caching: bool = True,
    seqs: int = 8,
) -> Any:
    """What of a VllmConfig the start-up checks look at."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=caching, mamba_cache_mode=mode),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=budget, max_num_scheduled_tokens=scheduled, max_num_seqs=seqs
        ),
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
    )
