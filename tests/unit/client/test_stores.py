"""What can be stored in a step: decided per object group, by the blocks that are there."""

import pytest

from lmcache_shm.arena.job import CopyJob, Pages
from lmcache_shm.client.copy_plan import step_states, storable
from lmcache_shm.client.plan import CachePlan, make_plan
from tests.unit.vllm_connector.worlds import full, groups_of, local, state, window

C = 128


def plan_of(*specs: object, **options: bool) -> CachePlan:
    return make_plan(groups_of(*specs), chunk_size=C, **options)


def blocks(pages: list[Pages] | None) -> list[tuple[int, int, list[int]]] | None:
    return None if pages is None else [(part, first, list(ids)) for part, first, ids in pages]


def test_a_chunk_of_full_attention_needs_all_its_blocks() -> None:
    plan = plan_of(full(32))
    table = [1, 2, 3, 4, 5, 6, 7]

    assert blocks(storable(plan, plan.groups[0], 0, [table], {})) == [(0, 0, [1, 2, 3, 4])]
    assert storable(plan, plan.groups[0], 1, [table], {}) is None  # its last block is not there yet


def test_a_null_block_is_an_absent_page() -> None:
    plan = plan_of(full(32))

    assert storable(plan, plan.groups[0], 0, [[1, 0, 3, 4]], {}) is None


def test_a_window_is_stored_as_long_as_its_tail_is_there() -> None:
    """Gemma 3 at 187 tokens, 128 a step: in step 2 chunk 0 has lost what nobody needs any more."""
    plan = plan_of(window(64, 32))

    assert blocks(storable(plan, plan.groups[0], 0, [[0, 0, 3, 4, 6, 5]], {})) == [(0, 0, [3, 4])]
    assert storable(plan, plan.groups[0], 0, [[0, 0, 0, 4, 6, 5]], {}) is None


def test_local_attention_is_stored_whole_or_not_at_all() -> None:
    plan = plan_of(local(256, 32))

    assert blocks(storable(plan, plan.groups[0], 1, [[1, 2, 3, 4, 5, 6, 7, 8]], {})) is not None
    assert storable(plan, plan.groups[0], 1, [[0, 0, 0, 0, 0, 6, 7, 8]], {}) is None


def test_a_state_is_stored_only_where_one_is_certain() -> None:
    plan = plan_of(state(64))
    group = plan.groups[0]

    assert blocks(storable(plan, group, 0, [[0, 5]], {(0, 128): 5})) == [(0, 0, [5])]
    assert storable(plan, group, 0, [[0, 5]], {}) is None
    assert storable(plan, group, 0, [[0, 5]], {(0, 128): 0}) is None


def test_every_group_of_an_object_is_needed() -> None:
    plan = plan_of(state(64), state(64))

    assert storable(plan, plan.groups[0], 0, [[0, 5], [0, 6]], {(0, 128): 5}) is None
    assert blocks(
        storable(plan, plan.groups[0], 0, [[0, 5], [0, 6]], {(0, 128): 5, (1, 128): 6})
    ) == [(0, 0, [5]), (1, 0, [6])]


def test_a_job_names_all_blocks_to_be_held() -> None:
    plan = plan_of(full(64), window(64, 32), separate=False)
    pages = storable(plan, plan.groups[0], 0, [[1, 2], [0, 0, 5, 6]], {})
    assert pages is not None

    assert CopyJob.of(1, "store", b"", [7], [0], [5], [0], [pages]).block_ids.tolist() == [
        1,
        2,
        5,
        6,
    ]


# ---------------------------------------------------------------------------------------- states
def test_a_step_that_ends_on_a_boundary_leaves_the_state_in_its_place() -> None:
    """160 tokens a step: tables [1], [1,5], [0,5,3]: the last entry is the state at the end."""
    plan = make_plan(groups_of(state(160)), chunk_size=160)

    assert step_states(plan, [[0, 5, 3]], [], [480]) == {(0, 480): 3}


def test_offers_are_taken_at_chunk_boundaries_only() -> None:
    plan = make_plan(groups_of(full(160), state(160)), chunk_size=320)

    offers = [(1, 7, 640), (1, 8, 800), (1, 9, 811), (0, 4, 640)]

    assert step_states(plan, [[], []], offers, []) == {(1, 640): 7}


def test_an_offer_wins_over_the_place_in_the_table() -> None:
    plan = make_plan(groups_of(state(160)), chunk_size=160)

    assert step_states(plan, [[4]], [(0, 9, 160)], [160]) == {(0, 160): 9}


@pytest.mark.parametrize("end", [0, 159, 161])
def test_off_the_boundary_there_is_no_state(end: int) -> None:
    plan = make_plan(groups_of(state(160)), chunk_size=160)

    assert step_states(plan, [[4, 5]], [], [end]) == {}


def test_a_null_entry_is_no_state() -> None:
    plan = make_plan(groups_of(state(160)), chunk_size=160)

    assert step_states(plan, [[0, 5]], [(0, 0, 320)], [160]) == {}
    assert step_states(plan, [[4]], [], [320]) == {}
