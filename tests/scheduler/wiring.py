"""The real connector on both sides of the simulated engine; its copies and threads move when the test says."""

import logging
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from lmcache_shm.arena.job import CopyJob
from lmcache_shm.client.in_flight import InFlightStores
from lmcache_shm.vllm import connector as connector_module
from lmcache_shm.vllm import worker as worker_module
from lmcache_shm.vllm.engine_api import StepMetadata
from lmcache_shm.vllm.scheduler import SchedulerSide
from lmcache_shm.vllm.worker import WorkerSide
from tests.scheduler.engine import Engine
from tests.scheduler.families import Setup
from tests.scheduler.late import LateEngine, Pace
from tests.scheduler.server import CacheServer
from tests.scheduler.worker import ours


class Errors(logging.Handler):
    """What our code logs as an error: it survives its own exceptions, so they are only seen there."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        trace = f" ({record.exc_info[1]!r})" if record.exc_info else ""
        self.lines.append(record.getMessage() + trace)


def plan_in(metadata: Any) -> StepMetadata:
    """Our part of a step's metadata."""
    family = getattr(metadata, "metadata", [metadata])
    return next(m for m in family if isinstance(m, StepMetadata))


class Wiring:
    """Connectors of one engine to `server`."""

    engine: Engine
    """From `begin` on."""
    scheduler_side: Any
    """Our connector in the scheduler, from `attach` on."""

    def __init__(
        self, server: CacheServer, rng: random.Random, pace: Pace | None, *, own_threads: bool
    ) -> None:
        self.server = server
        self.rng = rng
        self.pace = pace or Pace()
        self.own_threads = own_threads
        self.watching = True
        self.engines: list[LateEngine] = []
        self._patches = ExitStack()
        self._begun = False
        self.errors = Errors()

    def options(self, setup: Setup) -> Mapping[str, Any]:
        return {
            "lmcache_shm.instance": self.server.config.instance,
            "lmcache_shm.chunk_size": setup.chunk,
            "lmcache_shm.deadline_ms": 20000,
        }

    # ---------------------------------------------------------------------------- beginning and end
    def begin(self, engine: Engine) -> None:
        """Before the scheduler is built: from here on copies, reports and flushes happen when we say."""
        self.engine, self._begun = engine, True
        logger = logging.getLogger("lmcache_shm")
        logger.addHandler(self.errors)
        self._patches.callback(logger.removeHandler, self.errors)
        self._patches.enter_context(patch.object(worker_module, "open_engine", self._open_engine))
        if not self.own_threads:
            self._patches.enter_context(patch.object(InFlightStores, "_run", lambda stores: None))
            self._patches.enter_context(
                patch.object(SchedulerSide, "wait_flushed", self._waiting())
            )

    def _waiting(self) -> Any:
        """Where the scheduler side waits for copies, workers go on by themselves: all come to their end."""
        wait = SchedulerSide.wait_flushed

        def waiting(side: SchedulerSide, *given: Any, **more: Any) -> bool:
            if self.watching and side is self.side:
                self.catch_up()
            return wait(side, *given, **more)

        return waiting

    def attach(self, engine: Engine, configs: Sequence[KVCacheConfig]) -> None:
        """Build the workers' connectors, hand over their caches, and wait until the cache is in use."""
        self.oracle = engine.oracle
        self.chunk = engine.setup.chunk
        self.scheduler_side = ours(engine.scheduler.connector)
        handshake = {}
        for rank, config in enumerate(configs):
            connector = self._worker(rank, config)
            engine.workers.connectors.append(connector)
            told = connector.get_handshake_metadata()
            if told is not None:
                handshake[0, rank] = told
        engine.scheduler.connector.set_xfer_handshake_metadata_pp_aware(handshake)
        assert self.side.start.client.up, self.side.start.client.refusal
        self.attached()

    def attached(self) -> None:
        """The cache is in use from now on."""

    def _worker(self, rank: int, config: KVCacheConfig) -> Any:
        with ExitStack() as patches:
            patches.enter_context(patch.object(connector_module, "rank_in_engine", lambda: rank))
            if not self.own_threads:
                patches.enter_context(patch.object(WorkerSide, "_publish_on", lambda side: None))
            connector: Any = KVConnectorFactory.create_connector(
                self.engine.config, KVConnectorRole.WORKER, config
            )
            connector.register_kv_caches(self.engine.workers.ranks[rank].tensors)
        return connector

    def _open_engine(self, arena: Any, layouts: Any, tensors: Any, **_options: Any) -> LateEngine:
        """In place of transfer.select.open_engine: which rank it is for shows in where the tensors lie."""
        address = tensors[0].data_ptr()
        ranks = self.engine.workers.ranks
        rank = next(i for i, r in enumerate(ranks) if 0 <= address - r.address < r.raw.size)
        engine = LateEngine(
            arena,
            layouts,
            self.rng,
            self.pace,
            lambda *around: self.watch(rank, *around),
            self.refused,
        )
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        """The engine ends, whatever state it is in."""
        self.watching = False
        with self._patches:
            if not self._begun:
                return
            try:
                self.finish_copies()
            finally:
                for connector in self.engine.workers.connectors:
                    connector.shutdown()
                if self.engine.scheduler is not None:
                    self.engine.scheduler.shutdown()

    @property
    def side(self) -> SchedulerSide:
        """Our scheduler side behind vLLM's interface."""
        return self.scheduler_side.side

    # ---------------------------------------------------------------------------- time
    def tick(self) -> None:
        """Some copies get on, and what has ended may be reported."""
        for engine in self.engines:
            engine.tick()
        if self.rng.random() < 0.7:
            self.publish()

    def publish(self) -> None:
        """What the workers' reporting threads do (they do not run here)."""
        for connector in self.engine.workers.connectors:
            ours(connector).worker.publish()

    def flush(self) -> None:
        """What the flushing thread does while the engine is idle (it does not run here)."""
        self.side.in_flight.flush()

    def finish_copies(self) -> None:
        """Everything that was submitted comes to its end."""
        for engine in self.engines:
            engine.finish()
        self.publish()

    def catch_up(self) -> None:
        """Workers run all that is scheduled, and finish all their copies."""
        while any(step.result is None for step in self.engine.queue):
            self.engine.execute()
        self.finish_copies()

    # ---------------------------------------------------------------------------- for the checks
    def watch(self, rank: int, job: CopyJob, slot: int, when: str) -> None:
        """Around the copy of one slot on one rank (see LateEngine)."""

    def refused(self, job: CopyJob, slot: int, reason: str) -> None:
        """The real transfer engine did not copy a slot."""
