"""Startup of the scheduler side: checks, registration, and registering anew when servers come and go.

What is wrong with the model or the engine's options is an error at engine start if a server is there to
say so in time. If none is, the engine serves without a cache, and the client keeps looking for one in
the background; an error then is one line in the log, and the cache stays off.
"""

import hashlib
import logging
import time
from typing import Any

from lmcache_shm.client.autostart import AutostartError, ensure_server
from lmcache_shm.client.client import CacheClient, pack_rows
from lmcache_shm.client.in_flight import InFlightStores
from lmcache_shm.client.plan import CachePlan, ModelError, chosen_chunk_size, make_plan
from lmcache_shm.client.registration import Registration
from lmcache_shm.client.weights import PRIVATE, Weights, private
from lmcache_shm.config import Config
from lmcache_shm.protocol.messages import GroupInfo, HelloReply, Register, Registered
from lmcache_shm.protocol.rules import rule_words
from lmcache_shm.vllm.describe import descriptor, loaded_weights
from lmcache_shm.vllm.groups import check_recurrent, kv_groups
from lmcache_shm.vllm.hooks import watch_engine
from lmcache_shm.vllm.layouts import WorkerFacts

log = logging.getLogger("lmcache_shm")

HELLO_S = 2.0
"""A server whose socket is there has this long to answer at engine start."""
IDENTIFIED_S = 2.0
"""The engine start waits this long for the fingerprint of the weights; reading all of them may take minutes."""
READY_S = 10.0
"""And this long, once it has answered and all workers are up, to register the engine."""


class Start:
    """Scheduler side of the connection. `current()` gives the registration to work in, or None: no cache now."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, config: Config, *, alone: bool = True
    ) -> None:
        """`alone`: there is no other connector. Raises ModelError when this model cannot be cached as it is
        started, with any server."""
        self.alone = alone
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.config = config
        self.world = world_size(vllm_config)
        self.replicas = int(kv_cache_config.kv_tp_replicas)
        dcp = vllm_config.parallel_config.decode_context_parallel_size
        self.groups, self.ignored = kv_groups(kv_cache_config, dcp)
        self._notes = check_recurrent(vllm_config, self.groups, config.mamba_steps)
        self.client = CacheClient(config, engine_id(vllm_config), self._register, self._registered)
        self.in_flight = InFlightStores(self.client, lambda: self.latest)
        self.weights = Weights(
            str(vllm_config.instance_id), config.weight_version, lambda: loaded_weights(vllm_config)
        )
        self._waited = False
        self._register_for: tuple[CachePlan, Register, str] | None = None
        self.latest: Registration | None = None
        """The last registration there was, also when its server is gone. Any thread."""
        self.speculative = vllm_config.speculative_config is not None
        transfer = vllm_config.kv_transfer_config
        self.reads, self.writes = transfer.is_kv_consumer, transfer.is_kv_producer
        """Whether the engine's kv_role allows loads, and stores."""
        self._logged: CachePlan | None = None

    def open(self) -> None:
        """Begin to look for a server. Raises ModelError if one answers in time and does not suit the model."""
        watch_engine()
        self.weights.find()
        if self.config.autostart_gb:
            try:
                ensure_server(self.config)
            except AutostartError as error:
                log.warning("lmcache_shm: no server could be started: %s", error)
        here = self.client.path.exists()
        self.client.start()
        if here and (hello := self.client.wait_hello(HELLO_S)) is not None:
            try:
                self.plan_for(hello)
            except ModelError:
                self.client.close()
                raise

    def workers_are_up(self) -> None:
        """Wait for the registration if a server has answered: what comes first shall find the cache on.

        Raises ModelError if the server will never have this engine as it is. One that it will not have now serves
        without the cache until it will.
        """
        if self._waited or self.client.hello is None:
            return
        self._waited = True
        if not self.weights.wait(IDENTIFIED_S):
            return
        self.client.wait(READY_S)
        if self.client.refusal is not None and not self.client.busy:
            self.client.close()
            raise ModelError(
                f"the lmcache-shm server does not take this engine: {self.client.refusal}"
            )

    def current(self) -> Registration | None:
        """The registration of the connection in use; None while there is none. Scheduler thread only."""
        registration = self.latest if self.client.up else None
        if registration is not None and registration.weights != self.weights.identity:
            return self._move(registration)
        return registration

    def _move(self, registration: Registration) -> Registration | None:
        """Register for the namespace of the weights that are in memory now. Waits at most the deadline of a look-up;
        None if that was too short."""
        end = time.monotonic() + self.config.deadline_ms / 1e3
        if registration.weights.startswith(PRIVATE):
            self.client.clear()  # no other engine can have the token
        self.client.renew()
        self.client.wait(max(end - time.monotonic(), 0))
        current = self.latest if self.client.up else None
        return current if current and current.weights == self.weights.identity else None

    def plan_for(self, hello: HelloReply) -> CachePlan:
        """The plan under this server's options. Raises ModelError."""
        wanted = chosen_chunk_size(hello.chunk_size, self.config.chunk_size)
        return make_plan(self.groups, self.ignored, wanted, separate=hello.separate)

    # ------------------------------------------------------------------ in the client's thread
    def _register(self, hello: HelloReply) -> Register:
        plan = self.plan_for(hello)
        workers = [WorkerFacts.decode(told) for told in self.client.facts]
        self.weights.wait()
        weights = self.weights.identity or private()
        register = Register(
            engine_id=self.client.engine_id,
            world=self.world,
            replicas=self.replicas,
            chunk_size=plan.chunk_size,
            descriptor=descriptor(self.vllm_config, self.kv_cache_config, plan, workers, weights),
            groups=[group_info(plan, i) for i in range(len(plan.groups))],
            busy_rows=pack_rows(self.in_flight.busy(hello.arena_id)),
            name=str(self.vllm_config.model_config.model),
        )
        self._register_for = plan, register, weights
        return register

    def _registered(self, registered: Registered, hello: HelloReply) -> None:
        arena = self.client.arena
        if arena is None or self._register_for is None:
            raise ValueError("registered without an arena")
        plan, register, weights = self._register_for
        self.latest = Registration.of(registered, hello, arena, plan, register, weights)
        if self._logged != plan:
            self._logged = plan
            log.info(
                "lmcache_shm: chunks of %d tokens, %d object groups",
                plan.chunk_size,
                len(plan.groups),
            )
            for line in plan.lines(registered.slot_bytes) + self._notes:
                log.info("lmcache_shm: %s", line)

    def close(self) -> None:
        self.in_flight.close()
        self.weights.close()
        if self.latest is not None and self.latest.weights.startswith(PRIVATE):
            self.client.clear()  # as in `_move`
        self.client.close()


def group_info(plan: CachePlan, index: int) -> GroupInfo:
    """Object group `index` as it is registered."""
    group = plan.groups[index]
    word, tokens = rule_words(group.rule)
    return GroupInfo(
        name=group.name,
        rule=word,
        param=tokens,
        kv_groups=[part.group.index for part in group.parts],
        layers=sum(len(part.group.layers) for part in group.parts),
        block_sizes=sorted({part.group.block_size for part in group.parts}),
        parts=[str(part.group) for part in group.parts],
    )


def engine_id(vllm_config: Any) -> str:
    """The same in the scheduler and all workers of one engine, and in no other; at most 256 bytes.

    The id that an engine was given may still be held by one that lives on though its API server is gone. So this
    run's own number is part of it, which vLLM hands to the workers with the configuration.
    """
    given = str(vllm_config.kv_transfer_config.engine_id)
    run = f"{given} {vllm_config.instance_id}".encode(errors="replace")
    shown = given.encode(errors="replace")[:240].decode(errors="ignore")
    return f"{shown}-{hashlib.blake2b(run, digest_size=4).hexdigest()}"


def world_size(vllm_config: Any) -> int:
    """Workers of one engine: tensor × pipeline × prefill context."""
    parallel = vllm_config.parallel_config
    return int(
        parallel.tensor_parallel_size
        * parallel.pipeline_parallel_size
        * parallel.prefill_context_parallel_size
    )
