"""One registration with one server: the arena, the namespace, and keys that are known to be stored in it."""

from dataclasses import dataclass, field

import numpy as np

from lmcache_shm.arena.segment import Arena
from lmcache_shm.client.client import unpack_rows
from lmcache_shm.client.jobs import Place
from lmcache_shm.client.plan import CachePlan
from lmcache_shm.protocol.keys import seed
from lmcache_shm.protocol.messages import HelloReply, Register, Registered

KNOWN_LIMIT = 1 << 16
"""Keys remembered per object group; when there are more, all are forgotten."""


@dataclass(eq=False)
class Registration:
    """Everything that becomes void when the server restarts (`boot`) or the arena is replaced.

    Rows, leases and keys of one registration mean nothing in another. `known[g]` are keys that this engine has
    seen stored in object group g; an evicted one may still be among them.
    """

    registered: Registered
    arena: Arena
    plan: CachePlan
    seed: bytes
    place: Place
    writers: np.ndarray
    """Ranks that copy when something is stored: one of each set of replicas."""
    busy: set[int]
    """Rows that were named as busy, and that are to be aborted once their copies have ended."""
    known: list[set[bytes]]
    weights: str = ""
    """What the engine had in memory (`Weights.identity`) when the namespace was chosen."""
    boot: bytes = field(init=False)
    namespace: int = field(init=False)
    token_offset: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.boot, self.namespace = self.registered.boot, self.registered.namespace
        self.token_offset = self.registered.token_offset

    @classmethod
    def of(
        cls,
        registered: Registered,
        hello: HelloReply,
        arena: Arena,
        plan: CachePlan,
        register: Register,
        weights: str = "",
    ) -> "Registration":
        place = Place(
            registered.client,
            registered.region_offsets,
            registered.checksum_offset,
            hello.checksum,
            plan.chunk_size,
        )
        return cls(
            registered=registered,
            arena=arena,
            plan=plan,
            seed=seed(register.descriptor),
            place=place,
            writers=np.arange(0, register.world, register.replicas),
            busy=set(unpack_rows(register.busy_rows)),
            known=[set() for _ in plan.groups],
            weights=weights,
        )

    @property
    def arena_id(self) -> bytes:
        return bytes(self.arena.arena_id)

    def remember(self, group: int, *keys: bytes) -> None:
        """Note that `keys` are stored in object group `group`."""
        known = self.known[group]
        if len(known) + len(keys) > KNOWN_LIMIT:
            known.clear()
        known.update(keys)
