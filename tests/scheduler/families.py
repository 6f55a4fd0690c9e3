"""KV cache geometries of every kind of model, small enough that thousands of schedules run in minutes.

A family is a set of vLLM's own layer specs. What follows (grouping, page unification, placement, hash
block size) is computed by vLLM as in an engine start, from a tiny but real model configuration; there
is no model and nothing is executed.
"""

import atexit
import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core import kv_cache_utils as kcu
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from tools.tiny_models import load

MAX_MODEL_LEN = 512
Specs = Mapping[str, KVCacheSpec]


@dataclass(frozen=True)
class Family:
    """One geometry. `chunks` are the chunk sizes it is tried with; `steps` token budgets of a step."""

    name: str
    specs: Callable[[], Specs]
    chunks: tuple[int, ...]
    steps: tuple[int, ...] = (32, 64, 128)
    layout: str = "LBHNC"
    world: int = 1
    replicated: bool = False
    recurrent: bool = False
    drafts: bool = True
    """Whether vLLM can speculate with it here (ngram, in the synchronous scheduler)."""
    cache: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of CacheConfig."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """kv_connector_extra_config."""
    separate: bool = True


def full(block: int, head: int = 2, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=head, dtype=torch.float16, **more
    )


def window(block: int, tokens: int, head: int = 2) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=head, dtype=torch.float16, sliding_window=tokens
    )


def local(block: int, tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=2, dtype=torch.float16,
        attention_chunk_size=tokens,
    )  # fmt: skip


def state(block: int, nbytes: int, page: int, *, drafts: int = 0, checkpoint: int = 0) -> MambaSpec:
    return MambaSpec(
        block_size=block, shapes=((nbytes // 4,),), dtypes=(torch.float32,), page_size_padded=page,
        mamba_cache_mode="align", num_speculative_blocks=drafts,
        num_prefill_checkpoint_blocks=int(checkpoint > 0),
        prefill_checkpoint_alignment=checkpoint or None,
    )  # fmt: skip


def mla(block: int, words: int, per_state: int = 1, **more: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=4 * words, dtype=torch.float16,
        tokens_per_state=per_state, **more,
    )  # fmt: skip


def window_mla(block: int, tokens: int, words: int) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=block, num_kv_heads=1, head_size=4 * words, dtype=torch.float16,
        sliding_window=tokens,
    )  # fmt: skip


def _layers(**specs: KVCacheSpec) -> Specs:
    """Layers are named `model.layers.N.KIND`, in the order given."""
    return {f"model.layers.{i}.{name}": spec for i, (name, spec) in enumerate(specs.items())}


def _full() -> Specs:
    return _layers(a=full(8), b=full(8))


def _windows() -> Specs:
    # Neither window is a multiple of the block; the larger one exceeds a chunk.
    return _layers(a=window(8, 13), b=window(8, 42), c=full(8))


def _sizes() -> Specs:
    # Gemma 4: the wider sliding layers make vLLM double the block of the full ones.
    return _layers(a=window(8, 24, head=4), b=window(8, 24, head=4), c=full(8), d=full(8))


def _gdn(drafts: int = 0) -> Specs:
    page = 16 * 8
    gdn = state(16, 64, page, drafts=drafts)
    return _layers(a=gdn, b=gdn, c=gdn, d=full(16))


def _mamba2() -> Specs:
    mamba = state(16, 64, 16 * 8, checkpoint=8)
    return _layers(a=mamba, b=full(16))


def _gdn_window() -> Specs:
    return _layers(a=state(16, 64, 16 * 8), b=full(16), c=window(16, 40))


def _deepseek_v4() -> Specs:
    # A quarter of DeepSeek-V4-Flash: blocks 16/16/64/4/8, hits land on multiples of 64.
    return {
        "l.0.swa": window_mla(16, 32, 2), "l.1.swa": window_mla(16, 32, 2),
        "l.2.swa": window_mla(16, 32, 2), "l.3.swa": window_mla(16, 32, 2),
        "l.1.idx": mla(64, 1, 4), "l.1.attn": mla(64, 2, 4), "l.2.attn": mla(64, 2, 32),
        "l.3.idx": mla(64, 1, 4), "l.3.attn": mla(64, 2, 4),
        "l.1.istate": window_mla(4, 8, 1), "l.1.state": window_mla(4, 8, 2),
        "l.3.istate": window_mla(4, 8, 1), "l.3.state": window_mla(4, 8, 2),
        "l.2.state": window_mla(8, 32, 1),
    }  # fmt: skip


def _local() -> Specs:
    return _layers(a=local(8, 32), b=local(8, 32), c=full(8), d=full(8))


def _sliding_only() -> Specs:
    return _layers(a=window(8, 24), b=window(8, 24))


def _scratch() -> Specs:
    # GLM's indexer tail: a group that vLLM never caches.
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=2, dtype=torch.float16)
    return _layers(a=full(8), b=ring)


def _mla() -> Specs:
    spec = mla(8, 2, max_tp_shards=1)
    return _layers(a=spec, b=spec)


_RUNS = itertools.count()
"""Each engine is a run of its own, as one that a process of its own starts."""
_RECURRENT = {"mamba_cache_mode": "align"}
_ANY_STEP = {"lmcache_shm.mamba_steps": "any"}

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("full", _full, (8, 16, 40)),
        Family("windows", _windows, (16, 32)),
        Family("sizes", _sizes, (16, 48)),
        Family("gdn", _gdn, (16, 32), (16, 24, 31), recurrent=True, cache=_RECURRENT),
        Family("gdn_any", _gdn, (16, 32), (48, 96), recurrent=True, cache=_RECURRENT, extra=_ANY_STEP),
        Family("gdn_fine", _gdn, (16, 32), (16, 24), recurrent=True,
               cache={**_RECURRENT, "prefix_match_unit": 8}),
        Family("mamba2", _mamba2, (16, 32), (24, 48, 96), recurrent=True, drafts=False,
               cache=_RECURRENT, extra=_ANY_STEP),
        Family("gdn_window", _gdn_window, (16, 48), (16, 31), recurrent=True, cache=_RECURRENT),
        Family("deepseek_v4", _deepseek_v4, (64, 128), (64, 100, 200), layout="BLHNC", drafts=False),
        Family("local", _local, (8, 16, 32)),
        Family("sliding_only", _sliding_only, (8, 16)),
        Family("scratch", _scratch, (8, 16)),
        Family("full_tp2", _full, (8, 16), world=2),
        Family("windows_tp2", _windows, (16,), world=2),
        Family("mla_tp2", _mla, (8, 16), world=2, replicated=True),
        Family("windows_one_object", _windows, (16, 32), separate=False),
        Family("gdn_one_object", _gdn, (16, 32), (16, 24, 31), recurrent=True, cache=_RECURRENT,
               separate=False),
    )
}  # fmt: skip


@functools.cache
def _model() -> str:
    """A directory with the configuration of a tiny llama; only its lengths matter here."""
    folder = tempfile.mkdtemp(prefix=f"lmcshm-test-{os.getpid()}-sched-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(load("llama").write(Path(folder)))


@functools.cache
def _engine_config(world: int, drafts: int) -> VllmConfig:
    ngram = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
    return EngineArgs(
        model=_model(), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True,
        max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=MAX_MODEL_LEN, max_num_seqs=6,
        enable_prefix_caching=True, block_size=8, kv_cache_memory_bytes=1 << 20,
        async_scheduling=False, tensor_parallel_size=world,
        speculative_config=ngram if drafts else None,
    ).create_engine_config()  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """All that an engine start decides."""

    family: Family
    chunk: int
    step: int
    room: float = 1.0
    """KV blocks: as many as this many requests of the greatest length need."""
    max_len: int = MAX_MODEL_LEN
    asynchronous: bool = False
    drafts: int = 0
    max_seqs: int = 6
    policy: str = "fcfs"
    place: str = ""
    """Of our connector under MultiConnector: "only", "first", "second"; "": there is none around it."""


def fork(config: Any, **changes: Any) -> Any:
    """A shallow copy with other attributes: vLLM's validation has been through once, in `_engine_config`."""
    new = object.__new__(type(config))
    new.__dict__.update(config.__dict__)
    for name, value in changes.items():
        object.__setattr__(new, name, value)
    return new


def vllm_config(setup: Setup, engine_id: str | None, extra: Mapping[str, Any]) -> VllmConfig:
    """The VllmConfig of an engine; without `engine_id` it has no connector."""
    family = setup.family
    base = _engine_config(family.world, setup.drafts)
    transfer = None
    if engine_id is not None:
        transfer = KVTransferConfig(
            kv_connector="LMCacheShmConnector",
            kv_connector_module_path="lmcache_shm.vllm",
            kv_role="kv_both",
            engine_id=engine_id,
            kv_connector_extra_config={**family.extra, **extra},
        )
        if setup.place:
            transfer = _in_multi(transfer, setup.place)
    scheduler = base.scheduler_config
    spare = scheduler.max_num_batched_tokens - (
        scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    )
    return fork(
        base,
        instance_id=f"run {next(_RUNS)}",
        cache_config=fork(base.cache_config, kv_cache_layout=family.layout, **family.cache),
        model_config=fork(base.model_config, max_model_len=setup.max_len),
        scheduler_config=fork(
            scheduler,
            max_num_batched_tokens=setup.step,
            max_num_scheduled_tokens=setup.step - spare
            if scheduler.max_num_scheduled_tokens
            else None,
            # vLLM turns it off on CPU; the scheduler that GPUs get is tested here all the same.
            async_scheduling=setup.asynchronous,
            max_num_seqs=setup.max_seqs,
            policy=setup.policy,
        ),
        parallel_config=fork(base.parallel_config),
        kv_transfer_config=transfer,
    )


def _in_multi(ours: KVTransferConfig, place: str) -> KVTransferConfig:
    """What an engine is given whose MultiConnector has our connector in this place."""
    child = {
        "kv_connector": ours.kv_connector,
        "kv_connector_module_path": ours.kv_connector_module_path,
        "kv_role": ours.kv_role,
        "kv_connector_extra_config": ours.kv_connector_extra_config,
    }
    neighbour = {
        "kv_connector": "Neighbour",
        "kv_connector_module_path": "tests.scheduler.neighbour",
        "kv_role": "kv_both",
    }
    children = {"only": [child], "first": [child, neighbour], "second": [neighbour, child]}
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id=ours.engine_id,
        kv_connector_extra_config={"connectors": children[place]},
    )


def kv_cache_configs(
    setup: Setup, config: VllmConfig
) -> tuple[list[KVCacheConfig], KVCacheConfig, int]:
    """(configuration of every worker, that of the scheduler, scheduler block size), as vLLM's core makes them."""
    register_all_kvcache_specs(config)
    specs = dict(setup.family.specs())
    if setup.drafts and setup.family.recurrent:
        specs = {
            name: state(
                s.block_size, s.state_content_size_bytes, s.page_size_bytes, drafts=setup.drafts
            )
            if isinstance(s, MambaSpec)
            else s
            for name, s in specs.items()
        }
    world = setup.family.world
    groups = kcu.get_kv_cache_groups(config, dict(specs))
    per_block = kcu._pool_bytes_per_block(config, groups)
    one = -(-kcu._max_memory_usage_bytes_from_groups(config, groups) // per_block)
    config.cache_config.num_gpu_blocks_override = 1 + int(one * setup.room)
    workers = kcu.get_kv_cache_configs(
        config, [dict(specs) for _ in range(world)], [1 << 30] * world
    )
    for worker in workers:
        worker.kv_cache_layout = setup.family.layout
    whole = kcu.generate_scheduler_kv_cache_config(workers)
    config.cache_config.num_gpu_blocks = whole.num_blocks
    config.cache_config.block_size = min(
        g.kv_cache_spec.block_size for g in whole.prefix_cacheable_groups
    )
    scheduler_block, hash_block = kcu.resolve_kv_cache_block_sizes(whole, config)
    alignment = kcu.resolve_cache_hit_alignment_tokens(whole, config, scheduler_block, hash_block)
    for one in (*workers, whole):
        one.hash_block_size = hash_block
        one.cache_hit_alignment_tokens = alignment
    return workers, whole, scheduler_block
