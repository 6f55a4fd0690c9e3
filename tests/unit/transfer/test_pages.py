"""Placement: every content byte of a block is in exactly one run, and nothing else is."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_shm.transfer.pages import (
    GroupPages,
    Part,
    PlacementError,
    RawTensor,
    SlotLayout,
    StridedRun,
    group_pages,
)
from lmcache_shm.transfer.strided import consecutive, count_runs, part_runs

from .worlds import WORLDS, Group, World, deepseek_v4, dense_hnd, gemma4, head_outermost, permuted


def run_bytes(pages: GroupPages, block: int, base: int) -> np.ndarray:
    """Offsets from ``base`` of a block's bytes, run by run, not sorted."""
    starts = [run.base_addr - base + block * run.block_stride for run in pages.runs]
    sizes = [run.nbytes for run in pages.runs]
    return np.concatenate([at + np.arange(n) for at, n in zip(starts, sizes, strict=True)])


@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
def test_runs_hold_every_content_byte_once(make):
    """For every layout the runs of a block are exactly the bytes of its tensor elements."""
    world = make()

    for group in range(len(world.groups)):
        pages = world.part(group).pages
        for block in (0, 1, world.num_blocks - 1):
            got = run_bytes(pages, block, world.memory.ctypes.data)
            assert np.array_equal(world.content(group, block), np.sort(got))
            assert pages.page_bytes == len(got)


@settings(max_examples=150, deadline=None)
@given(
    order=st.permutations("BHNC"),
    sizes=st.tuples(*[st.integers(1, 5)] * 4),
    split=st.integers(1, 3),
    padding=st.integers(0, 9),
    item=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 3),
)
def test_any_order_of_dimensions_and_any_padding(order, sizes, split, padding, item, layers):
    """Tensors with permuted dimensions, kernel blocks and padding behind the outermost dimension."""
    blocks = sizes[0]
    named = dict(zip("BHNC", (blocks * split, *sizes[1:]), strict=True))
    shape, strides = permuted("".join(order), named, item)
    outer = order[0]
    strides = tuple(s + padding if d == outer else s for d, s in zip("BHNC", strides, strict=True))
    span = (named[outer] * strides["BHNC".index(outer)] + 64) * item
    tensors = [(layer * span, shape, strides, item) for layer in range(layers)]
    world = World("any", blocks, [Group(tensors, 1)], layers * span)
    pages = world.part(0).pages

    for block in range(blocks):
        got = run_bytes(pages, block, world.memory.ctypes.data)
        assert np.array_equal(world.content(0, block), np.sort(got))
    first = {int(x) for x in run_bytes(pages, 0, world.memory.ctypes.data)}
    if blocks > 1:
        assert not first & {int(x) for x in run_bytes(pages, 1, world.memory.ctypes.data)}


def test_dense_layers_have_one_lane_each_and_heads_outermost_one_per_head():
    assert len(dense_hnd().part(0).pages.runs) == 4
    assert len(head_outermost().part(0).pages.runs) == 3 * 4


def test_neighbouring_layers_of_a_block_merge():
    """Block-outermost layers that touch are one run; a hole between them keeps two."""
    world = deepseek_v4()

    assert (StridedRun(world.memory.ctypes.data, 3912, 3 * 1040),) == world.part(0).pages.runs
    assert [run.nbytes for run in world.part(4).pages.runs] == [342, 1026]


def test_kernel_blocks_count_in_full():
    """A tensor of 4 kernel blocks per block yields all four, not the first (1/k of the KV)."""
    pages = gemma4().part(0).pages

    assert [run.nbytes for run in pages.runs] == [4 * 16 * 4 * 2] * 2


def test_the_same_bytes_registered_twice_are_copied_once():
    tensor = RawTensor(4096, (8, 64), (64, 1), 2)

    assert group_pages([tensor], 8).runs == group_pages([tensor, tensor], 8).runs


def test_lane_order_is_that_of_the_tensors_not_of_addresses():
    """Two processes whose allocator put the layers elsewhere agree on the slot layout."""
    low, high = RawTensor(4096, (8, 64), (64, 1), 1, 1), RawTensor(9999, (8, 32), (32, 1), 1, 2)
    moved = [RawTensor(77777, (8, 64), (64, 1), 1, 9), RawTensor(100, (8, 32), (32, 1), 1, 8)]

    one, other = group_pages([low, high], 8), group_pages(moved, 8)

    assert [64, 32] == [run.nbytes for run in one.runs] == [run.nbytes for run in other.runs]
    assert one.signature == other.signature
    assert one.signature != group_pages([high, low], 8).signature


def test_accidental_neighbours_of_different_storages_do_not_merge():
    """What lies next to each other by chance must not change what a slot looks like."""
    first = RawTensor(4096, (1, 64), (64, 1), 1, storage=1)
    touching = RawTensor(4096 + 64, (1, 64), (64, 1), 1, storage=2)

    assert len(group_pages([first, touching], 1).runs) == 2


@pytest.mark.parametrize(
    ("tensor", "blocks", "says"),
    [
        (RawTensor(0, (7, 16), (16, 1)), 2, "does not hold 2 blocks"),
        (RawTensor(0, (8, 16), (8, 1)), 8, "exceeds the block stride"),
        (RawTensor(0, (8, 4, 16), (64, 8, 1)), 8, "elements overlap"),
        (RawTensor(0, (8, 4, 16), (64, 0, 1)), 8, "elements overlap"),
        (RawTensor(0, (8, 4, 16), (16, 64, 1)), 8, "overlap"),
        (RawTensor(0, (8, 0), (1, 1)), 8, "empty"),
        (RawTensor(0, (), ()), 1, "does not hold"),
    ],
)
def test_faked_strides_are_refused(tensor, blocks, says):
    """A view that would copy part of a block, or a byte twice, is an error at start."""
    with pytest.raises(PlacementError, match=says):
        group_pages([tensor], blocks)


def test_interleaved_blocks_of_two_tensors_are_refused():
    """Block 1 of the second tensor would lie on block 0 of the first."""
    one, two = RawTensor(0, (8, 100), (100, 1)), RawTensor(50, (8, 100), (100, 1))

    with pytest.raises(PlacementError, match="different blocks overlap"):
        group_pages([one, two], 8)


def test_bytes_must_add_up_to_the_spec():
    tensor = RawTensor(0, (8, 64), (64, 1), 2)

    assert group_pages([tensor], 8, expected_bytes=128).page_bytes == 128
    with pytest.raises(PlacementError, match=r"128 bytes .* spec says 256"):
        group_pages([tensor], 8, expected_bytes=256)


def test_no_tensor_at_all_is_refused():
    with pytest.raises(PlacementError, match="no KV cache tensor"):
        group_pages([], 8)


def test_torch_tensors_are_placed_by_pointer_and_stride():
    torch = pytest.importorskip("torch")
    storage = torch.zeros(6 * 4096, dtype=torch.int8)
    state = storage.as_strided((6, 1, 1, 3000), (4096, 3000, 3000, 1))

    pages = group_pages([state], 6)

    assert (StridedRun(storage.data_ptr(), 4096, 3000),) == pages.runs


def test_segments_do_not_overlap_and_are_aligned():
    """Slot layout: part → run → page, every segment on 64 bytes, nothing shared, nothing beyond."""
    world = gemma4()
    layout = SlotLayout([world.part(0), world.part(1)])

    end = 0
    for part, offsets in zip(layout.parts, layout.segments, strict=True):
        for run, offset in zip(part.pages.runs, offsets, strict=True):
            assert offset % 64 == 0
            assert offset >= end
            end = offset + run.nbytes * part.stored_pages
    assert end <= layout.region_bytes < end + 64


def test_a_window_stores_only_its_tail():
    part = Part(GroupPages((StridedRun(0, 64, 64),), 9), pages_per_chunk=8, first_page=5)

    assert part.stored_pages == 3
    assert SlotLayout([part]).region_bytes == 3 * 64
    with pytest.raises(ValueError, match="first_page"):
        Part(part.pages, 8, 8)


@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("limit", [1, 5000, 1 << 30])
def test_bundles_cover_every_lane_in_order(make, limit):
    """Splitting runs into runs loses none and repeats none, whatever the size limit."""
    for layout in make().layouts():
        runs = [
            (b.base + i * b.spacing, b.block_stride, b.nbytes, b.segment + i * b.segment_spacing)
            for b in part_runs(layout, 0, limit)
            for i in range(b.runs)
        ]
        expected = [
            (run.base_addr, run.block_stride, run.nbytes, segment)
            for run, segment in zip(layout.parts[0].pages.runs, layout.segments[0], strict=True)
        ]
        assert expected == runs


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_runs_of_neighbours_are_found(ids):
    array = np.array(ids, dtype=np.int64)

    runs = list(consecutive(array))

    rebuilt = [block + i for _, block, count in runs for i in range(count)]
    assert ids == rebuilt
    assert count_runs(array) == len(runs)
    assert all(b[1] != a[1] + a[2] for a, b in itertools.pairwise(runs))


def test_signature_differs_where_stored_pages_differ():
    pages = GroupPages((StridedRun(0, 64, 64),), 9, "0@0:64")

    assert SlotLayout([Part(pages, 4)]).signature != SlotLayout([Part(pages, 4, 1)]).signature


def test_placement_works_on_addresses_only():
    """This address belongs to nobody; nothing is read while runs are made."""
    assert group_pages([RawTensor(1 << 60, (4, 8), (8, 1))], 4).page_bytes == 8
