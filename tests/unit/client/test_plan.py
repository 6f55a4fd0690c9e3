"""Chunk sizes, object groups and their parts; what is refused at the start, and in which words."""

import pytest

from lmcache_shm.client.plan import (
    IgnoredGroup,
    ModelError,
    admissible_sizes,
    auto_chunk_size,
    chosen_chunk_size,
    make_plan,
)
from lmcache_shm.protocol.rules import Full, Recurrent, Window
from lmcache_shm.vllm.groups import check_recurrent
from tests.unit.vllm_connector.worlds import engine, full, groups_of, local, state, window


# ---------------------------------------------------------------------------------- chunk sizes
@pytest.mark.parametrize(
    ("specs", "size"),
    [
        ([full(16)], 256),
        ([full(64), window(64, 32)], 256),
        ([full(160), state(160)], 320),
        ([full(400)], 400),
        ([full(1600)], 1600),
        ([full(4), full(8), full(256)], 256),
        ([full(32), local(8192)], 256),
        ([full(32), local(64)], 64),
    ],
)
def test_auto_is_the_smallest_admissible_multiple_from_256_on(specs: list, size: int) -> None:
    """With chunked local attention it also divides the span, if need be below 256."""
    assert auto_chunk_size(groups_of(*specs)) == size
    assert make_plan(groups_of(*specs)).chunk_size == size


def test_every_admissible_size_ends_a_block_and_divides_the_span() -> None:
    sizes = admissible_sizes(groups_of(full(32), window(64, 64), local(768, 32)))

    assert sizes == [64, 128, 192, 256, 384, 768]


@pytest.mark.parametrize(
    ("block", "shown"), [(400, "400, 800, 1200, 1600"), (784, "784, 1568, 2352, 3136")]
)
def test_a_chunk_that_is_no_multiple_is_refused_with_those_that_are(block: int, shown: str) -> None:
    with pytest.raises(ModelError) as caught:
        make_plan(groups_of(full(block)), chunk_size=256)

    text = str(caught.value)
    assert f"chunk size 256 does not fit this model: it has to be a multiple of {block}" in text
    assert f"(block sizes of its KV cache groups: {block})" in text
    assert (
        f"admissible are {shown}, …: start the server with --chunk-size auto (here {block})" in text
    )


def test_all_block_sizes_are_named() -> None:
    with pytest.raises(
        ModelError, match=r"a multiple of 320 \(block sizes of its KV cache groups: 64, 160\)"
    ):
        make_plan(groups_of(full(64), state(160)), chunk_size=256)


def test_a_chunk_must_divide_the_span_of_local_attention() -> None:
    with pytest.raises(ModelError) as caught:
        make_plan(groups_of(full(32), local(96)), chunk_size=64)

    assert "that divides 96 (span of its local attention); admissible are 32, 96: start" in str(
        caught.value
    )


def test_no_size_at_all_asks_for_another_block_size() -> None:
    with pytest.raises(ModelError, match="no chunk size fits this model: .* another --block-size"):
        make_plan(groups_of(full(64), local(96, 32)))


def test_a_model_without_anything_to_cache_is_refused() -> None:
    ignored = [IgnoredGroup(0, ("a",), "scratch memory of one request, not prefix-cacheable")]

    with pytest.raises(ModelError, match=r"nothing of this model can be cached \(group 0: scratch"):
        make_plan([], ignored)
    with pytest.raises(ModelError, match="it has no KV cache"):
        make_plan([])


def test_the_server_and_the_engine_must_not_disagree() -> None:
    assert [chosen_chunk_size(*both) for both in ((0, 0), (256, 0), (0, 512), (64, 64))] == [
        0,
        256,
        512,
        64,
    ]
    with pytest.raises(
        ModelError,
        match="the server caches chunks of 256 tokens, lmcache_shm.chunk_size asks for 512",
    ):
        chosen_chunk_size(256, 512)


# -------------------------------------------------------------------------------- object groups
def test_groups_of_one_reach_are_one_object() -> None:
    plan = make_plan(groups_of(window(64), window(64), full(), window(128), state(32), state(32)))

    assert [(g.name, [p.group.index for p in g.parts]) for g in plan.groups] == [
        ("full", [2]),
        ("window-64", [0, 1]),
        ("window-128", [3]),
        ("recurrent", [4, 5]),
    ]
    assert plan.rules == [Full(), Window(64), Window(128), Recurrent()]


def test_block_sizes_may_differ_within_an_object() -> None:
    plan = make_plan(groups_of(full(64), full(4), full(256)), chunk_size=512)

    (group,) = plan.groups
    assert [(p.pages_per_chunk, p.first_page) for p in group.parts] == [(8, 0), (128, 0), (2, 0)]


def test_without_separation_all_is_one_object_kept_as_full_attention() -> None:
    plan = make_plan(groups_of(window(64), full(), state(32)), separate=False)

    (group,) = plan.groups
    assert (group.name, group.rule, group.recurrent) == ("all", Full(), True)
    assert [p.stored_pages for p in group.parts] == [2, 8, 1]


@pytest.mark.parametrize(
    ("tokens", "stored"),
    [(1, 1), (2, 1), (33, 1), (34, 2), (64, 2), (65, 2), (66, 3), (257, 8), (4096, 8)],
)
def test_of_a_window_only_the_tail_that_a_later_token_can_see_is_stored(
    tokens: int, stored: int
) -> None:
    """⌈(W−1)/B⌉ pages, at most all of the chunk."""
    part = make_plan(groups_of(window(tokens, 32)), chunk_size=256).groups[0].parts[0]

    assert (part.pages_per_chunk, part.first_page, part.stored_pages) == (8, 8 - stored, stored)


def test_of_a_recurrent_group_one_state_is_stored() -> None:
    part = make_plan(groups_of(state(160)), chunk_size=320).groups[0].parts[0]

    assert (part.pages_per_chunk, part.first_page) == (1, 0)


def test_the_log_shows_every_group() -> None:
    ignored = [IgnoredGroup(2, ("x", "y"), "scratch memory of one request, not prefix-cacheable")]
    plan = make_plan(groups_of(full(), window(64)), ignored)

    assert plan.lines([4096, 8192]) == [
        "object group full: 4,096 bytes a chunk: group 0 (full attention, block 32, 2 layers)",
        "object group window-64: 8,192 bytes a chunk: group 1 (sliding window, window 64, block 32, 2 layers)",
        "KV cache group 2 (2 layers) is not cached: scratch memory of one request, not prefix-cacheable",
    ]


# ------------------------------------------------------------------------------ recurrent models
HYBRID = [full(160), state(160)]


def test_a_model_without_recurrent_layers_needs_nothing() -> None:
    assert (
        check_recurrent(engine(budget=8192, mode="none", caching=False), groups_of(full()), "exact")
        == []
    )


def test_prefix_caching_must_be_on() -> None:
    with pytest.raises(
        ModelError, match="--enable-prefix-caching --mamba-cache-mode align"
    ) as caught:
        check_recurrent(engine(caching=False), groups_of(*HYBRID), "exact")
    assert "only with prefix caching on" in str(caught.value)


@pytest.mark.parametrize("mode", ["all", "none"])
def test_only_mode_align_will_do(mode: str) -> None:
    with pytest.raises(
        ModelError, match=f"runs with --mamba-cache-mode {mode}.*only in mode align"
    ):
        check_recurrent(engine(mode=mode), groups_of(*HYBRID), "exact")


@pytest.mark.parametrize("budget", [160, 161, 319])
def test_steps_of_one_to_two_blocks_are_fine(budget: int) -> None:
    assert check_recurrent(engine(budget=budget, seqs=1), groups_of(*HYBRID), "exact") == []


@pytest.mark.parametrize("steps", ["exact", "any"])
def test_a_step_must_hold_a_block(steps: str) -> None:
    with pytest.raises(ModelError, match=r"is 159, but .* N = 160: .*--max-num-batched-tokens 319"):
        check_recurrent(engine(budget=159), groups_of(*HYBRID), steps)


def test_larger_steps_are_refused_with_both_ways_out() -> None:
    with pytest.raises(ModelError) as caught:
        check_recurrent(engine(budget=320), groups_of(*HYBRID), "exact")

    text = str(caught.value)
    assert "max_num_batched_tokens is 320" in text
    assert "N = 160" in text
    assert "--max-num-batched-tokens 319" in text
    assert '"lmcache_shm.mamba_steps": "any"' in text


def test_any_accepts_larger_steps_and_says_what_is_cached() -> None:
    (note,) = check_recurrent(engine(budget=8192), groups_of(*HYBRID), "any")

    assert "only at boundaries that vLLM snapshots" in note


def test_the_budget_of_a_step_counts_where_it_is_smaller() -> None:
    assert (
        check_recurrent(engine(budget=8192, scheduled=319, seqs=1), groups_of(*HYBRID), "exact")
        == []
    )


def test_little_room_for_decoding_requests_is_told() -> None:
    (note,) = check_recurrent(engine(budget=160, seqs=8), groups_of(*HYBRID), "exact")

    assert "prefills wait while more than 0 other requests decode" in note
    assert "--max-num-batched-tokens 319 leaves room for 159" in note
