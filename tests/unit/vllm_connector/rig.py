"""The scheduler side over a real arena, catalog and block pool; the server without a socket, workers without copies."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool

from lmcache_shm.arena import segment
from lmcache_shm.arena.job import CopyJob
from lmcache_shm.arena.layout import RING, SlotState
from lmcache_shm.client.in_flight import InFlightStores
from lmcache_shm.client.jobs import Place
from lmcache_shm.client.plan import CachePlan, make_plan
from lmcache_shm.client.registration import Registration
from lmcache_shm.client.weights import Weights
from lmcache_shm.protocol.keys import seed
from lmcache_shm.protocol.messages import Acquired, Registered, Reserve, Stepped
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.catalog.groups import GroupSpec
from lmcache_shm.vllm.engine_api import StepMetadata
from lmcache_shm.vllm.scheduler import SchedulerSide

from .worlds import engine, groups_of

SLOT = 4096
TOKENS_AT = 1024
_numbers = itertools.count()


class DirectClient:
    """CacheClient's verbs straight on a catalog; `asked` lists what would have gone over the socket."""

    def __init__(self, catalog: Catalog, namespace: int, boot: bytes) -> None:
        self.catalog, self.namespace, self.boot = catalog, namespace, boot
        self.up = True
        self.asked: list[str] = []
        self.counted: list[str] = []
        self.leases: dict[int, list[Any]] = {}
        self._lease = 0

    def acquire(self, keys: bytes, local: int, total: int, replaces: int = 0) -> Acquired | None:
        self.asked.append("acquire")
        self._unpin([replaces])
        if not self.up:
            return None
        hit = self.catalog.acquire(self.namespace, keys, local, total)
        lease = 0
        if hit.n_chunks:
            self._lease = lease = self._lease + 1
            self.leases[lease] = hit.rows
        return Acquired(
            self.boot, lease, hit.n_chunks, list(hit.first), [r.tobytes() for r in hit.rows]
        )

    def step(
        self,
        reserve: Reserve | None = None,
        commit: Sequence[int] = (),
        abort: Sequence[int] = (),
        release: Sequence[int] = (),
        registered: Registered | None = None,
    ) -> Stepped | None:
        self.asked.append("step")
        if not self.up:
            return None
        self._unpin(release)
        if registered is not None and registered.boot != self.boot:
            return None
        self.catalog.commit(list(commit))
        self.catalog.abort(list(abort))
        if reserve is None:
            return Stepped(self.boot)
        rows = self.catalog.reserve(
            self.namespace,
            groups=np.frombuffer(reserve.groups, "<u2"),
            keys=reserve.keys,
            parents=reserve.parents,
            chunks=np.frombuffer(reserve.chunks, "<u4"),
            digests=reserve.digests,
            salts=np.frombuffer(reserve.salts, "<u8"),
            client=0,
        )
        return Stepped(self.boot, rows.astype("<i4").tobytes())

    def clear(self) -> int | None:
        self.asked.append("clear")
        return self.catalog.clear(self.namespace) if self.up else None

    def count(self, reason: str) -> None:
        self.counted.append(reason)

    def _unpin(self, leases: Sequence[int]) -> None:
        for lease in leases:
            for rows in self.leases.pop(lease, ()):
                self.catalog.release(rows)


class DirectStart:
    """Start, registered already."""

    def __init__(self, client: DirectClient, registration: Registration) -> None:
        self.client, self.latest = client, registration
        self.in_flight = InFlightStores(client, lambda: self.latest)  # type: ignore[arg-type]
        self.weights = Weights("engine", "", lambda: "loaded")
        self.weights.find()
        assert self.weights.wait(5)
        self.speculative, self.alone, self.world = False, True, registration.place.world
        self.reads = self.writes = True
        self.vllm_config = engine(budget=512)
        self.groups = [part.group for group in registration.plan.groups for part in group.parts]
        self.ignored: list[Any] = []

    def current(self) -> Registration | None:
        if not self.client.up:
            return None
        if self.latest.weights != self.weights.identity:
            self.latest = self._moved(str(self.weights.identity))
        return self.latest

    def _moved(self, weights: str) -> Registration:
        """As a new registration does."""
        catalog, plan, old = self.client.catalog, self.latest.plan, self.latest
        specs = [GroupSpec(group.name, group.rule, SLOT) for group in plan.groups]
        space = catalog.register(weights.encode(), specs, plan.chunk_size)
        self.client.namespace = space.id
        registered = Registered(
            old.boot, old.arena_id, ready=True, namespace=space.id, token_offset=old.token_offset
        )
        return Registration(
            registered, old.arena, plan, seed(weights.encode()), old.place, old.writers, set(),
            [set() for _ in plan.groups], weights,
        )  # fmt: skip

    def close(self) -> None:
        self.in_flight.close()


class Request:
    """What of vLLM's Request the scheduler side looks at."""

    def __init__(self, **facts: Any) -> None:
        self.__dict__ = facts


class Rig:
    """`side` is what is tested; `plan` says which groups there are."""

    def __init__(
        self, arena: segment.Arena, plan: CachePlan, *, blocks: int = 256, world: int = 1
    ) -> None:
        self.arena, self.plan = arena, plan
        self.catalog = Catalog(arena)
        specs = [GroupSpec(group.name, group.rule, SLOT) for group in plan.groups]
        self.space = self.catalog.register(b"{}", specs, plan.chunk_size)
        self.client = DirectClient(self.catalog, self.space.id, b"boot")
        groups = len(plan.groups)
        place = Place(0, [[0] * world] * groups, [512] * groups, "off", plan.chunk_size)
        registered = Registered(
            b"boot", arena.arena_id, ready=True, namespace=self.space.id, token_offset=[TOKENS_AT] * groups
        )  # fmt: skip
        self.registration = Registration(
            registered, arena, plan, seed(b"{}"), place, np.arange(world), set(),
            [set() for _ in plan.groups], "loaded",
        )  # fmt: skip
        self.start = DirectStart(self.client, self.registration)
        self.side = SchedulerSide(self.start)  # type: ignore[arg-type]
        self.side.in_flight.stepped()
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=32)
        self.manager = SimpleNamespace(
            block_pool=self.pool,
            reset_prefix_cache=lambda: True,
            coordinator=SimpleNamespace(single_type_managers=[]),
            free=lambda request: self.freed.append(request.request_id),
            allocate_slots=lambda: self.allocate(),  # noqa: PLW0108 (tests replace it)
        )
        self.allocate: Callable[[], Any] = lambda: None
        self.freed: list[str] = []
        """Requests whose blocks were given back."""
        self.side.bind(self.manager)
        self.tables: dict[str, list[list[int]]] = {}

    # ------------------------------------------------------------------------------ the engine
    def request(self, req_id: str, tokens: Sequence[int], **facts: Any) -> Any:
        plain = {
            "request_id": req_id, "all_token_ids": list(tokens), "num_tokens": len(tokens),
            "num_prompt_tokens": len(tokens), "num_computed_tokens": 0, "lora_request": None,
            "cache_salt": None, "mm_features": [], "prompt_embeds": None, "prompt_is_token_ids": None,
            "skip_reading_prefix_cache": False,
        }  # fmt: skip
        request = Request(**{**plain, **facts})
        self.side.on_new_request(request)
        return request

    def give_blocks(self, request: Any, upto: int, *, null_before: int = 0) -> list[list[int]]:
        """Blocks for `upto` tokens in every KV cache group; those before `null_before` are the null block."""
        tables = self.tables.setdefault(request.request_id, [[] for _ in range(16)])
        for part in (p for group in self.plan.groups for p in group.parts):
            size, table = part.group.block_size, tables[part.group.index]
            for i in range(len(table), -(-upto // size)):
                skip = (i + 1) * size <= null_before
                table.append(0 if skip else self.pool.get_new_blocks(1)[0].block_id)
        return tables

    def step(self, scheduled: dict[Any, int], **more: Any) -> StepMetadata:
        """One schedule(): tokens per request; computed counts move on afterwards, as vLLM's do."""
        facts = {"offers": {}, "drafts": {}, "preempted": set(), **more}
        output = SimpleNamespace(
            num_scheduled_tokens={r.request_id: n for r, n in scheduled.items()},
            scheduled_spec_decode_tokens=facts["drafts"],
            preempted_req_ids=facts["preempted"],
            kv_connector_block_state=SimpleNamespace(
                boundary_state_offloads=facts["offers"], get_block_ids=self.tables.get
            ),
        )
        self.client.asked.clear()
        meta = self.side.build_metadata(output)
        for request, n in scheduled.items():
            request.num_computed_tokens += n
        return meta

    def prefill(self, request: Any, n: int | None = None) -> StepMetadata:
        """Blocks and one step for `n` tokens (all that are left)."""
        left = request.num_tokens - request.num_computed_tokens if n is None else n
        self.give_blocks(request, request.num_computed_tokens + left)
        return self.step({request: left})

    # ----------------------------------------------------------------------------- the workers
    def report(self, job: CopyJob, *, ok: bool = True, rank: int = 0) -> None:
        self.arena.boards[0, rank, job.id % RING] = job.id << 1 | int(ok)

    def store(self, request: Any) -> None:
        """Prefill, copy, commit."""
        for job in self.prefill(request).stores:
            self.report(job)
        self.step({})

    def rows(self, state: SlotState) -> int:
        return int((self.arena.hot["state"] == state).sum())

    @property
    def pins(self) -> int:
        return int(self.arena.hot["pins"].sum())

    def held(self) -> int:
        """Blocks with a reference that no table of a request explains."""
        counted = sum(block.ref_cnt for block in self.pool.blocks if not block.is_null)
        return counted - sum(i != 0 for tables in self.tables.values() for t in tables for i in t)


@contextmanager
def rig_of(*specs: Any, chunk: int = 128, slots: int = 64, **options: Any) -> Iterator[Rig]:
    plan = make_plan(groups_of(*specs), chunk_size=chunk)
    name = f"test-{os.getpid()}-vllm{next(_numbers)}"
    arena = segment.create(name, slots * SLOT, chunk_size=chunk, slab_bytes=16 * SLOT)
    rig = None
    try:
        rig = Rig(arena, plan, **options)
        yield rig
    finally:
        if rig is not None:
            rig.side.start.close()
        arena.unlink()
        arena.close()
