"""A worker's connection to the server, and the arenas it has mapped."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache_shm.arena.job import CopyJob
from lmcache_shm.arena.segment import Arena
from lmcache_shm.client.client import WorkerClient
from lmcache_shm.client.connection import Connection
from lmcache_shm.client.jobs import Place
from lmcache_shm.client.plan import CachePlan
from lmcache_shm.config import Config
from lmcache_shm.protocol.messages import HelloReply
from lmcache_shm.transfer.engine import TransferEngine
from lmcache_shm.transfer.pages import SlotLayout

log = logging.getLogger("lmcache_shm")


class WorkerConnection(WorkerClient):
    """Registers this rank by being connected. Logs at debug level only: the scheduler side reports problems."""

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
class MappedArena:
    """An arena, the engine that copies in it, and the jobs that are underway there."""

    arena: Arena
    plan: CachePlan
    layouts: list[SlotLayout]
    engine: TransferEngine
    jobs: dict[int, tuple[CopyJob, Place]] = field(default_factory=dict)

    @property
    def region_bytes(self) -> list[int]:
        """Of this rank, by object group; 0 where it has nothing."""
        return [layout.region_bytes for layout in self.layouts]

    def fits(self, place: Place) -> bool:
        """Whether slots are laid out here as whoever planned for `place` thinks. A server that took over an
        arena may cut chunks differently, and a job from before it may arrive after."""
        return (place.chunk_size, len(place.region_offsets)) == (
            self.plan.chunk_size,
            len(self.plan.groups),
        )
