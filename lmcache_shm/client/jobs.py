"""What a step has to copy, as the scheduler's process hands it to the workers. Pickled and broadcast: numbers only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.job import CopyJob
from lmcache_shm.arena.slot import CHECKSUM_BYTES

Offsets = npt.NDArray[np.int64]
"""One arena offset per slot of a job."""


@dataclass(slots=True, frozen=True)
class Place:
    """How the slots of one arena are shared out, and where completions are reported."""

    client: int
    region_offsets: Sequence[Sequence[int]]
    """[object group][rank], bytes from the slot's start."""
    checksum_offset: Sequence[int]
    """Start of 8 bytes per rank, by object group."""
    checksum: str
    """"off", "store" or "verify"."""
    chunk_size: int
    """Tokens per slot. With the number of object groups it says how the engine's pages lie in a slot."""

    @property
    def world(self) -> int:
        """Ranks of the engine."""
        return len(self.region_offsets[0])

    def on_rank(
        self, job: CopyJob, rank: int, writer: int, checks: npt.NDArray[Any]
    ) -> tuple[Offsets, Offsets | None]:
        """Where the region of `rank` begins in each slot of a job; where its checksum is (-1: nowhere), if any has one.

        `writer`: the rank that writes its checksum (replicas share a region). `checks`: column of the slot table.
        """
        regions = job.offsets + np.asarray(self.region_offsets)[job.groups, rank]
        if self.checksum == "off" or (self.checksum == "store" and job.kind == "load"):
            return regions, None
        checksums = job.offsets + np.asarray(self.checksum_offset)[job.groups]
        checksums += CHECKSUM_BYTES * writer
        if job.kind == "load":  # earlier servers may have committed slots without checksums
            checksums[checks[job.rows] == 0] = -1
        return regions, checksums


@dataclass
class StepCopies:
    """One step's copies. `places` has an entry for each arena that a job names."""

    stores: list[CopyJob] = field(default_factory=list)
    loads: list[CopyJob] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Requests whose load cannot be carried out: to be reported as failed at once."""
    places: dict[bytes, Place] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    """Rank → changes of its weights that the scheduler knows of; a rank without an entry has none."""
    waiting: bool = False
    """Nothing is computed in this step, and nothing can be before a load has ended."""
    question: int = 0
    """Not 0: every worker is to answer which adapters it has loaded."""
