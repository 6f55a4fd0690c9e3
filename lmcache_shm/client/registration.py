"""One registration with one server: the arena, the namespace, and what is known to be stored in it."""

import itertools
from dataclasses import dataclass, field

import numpy as np

from lmcache_shm.arena.segment import Arena
from lmcache_shm.client.jobs import Place
from lmcache_shm.client.plan import CachePlan
from lmcache_shm.protocol.keys import seed
from lmcache_shm.protocol.messages import HelloReply, Registered

KNOWN_LIMIT = 1 << 16
"""Keys remembered per object group; when there are more, all are forgotten."""

_numbers = itertools.count(1)


@dataclass(eq=False)
class Epoch:
    """Everything that becomes void when the server restarts (`boot`) or the arena is replaced.

    Rows, leases and keys of one epoch mean nothing in another. `known[g]` are keys that this engine has
    seen stored in object group g; an evicted one may still be among them.
    """

    boot: bytes
    arena: Arena
    plan: CachePlan
    seed: bytes
    namespace: int
    token_offset: list[int]
    place: Place
    writers: np.ndarray
    """Ranks that copy when something is stored: one of each set of replicas."""
    known: list[set[bytes]] = field(default_factory=list)
    number: int = field(default_factory=lambda: next(_numbers))
    weights: str = ""
    """What the engine had in memory (`Weights.identity`) when the namespace was chosen."""

    @classmethod
    def of(
        cls,
        registered: Registered,
        hello: HelloReply,
        arena: Arena,
        plan: CachePlan,
        descriptor: bytes,
        world: int,
        replicas: int,
        weights: str,
    ) -> "Epoch":
        place = Place(
            registered.client,
            registered.region_offsets,
            registered.checksum_offset,
            hello.checksum,
            plan.chunk_size,
        )
        return cls(
            boot=registered.boot,
            arena=arena,
            plan=plan,
            seed=seed(descriptor),
            namespace=registered.namespace,
            token_offset=registered.token_offset,
            place=place,
            writers=np.arange(0, world, replicas),
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
