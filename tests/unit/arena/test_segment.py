"""Segments: made, mapped, adopted, removed; and never trusted when anything about them is off."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from lmcache_shm.arena import segment
from lmcache_shm.arena.clients import ClientRecord, erase_client, read_clients, write_client
from lmcache_shm.arena.layout import MAX_CLIENTS, MAX_RANKS, PAGE, RING, Geometry, Header, Regions
from lmcache_shm.arena.memory import SHM_DIR, Limit
from lmcache_shm.arena.processes import process_alive, start_time

SIZE = (3 << 20) + 3333


@pytest.fixture
def arena(instance):
    arena = segment.create(instance, SIZE, chunk_size=256)
    yield arena
    arena.unlink()
    arena.close()


def paths(instance):
    return [segment.shm_path(name) for name in segment.segment_names(instance)]


def run_python(program: str, *args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *args],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- creating
def test_a_new_arena_is_empty_reserved_and_private(arena, instance):
    data, meta = (path.stat() for path in paths(instance))

    assert arena.data_bytes == -(-SIZE // PAGE) * PAGE
    assert (data.st_size, meta.st_size) == (arena.data_bytes, arena.meta_bytes)
    assert data.st_blocks * 512 >= data.st_size
    assert meta.st_blocks * 512 >= meta.st_size
    assert data.st_mode & 0o777 == meta.st_mode & 0o777 == 0o600
    assert not arena.hot["state"].any()
    assert not arena.data_array.any()
    assert len(arena.hot) == len(arena.cold) == arena.max_slots
    assert arena.boards.shape == (MAX_CLIENTS, MAX_RANKS, RING)


def test_progress_reaches_the_whole(instance, monkeypatch):
    monkeypatch.setattr("lmcache_shm.arena.memory.PIECE", 1 << 20)
    seen = []
    arena = segment.create(instance, SIZE, progress=lambda done, total: seen.append((done, total)))
    arena.unlink()
    arena.close()

    assert [done for done, _ in seen] == [1 << 20, 2 << 20, 3 << 20, arena.geometry.data_bytes]
    assert {total for _, total in seen} == {arena.geometry.data_bytes}


def test_each_arena_has_an_id_of_its_own(instance):
    ids = set()
    for _ in range(3):
        arena = segment.create(instance, SIZE)
        ids.add(arena.arena_id)
        arena.unlink()
        arena.close()

    assert len(ids) == 3
    assert {len(i) for i in ids} == {16}


@pytest.mark.parametrize("name", ["", "a/b", "a\0b", "x.meta"])
def test_names_that_cannot_be_instances(name):
    """x.meta would be the table of x."""
    with pytest.raises(segment.ArenaError, match="cannot be the name"):
        segment.create(name, SIZE)


def test_too_little_room_is_one_line_with_the_remedy(instance):
    bounds = [Limit("/dev/shm", 1 << 20, "make it larger"), Limit("the host", 1 << 40, "no")]
    with pytest.raises(segment.ArenaError) as error:
        segment.create(instance, SIZE, bounds=bounds)

    text = str(error.value)
    assert "but /dev/shm leaves 1.0 MiB; make it larger, or choose a smaller --l1-size-gb" in text
    assert "\n" not in text
    assert not any(path.exists() for path in paths(instance))


def test_a_creation_that_fails_half_way_leaves_nothing(instance):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        segment.create(instance, SIZE, progress=stop)

    assert not any(path.exists() for path in paths(instance))


def test_a_small_dev_shm_is_an_error_and_never_a_sigbus(instance):
    """A private mount of 64 MB on /dev/shm; once with the check before, once with the kernel's own no."""
    program = """
        import subprocess, sys
        from lmcache_shm.arena import memory, segment
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"]).returncode:
            sys.exit(77)
        for bounds in (None, []):
            try:
                segment.create(sys.argv[1], 100 << 20, bounds=bounds)
            except segment.ArenaError as error:
                print(error)
        import os
        print(os.listdir("/dev/shm"))
        arena = segment.create(sys.argv[1], 40 << 20)
        arena.data_array[:] = 1
        print(int(arena.data_array.sum()) == 40 << 20)
    """
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no private mounts here")
    found = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", textwrap.dedent(program), instance],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    if found.returncode == 77:
        pytest.skip("mount is not allowed here")

    checked, refused, left, usable = found.stdout.splitlines()
    assert "/dev/shm leaves 64.0 MiB; make it larger (container: --shm-size" in checked
    assert "cannot reserve 100.0 MiB in /dev/shm: No space left on device" in refused
    assert "--shm-size" in refused
    assert (left, usable, found.returncode) == ("[]", "True", 0)


def test_a_file_size_limit_is_an_error_with_its_own_remedy(instance):
    found = run_python(
        """
        import resource, sys
        from lmcache_shm.arena import segment
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, 20 << 20))
        try:
            segment.create(sys.argv[1], 32 << 20, bounds=[])
        except segment.ArenaError as error:
            print(error)
        """,
        instance,
    )

    assert "File too large; raise the file size limit (ulimit -f)" in found.stdout
    assert found.returncode == 0


# --------------------------------------------------------------------------------------- attaching
def test_a_client_shares_data_and_boards_and_cannot_write_the_table(arena, instance):
    client = segment.attach(instance, writable_data=True)
    client.data_array[12345] = 7
    client.boards[3, 2, 1] = 99

    assert arena.data_array[12345] == 7
    assert arena.boards[3, 2, 1] == 99
    assert client.arena_id == arena.arena_id
    for table in (client.hot, client.cold, client.slabs, client.clients, client.live):
        assert not table.flags.writeable
    client.close()


def test_a_reader_can_write_nothing(arena, instance):
    reader = segment.attach(instance, writable_data=False)

    assert not reader.data_array.flags.writeable
    assert not reader.boards.flags.writeable
    reader.close()


def test_there_is_nothing_to_attach_to(instance):
    with pytest.raises(segment.ArenaError, match="there is no arena of instance"):
        segment.attach(instance, writable_data=True)


def test_a_mapping_outlives_names_and_close(arena, instance):
    client = segment.attach(instance, writable_data=True)
    view = client.data_array
    view[0] = 5
    arena.unlink()
    client.close()
    client.close()

    assert view[0] == 5


@pytest.mark.parametrize(
    ("at", "value", "what"),
    [
        (0, b"X", "wrong magic"),
        (8, b"\x07", "format version 7"),
        (20, b"\xff", "damaged header"),
        (70, b"\xff", "damaged header"),
        (110, b"\x55", "damaged header"),
    ],
)
def test_a_damaged_header_is_never_trusted(arena, instance, at, value, what):
    arena.meta[at : at + 1] = value

    with pytest.raises(segment.ArenaError, match=what):
        segment.attach(instance, writable_data=False)


def test_a_header_of_another_size_than_the_segment_is_never_mapped(arena, instance):
    """A table or data segment cut short would end in SIGBUS at the first touch."""
    for path in paths(instance):
        size = path.stat().st_size
        os.truncate(path, size - PAGE)
        with pytest.raises(segment.ArenaError, match="the header says"):
            segment.attach(instance, writable_data=False)
        os.truncate(path, size)


def test_a_foreign_data_segment_is_never_mapped(arena, instance):
    data, _ = paths(instance)
    data.rename(data.with_name(data.name + "-aside"))
    data.write_bytes(b"")
    os.truncate(data, arena.data_bytes)

    with pytest.raises(segment.ArenaError, match="not the one that the slot table describes"):
        segment.attach(instance, writable_data=False)
    assert not arena.unlink(), "the name is not ours any more"
    assert data.exists()
    data.unlink()
    data.with_name(data.name + "-aside").unlink()


# ---------------------------------------------------------------------------------------- adopting
def test_a_dead_servers_arena_is_adopted_with_its_contents(arena, instance):
    arena.data_array[777] = 9
    arena.hot["tick"][5] = 1234
    arena_id, geometry = arena.arena_id, arena.geometry
    arena.close()

    adopted = segment.adopt(instance, geometry)

    assert adopted.arena_id == arena_id
    assert adopted.data_array[777] == 9
    assert adopted.hot["tick"][5] == 1234
    assert adopted.unlink()
    adopted.close()


def test_after_sigkill_the_lock_is_free(instance):
    program = """
        import os, signal, sys
        from lmcache_shm.arena import segment
        arena = segment.create(sys.argv[1], 3 << 20)
        arena.data_array[3] = 8
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_python(program, instance).returncode == -signal.SIGKILL

    adopted = segment.adopt(instance, Geometry.plan(3 << 20, 0, True))

    assert adopted.data_array[3] == 8
    adopted.unlink()
    adopted.close()


@pytest.mark.parametrize(
    ("wanted", "what"),
    [
        (Geometry.plan(SIZE, 512, True), "chunk size in tokens.* is 256, wanted 512"),
        (Geometry.plan(SIZE, 256, False), "separate object groups is True, wanted False"),
        (Geometry.plan(2 * SIZE, 256, True), "size in bytes is 3149824, wanted 6299648"),
    ],
)
def test_what_differs_is_said_and_the_arena_is_left_alone(arena, instance, wanted, what):
    arena.close()
    with pytest.raises(segment.AdoptError, match=what) as error:
        segment.adopt(instance, wanted)

    assert error.value.reason
    segment.adopt(instance, arena.geometry).close()


def test_nothing_to_adopt(instance):
    with pytest.raises(segment.AdoptError, match="there is no arena of instance"):
        segment.adopt(instance, Geometry.plan(SIZE, 256, True))


def test_a_second_server_is_told_the_first_ones_pid(arena, instance):
    for attempt in (
        lambda: segment.create(instance, SIZE),
        lambda: segment.adopt(instance, arena.geometry),
        lambda: segment.attach(instance, writable_data=True, server=True),
    ):
        with pytest.raises(segment.InstanceBusy, match=f"process {os.getpid()}") as error:
            attempt()
        assert error.value.pid == os.getpid()
    assert segment.attach(instance, writable_data=False).arena_id == arena.arena_id


def test_a_live_server_is_noticed_whatever_its_runtime_directory(arena, instance):
    """The lock is on the segment itself."""
    program = """
        import sys
        from lmcache_shm.arena import segment
        try:
            segment.create(sys.argv[1], 3 << 20)
        except segment.InstanceBusy as error:
            print(error.pid)
    """
    assert run_python(program, instance).stdout.strip() == str(os.getpid())


def test_create_replaces_what_a_dead_server_left(arena, instance):
    client = segment.attach(instance, writable_data=True)
    client.data_array[1] = 4
    arena.close()
    successor = segment.create(instance, SIZE)

    assert successor.arena_id != client.arena_id
    assert client.data_array[1] == 4, "old mappings stay valid"
    assert not arena.unlink(), "a late unlink must not hit the successor"
    assert all(path.exists() for path in paths(instance))
    assert successor.unlink()
    successor.close()
    client.close()


def test_half_made_leftovers_are_replaced(instance):
    data, meta = paths(instance)
    for make in ([data], [meta], [data, meta]):
        for path in make:
            path.write_bytes(b"junk")
        arena = segment.create(instance, SIZE)
        assert arena.unlink()
        arena.close()


def test_set_owner_is_seen_by_clients(arena, instance):
    arena.set_owner(b"boot-id!")
    client = segment.attach(instance, writable_data=False)

    assert client.live["pid"][0] == os.getpid()
    assert client.live["boot"][0] == b"boot-id!"
    assert client.live["starts"][0] == 1
    client.close()


# --------------------------------------------------------------------------------------- prefault
@pytest.mark.parametrize("old_kernel", [False, True])
def test_prefault_touches_everything_and_changes_nothing(arena, monkeypatch, old_kernel):
    if old_kernel:
        monkeypatch.setattr("lmcache_shm.arena.memory._MADV_POPULATE_WRITE", 9999)
    arena.data_array[::5000] = 3
    expected = arena.data_array.copy()
    for thread in segment.prefault(arena, 3, threading.Event()):
        thread.join()

    assert arena.live["prefaulted"][0] == arena.data_bytes
    assert (arena.data_array == expected).all()


def test_prefault_stops_when_told(arena, monkeypatch):
    monkeypatch.setattr("lmcache_shm.arena.memory.PREFAULT_PIECE", PAGE)
    stop = threading.Event()
    stop.set()
    for thread in segment.prefault(arena, 2, stop):
        thread.join()

    assert arena.live["prefaulted"][0] == 0


# ---------------------------------------------------------------------------------------- clients
def test_clients_are_written_down(arena, instance):
    record = ClientRecord("engine-ü", 2, 1, [(0, 4321, 99), (1, 4322, 100)])
    write_client(arena, 7, record)
    write_client(arena, 8, ClientRecord("x" * 300, 1, 1, []))
    reader = segment.attach(instance, writable_data=False)

    assert read_clients(reader)[7] == record
    assert read_clients(reader)[8].engine_id == "x" * 256
    erase_client(arena, 7)
    assert list(read_clients(reader)) == [8]
    reader.close()


def test_more_processes_than_fit_keep_the_latest(arena):
    many = [(i % 8, 1000 + i, i) for i in range(100)]
    write_client(arena, 0, ClientRecord("e", 8, 1, many))

    assert read_clients(arena)[0].processes == many[-64:]


def test_processes_are_told_apart_by_their_start():
    me = os.getpid()

    assert start_time(me) > 0
    assert process_alive(me, start_time(me))
    assert process_alive(me, 0)
    assert not process_alive(me, start_time(me) + 1)
    assert process_alive(0, 0), "out of sight is not dead"
    child = subprocess.Popen(["true"])
    child.wait()
    assert not process_alive(child.pid, 0)


def test_a_zombie_is_dead():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert not process_alive(child.pid, 0)
    child.wait()


# ----------------------------------------------------------------------------------------- layout
@pytest.mark.parametrize(
    "size", [4096, 4097, 65535, 3333333, 64 << 20, (64 << 20) - 4096, 100 << 30, 1 << 40]
)
def test_geometry_covers_the_arena(size):
    g = Geometry.plan(size, 0, True)

    assert size <= g.data_bytes < size + PAGE
    assert g.slab_bytes & (g.slab_bytes - 1) == 0
    assert 1 <= g.slabs <= 16384
    assert g.max_slots == g.slabs * g.rows_per_slab
    assert g.data_bytes - g.slabs * g.slab_bytes < g.slab_bytes
    # Rows cost little next to the bytes they describe (tiny arenas apart, where the boards weigh more).
    table = Regions.of(g).clients
    assert size < 64 << 20 or table < size / 20


def test_regions_do_not_overlap_and_start_on_pages():
    r = Regions.of(Geometry.plan(SIZE, 0, True))
    starts = [r.slabs, r.hot, r.cold, r.namespaces, r.clients, r.boards, r.total]

    assert starts == sorted(set(starts))
    assert all(start % PAGE == 0 for start in starts)


def test_header_round_trip():
    header = Header(bytes(range(16)), 1, 2, 3, Geometry.plan(SIZE, 5, False), 4)

    assert Header.unpack(header.pack().ljust(PAGE, b"\0")) == header
    with pytest.raises(ValueError, match="has 5 of"):
        Header.unpack(b"short")


def test_an_arena_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 4096"):
        Geometry.plan(1, 0, True)


def test_shared_memory_lives_where_we_look(arena):
    assert segment.shm_path(arena.data_name).parent.as_posix() == SHM_DIR
    assert np.shares_memory(arena.hot, np.frombuffer(arena.meta, np.uint8))
