"""The stream engine on a simulated device: bytes, late completions, failures at every call."""

import gc
import mmap
import os
import threading
import time

import numpy as np
import pytest

from lmcache_shm.arena.layout import SlotState
from lmcache_shm.transfer import reserved, streams
from lmcache_shm.transfer.device import DeviceError
from lmcache_shm.transfer.engine import (
    REASON_ARENA,
    REASON_CHECKSUM,
    REASON_CLOSED,
    REASON_DEADLINE,
    REASON_GENERATION,
)
from lmcache_shm.transfer.select import TorchDevice
from lmcache_shm.transfer.streams import StreamEngine
from tools.harness.simulated_device import Event, SimulatedDevice

from .rig import SLOT, WAIT, Rig
from .worlds import WORLDS, FakeArena, dense_hnd, item, job

WHOLE = [(0, 8 * SLOT)]
# The second registration ends in the middle of slot 1, where the jobs of these tests have their region.
CUT = [(0, SLOT), (SLOT, SLOT + 4096), (SLOT + 4096, 8 * SLOT)]


@pytest.fixture
def rigs():
    made: list[Rig] = []

    def make(world, device, **more) -> Rig:
        more = {"registrations": WHOLE} | more
        made.append(
            Rig(world, None, lambda arena, slots: StreamEngine(arena, slots, device, **more))
        )
        made[-1].device = device
        return made[-1]

    yield make
    for one in made:
        for kind in ("store", "load"):
            one.engine.step(kind)
            one.device.advance(kind)
            one.engine.step(kind)
        one.engine.close()


@pytest.mark.parametrize("registrations", [WHOLE, CUT, []], ids=["pinned", "cut", "pageable"])
@pytest.mark.parametrize("backend", ["auto", "batch", "kernel", "rows", "ranges"])
@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
def test_every_back_end_restores_exactly_the_content_bytes(make, backend, registrations, rigs):
    """Pinned, pageable, and a slot that lies in two registrations (which the device refuses to cross)."""
    device = SimulatedDevice(mapped_at=1 << 40)
    b = rigs(make(), device, backend=backend, registrations=registrations)
    assert b.engine.pinned.join(WAIT)

    for group, layout in enumerate(b.layouts):
        pages = layout.parts[0].stored_pages
        blocks = b.world.scattered_blocks(pages)
        assert b.round_trip(group, blocks, b.world.scattered_blocks(pages))
        assert b.round_trip(group, np.arange(2, 2 + pages), blocks)
        if pages > 1:
            assert b.round_trip(group, blocks[1:], b.world.scattered_blocks(pages - 1), first=1)


@pytest.mark.parametrize("backend", ["batch", "kernel", "rows", "ranges"])
def test_a_page_across_the_edge_of_a_piece_is_cut_there(backend, rigs, monkeypatch):
    """Pieces end where slabs do, and a slot of several slabs goes on behind. Control: nobody cuts."""
    world = dense_hnd()
    boundary = (
        SLOT + world.layouts()[0].segments[0][2] + 1000
    )  # in the first page of the third layer
    device = SimulatedDevice(mapped_at=1 << 40)
    b = rigs(world, device, backend=backend, registrations=[(0, boundary), (boundary, 8 * SLOT)])
    assert b.engine.pinned.join(WAIT)
    blocks = world.scattered_blocks(4)

    assert b.round_trip(0, blocks, world.scattered_blocks(4))
    assert set(b.engine.used) == {"ranges" if backend == "rows" else backend}

    monkeypatch.setattr(streams, "split", lambda ranges, boundaries: ranges)
    assert not b.run("store", [item(b.layouts, 0, 3, SLOT, blocks)]).ok


def test_without_wishes_pinned_memory_is_copied_in_batches(rigs):
    device = SimulatedDevice()
    b = rigs(dense_hnd(), device)
    b.engine.pinned.join(WAIT)

    b.run("store", [item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))])

    assert device.calls["copy_batch"] == 1
    assert device.calls["copy"] == device.calls["copy_rows"] == 0


def test_a_driver_without_batches_gets_2d_copies(rigs):
    device = SimulatedDevice(has_batch=False, has_kernel=False)
    b = rigs(dense_hnd(), device)
    b.engine.pinned.join(WAIT)

    b.run("store", [item(b.layouts, 0, 3, SLOT, np.array([3, 4, 9, 11]))])

    assert device.calls["copy_rows"] == 3
    assert device.calls["copy"] == 0


# --------------------------------------------------------------------------------- events and lateness


@pytest.fixture
def stepped(rigs):
    """An engine without threads on a device that does nothing by itself, and its one store job."""

    def make(**more):
        device = SimulatedDevice(eager=False)
        b = rigs(dense_hnd(), device, start=False, **more)
        b.engine.pinned.run()
        b.blocks = b.world.scattered_blocks(4)
        b.item = item(b.layouts, 0, 3, SLOT, b.blocks, checksum_at=4 * SLOT)
        b.arena.set(3, SlotState.RESERVED, 5)
        b.running = None  # an event behind what the caller's stream is busy with
        recorded = device.marker_here

        def marker_here():
            event = recorded()
            return b.running or event

        device.marker_here = marker_here
        return b

    return make


def outcomes(b: Rig) -> list[tuple[int, bool, str]]:
    return [(r.id, r.ok, r.reason) for r in b.engine.poll()]


def test_a_result_comes_only_after_the_end_event(stepped):
    b = stepped()
    b.engine.submit(*job("store", [b.item]))
    b.engine.step("store")
    b.device.advance("store", 2)  # the gate and the first copy, not all of them

    assert not b.engine.step("store")
    assert outcomes(b) == []

    b.device.advance("store")
    assert b.engine.step("store")
    assert outcomes(b) == [(1, True, "")]


def test_a_store_reads_after_its_event_and_not_before(stepped):
    """The forward that computes the blocks is still running when the job is submitted."""
    b = stepped()
    forward = b.running = Event()
    b.engine.submit(*job("store", [b.item]))
    b.engine.step("store")
    assert b.device.advance("store") == 0
    b.world.scramble()  # what the forward computes

    forward.done = True
    b.device.advance("store")
    b.engine.step("store")

    assert outcomes(b) == [(1, True, "")]
    (run, *_), (segment, *_) = b.layouts[0].parts[0].pages.runs, b.layouts[0].segments[0]
    at = run.base_addr - b.world.memory.ctypes.data + int(b.blocks[0]) * run.block_stride
    slot = b.arena.data_array[SLOT + segment : SLOT + segment + run.nbytes]
    assert np.array_equal(b.world.memory[at : at + run.nbytes], slot)


def test_a_load_writes_only_after_its_event(stepped):
    """Kernels that were launched earlier may still use the blocks' former content."""
    b = stepped()
    b.arena.set(3, SlotState.COMMITTED, 5)
    b.item = item(b.layouts, 0, 3, SLOT, b.blocks)
    before, earlier = b.world.memory.copy(), Event()
    b.running = earlier
    b.engine.submit(*job("load", [b.item]))
    b.engine.step("load")
    b.device.advance("load")
    assert np.array_equal(before, b.world.memory)

    earlier.done = True
    b.device.advance("load")

    assert not np.array_equal(before, b.world.memory)


def test_loads_end_while_a_store_is_stuck(stepped):
    """Streams complete out of step."""
    b = stepped()
    b.arena.set(4, SlotState.COMMITTED, 5)
    b.running = Event()
    b.engine.submit(*job("store", [b.item], 1))
    b.running = None
    b.engine.submit(*job("load", [item(b.layouts, 0, 4, 2 * SLOT, b.blocks)], 2))
    for kind in ("store", "load"):
        b.engine.step(kind)
        b.device.advance(kind)
        b.engine.step(kind)

    assert outcomes(b) == [(2, True, "")]


def test_generation_is_checked_after_the_event(stepped):
    """The slot changes hands when all copies are done but nobody has looked yet."""
    b = stepped()
    b.arena.set(3, SlotState.COMMITTED, 5)
    b.engine.submit(*job("load", [item(b.layouts, 0, 3, SLOT, b.blocks)]))
    b.engine.step("load")
    b.device.advance("load")
    b.arena.set(3, SlotState.COMMITTED, 6)
    b.engine.step("load")

    assert outcomes(b) == [(1, False, REASON_GENERATION)]


def test_checksum_is_sealed_after_the_event_and_checked_after_the_load(stepped):
    b = stepped()
    b.engine.submit(*job("store", [b.item], 1))
    b.engine.step("store")
    b.device.advance("store")
    b.engine.step("store")
    b.arena.data_array[SLOT + 5] ^= 1
    b.arena.set(3, SlotState.COMMITTED, 5)
    b.engine.submit(*job("load", [b.item], 2))
    b.engine.step("load")
    b.device.advance("load")
    b.engine.step("load")

    assert outcomes(b) == [(1, True, ""), (2, False, REASON_CHECKSUM)]


def test_a_deadline_in_flight_is_reported_when_the_copies_have_ended(stepped):
    b = stepped()
    b.engine.submit(*job("store", [b.item], deadline_s=0.01))
    b.engine.step("store")
    assert not b.engine.drain(0.05)
    b.engine.step("store")
    assert outcomes(b) == []

    b.device.advance("store")
    b.engine.step("store")

    assert outcomes(b) == [(1, False, REASON_DEADLINE)]


def test_a_job_that_passed_its_deadline_before_it_was_issued_touches_nothing(stepped):
    b = stepped()
    b.engine.submit(*job("store", [b.item], deadline_s=0.0))
    time.sleep(0.001)
    assert outcomes(b) == [(1, False, REASON_DEADLINE)]

    b.engine.step("store")

    assert b.device.calls["copy_batch"] == 0


def test_the_thread_that_submits_only_records_an_event(stepped):
    """It is the engine's: it never waits for the device, nor asks whether anything is done."""
    b = stepped()
    pinning = b.device.calls.copy()
    b.engine.submit(*job("store", [b.item], 1))
    b.engine.submit(*job("store", [b.item], 2))
    b.engine.poll()

    assert b.device.calls - pinning == {"marker_here": 2}


def test_a_refused_job_records_no_event(stepped):
    b = stepped()
    b.engine.submit(*job("store", [b.item], arena_id=b"another"))

    assert outcomes(b) == [(1, False, REASON_ARENA)]
    assert b.device.calls["marker_here"] == 0


def test_close_waits_for_jobs_in_flight_and_unpins_last(rigs):
    """After close nothing runs on the streams and no registration is left."""
    device = SimulatedDevice(eager=False)
    b = rigs(dense_hnd(), device)
    assert b.engine.pinned.join(WAIT)
    b.arena.set(3, SlotState.RESERVED, 5)
    b.engine.submit(*job("store", [item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))]))
    closer = threading.Thread(target=b.engine.close)
    closer.start()
    while not device.calls["mark"] and closer.is_alive():
        pass  # the job is either issued, or dropped before it was
    assert device.registered or not closer.is_alive()
    device.advance("store")
    closer.join(WAIT)

    assert not closer.is_alive()
    assert device.registered == {}
    ((_, ok, reason),) = outcomes(b)
    assert ok or reason == REASON_CLOSED
    b.engine.submit(*job("store", [], 7))
    assert outcomes(b) == [(7, False, REASON_CLOSED)]


# ------------------------------------------------------------------------------- failures at each call


@pytest.mark.parametrize(
    ("call", "backend"),
    [
        ("marker_here", "auto"), ("wait", "auto"), ("copy_batch", "auto"), ("mark", "auto"),
        ("copy", "ranges"), ("copy_rows", "rows"), ("copy", "pageable"),
    ],
)  # fmt: skip
def test_a_failing_call_fails_its_job_and_not_the_next(call, backend, stepped):
    b = stepped(backend=backend)
    b.device.fail(call, 1)
    for number in (1, 2):
        b.engine.submit(*job("store", [b.item], number))
        b.engine.step("store")
        b.device.advance("store")
        b.engine.step("store")

    (first, second) = outcomes(b)
    assert first[:2] == (1, False)
    assert "told to fail" in first[2]
    assert second == (2, True, "")


def test_a_failure_in_mid_job_waits_for_what_was_issued(stepped):
    """The second slot's copy fails: the first one's is under way and still writes into the arena."""
    b = stepped(backend="ranges")
    b.arena.set(4, SlotState.RESERVED, 5)
    other = item(b.layouts, 0, 4, 2 * SLOT, b.blocks)
    b.device.fail("copy", b.blocks.size * 4 + 1)
    b.engine.submit(*job("store", [b.item, other]))
    b.engine.step("store")

    assert not b.engine.step("store")
    assert outcomes(b) == []

    b.device.advance("store")
    b.engine.step("store")
    ((_, ok, reason),) = outcomes(b)
    assert not ok
    assert "told to fail" in reason


def test_a_kernel_that_cannot_be_launched_is_replaced_for_good(rigs, caplog):
    """No compiler on the machine: said once, and copied in batches from then on."""
    device = SimulatedDevice()
    device.fail("copy_kernel")
    b = rigs(dense_hnd(), device, backend="kernel")
    b.engine.pinned.join(WAIT)
    for _ in range(2):
        assert b.round_trip(0, b.world.scattered_blocks(4), b.world.scattered_blocks(4))

    assert caplog.text.count("kernel cannot be used") == 1
    assert (device.calls["copy_kernel"], device.calls["copy_batch"]) == (1, 4)


@pytest.mark.parametrize("code", [1, 801])
def test_batches_that_the_driver_refuses_are_replaced_for_good(code, rigs, caplog):
    device = SimulatedDevice()
    device.fail("copy_batch", code=code)
    b = rigs(dense_hnd(), device, backend="batch")
    b.engine.pinned.join(WAIT)
    for _ in range(2):
        assert b.round_trip(0, b.world.scattered_blocks(4), b.world.scattered_blocks(4))

    assert caplog.text.count("batched copies cannot be used") == 1
    assert device.calls["copy_batch"] == 1
    assert set(b.engine.used) == {"ranges", "rows"}


@pytest.mark.parametrize("code", [1, 801])
def test_2d_copies_that_the_driver_refuses_are_replaced_for_good(code, rigs, caplog):
    """One of a job's copies is refused, the others were issued: all are made again, range by range."""
    device = SimulatedDevice(has_batch=False, has_kernel=False)
    device.fail("copy_rows", 2, code=code)
    b = rigs(dense_hnd(), device)
    b.engine.pinned.join(WAIT)
    for _ in range(2):
        assert b.round_trip(0, b.world.scattered_blocks(4), b.world.scattered_blocks(4))

    assert caplog.text.count("2D copies cannot be used") == 1
    assert device.calls["copy_rows"] == 2
    assert set(b.engine.used) == {"ranges"}


def test_the_kernel_is_made_ready_before_the_first_load(rigs):
    """Compiling takes seconds, and the engine's thread should not feel them while it serves."""
    for backend, expected in (("auto", 1), ("kernel", 1), ("batch", 0)):
        device = SimulatedDevice()
        b = rigs(dense_hnd(), device, backend=backend)
        b.run("store", [item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))])
        b.run("load", [item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))])
        assert device.calls["warm_up"] == expected


def test_a_kernel_that_cannot_be_made_ready_is_never_tried(rigs, caplog):
    device = SimulatedDevice()
    device.fail("warm_up")
    b = rigs(dense_hnd(), device, backend="kernel")
    b.engine.pinned.join(WAIT)
    while not device.calls["warm_up"]:
        time.sleep(0.001)
    assert b.round_trip(0, b.world.scattered_blocks(4), b.world.scattered_blocks(4))

    assert caplog.text.count("kernel cannot be used") == 1
    assert device.calls["copy_kernel"] == 0


def test_without_an_end_event_the_stream_is_emptied_before_the_result(stepped):
    b = stepped()
    b.device.fail("mark", 1)
    b.engine.submit(*job("store", [b.item]))
    b.engine.step("store")

    assert b.device.calls["synchronize"] == 1
    assert b.device.advance("store") == 0
    ((_, ok, _),) = outcomes(b)
    assert not ok


def test_any_error_of_the_end_event_empties_the_stream(stepped, monkeypatch):
    """Not only those that the device is known to raise."""
    b = stepped()

    def broken(kind):
        raise MemoryError("no event")

    monkeypatch.setattr(b.device, "mark", broken)
    b.engine.submit(*job("store", [b.item]))
    b.engine.step("store")
    b.engine.step("store")

    assert b.device.advance("store") == 0
    ((_, ok, reason),) = outcomes(b)
    assert not ok
    assert "no event" in reason


@pytest.mark.parametrize("failing", ["store", "load"])
def test_no_result_while_copies_may_still_run_on_a_device_that_fails(failing, stepped):
    """Asking for an event fails. The copies of both streams are waited for before anybody gets the blocks."""
    b = stepped()
    b.arena.set(4, SlotState.COMMITTED, 5)
    b.engine.submit(*job("store", [b.item], 1))
    b.engine.submit(*job("load", [item(b.layouts, 0, 4, 2 * SLOT, b.blocks)], 2))
    for kind in ("store", "load"):
        b.device.fail("reached", 1)
        b.engine._issue(b.engine._queues[kind], *begun(b, kind))
    b.engine.step(failing)
    left = {kind: len(b.device._streams[kind]) for kind in ("store", "load")}
    other = {"store": "load", "load": "store"}[failing]
    assert left[failing] == 0
    assert left[other] > 0
    assert [number for number, _, _ in outcomes(b)] == [{"store": 1, "load": 2}[failing]]

    b.engine.step(other)

    assert len(b.device._streams[other]) == 0
    ((_, ok, reason),) = outcomes(b)
    assert not ok
    assert "device lost" in reason


def begun(b, kind):
    """The one job that is queued, begun."""
    one, event = b.engine._queues[kind].queue.popleft()
    assert b.engine._jobs.begin(one)
    return one, event


@pytest.mark.parametrize("calls", [["reached"], ["mark", "synchronize"]])
def test_a_lost_device_fails_all_jobs_and_stops_the_cache(calls, stepped):
    b = stepped()
    for call in calls:
        b.device.fail(call)
    b.arena.set(4, SlotState.RESERVED, 5)
    b.engine.submit(*job("store", [b.item], 1))
    b.engine.submit(*job("store", [item(b.layouts, 0, 4, 2 * SLOT, b.blocks)], 2))
    b.engine.step("store")
    b.engine.step("store")
    b.engine.submit(*job("load", [b.item], 3))

    results = outcomes(b)
    assert [(number, ok) for number, ok, _ in results] == [(1, False), (2, False), (3, False)]
    assert all("device lost" in reason or "told to fail" in reason for _, _, reason in results)
    assert "device lost" in results[-1][2]


@pytest.mark.parametrize("error", [None, ValueError("not of the driver")])
def test_a_thread_that_cannot_use_the_device_fails_jobs_instead_of_hanging(
    error, rigs, monkeypatch
):
    device = SimulatedDevice()
    device.fail("enter_thread")
    if error is not None:

        def broken():
            raise error

        monkeypatch.setattr(device, "enter_thread", broken)
    b = rigs(dense_hnd(), device)

    result = b.run("store", [item(b.layouts, 0, 3, SLOT, b.world.scattered_blocks(4))])

    assert not result.ok


# ------------------------------------------------------------------------------------------- pinning


def test_failed_registration_is_logged_once_with_the_fix_and_copies_go_on(rigs, caplog):
    """A memlock limit that only the first two registrations fit into."""
    device = SimulatedDevice(pinned_limit=3 * SLOT)
    with caplog.at_level("WARNING"):
        b = rigs(dense_hnd(), device, registrations=[(i * SLOT, (i + 1) * SLOT) for i in range(8)])
        assert not b.engine.pinned.join(WAIT)

    (record,) = caplog.records
    assert "Raise the memlock limit" in record.getMessage()
    assert b.engine.pinned.pinned_bytes == 3 * SLOT
    blocks = b.world.scattered_blocks(4)
    assert b.round_trip(0, blocks, b.world.scattered_blocks(4))
    high = item(b.layouts, 0, 5, 6 * SLOT, blocks)
    assert b.run("store", [high]).ok
    assert device.calls["copy"] == 4 * 4  # the slot beyond the limit, range by range


def test_copies_work_while_registration_is_under_way(rigs):
    device = SimulatedDevice()
    b = rigs(dense_hnd(), device, registrations=CUT, start=False)
    blocks = b.world.scattered_blocks(4)
    one = item(b.layouts, 0, 3, SLOT, blocks)
    for upto in range(4):
        b.arena.set(3, SlotState.RESERVED, 5)
        b.engine.submit(*job("store", [one], upto))
        b.engine.step("store")
        assert outcomes(b) == [(upto, True, "")]
        if upto < 3:
            low, high = CUT[upto]
            start = b.arena.data_array.ctypes.data
            device.register(start + low, high - low)  # the driver knows already, the engine not yet


class Slow(SimulatedDevice):
    """Its first registration takes until it is told to go on, as one of a cold arena does."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may = threading.Event(), threading.Event()
        self.threads: set[threading.Thread] = set()

    def register(self, address, nbytes):
        self.threads.add(threading.current_thread())
        self.begun.set()
        assert self.may.wait(WAIT)
        return super().register(address, nbytes)


def test_an_engine_copies_before_the_first_of_500_gib_is_pinned(monkeypatch):
    """Neither its start nor its first jobs wait for the driver; then all is pinned, from the start on."""
    monkeypatch.setattr(reserved, "PAUSE_S", 0.0)
    device, size, world, arena = Slow(), 500 << 30, dense_hnd(), FakeArena(0)
    fd = os.memfd_create("sparse")
    os.ftruncate(fd, size)
    arena.data_array = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
    arena.backed_bytes = size
    os.close(fd)
    layouts = world.layouts()
    engine = StreamEngine(arena, layouts, device)
    assert device.begun.wait(WAIT)
    arena.set(3, SlotState.RESERVED, 5)
    engine.submit(*job("store", [item(layouts, 0, 3, size - SLOT, world.scattered_blocks(4))]))
    assert engine.drain(WAIT)
    assert [(r.ok, r.reason) for r in engine.poll()] == [(True, "")]
    assert (set(engine.used), engine.pinned.pinned_bytes) == ({"pageable"}, 0)

    device.may.set()
    assert engine.pinned.join(WAIT)
    asked = list(device.registered.items())
    assert asked == sorted(asked)
    assert (sum(device.registered.values()), engine.pinned.pinned_bytes) == (size, size)
    assert max(device.registered.values()) <= 1 << 30
    assert threading.main_thread() not in device.threads
    engine.close()
    assert device.registered == {}


def test_memory_stays_mapped_until_the_engine_has_let_go_of_it():
    """Whoever attached the arena closes it first: copies go on, everything is unpinned, and then it goes."""
    segment = mmap.mmap(-1, 8 * SLOT)
    device, world = SimulatedDevice(), dense_hnd()
    arena = FakeArena(0)
    arena.data_array, arena.backed_bytes = np.frombuffer(segment, dtype=np.uint8), 8 * SLOT
    layouts, hot = world.layouts(), arena.hot
    engine = StreamEngine(arena, layouts, device)
    assert engine.pinned.join(WAIT)
    del arena.data_array
    with pytest.raises(BufferError):  # what arena.close() meets, and leaves to the last view
        segment.close()
    hot["state"][3], hot["generation"][3] = SlotState.RESERVED, 5
    engine.submit(*job("store", [item(layouts, 0, 3, SLOT, world.scattered_blocks(4))]))
    assert engine.drain(WAIT)
    assert engine.poll()[0].ok

    engine.close()
    assert device.registered == {}
    del engine
    gc.collect()
    segment.close()


def test_who_wants_pageable_copies_pins_nothing(rigs):
    device = SimulatedDevice()
    b = rigs(dense_hnd(), device, backend="pageable", registrations=None)
    assert b.round_trip(0, b.world.scattered_blocks(4), b.world.scattered_blocks(4))

    assert device.calls["register"] == 0
    assert set(b.engine.used) == {"pageable"}


def test_an_unpin_that_fails_is_no_exception(rigs, caplog):
    device = SimulatedDevice()
    b = rigs(dense_hnd(), device)
    b.engine.pinned.join(WAIT)
    device.fail("unregister")

    b.engine.close()

    assert "could not unpin" in caplog.text


# ----------------------------------------------------------------------------- pageable through torch


@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
def test_pageable_copies_through_torch_restore_the_bytes(make, caplog):
    """What ROCm and XPU get; here on CPU tensors."""
    torch = pytest.importorskip("torch")
    world = make()
    tensor = torch.from_numpy(world.memory)
    device = TorchDevice([tensor])
    b = Rig(
        world, None, lambda arena, slots: StreamEngine(arena, slots, device, registrations=WHOLE)
    )

    for group, layout in enumerate(b.layouts):
        pages = layout.parts[0].stored_pages
        assert b.round_trip(group, world.scattered_blocks(pages), world.scattered_blocks(pages))
    b.engine.close()

    assert caplog.text.count("not supported on cpu") == 1


def test_the_simulated_device_is_as_strict_as_a_driver():
    """Half registered host memory is refused, or the tests of splitting would prove nothing."""
    memory = np.zeros(4096, dtype=np.uint8)
    device = SimulatedDevice()
    device.register(memory.ctypes.data, 2048)

    with pytest.raises(DeviceError, match="partly registered"):
        device.copy("store", memory.ctypes.data, memory.ctypes.data + 2000, 100)
