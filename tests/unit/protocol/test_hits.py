"""Which prefix is usable, compared with a token-by-token oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_shm.protocol.rules import (
    ChunkedLocal,
    Full,
    Recurrent,
    Window,
    needed,
    rule_of,
    rule_words,
    usable_chunks,
)
from tests.unit.server.rig import tokens_needed, usable_by_force

RULES = st.one_of(
    st.just(Full()),
    st.just(Recurrent()),
    st.builds(Window, st.integers(1, 40)),
    st.builds(ChunkedLocal, st.integers(1, 40)),
)


@st.composite
def situations(draw):
    size = draw(st.integers(1, 7))
    rules = draw(st.lists(RULES, min_size=1, max_size=4))
    num_tokens = draw(st.integers(0, 8 * size))
    local = draw(st.integers(0, num_tokens))
    # Mostly present: a hit over several groups would otherwise be rare.
    have = st.lists(st.sampled_from([True, True, True, True, False]), max_size=9)
    present = [np.array(draw(have), np.bool_) for _ in rules]
    return size, num_tokens, local, rules, present


@given(situations())
def test_usable_prefix_is_what_the_oracle_finds(situation):
    size, num_tokens, local, rules, present = situation

    expected = usable_by_force(size, num_tokens, local, rules, present)

    assert expected == usable_chunks(size, num_tokens, local, rules, present)


@given(RULES, st.integers(1, 7), st.integers(1, 12), st.data())
def test_needed_chunks_are_those_of_the_needed_tokens(rule, size, n, data):
    local = data.draw(st.integers(0, n * size - 1))

    tokens = {t for t in tokens_needed(rule, n * size, size) if t >= local}

    assert {t // size for t in tokens} == set(needed(rule, size, n, local))


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(63, 3), (64, 3), (65, 4), (16, 0), (17, 1), (1, 0), (0, 0)]
)
def test_at_least_one_token_is_left_to_compute(num_tokens, expected):
    """A prompt of exactly k chunks uses k − 1 of them: a recurrent state cannot give a token back."""
    present = [np.ones(9, np.bool_)] * 2

    assert expected == usable_chunks(16, num_tokens, 0, [Full(), Recurrent()], present)


def test_a_hit_that_ends_inside_a_chunk_needs_that_chunk():
    """The engine holds 20 of 48 tokens: chunk 1 is loaded, for its tokens from 20 on."""
    gap = np.array([False, True, True])

    assert usable_chunks(16, 49, 20, [Full()], [gap]) == 3
    assert usable_chunks(16, 49, 15, [Full()], [gap]) == 0
    assert list(needed(Full(), 16, 3, 20)) == [1, 2]


def test_no_group_is_forgotten():
    """The hit of the attention layers alone would be 5; the state is there only at 3 and 1."""
    full = np.ones(6, np.bool_)
    states = np.array([True, False, True, False, False, False])

    assert usable_chunks(16, 96, 0, [Full(), Recurrent()], [full, states]) == 3


def test_a_window_forgives_gaps_before_it():
    have = np.array([False, False, False, True, True, False])

    assert usable_chunks(16, 99, 0, [Window(32)], [have]) == 5
    assert usable_chunks(16, 99, 0, [Window(34)], [have]) == 0


def test_what_is_stored_is_found_by_the_same_request():
    """Whatever subset of the chunks the rule of a hit of n needs: with exactly these, the hit is n."""
    rules = [Full(), Window(40), ChunkedLocal(32), Recurrent()]
    for n in range(1, 8):
        present = []
        for rule in rules:
            have = np.zeros(8, np.bool_)
            have[list(needed(rule, 16, n, 0))] = True
            present.append(have)

        assert usable_chunks(16, n * 16 + 1, 0, rules, present) == n


@pytest.mark.parametrize("rule", [Full(), Window(128), ChunkedLocal(64), Recurrent()])
def test_a_rule_is_the_same_after_the_wire(rule):
    assert rule_of(*rule_words(rule)) == rule


@pytest.mark.parametrize(
    ("name", "tokens", "error"),
    [
        ("window", 0, "window of 0 tokens"),
        ("chunked_local", -1, "chunked_local of -1 tokens"),
        ("sparse", 1, "unknown rule 'sparse'"),
    ],
)
def test_a_rule_that_does_not_exist_is_named(name, tokens, error):
    with pytest.raises(ValueError, match=error):
        rule_of(name, tokens)
