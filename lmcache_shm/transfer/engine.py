"""Copy jobs and the interface that every transfer engine keeps.

A job moves the pages of some slots, either way. It ends in exactly one JobResult, and only when the
engine has stopped touching both the arena and the blocks: after that the caller may hand the blocks
to someone else, and may commit (store) or use (load) the bytes if ``ok``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

JobKind = Literal["store", "load"]

REASON_DEADLINE = "deadline"
REASON_CANCELLED = "cancelled"
REASON_GENERATION = "generation"
"""The slot changed hands (or was not ours) while it was being copied."""
REASON_CHECKSUM = "checksum"
REASON_ARENA = "arena"
"""The job speaks of another arena than the one that is mapped."""
REASON_CLOSED = "closed"
REASON_ERROR = "error"
"""Anything else; the reason string is ``error: …``."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive stored pages of one part and the blocks they belong to."""

    part: int
    first: int
    """Index of the first page among the part's *stored* pages (0 is page ``part.first_page``)."""
    block_ids: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CopyItem:
    """One slot, or some of its pages."""

    row: int
    offset: int
    """Arena byte offset of this rank's region in the slot."""
    generation: int
    """What ``hot["generation"][row]`` was when the lease was given."""
    group: int
    """Object group: index into the engine's layouts."""
    runs: Sequence[PageRun]
    checksum_at: int = -1
    """Arena offset of this rank's 8-byte checksum, or -1. Covers the whole region: a load checks it
    only if it reads every page, so a partial load of a checksummed slot reads the whole region too."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """A set of slots that succeed or fail together."""

    id: int
    kind: JobKind
    items: Sequence[CopyItem]
    deadline_s: float = 30.0
    """Seconds from submit() until the engine gives up (it still waits for its own copies to stop)."""
    arena_id: bytes = b""
    """Arena the offsets belong to; empty skips the comparison."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """The end of a job. ``nbytes`` counts content bytes moved, ``seconds`` from submit to end."""

    id: int
    kind: JobKind
    ok: bool
    reason: str = ""
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class EngineStats:
    """Totals since the start; they only grow."""

    jobs: int = 0
    failed: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    busy_seconds: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)


class TransferEngine(Protocol):
    """Moves pages between registered tensors and the arena. All methods are thread-safe."""

    @property
    def stats(self) -> EngineStats: ...

    def submit(self, job: CopyJob, ready_event: Any = None) -> None:
        """Queue a job; never blocks on the copy and never raises for a bad job (its result says so).

        ``ready_event`` (``torch.Event`` or anything with ``synchronize()``) is waited for before the
        first block is touched. Without one a CPU engine starts at once, and a device engine waits for
        what was submitted to the caller's current stream so far: submit stores after the forward was
        launched, and loads before kernels that need them. A job id may be used again once its
        result was polled.
        """

    def poll(self) -> list[JobResult]:
        """Results since the last call, in order of completion. Does not block."""

    def cancel(self, job_id: int) -> None:
        """Ask a job to stop early. Its result still comes, when nothing is touched any more."""

    def drain(self, timeout: float) -> bool:
        """Wait until every submitted job has a result; False when ``timeout`` seconds were too short."""

    def close(self) -> None:
        """Cancel what is queued, wait for what runs, end the threads. Idempotent."""
