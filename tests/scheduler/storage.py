"""One rank's KV cache bytes: vLLM's own allocation and views, and a model that reads and writes them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.config.cache import KVCacheLayout
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.utils import allocate_kv_cache

from tests.scheduler.content import MULTIPLIER, U64

POISON = 0xEE


@dataclass
class Plane:
    """Layers of one KVCacheTensor: `words` is a view ``[layers, blocks, states, words]`` of the pool."""

    words: U64
    adders: U64
    """``[layers, 1, words]``: what makes a layer's words its own."""
    per_state: int

    def values(self, h: U64) -> U64:
        """``[layers, n, words]`` for n states."""
        return (h[None, :, None] ^ self.adders) * MULTIPLIER


class Group:
    """One KV cache group's layers: what is written when tokens are computed, and what they read."""

    def __init__(self, index: int, spec: KVCacheSpec, planes: list[Plane], cacheable: bool) -> None:
        self.index = index
        self.block_size = spec.block_size
        self.planes = planes
        self.cacheable = cacheable
        self.recurrent = isinstance(spec, MambaSpec)
        self.ring = isinstance(spec, CircularBufferSpec)
        self.window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
        self.local = spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else 0
        self.checkpoint = isinstance(spec, MambaSpec) and spec.num_prefill_checkpoint_blocks > 0
        self.drafts = spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0

    def first_read(self, position: int) -> int:
        """The first earlier token that the token at `position` attends to."""
        if self.window:
            return max(0, position - self.window + 1)
        if self.local:
            return position // self.local * self.local
        return 0

    # -------------------------------------------------------------------- attention
    def write(self, table: npt.NDArray[np.int64], h: U64, begin: int, end: int) -> None:
        """Tokens [begin, end) of the stream h are computed into the blocks of `table`."""
        for plane in self.planes:
            per, n = plane.per_state, plane.words.shape[2]
            states = np.arange(begin // per, end // per)
            if not len(states):
                continue
            plane.words[:, table[states // n], states % n] = plane.values(h[(states + 1) * per - 1])

    def wrong(
        self, table: npt.NDArray[np.int64], h: U64, begin: int, end: int
    ) -> list[tuple[int, int]]:
        """(position, block) of states within tokens [begin, end) that do not hold what h demands."""
        bad: list[tuple[int, int]] = []
        for plane in self.planes:
            per, n = plane.per_state, plane.words.shape[2]
            states = np.arange(-(-begin // per), end // per)
            if not len(states):
                continue
            blocks = table[states // n]
            got = plane.words[:, blocks, states % n]
            differs = (got != plane.values(h[(states + 1) * per - 1])).any(axis=(0, 2))
            bad += [
                (int(s) * per, int(b))
                for s, b in zip(states[differs], blocks[differs], strict=True)
            ]
        return bad

    # -------------------------------------------------------------------- recurrent
    def write_state(self, block: int, h: int) -> None:
        for plane in self.planes:
            plane.words[:, block] = plane.values(np.array([h], np.uint64))

    def state_is(self, block: int, h: int) -> bool:
        return all(
            np.array_equal(plane.words[:, block], plane.values(np.array([h], np.uint64)))
            for plane in self.planes
        )

    def copy_state(self, source: int, target: int) -> None:
        for plane in self.planes:
            plane.words[:, target] = plane.words[:, source]


class Storage:
    """The pool of one rank. `blocks` overrides the number of blocks (for scratch copies of a pool)."""

    def __init__(self, config: KVCacheConfig, rank: int) -> None:
        self.config = config
        layout = KVCacheLayout[config.kv_cache_layout]
        self.tensors: dict[str, torch.Tensor] = allocate_kv_cache(
            config, torch.device("cpu"), layout
        )
        first = next(iter(self.tensors.values()))
        self.raw: npt.NDArray[np.uint8] = (
            torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage()).numpy()
        )
        self.address = self.raw.ctypes.data
        self.groups = [
            self._group(i, rank if config.kv_tp_replicas == 1 else 0)
            for i in range(len(config.kv_cache_groups))
        ]
        self.raw[:] = POISON

    def _group(self, index: int, shard: int) -> Group:
        group = self.config.kv_cache_groups[index]
        spec = group.kv_cache_spec
        first = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        planes = [
            self._plane(t, shard)
            for t in self.config.kv_cache_tensors
            if not set(t.layers).isdisjoint(group.layer_names)
        ]
        return Group(index, first, planes, index in self.config.prefix_cacheable_group_ids)

    def _plane(self, tensor: KVCacheTensor, shard: int) -> Plane:
        spec = next(
            s
            for g in self.config.kv_cache_groups
            for s in (
                g.kv_cache_spec.kv_cache_specs.values()
                if isinstance(g.kv_cache_spec, UniformTypeKVCacheSpecs)
                else [g.kv_cache_spec]
            )
            if tensor.layers[0]
            in (
                [k for k, v in g.kv_cache_spec.kv_cache_specs.items() if v is s]
                if isinstance(g.kv_cache_spec, UniformTypeKVCacheSpecs)
                else g.layer_names
            )
        )
        size = spec.state_content_size_bytes // 8
        words = np.lib.stride_tricks.as_strided(
            self.raw[tensor.offset :].view(np.uint8)[:8].view(np.uint64),
            shape=(len(tensor.layers), self.config.num_blocks, spec.num_states, size),
            strides=(tensor.layer_stride, tensor.block_stride, size * 8, 8),
        )
        layers = [abs(hash_name(name)) + 1000 * shard for name in tensor.layers]
        adders = np.array(
            [[[layer * 64 + w for w in range(size)]] for layer in layers], np.uint64
        ) * np.uint64(0x2545F4914F6CDD1D)
        per = 1 if isinstance(spec, MambaSpec) else int(spec.tokens_per_state)
        return Plane(words, adders, per)

    def poison(self, blocks: Sequence[int]) -> None:
        """Blocks that were just handed out hold nothing that anyone may use."""
        if len(blocks):
            ids = np.asarray(blocks)
            for group in self.groups:
                for plane in group.planes:
                    plane.words[:, ids] = np.uint64(0xEEEEEEEEEEEEEEEE)

    def copy_block(self, source: int, target: int) -> None:
        for group in self.groups:
            for plane in group.planes:
                plane.words[:, target] = plane.words[:, source]


def hash_name(name: str) -> int:
    """A small number of a layer's name, the same in every process."""
    value = 7
    for byte in name.encode():
        value = (value * 31 + byte) % 1000003
    return value
