"""A copy job as the scheduler plans it, for all ranks. Numbers only: it is pickled and broadcast."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int64]

Run = tuple[int, int, BlockIds]
"""KV cache group, index of the first page among the part's stored pages, blocks."""


@dataclass(slots=True, frozen=True)
class Adapter:
    """A LoRA adapter as the workers have loaded it."""

    id: int
    """The engine's."""
    digest: bytes
    """Of its content on all ranks: the same in every engine that has loaded the same."""
    contents: tuple[int, ...]
    """By rank: which of the contents that were loaded under this id one after the other."""
    path: str
    reloads: bool = False
    """Whether the engine reads it anew for each step of the request."""


@dataclass(slots=True)
class SlotCopy:
    """Pages of one slot and the blocks they belong to."""

    row: int
    offset: int
    """Where the slot begins in the arena, in bytes."""
    generation: int
    group: int
    """Object group."""
    runs: list[Run]


@dataclass(slots=True)
class Job:
    """Slots that succeed or fail together. Stores and loads are counted together, from 1."""

    id: int
    arena_id: bytes
    slots: list[SlotCopy]
    req_id: str = ""
    """Of a load: the request that waits for it."""
    adapter: Adapter | None = None
    """What the bytes were computed with. A worker that has loaded another content refuses the job."""


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


@dataclass
class StepCopies:
    """One step's copies. `places` has an entry for each arena that a job names."""

    stores: list[Job] = field(default_factory=list)
    loads: list[Job] = field(default_factory=list)
    doomed: list[str] = field(default_factory=list)
    """Requests whose load cannot be carried out: to be reported as failed at once."""
    places: dict[bytes, Place] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    """Rank → changes of its weights that the scheduler knows of; a rank without an entry has none."""
    waiting: bool = False
    """Nothing is computed in this step, and nothing can be before a load has ended."""
    question: int = 0
    """Not 0: every worker is to answer which adapters it has loaded."""
