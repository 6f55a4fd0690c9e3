"""Which pages of which slots go into which blocks."""

from collections.abc import Sequence

import pytest

from lmcache_shm.client.copy_plan import CannotLoad, ChunkCopy, plan_load
from lmcache_shm.client.plan import CachePlan, make_plan
from tests.unit.vllm_connector.worlds import full, groups_of, local, state, window

C = 128


def pages(
    plan: CachePlan, copies: Sequence[ChunkCopy]
) -> dict[tuple[int, int, int], tuple[int, list[int]]]:
    """(object group, chunk, KV cache group) → first stored page, blocks."""
    return {
        (group, chunk, plan.groups[group].parts[part].group.index): (first, list(ids))
        for group, chunk, found in copies
        for part, first, ids in found
    }


def plan_of(*specs: object, **options: bool) -> CachePlan:
    return make_plan(groups_of(*specs), chunk_size=C, **options)


def test_of_full_attention_every_chunk_is_read() -> None:
    plan = plan_of(full(32))

    copies = plan_load(plan, [0], 2, 0, 256, [[11, 12, 13, 14, 15, 16, 17, 18]])

    assert pages(plan, copies) == {
        (0, 0, 0): (0, [11, 12, 13, 14]),
        (0, 1, 0): (0, [15, 16, 17, 18]),
    }


def test_blocks_that_the_engine_holds_are_never_written() -> None:
    """A local hit that ends in the middle of a chunk: reading begins there, at that page of the slot."""
    plan = plan_of(full(32))

    copies = plan_load(plan, [1], 2, 192, 256, [[1, 2, 3, 4, 5, 6, 17, 18]])

    assert pages(plan, copies) == {(0, 1, 0): (2, [17, 18])}


def test_of_a_window_only_the_blocks_that_vllm_allocated_are_filled() -> None:
    """Window 64 at 256: two blocks; what left the window is the null block in the table."""
    plan = plan_of(window(64, 32))

    copies = plan_load(plan, [1], 2, 0, 256, [[0, 0, 0, 0, 0, 0, 7, 8]])

    assert pages(plan, copies) == {(0, 1, 0): (0, [7, 8])}


def test_a_window_longer_than_a_chunk_reads_the_tails_of_several() -> None:
    """Window 225 before 256 begins at token 32: three pages of chunk 0, all of chunk 1."""
    plan = plan_of(window(225, 32))

    copies = plan_load(plan, [0], 2, 0, 256, [[0, 2, 3, 4, 5, 6, 7, 8]])

    assert pages(plan, copies) == {(0, 0, 0): (1, [2, 3, 4]), (0, 1, 0): (0, [5, 6, 7, 8])}


def test_a_window_that_begins_in_local_blocks_is_filled_behind_them() -> None:
    plan = plan_of(window(129, 32))

    copies = plan_load(plan, [1], 2, 160, 256, [[0, 0, 0, 0, 5, 16, 17, 18]])

    assert pages(plan, copies) == {(0, 1, 0): (1, [16, 17, 18])}


def test_of_a_recurrent_group_the_state_at_the_end_is_read() -> None:
    plan = plan_of(full(32), state(64))

    copies = plan_load(plan, [0, 1], 2, 0, 256, [list(range(11, 19)), [0, 0, 0, 9]])

    assert pages(plan, copies)[1, 1, 1] == (0, [9])
    assert (1, 0, 1) not in pages(plan, copies)


def test_local_attention_reads_the_span_that_the_next_token_is_in() -> None:
    plan = plan_of(local(256, 32))

    copies = plan_load(plan, [2], 3, 0, 384, [[0] * 8 + [9, 10, 11, 12]])

    assert pages(plan, copies) == {(0, 2, 0): (0, [9, 10, 11, 12])}


def test_local_attention_needs_nothing_at_the_end_of_a_span() -> None:
    plan = plan_of(full(32), local(256, 32))

    copies = plan_load(plan, [0, 2], 2, 0, 256, [list(range(1, 9)), [0] * 8])

    assert {group for group, _, _ in pages(plan, copies)} == {0}


def test_groups_of_different_block_size_share_a_slot() -> None:
    plan = plan_of(full(64), full(32))

    copies = plan_load(plan, [0], 1, 64, 128, [[1, 12], [1, 2, 13, 14]])

    assert pages(plan, copies) == {(0, 0, 0): (1, [12]), (0, 0, 1): (2, [13, 14])}


def test_in_one_object_each_part_keeps_its_rule() -> None:
    """Without separation: all full pages, the window's allocated blocks, one state."""
    plan = plan_of(full(32), window(64, 32), state(128), separate=False)
    tables = [list(range(11, 19)), [0] * 6 + [7, 8], [0, 9]]

    copies = plan_load(plan, [0], 2, 0, 256, tables)

    assert pages(plan, copies) == {
        (0, 0, 0): (0, [11, 12, 13, 14]),
        (0, 1, 0): (0, [15, 16, 17, 18]),
        (0, 1, 1): (0, [7, 8]),
        (0, 1, 2): (0, [9]),
    }


def test_fewer_tokens_than_offered_are_loaded_where_the_slots_suffice() -> None:
    plan = plan_of(full(32))

    copies = plan_load(plan, [0], 2, 0, 128, [[11, 12, 13, 14]])

    assert pages(plan, copies) == {(0, 0, 0): (0, [11, 12, 13, 14])}


@pytest.mark.parametrize(
    ("total", "why"), [(100, "100 tokens are not a prefix"), (384, "384 tokens"), (0, "0 tokens")]
)
def test_what_was_not_offered_cannot_be_loaded(total: int, why: str) -> None:
    with pytest.raises(CannotLoad, match=why):
        plan_load(plan_of(full(32)), [0], 2, 0, total, [list(range(1, 13))])


def test_a_shorter_hit_needs_slots_that_are_not_pinned() -> None:
    """The window at 128 lies in chunk 0, but only chunk 1 was pinned for the window at 256."""
    with pytest.raises(CannotLoad, match="chunk 0 of window-64 is not pinned"):
        plan_load(plan_of(window(64, 32)), [1], 2, 0, 128, [[0, 0, 3, 4]])


def test_a_missing_block_is_a_failed_load_not_a_wrong_one() -> None:
    with pytest.raises(CannotLoad, match="has no block for a page of chunk 0"):
        plan_load(plan_of(full(32)), [0], 1, 0, 128, [[1, 0, 3, 4]])
    with pytest.raises(CannotLoad, match="has no block for a page of chunk 1"):
        plan_load(plan_of(window(129, 32)), [1], 2, 0, 256, [[0, 0, 0, 0, 5, 0, 7, 8]])
    with pytest.raises(CannotLoad, match="has 3 blocks, not 4"):
        plan_load(plan_of(full(32)), [0], 1, 0, 128, [[1, 2, 3]])
    with pytest.raises(CannotLoad, match="no block for the state at 128"):
        plan_load(plan_of(state(64)), [0], 1, 0, 128, [[0, 0]])
