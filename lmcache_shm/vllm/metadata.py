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
class RefusedStores(KVConnectorWorkerMetadata):
    """Store jobs that ranks did not even begin, mostly because the arena is not the one they have mapped.

    Such a job may have no board to be reported on. `ranks`: job → ranks that refused it. `weights`: rank → the
    number of changes of its weights and the time.monotonic() of the last one, if the scheduler knew of fewer.
    """

    ranks: dict[int, set[int]] = field(default_factory=dict)
    weights: dict[int, tuple[int, float]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        for job, ranks in other.ranks.items():
            self.ranks.setdefault(job, set()).update(ranks)
        self.weights.update(other.weights)
        return self
