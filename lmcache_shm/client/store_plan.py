"""Which pages of which blocks can be stored in this step. Pure, but for the request's cursor.

What can be stored of a chunk is decided per object group, by what is in the true block tables *now*:
a block that has left a window, a state that was never snapshotted, is the null block, and then that
group's object of the chunk does not come to be. Others may.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lmcache_shm.client.jobs import Run
from lmcache_shm.client.plan import CachePlan, ObjectGroup, Part

States = Mapping[tuple[int, int], int]
"""(KV cache group, boundary in tokens) → block that holds the state there once this step has run."""
Tables = Sequence[Sequence[int]]
"""Block ids by KV cache group."""


@dataclass(slots=True)
class Candidate:
    """One chunk of one object group, and the blocks its pages lie in."""

    group: int
    chunk: int
    runs: list[Run]

    def block_ids(self) -> list[int]:
        return [block for _, _, ids in self.runs for block in ids.tolist()]


def storable(
    plan: CachePlan, group: ObjectGroup, chunk: int, tables: Tables, states: States, null: int = 0
) -> list[Run] | None:
    """The runs of one object; None when a page or a state of it is not to be had."""
    runs: list[Run] = []
    for part in group.parts:
        if part.group.recurrent:
            boundary = (chunk + 1) * plan.chunk_size
            block = states.get((part.group.index, boundary), null)
            if block == null:
                return None
            runs.append((part.group.index, 0, np.array([block], np.int64)))
            continue
        ids = _tail(part, chunk, tables)
        if len(ids) != part.stored_pages or null in ids:
            return None
        runs.append((part.group.index, 0, np.array(ids, np.int64)))
    return runs


def _tail(part: Part, chunk: int, tables: Tables) -> Sequence[int]:
    start = chunk * part.pages_per_chunk
    return tables[part.group.index][start + part.first_page : start + part.pages_per_chunk]


def step_states(
    plan: CachePlan,
    tables: Tables,
    offers: Sequence[tuple[int, int, int]],
    ends: Sequence[int],
    null: int = 0,
) -> dict[tuple[int, int], int]:
    """Recurrent states that are certain after this step, at chunk boundaries only.

    `offers`: vLLM's (KV cache group, block, boundary). `ends`: token counts at which a state is known
    to stand in its positional place in the table: where this step ends exactly, or a prefix hit begins.
    """
    states: dict[tuple[int, int], int] = {}
    for part in (p for group in plan.groups for p in group.parts if p.group.recurrent):
        index, size = part.group.index, part.group.block_size
        for end in ends:
            place = end // size - 1
            if end > 0 and end % plan.chunk_size == 0 and place < len(tables[index]):
                states[index, end] = tables[index][place]
        for group, block, boundary in offers:
            if group == index and boundary > 0 and boundary % plan.chunk_size == 0:
                states[index, boundary] = block
    return {at: block for at, block in states.items() if block != null}
