"""Which pages of which chunks are copied from or to which blocks, in terms of vLLM's block tables. Pure.

What can be stored of a chunk is decided per object group, by what is in the true block tables *now*:
a block that has left a window, a state that was never snapshotted, is the null block, and then that
group's object of the chunk does not come to be. Others may.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lmcache_shm.arena.job import Pages
from lmcache_shm.client.plan import CachePlan, ObjectGroup, Part
from lmcache_shm.protocol.rules import Full, needed

Tables = Sequence[Sequence[int]]
"""Block ids by KV cache group."""
States = Mapping[tuple[int, int], int]
"""(KV cache group, boundary in tokens) → block that holds the state there once this step has run."""


class ChunkCopy(NamedTuple):
    """What is copied of one chunk of one object group."""

    group: int
    chunk: int
    pages: list[Pages]


def storable(
    plan: CachePlan, group: ObjectGroup, chunk: int, tables: Tables, states: States, null: int = 0
) -> list[Pages] | None:
    """The pages of one object; None when a page or a state of it is not to be had."""
    pages: list[Pages] = []
    for index, part in enumerate(group.parts):
        if part.group.recurrent:
            boundary = (chunk + 1) * plan.chunk_size
            block = states.get((part.group.index, boundary), null)
            if block == null:
                return None
            pages.append(Pages(index, 0, [block]))
            continue
        ids = _tail(part, chunk, tables)
        if len(ids) != part.stored_pages or null in ids:
            return None
        pages.append(Pages(index, 0, ids))
    return pages


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


class CannotLoad(Exception):
    """The blocks that vLLM allocated do not fit the hit: the load has to be reported as failed."""


def plan_load(
    plan: CachePlan,
    first: Sequence[int],
    held: int,
    local_tokens: int,
    total_tokens: int,
    tables: Tables,
    null: int = 0,
) -> list[ChunkCopy]:
    """What to read for a prefix of `total_tokens`, of which the engine holds `local_tokens`.

    `first[g]`: number of the first chunk that is pinned in object group g; chunks up to `held`,
    exclusive, are. `tables[k]`: all block ids of KV cache group k. Blocks that hold local tokens are
    never written, and blocks that vLLM left out (outside a window) are not needed. Raises CannotLoad.
    """
    n, rest = divmod(total_tokens, plan.chunk_size)
    if rest or n > held or total_tokens <= local_tokens:
        raise CannotLoad(f"{total_tokens} tokens are not a prefix that was offered")
    copies: list[ChunkCopy] = []
    for g, group in enumerate(plan.groups):
        chunks = needed(group.rule, plan.chunk_size, n, local_tokens)
        if len(chunks) and chunks.start < first[g]:
            raise CannotLoad(f"chunk {chunks.start} of {group.name} is not pinned")
        for chunk in chunks:
            pages: list[Pages] = []
            for index, part in enumerate(group.parts):
                table = tables[part.group.index]
                if not part.group.recurrent:
                    begin, ids = _pages(part, chunk, local_tokens, table, null)
                    if ids:
                        pages.append(Pages(index, begin, ids))
                elif chunk == n - 1:  # only from the state at the end can be gone on
                    pages.append(Pages(index, 0, _state(part, total_tokens, table, null)))
            if pages:
                copies.append(ChunkCopy(g, chunk, pages))
    return copies


def _state(part: Part, boundary: int, table: Sequence[int], null: int) -> Sequence[int]:
    group = part.group
    index = boundary // group.block_size - 1
    if index >= len(table) or table[index] == null:
        raise CannotLoad(f"KV cache group {group.index} has no block for the state at {boundary}")
    return [table[index]]


def _pages(
    part: Part, chunk: int, local_tokens: int, table: Sequence[int], null: int
) -> tuple[int, Sequence[int]]:
    """The pages of one chunk that are wanted of one part: number of the first, blocks. Raises CannotLoad."""
    group = part.group
    start = chunk * part.pages_per_chunk + part.first_page
    end = (chunk + 1) * part.pages_per_chunk
    begin = max(start, -(-local_tokens // group.block_size))
    if end > len(table):
        raise CannotLoad(f"KV cache group {group.index} has {len(table)} blocks, not {end}")
    if not isinstance(group.rule, Full):
        while begin < end and table[begin] == null:  # outside the window: at the front, if anywhere
            begin += 1
    ids = table[begin:end]
    if null in ids:
        raise CannotLoad(f"KV cache group {group.index} has no block for a page of chunk {chunk}")
    return begin - start, ids
