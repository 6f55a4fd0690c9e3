"""The live view: right at any size, with and without colour, across restarts, and driven by keys."""

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from lmcache_shm.cli.top import Screen, rates
from lmcache_shm.cli.top_tables import PLAIN, SORTS, picture, slabs_per_cell
from lmcache_shm.cli.top_view import History, View, frame, joined
from lmcache_shm.client.connection import Unavailable
from tests.unit.sample_snapshot import later, snapshot


def history_of(*snapshots: dict[str, Any], every_s: float = 1.0) -> History:
    history = History()
    for k, item in enumerate(snapshots):
        history.add(k * every_s, item)
    return history


def shown(
    view: View, item: dict[str, Any] | None = None, history: History | None = None
) -> list[str]:
    """The frame as a terminal of that size shows it."""
    item = item or snapshot()
    history = history or history_of(item)
    console = Console(
        width=view.width, height=view.height or 60, file=io.StringIO(), record=True,
        color_system="truecolor" if view.colour else None, force_terminal=view.colour,
    )  # fmt: skip
    console.print(joined(frame(item, history, view)))
    return console.export_text().split("\n")[:-1]


# ------------------------------------------------------------------------------------------------ size
@pytest.mark.parametrize(
    "size", [(80, 24), (100, 30), (132, 24), (160, 48), (200, 60), (40, 10), (20, 5)]
)
@pytest.mark.parametrize("colour", [True, False])
def test_a_frame_fills_the_terminal_exactly(size: tuple[int, int], colour: bool):
    width, height = size
    lines = shown(View(width, height, colour=colour))

    assert len(lines) == height
    assert {cell_len(line) for line in lines} == {width}


@given(width=st.integers(20, 300), height=st.integers(4, 90), chosen=st.sampled_from([None, 0, 1]))
def test_no_size_breaks_a_frame(width: int, height: int, chosen: int | None):
    lines = frame(snapshot(), history_of(snapshot()), View(width, height, namespace=chosen))

    assert len(lines) <= height
    assert all(line.cell_len == width for line in lines)


def test_a_standard_terminal_shows_every_section_and_the_keys():
    text = "\n".join(shown(View(80, 24)))

    for word in (
        "arena",
        "hits",
        "loaded",
        "stored",
        "evicted",
        "groups",
        "misses",
        "engines",
        "events",
    ):
        assert word in text
    assert "never seen 1310" in text
    assert "qwen-7f3a" in text
    assert " q  quit" in shown(View(80, 24))[-1]


def test_memory_that_is_not_all_reserved_is_told():
    there = snapshot(arena__backed_bytes=1 << 30, arena__growing=True)

    assert any(
        "of 4.0 GiB" in row and "1.0 GiB reserved" in row for row in shown(View(80, 24), there)
    )
    assert not any("GiB reserved" in row for row in shown(View(80, 24)))


def test_what_has_no_room_is_said_to_be_there():
    assert any(line.endswith("more ──") for line in shown(View(80, 24)))
    assert not any(line.endswith("more ──") for line in shown(View(160, 48)))


def test_without_a_height_everything_is_told():
    text = "\n".join(shown(View(80, 0, keys=False)))

    assert "adopted 1,200 slots" in text
    assert "server too slow 2" in text
    assert "quit" not in text


def test_two_columns_in_a_wide_terminal():
    lines = shown(View(160, 40))
    header = next(line for line in lines if line.startswith("── arena"))

    assert "── misses" in header


def test_ascii_terminals_get_ascii_only():
    lines = shown(View(80, 24, colour=False, ascii=True))

    assert all(line.isascii() for line in lines)


def test_the_screen_follows_a_resize():
    screen = Screen(colour=False, ascii=False)
    screen.take(0.0, snapshot)
    sizes = []
    for width, height in ((80, 24), (150, 40), (60, 15)):
        console = Console(width=width, height=height, file=io.StringIO(), record=True)
        with console.capture() as capture:
            console.print(screen, height=height)
        lines = capture.get().split("\n")
        sizes.append((max(map(cell_len, lines)), len(lines)))

    assert sizes == [(80, 24), (150, 40), (60, 15)]


# --------------------------------------------------------------------------------------------- numbers
def test_rates_are_those_of_the_last_seconds():
    items = [snapshot()]
    for _ in range(10):
        items.append(
            later(items[-1], 1.0, bytes_acquired=2 << 30, hit_tokens=500, query_tokens=1000)
        )
    text = "\n".join(shown(View(80, 24), items[-1], history_of(*items)))

    assert "2.0 GiB/s" in text
    assert "500 tok/s" in text
    assert "50 % now" in text


def test_a_single_snapshot_shows_means_since_the_start():
    item = snapshot(server__uptime_s=100.0, counters__bytes_acquired=200 << 30)

    assert "2.0 GiB/s" in "\n".join(shown(View(80, 24), item))


def test_a_restart_is_no_loss_and_is_counted():
    before = snapshot()
    after = later(snapshot(server__boot="c0c0", server__pid=5000), 1.0)
    after["counters"]["evictions"] = 7
    history = history_of(before, after)

    assert history.restarts == 1
    assert history.gained("evictions", 60.0) == (7.0, 1.0)
    assert "restarts seen: 1" in shown(View(100, 24), after, history)[0]


@given(st.lists(st.tuples(st.floats(0.1, 5.0), st.integers(0, 10**6)), min_size=2, max_size=60))
def test_the_history_loses_no_gain(steps: list[tuple[float, int]]):
    history, item, at = History(keep_s=1e9), snapshot(), 0.0
    history.add(at, item)
    for seconds, gain in steps:
        at += seconds
        item = later(item, seconds, evictions=gain)
        history.add(at, item)
    total = sum(gain for _, gain in steps)
    points = history.rates(
        "evictions", 7, 7 * at
    )  # far more than was seen: nothing falls off the left

    assert history.gained("evictions", 1e9)[0] == pytest.approx(total)
    assert history.rate("evictions", 1e9) == pytest.approx(total / at)
    assert any(points) == (total > 0)


def test_old_samples_are_forgotten():
    history = History(keep_s=10.0)
    for k in range(100):
        history.add(float(k), snapshot())

    assert len(history) == 11
    assert history.gained("evictions", 1e9)[1] == 10.0  # seconds between the first and the last


def test_a_sparkline_has_gaps_where_nobody_looked():
    history = history_of(snapshot(), later(snapshot(), 1.0, evictions=10))
    points = history.rates("evictions", 10, 10.0)

    assert points[0] is None
    assert any(point for point in points if point)


# ------------------------------------------------------------------------------------------ the arena
def test_the_picture_shows_every_slab_once():
    item = snapshot()
    cells = sum(len(line.plain.rstrip()) for line in picture(item, 80, 40, colour=True))
    slabs = sum(row[6] for row in item["slab_map"])

    assert cells == slabs  # there is room for one cell each
    assert slabs_per_cell(item, 80 * 2) == -(-slabs // 160)


@pytest.mark.parametrize("colour", [True, False])
def test_pinned_written_and_quarantined_slabs_stand_out(colour: bool):
    drawn = "".join(line.plain for line in picture(snapshot(), 80, 40, colour=colour))
    marks = "◆+!" if colour else PLAIN["◆"] + "+!"

    assert all(mark in drawn for mark in marks)


def test_without_colour_groups_are_letters():
    drawn = "".join(line.plain for line in picture(snapshot(), 80, 40, colour=False))

    assert {"A", "C"} <= set(drawn)  # full slabs of both models' first groups
    assert "c  full" in "\n".join(shown(View(80, 30, colour=False)))


def test_an_empty_arena_is_drawn_as_free():
    item = snapshot(
        slab_map=[[-1, -1, 0, 0, 0, 0, 1024, 0]], namespaces=[], clients=[], events=[], misses={}
    )
    text = "\n".join(shown(View(80, 24), item))

    assert "no engine has registered yet" in text
    assert "░▒▓█" in text


# ------------------------------------------------------------------------------------------- choices
def test_namespaces_and_groups_sort_by_what_was_asked_for():
    def names(sort: str) -> list[str]:
        lines = shown(View(100, 40, sort=sort))
        return [
            n
            for line in lines
            for n in ("Qwen/Qwen3.5-4B ", "openai/gpt-oss-20b")
            if f"  {n}" in line
        ]

    assert names("slots")[0] == "openai/gpt-oss-20b"
    assert names("hits")[0] == "Qwen/Qwen3.5-4B "
    assert names("name")[0] == "Qwen/Qwen3.5-4B "


def test_keys_do_what_the_help_line_says():
    screen = Screen(colour=True, ascii=False)
    screen.take(0.0, snapshot)

    for sort in (*SORTS[1:], SORTS[0]):
        assert screen.press("s")
        assert screen.view.sort == sort
    seen = []
    for _ in range(3):
        screen.press("n")
        seen.append(screen.view.namespace)
    assert seen == [0, 1, None]
    screen.press("n")
    screen.press("a")
    assert screen.view.namespace is None
    screen.press("h")
    assert screen.view.help
    assert not screen.press("q")


def test_pausing_keeps_the_picture_and_goes_on_counting():
    screen = Screen(colour=True, ascii=False)
    screen.take(0.0, snapshot)
    screen.press("p")
    screen.take(1.0, lambda: later(snapshot(), 1.0, evictions=5))

    assert screen.shown is not None
    assert screen.shown["counters"]["evictions"] == 3411
    assert screen.history.gained("evictions", 60)[0] == 5
    screen.press("p")
    assert screen.shown is None


def test_a_chosen_namespace_is_described_and_others_are_left_out():
    text = "\n".join(shown(View(100, 40, namespace=1)))

    assert "model=openai/gpt-oss-20b tp=2" in text
    assert "Qwen/Qwen3.5-4B  " not in text


def test_a_lost_server_is_said_and_its_return_is_followed():
    def gone() -> dict[str, Any]:
        raise Unavailable("no server at /x.sock")

    screen = Screen(colour=False, ascii=False)
    screen.take(0.0, snapshot)
    screen.take(1.0, gone)
    assert screen.view.lost_s is not None
    assert screen.snapshot is not None  # the last one stays
    screen.take(2.0, lambda: snapshot(server__boot="d1d1"))
    assert screen.view.lost_s is None
    assert screen.history.restarts == 1
    assert "no answer for 3 s" in shown(View(100, 24, lost_s=3.0))[0]


def test_it_waits_for_a_server_that_was_never_there():
    def gone() -> dict[str, Any]:
        raise Unavailable("no server at /run/x.sock: No such file or directory")

    screen = Screen(colour=False, ascii=False)
    screen.take(0.0, gone)
    console = Console(width=80, height=24, file=io.StringIO(), record=True)
    console.print(screen)

    assert "no server at /run/x.sock" in console.export_text()


def test_a_namespace_that_vanished_is_not_chosen_any_more():
    screen = Screen(colour=False, ascii=False)
    screen.take(0.0, snapshot)
    screen.press("n")
    screen.take(1.0, lambda: snapshot(namespaces=[]))

    assert screen.view.namespace is None


def test_rates_for_programs_are_json():
    items = [snapshot(), later(snapshot(), 1.0, bytes_committed=1000, query_tokens=10)]
    found = rates(history_of(*items), 1.0)

    assert json.loads(json.dumps(found))["stored_bytes_per_s"] == 1000.0
    assert found["hit_rate"] == 0.0
    assert rates(history_of(snapshot()), 1.0)["loaded_bytes_per_s"] is None
