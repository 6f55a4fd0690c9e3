"""What travels from the scheduler to the workers with each step, and the little that travels back.

It is pickled and broadcast to every rank, so it holds numbers only, and an ordinary step's is empty.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_shm.client.jobs import StepCopies


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
