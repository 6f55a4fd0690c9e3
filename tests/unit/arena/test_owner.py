"""Runtime directory, owner locks, leftovers: who is alive, and what may be removed."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from lmcache_shm.arena import segment
from lmcache_shm.arena.errors import InstanceBusy, RuntimeDirError
from lmcache_shm.arena.leftovers import leftovers, purge
from lmcache_shm.arena.owner import GLANCE_S, OwnerLock, is_owned, runtime_dir, safe_dir


def test_the_environment_names_the_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("LMCACHE_SHM_RUNTIME_DIR", str(tmp_path / "mine"))

    assert runtime_dir() == tmp_path / "mine"
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700


def test_the_users_runtime_directory_comes_next(tmp_path, monkeypatch):
    monkeypatch.delenv("LMCACHE_SHM_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    assert runtime_dir() == tmp_path / "lmcache-shm"


def test_a_directory_open_to_others_is_closed(tmp_path):
    tmp_path.chmod(0o777)

    assert safe_dir(tmp_path).stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_use_is_not_shut(tmp_path):
    """As when somebody names /run: it stays as it is, and the message says why."""
    tmp_path.chmod(0o777)
    (tmp_path / "x.sock").touch()
    (tmp_path / "somebody.pid").touch()

    with pytest.raises(RuntimeDirError, match=r"holds more than .* \(somebody.pid\); chmod 700"):
        safe_dir(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o777


def test_a_symbolic_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(RuntimeDirError, match="is not a directory"):
        safe_dir(tmp_path / "link")


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(RuntimeDirError, match="LMCACHE_SHM_RUNTIME_DIR"):
        safe_dir(tmp_path / "file" / "below")


@pytest.mark.skipif(os.getuid() != 0, reason="needs to give a directory away")
def test_another_users_directory_is_refused(tmp_path):
    os.chown(tmp_path, 12345, 12345)

    with pytest.raises(RuntimeDirError, match="belongs to uid 12345"):
        safe_dir(tmp_path)
    os.chown(tmp_path, 0, 0)


def test_second_owner_is_told_the_first_ones_pid(tmp_path):
    lock = OwnerLock(tmp_path, "x")
    lock.acquire(b"\x01\x02")

    assert lock.path.read_text() == f"{os.getpid()} 0102\n"
    with pytest.raises(InstanceBusy, match=f"process {os.getpid()}"):
        OwnerLock(tmp_path, "x").acquire()
    OwnerLock(tmp_path, "y").acquire()
    lock.release()
    lock.release()
    assert not lock.path.exists()
    again = OwnerLock(tmp_path, "x")
    again.acquire()
    again.release()


def test_a_dead_owners_lock_is_taken_over(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path;"
        "from lmcache_shm.arena.owner import OwnerLock;"
        "OwnerLock(Path(sys.argv[1]), 'x').acquire(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False,
    )  # fmt: skip
    assert found.returncode == -signal.SIGKILL
    assert (tmp_path / "x.lock").exists()

    lock = OwnerLock(tmp_path, "x")
    lock.acquire()
    assert lock.path.read_text().startswith(f"{os.getpid()} ")
    lock.release()


def test_a_lock_in_a_directory_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(RuntimeDirError, match=r"cannot write .*--runtime-dir"):
        OwnerLock(tmp_path / "missing", "x").acquire()


def test_release_does_not_remove_a_successors_file(tmp_path):
    lock = OwnerLock(tmp_path, "x")
    lock.acquire()
    lock.path.unlink()
    lock.path.write_text("another one's")
    lock.release()

    assert lock.path.read_text() == "another one's"


def test_looking_takes_nothing_from_a_server_that_starts(tmp_path):
    """A tool was stopped in the middle of its look, for longer than a server waits for an owner to go."""
    lock = OwnerLock(tmp_path, "x")
    fd = os.open(lock.path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    timer = threading.Timer(2 * GLANCE_S, os.close, [fd])
    timer.start()
    lock.acquire()

    assert not timer.is_alive()
    fd = os.open(lock.path, os.O_RDWR)
    assert is_owned(fd)
    os.close(fd)
    lock.release()


# -------------------------------------------------------------------------------------- leftovers
def mine(runtime, instance):
    return [entry for entry in leftovers(runtime) if entry.instance == instance]


def test_the_living_are_listed_as_living_and_stay(tmp_path, instance):
    arena = segment.create(instance, 3 << 20)
    lock = OwnerLock(tmp_path, instance)
    lock.acquire()
    found = mine(tmp_path, instance)

    assert sorted(entry.kind for entry in found) == ["data", "lock", "meta"]
    assert all(entry.live and entry.pid in {os.getpid(), 0} for entry in found)
    assert {entry.note for entry in found} == {"in use"}
    assert purge(found) == []
    # Even an entry that claims to be dead: the lock decides.
    from dataclasses import replace

    assert purge(replace(entry, live=False) for entry in found) == []
    arena.unlink()
    arena.close()
    lock.release()


def test_the_dead_are_removed_and_only_they(tmp_path, instance):
    dead = segment.create(instance, 3 << 20)
    nbytes = dead.data_bytes + dead.meta_bytes
    dead.close()
    (tmp_path / f"{instance}.lock").write_text("4194305 00\n")
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / f"{instance}.sock"))
    sock.close()
    (tmp_path / "notes.txt").touch()
    found = mine(tmp_path, instance)

    assert sorted(entry.kind for entry in found) == ["data", "lock", "meta", "socket"]
    assert not any(entry.live for entry in found)
    assert sum(e.nbytes for e in found if e.kind in {"data", "meta"}) == nbytes
    assert {e.note for e in found if e.kind == "meta"} == {
        "arena of a dead server; a new one can adopt it"
    }
    assert len(purge(found)) == 4
    assert mine(tmp_path, instance) == []
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_was_replaced_since_it_was_listed_stays(tmp_path, instance):
    segment.create(instance, 3 << 20).close()
    found = mine(tmp_path, instance)
    successor = segment.create(instance, 3 << 20)

    assert purge(found) == []
    assert successor.unlink()
    successor.close()


def test_data_without_a_table_and_damaged_tables_are_told_and_removed(tmp_path, instance):
    data, meta = (segment.shm_path(name) for name in segment.segment_names(instance))
    data.write_bytes(b"x")

    assert [e.note for e in mine(tmp_path, instance)] == ["data without a slot table"]
    meta.write_bytes(b"junk")
    assert {e.note for e in mine(tmp_path, instance)} == {"damaged: the header has 4 of 4096 bytes"}
    assert len(purge(mine(tmp_path, instance))) == 2
    assert not data.exists()
    assert not meta.exists()


def test_no_runtime_directory_is_no_trouble(tmp_path):
    assert all(entry.kind in {"data", "meta"} for entry in leftovers(tmp_path / "missing"))
