"""Memory behind the arena: some of it at once, the rest later, and nothing beyond the mark is touched."""

import errno
import os
import threading

import pytest

from lmcache_shm.arena import memory, segment
from lmcache_shm.arena.layout import PAGE
from lmcache_shm.transfer.reserved import PageTables, PinnedMemory, wait_reserved

SIZE = (3 << 20) + 3333
FIRST = 1 << 20


@pytest.fixture
def arena(instance):
    arena = segment.create(instance, SIZE, chunk_size=256, first=FIRST)
    yield arena
    arena.unlink()
    arena.close()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(memory, "STEP", 256 << 10)
    monkeypatch.setattr(memory, "PREFAULT_PIECE", 64 << 10)


def taken(arena):
    """Bytes that the data segment really takes."""
    return segment.shm_path(arena.data_name).stat().st_blocks * 512


def fail_from(monkeypatch, at):
    """The kernel has no room for what starts at or after `at`."""
    real = os.posix_fallocate

    def fallocate(fd, offset, length):
        if offset >= at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)


def test_only_the_first_part_is_reserved_at_once(arena):
    assert taken(arena) == arena.backed_bytes == FIRST < arena.data_bytes
    assert arena.growing
    assert segment.shm_path(arena.data_name).stat().st_size == arena.data_bytes


def test_the_rest_follows(arena):
    seen = []
    assert segment.reserve_rest(arena, threading.Event(), lambda *at: seen.append(at)) is None

    assert taken(arena) == arena.backed_bytes == arena.data_bytes
    assert not arena.growing
    assert seen[0] == (FIRST + (256 << 10), arena.data_bytes)
    assert seen[-1] == (arena.data_bytes, arena.data_bytes)


def test_room_for_all_of_it_is_looked_for_before_any_of_it_is_reserved(instance):
    bounds = [memory.Limit("/dev/shm", 2 << 20, "make it larger")]
    with pytest.raises(segment.ArenaError, match="/dev/shm leaves 2.0 MiB"):
        segment.create(instance, SIZE, first=FIRST, bounds=bounds)


def test_it_ends_at_once_when_told(arena):
    stop = threading.Event()
    stop.set()
    segment.reserve_rest(arena, stop)

    assert arena.backed_bytes == FIRST
    assert arena.growing, "the next server goes on"


def test_where_room_ends_the_mark_stays(arena, monkeypatch):
    fail_from(monkeypatch, 2 << 20)
    error = segment.reserve_rest(arena, threading.Event())

    assert error is not None
    assert error.errno == errno.ENOSPC == arena.live["stopped"][0]
    assert taken(arena) == arena.backed_bytes == 2 << 20
    assert not arena.growing
    assert "--shm-size" in memory.remedy(error.errno)


def test_a_client_sees_the_mark_rise(arena, instance):
    client = segment.attach(instance, writable_data=True)
    assert (client.backed_bytes, client.growing) == (FIRST, True)

    segment.reserve_rest(arena, threading.Event())

    assert (client.backed_bytes, client.growing) == (client.data_bytes, False)
    client.close()


# ---------------------------------------------------------------------------------------- adopting
def test_after_a_crash_in_between_the_next_server_goes_on(arena, instance, monkeypatch):
    with monkeypatch.context() as full:
        fail_from(full, 2 << 20)
        segment.reserve_rest(arena, threading.Event())
    arena.close()
    adopted = segment.adopt(instance, arena.geometry)

    assert adopted.backed_bytes == 2 << 20
    assert adopted.growing, "there may be room again"
    assert segment.reserve_rest(adopted, threading.Event()) is None
    assert taken(adopted) == adopted.data_bytes
    adopted.close()


@pytest.mark.parametrize("mark", [2 << 20, 1 << 50])
def test_a_mark_is_made_true_rather_than_believed(arena, instance, mark):
    arena.live["backed"] = mark
    assert taken(arena) < min(mark, arena.data_bytes), "it is a lie"
    arena.close()
    adopted = segment.adopt(instance, arena.geometry)

    assert taken(adopted) >= adopted.backed_bytes == min(mark, adopted.data_bytes)
    adopted.close()


def test_a_mark_that_cannot_be_made_true_is_not_adopted(arena, instance, monkeypatch):
    arena.live["backed"] = 2 << 20
    arena.close()
    with monkeypatch.context() as full:
        fail_from(full, 0)
        with pytest.raises(segment.AdoptError, match="No space left on device"):
            segment.adopt(instance, arena.geometry)

    segment.adopt(instance, arena.geometry).close()


def test_a_whole_arena_needs_no_mark(arena, instance):
    """All its memory is there, whatever the dead server had time to write down."""
    segment.reserve_rest(arena, threading.Event())
    arena.live["backed"] = 0
    arena.close()
    adopted = segment.adopt(instance, arena.geometry)

    assert adopted.backed_bytes == adopted.data_bytes
    adopted.close()


# ------------------------------------------------------------------- nobody touches what is beyond
def test_prefault_follows_the_mark(arena, monkeypatch):
    stop = threading.Event()
    threads = segment.prefault(arena, 2, stop)
    with monkeypatch.context() as full:
        fail_from(full, 2 << 20)
        segment.reserve_rest(arena, stop)
    for thread in threads:
        thread.join()

    assert arena.live["prefaulted"][0] == taken(arena) == 2 << 20


def test_prefault_goes_through_to_the_end(arena):
    stop = threading.Event()
    threads = segment.prefault(arena, 2, stop)
    segment.reserve_rest(arena, stop)
    for thread in threads:
        thread.join()

    assert arena.live["prefaulted"][0] == arena.data_bytes


@pytest.mark.parametrize("lie", [False, True])
def test_page_tables_follow_the_mark(arena, instance, lie, monkeypatch):
    """With a mark that lies they allocate what nobody reserved: so this can fail."""
    monkeypatch.setattr("lmcache_shm.transfer.reserved.POPULATED_BYTES", 256 << 10)
    monkeypatch.setattr("lmcache_shm.transfer.reserved.LOOK_S", 0.001)
    client = segment.attach(instance, writable_data=True)
    if lie:
        arena.live["backed"] = arena.data_bytes
    tables = PageTables(client)
    tables.join(5.0 if lie else 0.3)

    assert tables.done_bytes == (arena.data_bytes if lie else FIRST)
    assert (taken(arena) > FIRST) == lie
    if not lie:
        segment.reserve_rest(arena, threading.Event())
        assert tables.join(10.0)
    tables.close()
    client.close()


class Driver:
    """Registers memory; only what is asked for is noted."""

    def __init__(self):
        self.upto = 0

    def enter_thread(self):
        pass

    def register(self, address, nbytes):
        self.upto = max(self.upto, address + nbytes)
        return address

    def unregister(self, address):
        pass


def test_pinning_follows_the_mark(monkeypatch):
    """Pinning would allocate what is not reserved."""
    monkeypatch.setattr("lmcache_shm.transfer.reserved.LOOK_S", 0.001)
    mark, driver = [3 * PAGE], Driver()
    pieces = [(0, 2 * PAGE), (2 * PAGE, 4 * PAGE), (4 * PAGE, 8 * PAGE)]
    pinned = PinnedMemory(driver, 1 << 30, pieces, reserved=lambda: mark[0])

    assert not pinned.join(0.2)
    assert driver.upto == (1 << 30) + 2 * PAGE
    mark[0] = 8 * PAGE
    assert pinned.join(10.0)
    assert driver.upto == (1 << 30) + 8 * PAGE
    pinned.close()


def test_pinning_that_waits_can_be_ended(monkeypatch):
    monkeypatch.setattr("lmcache_shm.transfer.reserved.LOOK_S", 0.001)
    pinned = PinnedMemory(Driver(), 1 << 30, [(0, PAGE)], reserved=lambda: 0)
    pinned.close()

    assert pinned.pinned_bytes == 0


def test_a_mark_that_does_not_rise_is_looked_at_ever_more_rarely():
    pauses = []

    class Stop(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            return False

    assert wait_reserved(lambda: len(pauses), 7, Stop())
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
