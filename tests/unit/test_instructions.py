"""The counter of instructions sees a deliberate slowdown, and compares only what can be compared."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lmcache_shm.server.catalog.groups import Index
from tools.count_instructions import compare, count, versions
from tools.hot_paths import Action, step

LOOPS = 3


@contextmanager
def slow_step() -> Iterator[Action]:
    """A step whose server looks up every key LOOPS times more."""
    find = Index.find

    def again(self: Index, keys: list[bytes]) -> list[int]:
        for _ in range(LOOPS):
            for key in keys:
                self.get(key)
        return find(self, keys)

    Index.find = again  # type: ignore[method-assign]
    try:
        with step() as action:
            yield action
    finally:
        Index.find = find  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
@pytest.mark.timeout(300)  # of 10 s of a CPU
def test_a_slowdown_changes_the_count() -> None:
    """Twice the same, and once with 72 superfluous look-ups, which are a small part of a step."""
    plain, slowed = "tools.hot_paths:step", f"{__name__}:slow_step"

    found = count([plain, slowed])

    more = found[slowed] - found[plain]
    assert 72 * 100 < more < 72 * 3_000
    assert found[plain] > 20 * 72


def test_growth_beyond_the_tolerance_is_told() -> None:
    baseline = {"versions": versions(), "counts": {"step": 1000, "acquire": 1000, "hashing": 1000}}

    rows = compare({"step": 1040, "acquire": 1060, "hashing": 500, "new": 7}, baseline, 0.05)

    assert {row["name"]: row["grown"] for row in rows} == {
        "step": False, "acquire": True, "hashing": False, "new": False,
    }  # fmt: skip


def test_counts_of_other_versions_are_shown_but_not_judged() -> None:
    baseline = {"versions": {**versions(), "python": "2.7"}, "counts": {"step": 1000}}

    (row,) = compare({"step": 5000}, baseline, 0.05)

    assert (row["ratio"], row["grown"]) == (5.0, False)
