"""Numbers as text: short, of a known width, and never rounded into a lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_shm.cli.formatting import count, duration, percent, size, sparkline


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (1 << 20, "1.0 MiB"), (3 << 30, "3.0 GiB"),
        (150 << 30, "150 GiB"), (5 << 40, "5.0 TiB"), (9999 << 40, "9999 TiB"),
    ],
)  # fmt: skip
def test_sizes(n: int, text: str):
    assert size(n) == text


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0"), (9999, "9999"), (12_345, "12.3k"), (1_817_600, "1.8M"), (2.5, "2.5")]
)
def test_counts(n: float, text: str):
    assert count(n) == text


@pytest.mark.parametrize(
    ("s", "text"),
    [(0, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (1800, "30 min"), (11527, "3 h 12 min"), (200_000, "2 d 7 h")],
)  # fmt: skip
def test_durations(s: float, text: str):
    assert duration(s) == text


def test_percent_keeps_0_and_100_for_what_is_so():
    assert percent(0, 10) == "0 %"
    assert percent(1, 10_000) == "<1 %"
    assert percent(9_999, 10_000) == "99 %"
    assert percent(10, 10) == "100 %"
    assert percent(1, 0) == "-"


@given(st.floats(0, 1e15))
def test_widths_are_bounded(n: float):
    assert len(size(n)) <= 8
    assert len(count(n)) <= 6


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e12)), max_size=50))
def test_a_sparkline_has_one_cell_per_value(values: list[float | None]):
    drawn = sparkline(values)

    assert len(drawn) == len(values)
    assert all((cell == " ") == (value is None) for cell, value in zip(drawn, values, strict=True))
