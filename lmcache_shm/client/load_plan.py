"""Which pages of which slots go into which blocks, for a hit that vLLM has allocated blocks for. Pure."""

from collections.abc import Sequence

import numpy as np

from lmcache_shm.client.jobs import Run
from lmcache_shm.client.plan import CachePlan, Part
from lmcache_shm.protocol.rules import Full, needed

SlotRuns = tuple[int, int, list[Run]]
"""Object group, chunk, runs."""


class CannotLoad(Exception):
    """The blocks that vLLM allocated do not fit the hit: the load has to be reported as failed."""


def plan_load(
    plan: CachePlan,
    first: Sequence[int],
    held: int,
    local_tokens: int,
    total_tokens: int,
    tables: Sequence[Sequence[int]],
    null: int = 0,
) -> list[SlotRuns]:
    """Slots to read for a prefix of `total_tokens`, of which the engine holds `local_tokens`.

    `first[g]`: number of the first chunk that is pinned in object group g; chunks up to `held`,
    exclusive, are. `tables[k]`: all block ids of KV cache group k. Blocks that hold local tokens are
    never written, and blocks that vLLM left out (outside a window) are not needed. Raises CannotLoad.
    """
    n, rest = divmod(total_tokens, plan.chunk_size)
    if rest or n > held or total_tokens <= local_tokens:
        raise CannotLoad(f"{total_tokens} tokens are not a prefix that was offered")
    slots: list[SlotRuns] = []
    for g, group in enumerate(plan.groups):
        chunks = needed(group.rule, plan.chunk_size, n, local_tokens)
        if len(chunks) and chunks.start < first[g]:
            raise CannotLoad(f"chunk {chunks.start} of {group.name} is not pinned")
        for chunk in chunks:
            runs: list[Run] = []
            for part in group.parts:
                table = tables[part.group.index]
                if not part.group.recurrent:
                    run = _pages(part, chunk, local_tokens, table, null)
                    runs += [run] if run else []
                elif chunk == n - 1:  # only from the state at the end can be gone on
                    runs.append(_state(part, total_tokens, table, null))
            if runs:
                slots.append((g, chunk, runs))
    return slots


def _state(part: Part, boundary: int, table: Sequence[int], null: int) -> Run:
    group = part.group
    index = boundary // group.block_size - 1
    if index >= len(table) or table[index] == null:
        raise CannotLoad(f"KV cache group {group.index} has no block for the state at {boundary}")
    return group.index, 0, np.array([table[index]], np.int64)


def _pages(
    part: Part, chunk: int, local_tokens: int, table: Sequence[int], null: int
) -> Run | None:
    """The pages of one chunk that are wanted of one part; None if there are none. Raises CannotLoad."""
    group = part.group
    start = chunk * part.pages_per_chunk + part.first_page
    end = (chunk + 1) * part.pages_per_chunk
    begin = max(start, -(-local_tokens // group.block_size))
    if end > len(table):
        raise CannotLoad(f"KV cache group {group.index} has {len(table)} blocks, not {end}")
    if not isinstance(group.rule, Full):
        while begin < end and table[begin] == null:  # outside the window: at the front, if anywhere
            begin += 1
    ids = np.array(table[begin:end], np.int64)
    if (ids == null).any():
        raise CannotLoad(f"KV cache group {group.index} has no block for a page of chunk {chunk}")
    return (group.index, begin - start, ids) if len(ids) else None
