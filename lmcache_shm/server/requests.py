"""The fields of requests, checked and converted; nothing here changes anything."""

from typing import Any

import numpy as np

from lmcache_shm.arena.slot import SlotGeometry, slot_geometry
from lmcache_shm.config import Config
from lmcache_shm.protocol import messages as m
from lmcache_shm.protocol.rules import Rule, rule_of
from lmcache_shm.server.catalog.groups import GroupSpec
from lmcache_shm.server.engines import MAX_GROUPS, Denied, Engine, check_shape

MAX_DESCRIPTOR = 64 << 10
_SIZES = {"groups": 2, "parents": m.KEY, "chunks": 4, "digests": 16, "salts": 8}


def count(packed: bytes, size: int, name: str) -> int:
    """Entries of `size` bytes in a packed field. Raises Denied."""
    n, left = divmod(len(packed), size)
    if left:
        raise Denied("invalid", f"{name}: {len(packed)} bytes are no entries of {size} bytes")
    if n > m.MAX_KEYS:
        raise Denied("limit", f"{name}: {n} entries; at most {m.MAX_KEYS} are allowed")
    return n


def entries(reserve: m.Reserve, n_groups: int) -> dict[str, Any]:
    """The arrays of a Reserve with `n_groups` object groups, all of one length and within bounds (else Denied)."""
    n = count(reserve.keys, m.KEY, "keys")
    for name, size in _SIZES.items():
        if len(getattr(reserve, name)) != n * size:
            raise Denied("invalid", f"{name}: not {n} entries of {size} bytes, as there are keys")
    groups = np.frombuffer(reserve.groups, "<u2")
    group = max(groups.tolist(), default=0)
    if group >= n_groups:
        raise Denied("invalid", f"object group {group} of {n_groups}")
    return {
        "groups": groups,
        "keys": reserve.keys,
        "parents": reserve.parents,
        "chunks": np.frombuffer(reserve.chunks, "<u4"),
        "digests": reserve.digests,
        "salts": np.frombuffer(reserve.salts, "<u8"),
    }


def check_register(request: m.Register, config: Config) -> None:
    """Raises Denied for a Register that this server cannot serve."""
    check_shape(request.world, request.replicas)
    if not 1 <= len(request.groups) <= MAX_GROUPS:
        raise Denied("limit", f"{len(request.groups)} object groups; 1 to {MAX_GROUPS} are allowed")
    if not 0 < len(request.descriptor) <= MAX_DESCRIPTOR:
        raise Denied("limit", f"a namespace descriptor has 1 to {MAX_DESCRIPTOR} bytes")
    if not 1 <= request.chunk_size <= 1 << 20:
        raise Denied("invalid", f"a chunk of {request.chunk_size} tokens")
    wanted = config.chunk_size
    if wanted and request.chunk_size != wanted:
        raise Denied(
            "refused",
            f"the server caches chunks of {wanted} tokens, this engine wants {request.chunk_size}; "
            f"start the server with --chunk-size {request.chunk_size} (or auto)",
        )
    if not config.separate_object_groups and len(request.groups) > 1:
        raise Denied(
            "refused", "the server keeps all layers in one object group, the engine has more"
        )


def geometries(engine: Engine, request: m.Register) -> list[SlotGeometry]:
    """The slot of each object group, from its workers' regions. Raises Denied when they do not fit together."""
    by_rank = [engine.workers[rank].region_bytes for rank in range(engine.world)]
    for rank, regions in enumerate(by_rank):
        if len(regions) != len(request.groups):
            raise Denied(
                "refused",
                f"rank {rank} has {len(regions)} object groups, the scheduler {len(request.groups)}",
            )
    try:
        return [
            slot_geometry(regions, engine.replicas, request.chunk_size)
            for regions in zip(*by_rank, strict=True)
        ]
    except ValueError as error:
        raise Denied("refused", str(error)) from None


def group_spec(info: m.GroupInfo, slot: SlotGeometry, model: str) -> GroupSpec:
    """An object group as the catalog knows it. Raises Denied for an unknown rule."""
    shown = {
        "model": model[:256],
        "kv_groups": info.kv_groups,
        "layers": info.layers,
        "block_sizes": info.block_sizes,
        "parts": info.parts,
        "checked": slot.checked,  # kept with the namespace: a later server's scrub needs it
    }
    return GroupSpec(info.name, _rule(info), slot.slot_bytes, shown)


def _rule(info: m.GroupInfo) -> Rule:
    try:
        return rule_of(info.rule, info.param)
    except ValueError as error:
        raise Denied("invalid", f"group {info.name}: {error}") from None
