"""From the tensors that vLLM registers to the byte layout of slots, with the books balanced on the way."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lmcache_shm.client.groups import KVGroup, ModelError
from lmcache_shm.client.plan import CachePlan
from lmcache_shm.transfer.pages import GroupPages, PlacementError, SlotLayout, group_pages
from lmcache_shm.transfer.pages import Part as PagePart
from lmcache_shm.vllm.groups import content_bytes


@dataclass
class WorkerFacts:
    """What only a worker knows and a namespace must hold; it travels to the scheduler by way of the server.

    (vLLM's handshake carries one connector's metadata: under MultiConnector that may be another's.)

    `groups[i]`: of KV cache group i: digest of the page layout, attention backends, kernel block sizes.
    """

    rank: int
    world: int
    device: str
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, told: bytes) -> "WorkerFacts":
        """Raises msgspec.MsgspecError."""
        return msgspec.json.decode(told, type=cls)


@dataclass(frozen=True)
class RankLayout:
    """One rank's share of the slots of a plan.

    `layouts` holds only object groups of which this rank has layers; `place[g]` is the index of object
    group g in it, or -1. `part[g][i]` is the index in that layout of KV cache group i.
    """

    layouts: tuple[SlotLayout, ...]
    place: tuple[int, ...]
    part: tuple[dict[int, int], ...]

    @property
    def region_bytes(self) -> list[int]:
        """By object group; 0 where this rank has nothing."""
        return [self.layouts[p].region_bytes if p >= 0 else 0 for p in self.place]


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


def rank_layout(plan: CachePlan, pages: Mapping[int, GroupPages]) -> RankLayout:
    """The slots of `plan` as this rank fills them."""
    layouts: list[SlotLayout] = []
    place: list[int] = []
    part: list[dict[int, int]] = []
    for group in plan.groups:
        mine = [p for p in group.parts if p.group.index in pages]
        part.append({p.group.index: i for i, p in enumerate(mine)})
        place.append(len(layouts) if mine else -1)
        if mine:
            layouts.append(
                SlotLayout(
                    [PagePart(pages[p.group.index], p.pages_per_chunk, p.first_page) for p in mine]
                )
            )
    return RankLayout(tuple(layouts), tuple(place), tuple(part))


def worker_facts(
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    groups: Sequence[KVGroup],
    pages: Mapping[int, GroupPages],
    backends: Mapping[str, str],
    rank: int,
    world: int,
) -> WorkerFacts:
    """Gather this rank's facts; `backends` maps layers to the name of their attention backend."""
    facts = WorkerFacts(rank, world, "")
    for group in groups:
        tensors = tensors_of(kv_caches, group.layers)
        if tensors:
            facts.device = str(tensors[0].device.type)
        signature = pages[group.index].signature if group.index in pages else ""
        splits = sorted({t.shape[0] // kv_cache_config.num_blocks for t in tensors})
        facts.groups[str(group.index)] = {
            "layers": len(group.layers),
            "pages": _digest([signature, *map(_form, tensors)]),
            "backends": sorted({backends[name] for name in group.layers if name in backends}),
            "kernel_blocks": [group.block_size // split for split in splits],
        }
    return facts


def layer_backends(vllm_config: Any, layers: Iterable[str]) -> dict[str, str]:
    """Layer → name of its attention backend, for layers that say so."""
    context = vllm_config.compilation_config.static_forward_context
    found = {}
    for name in layers:
        backend = getattr(context.get(name), "get_attn_backend", None)
        if backend is not None:
            found[name] = str(backend().get_name())
    return found


def _form(tensor: Any) -> str:
    """How the bytes of a block are to be read, independent of where they are and of how many there are."""
    return f"{tensor.dtype}{list(tensor.shape[1:])}{list(tensor.stride()[1:])}"


def _digest(words: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(words).encode(), digest_size=12).hexdigest()
