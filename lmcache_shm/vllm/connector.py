"""LMCacheShmConnector: what vLLM calls, handed on to the scheduler side or the worker side."""

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmcache_shm.config import ConfigError, connector_config
from lmcache_shm.log import NAME
from lmcache_shm.vllm.engine_api import StepMetadata
from lmcache_shm.vllm.layouts import layer_facts
from lmcache_shm.vllm.parent import obeyed_config
from lmcache_shm.vllm.scheduler import SchedulerSide
from lmcache_shm.vllm.start import Start, world_size
from lmcache_shm.vllm.stats import ShmPromMetrics, ShmStats
from lmcache_shm.vllm.worker import WorkerSide

log = logging.getLogger(NAME)


class LMCacheShmConnector(KVConnectorBase_V1, SupportsHMA):
    """KV cache in the host's shared memory. Loads and stores are asynchronous, and best effort."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm_does()
        config = connector_config(self._kv_transfer_config.kv_connector_extra_config or {})
        self._side: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            # A cache may lose things: the engine must compute them then. The scheduler reads this next.
            obeyed = obeyed_config(self._kv_transfer_config)
            obeyed.kv_load_failure_policy = "recompute"
            if self._kv_transfer_config.is_kv_consumer and not obeyed.is_kv_consumer:
                raise ConfigError(
                    f'MultiConnector\'s "kv_role" is "{obeyed.kv_role}", its child\'s '
                    f'"{self._kv_transfer_config.kv_role}": blocks that vLLM frees might be loaded into while a step '
                    'still writes them; expected "kv_role":"kv_both" of MultiConnector, or "kv_role":"kv_producer" of '
                    "the child (it then stores and never loads)"
                )
            alone = obeyed is self._kv_transfer_config
            if not alone:
                log.info(
                    "lmcache_shm: kv_load_failure_policy is recompute for all connectors of %s",
                    obeyed.kv_connector,
                )
            start = Start(vllm_config, kv_cache_config, config, alone=alone)
            start.open()
            self._side = SchedulerSide(start)
        else:
            self._worker = WorkerSide(
                vllm_config, kv_cache_config, config, rank_in_engine(), world_size(vllm_config)
            )

    @property
    def side(self) -> SchedulerSide:
        """The scheduler side. Raises RuntimeError in a worker."""
        if self._side is None:
            raise RuntimeError("this is a worker's connector")
        return self._side

    @property
    def worker(self) -> WorkerSide:
        """The worker side. Raises RuntimeError in the scheduler."""
        if self._worker is None:
            raise RuntimeError("this is the scheduler's connector")
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # --------------------------------------------------------------------------- scheduler side
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.side.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """All workers are up. `metadata` is of other connectors, if anything."""
        self.side.start.workers_are_up()

    def on_new_request(self, request: Any) -> None:
        self.side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = 0, False
        with self.side.survives("a lookup"):
            answer = self.side.matched_tokens(request, num_computed_tokens)
        return answer  # noqa: RET504  (the block may end before it has one)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        planned = False
        with self.side.survives("planning a load"):
            tables = blocks.get_block_ids() if num_external_tokens else ()
            self.side.allocated(request, tables, num_external_tokens)
            planned = True
        if num_external_tokens and not planned:
            self.side.fail_load(request, "an error, see above")

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self.side.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        with self.side.survives("taking the workers' reports"):
            self.side.output(connector_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        with self.side.survives("forgetting a request"):
            self.side.request_finished(request)
        return False, None  # blocks that are still being copied are held in the block pool

    def has_pending_block_frees(self) -> bool:
        return self.side.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        return self._side is not None and self._side.has_pending_work()

    def reset_cache(self) -> bool | None:
        return self.side.reset()

    # ------------------------------------------------------------------------------ worker side
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.worker.register(kv_caches, layer_facts(self._vllm_config, kv_caches))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._connector_metadata
        if isinstance(meta, StepMetadata):
            self.worker.start_loads(meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before a request runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Stores begin after the step."""

    def wait_for_save(self) -> None:
        meta = self._connector_metadata
        if isinstance(meta, StepMetadata):
            self.worker.start_stores(meta)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        meta = self._connector_metadata
        if isinstance(meta, StepMetadata) and meta.waiting:
            self.worker.back_off()
        received, failed = self.worker.results()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        meta = self._connector_metadata
        return self.worker.report(meta.question if isinstance(meta, StepMetadata) else 0)

    # ------------------------------------------------------------------------------------- both
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._side is not None:
            self._side.close()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counts = self._side.counts if self._side is not None else self.worker.counts
        since = counts.take()
        return ShmStats(data={"counts": since}) if since is not None else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return ShmStats(data=data) if data is not None else ShmStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return ShmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def rank_in_engine() -> int:
    """This worker's number in its engine: pipeline, then prefill context, then tensor rank."""
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group  # noqa: PLC0415  (groups exist only in workers)

    tp, pp, pcp = get_tp_group(), get_pp_group(), get_pcp_group()
    outer: int = pp.rank_in_group * pcp.world_size + pcp.rank_in_group
    return outer * int(tp.world_size) + int(tp.rank_in_group)


def log_as_vllm_does() -> None:
    """Our lines go where vLLM's go; by themselves, only warnings would be seen."""
    ours, theirs = logging.getLogger(NAME), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
