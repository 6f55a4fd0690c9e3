"""From the tensors that vLLM registers to the byte layout of slots, with the books balanced on the way."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from vllm import envs

from lmcache_shm.client.plan import CachePlan, KVGroup, ModelError
from lmcache_shm.transfer.pages import GroupPages, PlacementError, SlotLayout, group_pages
from lmcache_shm.transfer.pages import Part as PagePart
from lmcache_shm.vllm.groups import content_bytes

_VARIABLES = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_SSM_CONV_STATE_LAYOUT",
)
"""Of the environment what changes values beyond the last bits, or the order of the bytes in a block behind
the tensors' back. Other variables choose between kernels for the same computation, or show elsewhere."""


@dataclass
class WorkerFacts:
    """Facts of the namespace that only a worker knows; sent to the scheduler by way of the server.

    (vLLM's handshake carries one connector's metadata: under MultiConnector that may be another's.)

    `groups[i]`: of KV cache group i: digest of the page layout and the layers in it, attention backends,
    types and scales of the cache, kernel block sizes. `environment`: variables that are set.
    """

    rank: int
    world: int
    device: str
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, told: bytes) -> "WorkerFacts":
        """Raises msgspec.MsgspecError."""
        return msgspec.json.decode(told, type=cls)


class LayerFacts(NamedTuple):
    """What a layer itself says once the model is loaded; "" where it says nothing."""

    backend: str = ""
    dtype: str = ""
    """Of its KV cache, in vLLM's words: a worker may store another one than the engine was started with."""
    scales: str = ""
    """By which a quantized cache is scaled."""


def tensors_of(kv_caches: Mapping[str, Any], layers: Sequence[str]) -> list[Any]:
    """Every registered tensor of `layers`, in layer order. Raises ModelError for a layer without one."""
    found: list[Any] = []
    for layer in layers:
        entry = kv_caches.get(layer)
        if entry is None:
            raise ModelError(f"vLLM registered no KV cache tensor for layer {layer}")
        found += entry if isinstance(entry, (list, tuple)) else [entry]
    return found


def pages_by_group(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], groups: Sequence[KVGroup]
) -> dict[int, GroupPages]:
    """Pages of each cached group that has layers on this rank.

    Every content byte that a group's spec promises must lie in the registered tensors, no more and no
    less, and every registered layer must be accounted for. Raises ModelError with the figures.
    """
    pages: dict[int, GroupPages] = {}
    for group in groups:
        if not group.layers:
            continue
        spec = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
        promised = content_bytes(spec, group.layers)
        try:
            pages[group.index] = group_pages(
                tensors_of(kv_caches, group.layers), kv_cache_config.num_blocks, promised
            )
        except PlacementError as error:
            raise ModelError(
                f"KV cache group {group.index} ({group}): {error}; this layout of vLLM is not known to "
                "lmcache_shm, and it will not guess"
            ) from None
    _require_claimed(kv_cache_config, kv_caches)
    return pages


def _require_claimed(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> None:
    """A layer in no group may only share the tensor of one that is (KV sharing)."""
    grouped = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    known = {
        _place(t) for name in grouped & kv_caches.keys() for t in tensors_of(kv_caches, [name])
    }
    for name in kv_caches.keys() - grouped:
        if any(_place(tensor) not in known for tensor in tensors_of(kv_caches, [name])):
            raise ModelError(
                f"layer {name} has a KV cache of its own, but is in no KV cache group: its bytes would be "
                "lost"
            )


def _place(tensor: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def rank_layouts(plan: CachePlan, pages: Mapping[int, GroupPages]) -> list[SlotLayout]:
    """Layout of this rank's region in the slots of each object group. Layers of other pipeline stages take no bytes."""
    nothing = GroupPages((), 1)
    return [
        SlotLayout(
            [
                PagePart(pages.get(p.group.index, nothing), p.pages_per_chunk, p.first_page)
                for p in group.parts
            ]
        )
        for group in plan.groups
    ]


def worker_facts(
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    groups: Sequence[KVGroup],
    pages: Mapping[int, GroupPages],
    layers: Mapping[str, LayerFacts],
    rank: int,
    world: int,
) -> WorkerFacts:
    """Gather this rank's facts; `layers`: what layers say of themselves, as far as they do."""
    facts = WorkerFacts(rank, world, "", environment=environment())
    for group in groups:
        tensors = tensors_of(kv_caches, group.layers)
        if tensors:
            facts.device = str(tensors[0].device.type)
        signature = pages[group.index].signature if group.index in pages else ""
        told = [layers.get(name, LayerFacts()) for name in group.layers]
        splits = sorted({t.shape[0] // kv_cache_config.num_blocks for t in tensors})
        facts.groups[str(group.index)] = {
            "layers": len(group.layers),
            "pages": _digest([signature, *group.layers, *map(_form, tensors)]),
            "backends": sorted({layer.backend for layer in told if layer.backend}),
            "dtypes": sorted({layer.dtype for layer in told if layer.dtype}),
            "scales": _digest(layer.scales for layer in told),
            "kernel_blocks": [group.block_size // split for split in splits],
        }
    return facts


def layer_facts(vllm_config: Any, layers: Iterable[str]) -> dict[str, LayerFacts]:
    """By layer: its attention backend, and the type and scales of its cache. In a worker, of a loaded model."""
    context = vllm_config.compilation_config.static_forward_context
    found = {}
    for name in layers:
        layer = context.get(name)
        backend = getattr(layer, "get_attn_backend", None)
        dtype = str(getattr(layer, "kv_cache_dtype", ""))
        found[name] = LayerFacts(
            str(backend().get_name()) if backend is not None else "",
            dtype,
            _scales(layer) if dtype not in ("", "auto") else "",
        )
    return found


def environment() -> dict[str, str]:
    """This process's vLLM variables that are part of what its bytes are, as far as they are set."""
    values = {name: getattr(envs, name) for name in _VARIABLES if envs.is_set(name)}
    return {name: repr(value) for name, value in values.items() if value}


def _scales(layer: Any) -> str:
    """Per tensor or per head."""
    scales = [getattr(layer, name, None) for name in ("_k_scale", "_v_scale")]
    return repr([s.tolist() if s is not None else None for s in scales])


def _form(tensor: Any) -> str:
    """How the bytes of a block are to be read, independent of where they are and of how many there are."""
    return f"{tensor.dtype}{list(tensor.shape[1:])}{list(tensor.stride()[1:])}"


def _digest(words: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(words).encode(), digest_size=12).hexdigest()
