"""vLLM's side of the interface: its objects as far as they are read here, and ours that it carries.

What is carried is pickled and broadcast to every rank, so it holds numbers only, and an ordinary step's is empty.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_shm.client.jobs import StepCopies
from lmcache_shm.client.requests import Request


class ScheduledRequest(Request, Protocol):
    """``vllm.v1.request.Request``; `identity` reads what else identifies its chunks."""

    skip_reading_prefix_cache: bool
    lora_request: Any
    cache_salt: str | None
    mm_features: Sequence[Any]
    prompt_embeds: Any
    prompt_is_token_ids: Any


class ConnectorOutput(Protocol):
    """``KVConnectorOutput``: what the workers report with a step."""

    finished_recving: Iterable[str] | None
    failed_recving: Iterable[str] | None
    kv_connector_worker_meta: Any


class KVCacheManager(Protocol):
    """``vllm.v1.core.kv_cache_manager.KVCacheManager``; `SchedulerSide.bind` wraps the two methods."""

    block_pool: Any
    reset_prefix_cache: Callable[[], bool]
    allocate_slots: Callable[..., Any]


class StepMetadata(StepCopies, KVConnectorMetadata):
    """One step's copies, as vLLM carries them to the workers."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What workers have to say with a step, beside ended loads."""

    refused: dict[int, set[int]] = field(default_factory=dict)
    """Store job → ranks that did not even begin it, mostly because the arena is not the one they have
    mapped. Such a job may have no board to be reported on."""
    adapters: dict[int, dict[int, tuple[int, bytes]]] = field(default_factory=dict)
    """Rank → LoRA adapters by vLLM's id, as far as it was not said before: number and digest of the content
    that is loaded (see `adapters`)."""
    answer: int = 0
    """The last question that this answers."""
    weights: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Rank → the number of changes of its weights and the time.monotonic() of the last one, if the scheduler
    knew of fewer."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        for job, ranks in other.refused.items():
            self.refused.setdefault(job, set()).update(ranks)
        self.weights |= other.weights
        self.adapters |= other.adapters
        self.answer = max(self.answer, other.answer)
        return self
