"""An engine registers: its groups become slot sizes, its workers regions, its namespace a number."""

from typing import TYPE_CHECKING

import numpy as np

from lmcache_shm.arena.layout import SlotState
from lmcache_shm.arena.slot import SlotGeometry, checks_number, slot_geometry
from lmcache_shm.protocol.messages import GroupInfo, Register, Registered, facts_digest
from lmcache_shm.protocol.rules import ChunkedLocal, Full, Recurrent, Rule, Window
from lmcache_shm.server.catalog.catalog import GroupSpec
from lmcache_shm.server.engines import MAX_GROUPS, Engine, check_shape
from lmcache_shm.server.session import Denied, Session

if TYPE_CHECKING:
    from lmcache_shm.server.handlers import Service

MAX_DESCRIPTOR = 64 << 10


def register(service: "Service", session: Session, request: Register) -> Registered:
    """Answer a Register: ready, or who is still missing. Raises Denied."""
    _check(service, session, request)
    engine = service.engines.find(session, request.engine_id)
    if engine.scheduler is not None and engine.scheduler is not session:
        service.retire(engine.scheduler)  # the same process came back before its end was seen
        engine = service.engines.find(session, request.engine_id)
    if engine.workers and (engine.world, engine.replicas) != (request.world, request.replicas):
        raise Denied(
            "refused",
            f"the workers of engine {engine.engine_id} are {engine.world} with {engine.replicas} "
            f"replicas, its scheduler says {request.world} with {request.replicas}",
        )
    service.engines.seat(engine, session, request.world, request.replicas)
    _settle_quarantine(service, engine, session, request.busy_rows)
    missing = engine.missing()
    arena_id = bytes(service.arena.arena_id)
    if missing:
        who = ", ".join(map(str, missing))
        message = f"waiting for rank {who} of {engine.world} to attach"
        return Registered(service.boot, arena_id, False, message)
    facts = [engine.workers[rank].facts for rank in range(engine.world)]
    if request.facts != facts_digest(facts):
        message = "the descriptor does not hold what the workers say of themselves"
        return Registered(service.boot, arena_id, False, message, facts=facts)
    slots = _geometries(engine, request)
    namespace = service.catalog.register(
        request.descriptor,
        [_spec(info, slot, request.name) for info, slot in zip(request.groups, slots, strict=True)],
        request.chunk_size,
    )
    engine.registered = [engine.workers[rank].region_bytes for rank in range(engine.world)]
    session.namespace = namespace.id
    session.client = engine.index
    session.groups = len(request.groups)
    if service.config.checksum != "off":
        session.checks = [checks_number(slot.checked) for slot in slots]
    if service.scrub is not None:
        for slot in slots:
            service.scrub.learn(slot.checked)
    service.note(
        f"engine {engine.engine_id} registered ({request.name or 'model'}, {engine.world} "
        f"worker{'s' * (engine.world > 1)}, {len(slots)} object group{'s' * (len(slots) > 1)}, "
        f"chunks of {request.chunk_size} tokens)"
    )
    return Registered(
        service.boot, arena_id, True, "", namespace.id, engine.index, request.chunk_size,
        [slot.slot_bytes for slot in slots], [slot.region_offsets for slot in slots],
        [slot.checksum_offset for slot in slots], [slot.token_offset for slot in slots],
    )  # fmt: skip


def _check(service: "Service", session: Session, request: Register) -> None:
    if session.namespace >= 0:
        raise Denied("invalid", "this connection has registered before")
    check_shape(request.world, request.replicas)
    if not 1 <= len(request.groups) <= MAX_GROUPS:
        raise Denied("limit", f"{len(request.groups)} object groups; 1 to {MAX_GROUPS} are allowed")
    if not 0 < len(request.descriptor) <= MAX_DESCRIPTOR:
        raise Denied("limit", f"a namespace descriptor has 1 to {MAX_DESCRIPTOR} bytes")
    if not 1 <= request.chunk_size <= 1 << 20:
        raise Denied("invalid", f"a chunk of {request.chunk_size} tokens")
    wanted = service.config.chunk_size
    if wanted and request.chunk_size != wanted:
        raise Denied(
            "refused",
            f"the server caches chunks of {wanted} tokens, this engine wants {request.chunk_size}; "
            f"start the server with --chunk-size {request.chunk_size} (or auto)",
        )
    if not service.config.separate_object_groups and len(request.groups) > 1:
        raise Denied(
            "refused", "the server keeps all layers in one object group, the engine has more"
        )


def _geometries(engine: Engine, request: Register) -> list[SlotGeometry]:
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


def _spec(info: GroupInfo, slot: SlotGeometry, model: str) -> GroupSpec:
    shown = {
        "model": model[:256],
        "kv_groups": info.kv_groups,
        "layers": info.layers,
        "block_sizes": info.block_sizes,
        "parts": info.parts,
        "checked": slot.checked,  # kept with the namespace: a later server's scrub needs it
    }
    return GroupSpec(info.name, _rule(info), slot.slot_bytes, shown)


def _rule(info: GroupInfo) -> Rule:
    if info.rule == "full":
        return Full()
    if info.rule == "recurrent":
        return Recurrent()
    if info.param < 1:
        raise Denied("invalid", f"group {info.name}: {info.rule} of {info.param} tokens")
    if info.rule == "window":
        return Window(info.param)
    if info.rule == "chunked_local":
        return ChunkedLocal(info.param)
    raise Denied("invalid", f"group {info.name}: unknown rule {info.rule[:40]!r}")


def _settle_quarantine(
    service: "Service", engine: Engine, session: Session, busy_rows: bytes
) -> None:
    """Free what the engine had in quarantine, except what it says it is still writing."""
    if len(busy_rows) % 4:
        raise Denied("invalid", "busy_rows are no rows of 4 bytes")
    hot = service.arena.hot
    held = np.flatnonzero(
        (hot["state"] == SlotState.QUARANTINED) & (hot["client"] == engine.index)
    ).astype(np.int32)
    busy = np.isin(held, np.frombuffer(busy_rows, "<i4"))
    if not busy.all():
        service.catalog.abort(held[~busy])
    session.in_doubt = set(held[busy].tolist())
    engine.quarantined = len(session.in_doubt)
