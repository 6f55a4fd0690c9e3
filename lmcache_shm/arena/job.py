"""A copy job: which pages of which slots go into, or come from, which blocks of an engine.

Planned once, by the scheduler's process, for all ranks. It is pickled and broadcast as it is, and a transfer engine
consumes it as it is: a rank adds only where its region begins in each slot. So it is a handful of numpy arrays over
the whole job, whatever the number of slots.

::

    slot i        rows[i]  offsets[i]  generations[i]  groups[i]
    page run j    page_runs[j] = (slot, part, first page, count), in the order of the slots
    block_ids     page run 0's blocks | page run 1's blocks | …
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

JobKind = Literal["store", "load"]

PAGE_RUN = np.dtype([("slot", "<i4"), ("part", "<i4"), ("first", "<i4"), ("count", "<i4")])


class Pages(NamedTuple):
    """Consecutive stored pages of one part of a slot, and the blocks they belong to."""

    part: int
    """Index among the parts (KV cache groups) of the slot's object group."""
    first: int
    """Index of the first page among the part's *stored* pages."""
    block_ids: Any
    """Of vLLM's block table: a list while it is planned, i8[pages] once it is part of a job."""


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


@dataclass(frozen=True, slots=True, eq=False)
class CopyJob:
    """Slots that succeed or fail together. Stores and loads are counted together, from 1."""

    id: int
    kind: JobKind
    arena_id: bytes
    """The arena that rows and offsets belong to."""
    rows: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    """Where each slot begins in the arena, in bytes."""
    generations: npt.NDArray[np.uint64]
    """Of each row when it was reserved, or acquired."""
    groups: npt.NDArray[np.int32]
    """Object group of each slot."""
    page_runs: npt.NDArray[np.void]
    """PAGE_RUN[m], in the order of the slots: consecutive stored pages of one part."""
    block_ids: npt.NDArray[np.int64]
    req_id: str = ""
    """Of a load: the request that waits for it."""
    adapter: Adapter | None = None
    """What the bytes were computed with. A worker that has loaded another content refuses the job."""

    @classmethod
    def of(
        cls,
        number: int,
        kind: JobKind,
        arena_id: bytes,
        rows: npt.ArrayLike,
        offsets: npt.ArrayLike,
        generations: npt.ArrayLike,
        groups: npt.ArrayLike,
        pages: Iterable[Iterable[Pages]],
        req_id: str = "",
        adapter: Adapter | None = None,
    ) -> "CopyJob":
        """One element per slot in `rows`, `offsets`, `generations`, `groups`, and `pages`: what is copied of it."""
        runs: list[tuple[int, int, int, int]] = []
        blocks: list[int] = []
        for slot, of_slot in enumerate(pages):
            for part, first, ids in of_slot:
                runs.append((slot, part, first, len(ids)))
                blocks.extend(ids)
        return cls(
            number,
            kind,
            arena_id,
            np.asarray(rows, np.int32),
            np.asarray(offsets, np.int64),
            np.asarray(generations, np.uint64),
            np.asarray(groups, np.int32),
            np.array(runs, PAGE_RUN),
            np.array(blocks, np.int64),
            req_id,
            adapter,
        )

    def pages(self) -> list[list[Pages]]:
        """What is copied of each slot."""
        found: list[list[Pages]] = [[] for _ in range(len(self.rows))]
        end = 0
        for slot, part, first, count in self.page_runs.tolist():
            start, end = end, end + count
            found[slot].append(Pages(part, first, self.block_ids[start:end]))
        return found
