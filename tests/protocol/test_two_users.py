"""Several users on one host: each has a cache of his own, whatever others put in the way."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmcache_shm.arena.owner import segment_names, shm_path
from tests.protocol.harness import ServerProcess
from tests.protocol.users import PYTHON, ROOT, User, users_of_this_run

PRECIOUS = b"precious" * 1024


@pytest.fixture
def users() -> Iterator[tuple[User, User]]:
    """Two users; what they leave in /tmp and /dev/shm under their names goes at the end."""
    pair = users_of_this_run()
    yield pair
    for user in pair:
        places = [user.runtime, *Path("/dev/shm").glob(f"lmcache_shm.{user.uid}.*")]
        for path in places:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


@pytest.fixture
def victim(users: tuple[User, User]) -> User:
    return users[0]


@pytest.fixture
def other(users: tuple[User, User]) -> User:
    return users[1]


def seen(path: Path) -> tuple[int, int, int, int]:
    """What must stay as it was."""
    facts = path.lstat()
    return facts.st_ino, facts.st_uid, facts.st_mode, facts.st_size


def at_once(*looks: Callable[[], Any]) -> list[Any]:
    """What commands that change nothing say, run side by side. No servers: they end with their thread."""
    with ThreadPoolExecutor(len(looks)) as pool:
        return [look.result() for look in [pool.submit(look) for look in looks]]


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> None:
    process.send_signal(number)
    process.communicate(timeout=30)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter; pytest's own are closed to all but one, which would hide a mistake."""
    path = Path(tempfile.mkdtemp(prefix=f"lmcshm-test-{os.getpid()}-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def precious(place: Path) -> Path:
    """What a link points to."""
    path = place / "precious"
    path.write_bytes(PRECIOUS)
    return path


def root(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lmcache_shm", *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


# ---------------------------------------------------------------------------------- each his own
def test_two_users_run_the_default_instance_and_each_adopts_his_own(victim: User, other: User):
    servers = [victim.serve()[0], other.serve()[0]]
    try:
        told = at_once(lambda: victim.command("status"), lambda: other.command("status"))
        for user, server, status in zip((victim, other), servers, told, strict=True):
            assert f"pid {server.pid}" in status.stdout
            assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in user.segments())
        end(servers[0], signal.SIGKILL)
        left = [seen(path) for path in victim.segments()]

        purged, doctor = at_once(  # both look at a dead arena that is not his
            lambda: other.command("purge", "--yes"), lambda: other.command("doctor")
        )
        assert purged.returncode == 0
        assert "0 files removed" in purged.stdout
        whose = (
            f"{victim.segments()[0]}  belongs to uid {victim.uid}, not to uid {other.uid}: stays"
        )
        assert whose in purged.stdout
        assert (
            f"belongs to uid {victim.uid}, not to uid {other.uid}: it is left alone"
            in doctor.stdout
        )
        assert "instance default has no server" not in doctor.stdout
        assert [seen(path) for path in victim.segments()] == left

        servers[0], said = victim.serve()
        assert "adopted" in said
        assert [seen(path)[0] for path in victim.segments()] == [facts[0] for facts in left]
    finally:
        for server in servers:
            end(server)
    assert not any(path.exists() for user in (victim, other) for path in user.segments())


def test_a_user_beside_root_has_the_same_instance(victim: User, server: ServerProcess):
    theirs, _ = victim.serve("--instance", server.instance)
    end(theirs)
    assert server.status()["server"]["pid"] == server.pid


def test_an_engine_in_another_user_namespace_finds_the_segments(victim: User):
    """There our uid has another number: the names are those that the server tells."""
    server, _ = victim.serve()
    program = (
        "import os, sys; from lmcache_shm.client.connection import Connection;"
        "from lmcache_shm.protocol.messages import PROTOCOL, Hello; from lmcache_shm.client.reconnect import Link;"
        "from lmcache_shm.config import Config; link = Link(Config(runtime_dir=sys.argv[1]), 'e');"
        "link._greet = lambda c: None; link.start(); up = link.wait(10); print(os.geteuid(), up); link.close()"
    )
    try:
        done = victim.run(
            "unshare", "--user", "--map-root-user", PYTHON, "-c", program, str(victim.runtime)
        )
        if "unshare" in done.stderr:
            pytest.skip("no user namespaces here")
        assert done.stdout == "0 True\n", done.stderr
    finally:
        end(server)


# -------------------------------------------------------------------------------- names in /dev/shm
def a_file(path: Path, _precious: Path) -> None:
    path.write_bytes(bytes(8192))


def a_link(path: Path, precious: Path) -> None:
    path.symlink_to(precious)


def a_pipe(path: Path, _precious: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path, _precious: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("segment", "plant"),
    [(0, a_file), (0, a_link), (1, a_file), (1, a_pipe), (1, a_directory)],
    ids=lambda what: getattr(what, "__name__", None) or ("data", "meta")[what],
)
def test_what_another_user_put_under_a_segments_name_is_told_and_left_alone(
    segment: int, plant: Callable[[Path, Path], None], victim: User, other: User, precious: Path
):
    """It is open to all, so that no missing permission helps."""
    planted = victim.segments()[segment]
    plant(planted, precious)
    other.give(planted, 0o777)
    before = seen(planted)
    whose = f"{planted} belongs to uid {other.uid}, not to uid {victim.uid}; "

    line = victim.refusal("server", "--l1-size-gb", "0.0625")
    assert line.startswith(whose)
    assert "choose another --instance" in line
    if plant is a_pipe:
        assert victim.refusal("check").startswith(whose)
    if plant is a_file and segment:
        told, purged = at_once(
            lambda: victim.command("doctor", "-q", "--l1-size-gb", "0.0625"),
            lambda: victim.command("purge", "--yes"),
        )
        assert f"not to uid {victim.uid}: no server of instance default can start" in told.stdout
        assert purged.returncode == 0
    assert seen(planted) == before
    assert precious.read_bytes() == PRECIOUS
    assert not victim.segments()[1 - segment].exists()


def test_root_does_not_take_over_an_arena_that_another_user_can_write(
    instance: str, victim: User, runtime_dir: Path
):
    ServerProcess(instance, "--keep-arena").end()
    paths = [shm_path(name) for name in segment_names(instance)]
    before = [seen(victim.give(path, 0o666)) for path in paths]
    try:
        done = root("server", "--instance", instance, "--l1-size-gb", "0.0625")
        assert done.returncode == 1
        assert f"belongs to uid {victim.uid}, not to uid 0" in done.stderr
        assert root("purge", "--yes", "--instance", instance).stdout.startswith("0 files removed")
        assert [seen(path) for path in paths] == before
    finally:
        for path in paths:
            path.unlink()


# ------------------------------------------------------------------------------- the runtime directory
def taken(victim: User, other: User, _precious: Path) -> str:
    victim.runtime.mkdir()
    other.give(victim.runtime, 0o777)
    return f"belongs to uid {other.uid}, not to uid {victim.uid}"


def linked(victim: User, other: User, precious: Path) -> str:
    victim.runtime.symlink_to(victim.give(precious.parent / "of-the-victim", 0o700))
    other.give(victim.runtime)
    return "is not a directory"


def no_directory(victim: User, other: User, _precious: Path) -> str:
    victim.runtime.touch()
    victim.give(victim.runtime)
    return "is not a directory"


def closed(victim: User, other: User, _precious: Path) -> str:
    victim.runtime.mkdir()
    victim.give(victim.runtime, 0o300)
    return f"has mode 300; chmod 700 {victim.runtime}"


@pytest.mark.parametrize("plant", [taken, linked, no_directory, closed], ids=lambda p: p.__name__)
def test_a_runtime_directory_that_is_not_ours_is_one_line(
    plant: Callable[[User, User, Path], str], victim: User, other: User, precious: Path
):
    (precious.parent / "of-the-victim").mkdir()
    told = plant(victim, other, precious)
    before = seen(victim.runtime)

    line = victim.refusal("server")
    assert line.startswith(f"runtime directory {victim.runtime} ")
    assert told in line
    if plant is closed:
        assert f"chmod 700 {victim.runtime}" in victim.command("doctor", "-q").stdout
    assert seen(victim.runtime) == before
    assert not any((precious.parent / "of-the-victim").iterdir())


def test_every_command_ends_in_one_line_beside_a_directory_of_another_user(
    victim: User, other: User
):
    """Each that wants a server, and none of them hangs or shows its insides."""
    victim.runtime.mkdir()
    other.give(victim.runtime, 0o777)
    commands = ("status", "top --once", "ls", "clear --all --yes", "stop", "purge --yes")
    lines = at_once(*(partial(victim.refusal, *words.split()) for words in commands))
    for words, line in zip(commands, lines, strict=True):
        assert f"belongs to uid {other.uid}" in line, (words, line)
    assert list(victim.runtime.iterdir()) == []


def test_another_users_xdg_directory_is_passed_over(victim: User, other: User, place: Path):
    """As `su` and `sudo` leave it behind, closed or open to all."""
    for mode in (0o700, 0o777):
        folder = place / f"{mode:o}"
        folder.mkdir()
        other.give(folder, mode)
        (folder / "lmcache-shm").mkdir()
        line = victim.refusal("status", XDG_RUNTIME_DIR=str(folder))
        assert f"answers at {victim.runtime}/default.sock" in line


# ------------------------------------------------------------------------ files in our own directory
def lock_of_another(victim: User, other: User, _precious: Path) -> str:
    path = victim.runtime / "default.lock"
    path.touch()
    other.give(path, 0o666)
    return f"{path} belongs to uid {other.uid}, not to uid {victim.uid}; remove it: rm -r {path}"


def linked_lock(victim: User, other: User, precious: Path) -> str:
    path = victim.runtime / "default.lock"
    path.symlink_to(precious)
    victim.give(path)
    return f"{path} is a symbolic link, not a file; remove it: rm -r {path}"


def locked_directory(victim: User, other: User, _precious: Path) -> str:
    path = victim.runtime / "default.lock"
    path.mkdir()
    victim.give(path, 0o700)
    return f"{path} is a directory, not a file; remove it: rm -r {path}"


def notes_for_a_socket(victim: User, other: User, _precious: Path) -> str:
    path = victim.runtime / "default.sock"
    path.write_bytes(PRECIOUS)
    victim.give(path)
    return f"{path} is not a socket; remove it (rm -r {path})"


@pytest.mark.parametrize(
    "plant",
    [lock_of_another, linked_lock, locked_directory, notes_for_a_socket],
    ids=lambda p: p.__name__,
)
def test_what_is_in_the_way_in_our_own_directory_is_named_and_stays(
    plant: Callable[[User, User, Path], str], victim: User, other: User, precious: Path
):
    victim.runtime.mkdir()
    victim.give(victim.runtime, 0o700)
    victim.give(precious)
    told = plant(victim, other, precious)
    (planted,) = victim.runtime.iterdir()
    before = seen(planted)

    assert victim.refusal("server", "--l1-size-gb", "0.0625").startswith(told)
    if plant is notes_for_a_socket:
        assert victim.command("purge", "--yes").returncode == 0
    assert seen(planted) == before
    assert precious.read_bytes() == PRECIOUS
    assert not any(path.exists() for path in victim.segments())


def test_a_socket_of_another_user_is_no_server_of_ours(victim: User, other: User):
    victim.runtime.mkdir()
    victim.give(victim.runtime, 0o700)
    path = victim.runtime / "default.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        other.give(path, 0o600)
        assert (
            victim.refusal("status") == f"{path} belongs to another user, or is closed to this one"
        )
        path.chmod(0o777)
        line, doctor = at_once(
            lambda: victim.refusal("status"), lambda: victim.command("doctor", "-q").stdout
        )
        assert line == f"the server at {path} belongs to uid 0, not to uid {victim.uid}"
        assert f"rm {path}" in doctor


def test_autostart_beside_what_is_not_ours_is_one_line(victim: User, other: User, precious: Path):
    program = (
        "import sys; from lmcache_shm.client.autostart import AutostartError, ensure_server;"
        "from lmcache_shm.config import Config\n"
        "try: print(ensure_server(Config(autostart_gb=0.0625), 10.0))\n"
        "except AutostartError as error: print(error)"
    )
    victim.runtime.mkdir()
    victim.give(victim.runtime, 0o700)
    victim.give(precious)
    for suffix, plant in ((".autostart", a_directory), (".log", a_link), (".log", a_pipe)):
        path = victim.runtime / f"default{suffix}"
        plant(path, precious)
        victim.give(path, 0o700)
        line = victim.python(program)
        assert line.startswith(f"{path} is a"), line
        assert line.endswith(f"remove it: rm -r {path}\n")
        path.rmdir() if plant is a_directory else path.unlink()
    assert precious.read_bytes() == PRECIOUS
    other.give(victim.runtime, 0o777)
    assert f"belongs to uid {other.uid}" in victim.python(program)


# ---------------------------------------------------------------------------- digests of weights
IDENTITIES = """
import os, pathlib, signal, sys, time
from lmcache_shm.client import fingerprint
from lmcache_shm.client.fingerprint import default_memory, identity_on_disk
fingerprint.SETTLED_S = 0.0  # remembers weights that were written just now
signal.alarm(30)  # whatever waits for another user ends here
for cache in sys.argv[2:]:
    os.environ["XDG_CACHE_HOME"] = cache
    memory = default_memory()
    print(identity_on_disk(sys.argv[1], None, None, time.time() + 60, memory), memory.read_bytes)
"""
"""`time.time() + 60`: the engine's start, so that weights written just now count as older than it."""


@pytest.fixture
def weights(precious: Path) -> Path:
    """A checkpoint that all may read."""
    folder = precious.parent / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(PRECIOUS)
    return folder


def cache_of(owner: User, folder: Path, mode: int = 0o700) -> Path:
    """$XDG_CACHE_HOME/lmcache-shm of a user, in a directory that is open to all."""
    inner = folder / "lmcache-shm"
    inner.mkdir(parents=True)
    folder.chmod(0o777)
    return owner.give(inner, mode)


def test_digests_of_weights_are_this_users_own_and_nothing_in_their_way_is_an_error(
    victim: User, other: User, precious: Path, weights: Path
):
    base = precious.parent
    facts = (weights / "a.safetensors").stat()
    key = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
    forged = json.dumps({":".join(map(str, key)): "0" * 32})

    ours = cache_of(victim, base / "ours")
    planted = []
    for name, plant in (("pipe", a_pipe), ("link", a_link), ("directory", a_directory)):
        path = cache_of(victim, base / name) / "weights.json"
        plant(path, precious)
        planted.append(victim.give(path, 0o700))
    linked = cache_of(victim, base / "linked-lock") / "weights.lock"
    linked.symlink_to(base / "made-through-a-link")
    planted.append(victim.give(linked))
    for name, owner in (("file-of-another", victim), ("folder-of-another", other)):
        path = cache_of(owner, base / name, 0o777) / "weights.json"
        path.write_text(forged)
        planted.append(other.give(path, 0o644))
    lock = cache_of(other, base / "lock-of-another", 0o777) / "weights.lock"
    lock.touch()
    planted.append(other.give(lock, 0o666))
    base.chmod(0o777)  # so that the link could be followed
    before = [seen(path) for path in planted]

    places = [str(path.parents[1]) for path in planted]
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        told = victim.python(
            IDENTITIES, str(weights), str(base / "ours"), *places, "~nobody-here/x"
        )
    base.chmod(0o755)

    first = told.splitlines()[0].removesuffix(f" {len(PRECIOUS)}")
    assert told.splitlines() == [f"{first} {len(PRECIOUS)}"] * (len(places) + 2), "all were read"
    again = victim.python(IDENTITIES, str(weights), str(base / "ours"))
    assert again == f"{first} 0\n", "his own are believed"
    assert sorted(path.name for path in ours.iterdir()) == ["weights.json", "weights.lock"]
    assert [seen(path) for path in planted] == before
    assert not (base / "made-through-a-link").exists()
    assert {path.name for path in (base / "folder-of-another/lmcache-shm").iterdir()} == {
        "weights.json"
    }
    assert precious.read_bytes() == PRECIOUS


def test_a_user_without_a_home_has_an_identity_of_weights(victim: User, weights: Path):
    """His uid is not in /etc/passwd and HOME is not set, or leads where he may not write."""
    program = IDENTITIES.replace('os.environ["XDG_CACHE_HOME"]', 'os.environ["HOME"]')
    without = program.replace('os.environ["HOME"] = cache', "os.environ.pop('HOME', None)")
    said = set(
        at_once(
            *(partial(victim.python, p, str(weights), "/nonexistent") for p in (program, without))
        )
    )
    assert len(said) == 1, said
    assert said.pop().startswith("files#")


# -------------------------------------------------------------------------------------- the host itself
def test_a_dev_shm_that_only_root_may_write_is_one_line(victim: User):
    closed_shm = "mount -t tmpfs -o mode=755 t /dev/shm"
    line, doctor = at_once(
        lambda: victim.refusal("server", "--l1-size-gb", "0.0625", before=closed_shm),
        lambda: victim.command("doctor", "-q", before=closed_shm).stdout,
    )
    assert line == (
        f"/dev/shm is not writable for uid {victim.uid}; make it so: chmod 1777 /dev/shm"
    )
    assert "chmod 1777 /dev/shm" in doctor


def test_a_process_that_proc_hides_is_not_taken_for_dead(victim: User):
    """With hidepid, an engine with more capabilities than the server: its slots must stay in quarantine."""
    engine = victim.start("sh", "-c", "echo; exec sleep 60", caps="net_raw")
    try:
        assert engine.stdout is not None
        engine.stdout.readline()
        program = (
            "import os, sys; from lmcache_shm.arena.processes import Process;"
            "pid = int(sys.argv[1]); print(os.path.exists(f'/proc/{pid}'));"
            "found = Process(pid, 0, os.pidfd_open(pid)); print(found.alive(), found.running())"
        )
        hide = "mount -t proc -o hidepid=2 proc /proc"
        assert victim.python(program, str(engine.pid), before=hide) == "False\nTrue False\n"
    finally:
        engine.kill()
        engine.communicate()


# ------------------------------------------------------------------------------------ tests and tools
@pytest.mark.parametrize("module", ["tools.harness.leftovers", "tools.scratch"])
def test_cleaning_up_touches_nothing_of_another_user(
    module: str, victim: User, other: User, instance: str
):
    """Not even as root, who could: the pid in the name may be one of another container's."""
    dead = 1 << 30
    planted = [
        Path(f"/tmp/lmcshm-test-{dead}-of-{other.uid}"),
        Path(f"/tmp/lmcshm-tool-{dead}-of-{other.uid}"),
        Path(f"/dev/shm/lmcache_shm.{other.uid}.test-{dead}-x"),
    ]
    try:
        for path in planted:
            path.touch() if path.parent.name == "shm" else path.mkdir()
            other.give(path, 0o777)
        program = {
            "tools.harness.leftovers": "from tools.harness.leftovers import clear_dead_runs; clear_dead_runs()",
            "tools.scratch": "from tools.scratch import scratch_folder\nwith scratch_folder(): pass",
        }[module]
        victim.python(program)
        subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
        assert all(path.exists() for path in planted)
        other.python(program)
        gone = [path.exists() for path in planted]
        assert gone == (
            [False, True, False] if module == "tools.harness.leftovers" else [True, False, True]
        )
    finally:
        for path in planted:
            with contextlib.suppress(FileNotFoundError):
                path.unlink() if path.parent.name == "shm" else path.rmdir()
