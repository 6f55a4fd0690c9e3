"""Planning of device copies: pure functions over addresses, checked byte by byte."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_shm.transfer.device import Ranges
from lmcache_shm.transfer.plan import (
    GIB,
    KERNEL_MIN_RANGES,
    LARGEST_REGISTRATION,
    REGISTRATION_ALIGN,
    choose,
    merge,
    page_ranges,
    page_rows,
    registration_ranges,
    run_table,
    split,
)
from lmcache_shm.transfer.strided import part_runs

from .worlds import WORLDS


def of(*triples: tuple[int, int, int]) -> Ranges:
    return Ranges(*np.array(triples, dtype=np.int64).reshape(-1, 3).T)


def pairs(ranges: Ranges) -> list[tuple[int, int]]:
    """Every (device byte, host byte) that is copied, in order."""
    return [
        (d + i, h + i)
        for d, h, n in zip(*(column.tolist() for column in ranges), strict=True)
        for i in range(n)
    ]


some_ranges = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=12
).map(lambda triples: of(*triples))


@given(some_ranges)
def test_merging_keeps_every_byte_pair(ranges):
    assert pairs(merge(ranges)) == pairs(ranges)


def test_ranges_that_touch_on_both_sides_become_one():
    touching = of((0, 100, 8), (8, 108, 8), (16, 116, 4))

    assert len(merge(touching).nbytes) == 1
    assert len(merge(of((0, 100, 8), (8, 109, 8))).nbytes) == 2


@settings(max_examples=200)
@given(some_ranges, st.lists(st.integers(1, 340), max_size=6, unique=True))
def test_splitting_keeps_every_byte_pair_and_crosses_no_edge(ranges, boundaries):
    """Whatever the registrations are, no copy touches two registrations."""
    sorted_edges = np.array(sorted(boundaries), dtype=np.int64)

    cut = split(ranges, sorted_edges)

    assert pairs(cut) == pairs(ranges)
    for host, nbytes in zip(cut.host, cut.nbytes, strict=True):
        assert nbytes > 0
        assert not ((sorted_edges > host) & (sorted_edges < host + nbytes)).any()


@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("max_pitch", [1 << 31, 3000, 1])
def test_ranges_and_2d_copies_name_the_bytes_of_the_oracle(make, max_pitch):
    """Scattered and neighbouring blocks, whole slots and parts; 2D copies with and without room."""
    world = make()
    base = world.memory.ctypes.data
    for group, layout in enumerate(world.layouts()):
        stored = layout.parts[0].stored_pages
        for ids in (world.scattered_blocks(stored), np.arange(2, 2 + stored)):
            for first in {0, stored - 1}:
                some = ids[first:]
                runs = [(b, first, some) for b in part_runs(layout, 0)]
                ranges = page_ranges(run_table(layout, 0), 0, first, some)
                copies = [r for b, f, i in runs for r in page_rows(b, 0, f, i, max_pitch)]
                for r in copies:
                    assert r.height == 1 or max(r.device_pitch, r.host_pitch) <= max_pitch
                rows = [
                    (r.device + i * r.device_pitch, r.host + i * r.host_pitch, r.width)
                    for r in copies
                    for i in range(r.height)
                ]
                expected = np.concatenate([world.content(group, int(b)) for b in some])
                device = np.sort([d for d, _ in pairs(ranges)]) - base
                assert np.array_equal(device, np.sort(expected))
                assert sorted(pairs(of(*rows))) == sorted(pairs(ranges))


def test_uniform_layers_need_one_2d_copy_per_run_of_blocks():
    world = WORLDS[0]()
    (run,) = part_runs(world.layouts()[0], 0)

    assert len(page_rows(run, 0, 0, np.array([3, 4, 5, 9]), 1 << 31)) == 2


@pytest.mark.parametrize(
    "nbytes", [4096, REGISTRATION_ALIGN, GIB, 3 * GIB + 4096, 500 * GIB, 2048 * GIB]
)
def test_registrations_cover_the_arena_in_order(nbytes):
    registrations = registration_ranges(nbytes)

    assert [low for low, _ in registrations] == [0, *(high for _, high in registrations[:-1])]
    assert registrations[-1][1] == nbytes
    assert all(0 < high - low <= LARGEST_REGISTRATION for low, high in registrations)
    assert all(high % REGISTRATION_ALIGN == 0 for _, high in registrations[:-1])


def test_the_first_registration_is_small_so_that_early_slabs_are_pinned_early():
    first, second, *_ = registration_ranges(500 * GIB)

    assert first[1] <= GIB // 4
    assert second[1] - second[0] <= GIB


@pytest.mark.parametrize(
    "sizes", [{"first": 5000}, {"largest": 65 * GIB}, {"first": 2 * GIB, "largest": GIB}]
)
def test_registrations_beyond_the_limit_or_across_slabs_are_refused(sizes):
    with pytest.raises(ValueError, match="registrations"):
        registration_ranges(100 * GIB, **sizes)


SMALL = of(*[(i * 4096, i * 4096, 4096) for i in range(KERNEL_MIN_RANGES)])
LARGE = of(*[(i << 20, i << 20, 1 << 20) for i in range(KERNEL_MIN_RANGES)])
CAN = {"has_batch": True, "has_kernel": True}


@pytest.mark.parametrize(
    ("requested", "kind", "ranges", "more", "expected"),
    [
        ("auto", "load", SMALL, CAN, "kernel"),
        ("auto", "store", SMALL, CAN, "batch"),
        ("auto", "load", LARGE, CAN, "batch"),
        ("auto", "load", SMALL.pick(slice(1, None)), CAN, "batch"),
        ("auto", "load", SMALL, CAN | {"has_kernel": False}, "batch"),
        ("auto", "load", LARGE, CAN | {"has_batch": False}, "rows"),
        ("auto", "store", SMALL, CAN | {"kernel_below": {"store": 5000}}, "kernel"),
        ("kernel", "load", LARGE, CAN, "kernel"),
        ("kernel", "load", LARGE._replace(nbytes=LARGE.nbytes - 1), CAN, "batch"),
        ("batch", "load", SMALL, CAN | {"has_batch": False}, "rows"),
        ("rows", "load", SMALL, CAN, "rows"),
        ("ranges", "load", SMALL, CAN, "ranges"),
    ],
)
def test_choice_of_the_back_end(requested, kind, ranges, more, expected):
    assert choose(requested, kind, ranges, **more) == expected
