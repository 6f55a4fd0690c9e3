"""A worker's hold on the server and on the arena: the connection that says it is there, the mapping it copies in."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache_shm.arena.segment import Arena
from lmcache_shm.client.client import WorkerClient
from lmcache_shm.client.connection import Connection
from lmcache_shm.client.jobs import Job, Place
from lmcache_shm.client.plan import CachePlan
from lmcache_shm.config import Config
from lmcache_shm.protocol.messages import HelloReply
from lmcache_shm.transfer.engine import TransferEngine
from lmcache_shm.vllm.layouts import RankLayout

log = logging.getLogger("lmcache_shm")


class Attachment(WorkerClient):
    """Tells the server that this rank is there. What is wrong, the scheduler side says; this one is silent."""

    def __init__(
        self,
        config: Config,
        engine: str,
        rank: int,
        world: int,
        replicas: int,
        prepare: Callable[[HelloReply, Arena], list[int]],
    ) -> None:
        super().__init__(config, engine, rank, world, replicas, [])
        self._prepare = prepare

    def say(self, facts: bytes) -> None:
        """What the worker tells of itself when it attaches. Before `start`."""
        self._request.facts = facts

    def _greet(self, connection: Connection) -> None:
        if self.arena is None:
            raise ValueError("no arena is mapped")
        # Before the server knows of us: the first job may come as soon as it does.
        self._request.region_bytes = self._prepare(connection.hello, self.arena)
        super()._greet(connection)

    def _say(self, message: str, *, warn: bool = False) -> None:
        log.debug("lmcache_shm worker: %s", message)

    def _refuse(self, message: str) -> None:
        self.refusal = message
        log.debug("lmcache_shm worker: %s", message)


@dataclass(eq=False)
class Mount:
    """An arena, the engine that copies in it, and the jobs that are underway there."""

    arena: Arena
    plan: CachePlan
    layout: RankLayout
    engine: TransferEngine
    jobs: dict[int, tuple[Job, Place]] = field(default_factory=dict)

    def fits(self, place: Place) -> bool:
        """Whether slots are laid out here as whoever planned for `place` thinks. A server that took over an
        arena may cut chunks differently, and a job from before it may arrive after."""
        return (place.chunk_size, len(place.region_offsets)) == (
            self.plan.chunk_size,
            len(self.plan.groups),
        )
