"""What the operating system limits or forbids: small /dev/shm, few descriptors, another user."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_shm.arena.owner import segment_names, shm_path
from tests.faults import held
from tools.harness import cluster as cluster_module
from tools.harness.cluster import Cluster
from tools.harness.wait import LONG_S, until

as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root to become another user or to mount"
)


@pytest.fixture
def private_mounts() -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no private mounts here")


def python(program: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    before = options.pop("before", [])
    return subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(program), *arguments],  # type: ignore[misc]
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, **options,
    )  # type: ignore[call-overload,no-any-return]  # fmt: skip


def python_in_dev_shm(
    megabytes: int, program: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run it with a /dev/shm of that size, which nobody else sees."""
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm || exit 77"
    shell = ["sh", "-c", f'{mount}; exec "$@"', "sh"]
    found = python(program, *arguments, before=["unshare", "-m", *shell])
    if found.returncode == 77:
        pytest.skip("mount is not allowed here")
    return found


@as_root
def test_another_user_can_neither_map_the_arena_nor_connect(instance: str) -> None:
    """The second time even the runtime directory and the socket are open to all: the peer's uid is checked."""
    program = """
        import os, socket, sys
        name, path = sys.argv[1:]
        os.setgid(65534)
        os.setuid(65534)
        for segment in (name, name + ".meta"):
            for flags in (os.O_RDONLY, os.O_RDWR):
                try:
                    os.open("/dev/shm/" + segment, flags)
                    print("mapped", segment)
                except PermissionError:
                    pass
        for attempt in range(2):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(10)
            try:
                sock.connect(path)
                print(sock.recv(1000))
            except PermissionError:
                print("no way in")
            sock.close()
            if attempt == 0:
                print("open", flush=True)
                sys.stdin.readline()
    """
    with Cluster(instance) as cluster:
        cluster.start_server()
        path = os.path.join(os.environ["LMCACHE_SHM_RUNTIME_DIR"], f"{instance}.sock")
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), segment_names(instance)[0][1:], path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        folder = os.path.dirname(path)
        try:
            said = [child.stdout.readline(), child.stdout.readline()]
            os.chmod(folder, 0o755)
            os.chmod(path, 0o777)
            rest, _ = child.communicate("go\n", timeout=60)
        finally:
            os.chmod(folder, 0o700)
            child.kill()
            child.wait()
        assert said == ["no way in\n", "open\n"]
        assert "belongs to uid 0, not to uid 65534" in rest
        assert "mapped" not in rest
        cluster.add_engines({})
        cluster.prove()


@as_root
@pytest.mark.usefixtures("private_mounts")
def test_a_dev_shm_that_others_fill_later_costs_nothing(instance: str) -> None:
    """The arena was reserved at the start: with /dev/shm full, every byte of it can be written."""
    program = """
        import sys
        from tools.harness.cluster import Cluster
        with Cluster(sys.argv[1]) as cluster:
            cluster.start_server()
            with open("/dev/shm/somebody", "wb") as file:
                try:
                    while True:
                        file.write(bytes(1 << 20))
                        file.flush()
                except OSError as error:
                    print(error.strerror)
            (engine,) = cluster.add_engines({})
            for document in range(0, 80, 4):
                engine.tell(document=document, chunks=5)
            engine.answer()
            print(engine.counts["stored"])
            cluster.kill_server()
            cluster.start_server()
            print(cluster.status()["server"]["adopted"]["slots"] == cluster.committed() > 60)
            assert engine.ask(wait_up=20.0)["up"]
            print(cluster.prove()["wrong"])
    """
    found = python_in_dev_shm(80, program, instance)
    assert found.returncode == 0, found.stderr
    said = [line for line in found.stdout.splitlines() if line]
    assert said == ["No space left on device", "200", "True", "0"]


@as_root
@pytest.mark.usefixtures("private_mounts")
def test_a_dev_shm_that_others_fill_while_the_rest_is_reserved(instance: str) -> None:
    """A server that has reserved a quarter, held there: it serves, refuses what has no room and evicts nothing.

    Then others take the room: it stays as small as it is, says so once, and evicts as ever. Killed, and with
    room again, its successor adopts the chunks and gets the rest.
    """
    program = """
        import os, sys
        from pathlib import Path
        from lmcache_shm.cli.admin import _status_lines
        from lmcache_shm.arena.owner import segment_names, shm_path
        from tests.faults import held
        from tools.harness import cluster as module
        from tools.harness.cluster import Cluster
        from tools.harness.wait import LONG_S, until
        go = Path(os.environ["LMCACHE_SHM_RUNTIME_DIR"], sys.argv[1] + ".go")
        module.SERVER = held.PROGRAM + module.SERVER
        def backing():
            arena = cluster.status()["arena"]
            return arena["backed_bytes"] >> 20, arena["growing"]
        def stores():
            for document in range(0, 80, 4):
                engine.tell(document=document, chunks=5)
            engine.answer()
            return cluster.status()["counters"]
        with Cluster(sys.argv[1], **{held.GO: str(go)}) as cluster:
            cluster.start_server()
            print(*backing())
            (engine,) = cluster.add_engines({})
            counters = stores()
            print(counters["stores_skipped_full"] > 0, counters["evictions"])
            with open("/dev/shm/somebody", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1 << 20))
                except OSError as error:
                    print(error.strerror)
            go.touch()
            until(lambda: not backing()[1], "it gives up", LONG_S)
            print(*backing())
            print(*[line for line in _status_lines(cluster.status()) if "reserved:" in line])
            print(stores()["evictions"] > 0, cluster.prove()["wrong"])
            log = cluster.server.errors
            print(log.count("could be reserved"), log.count("--shm-size"))
            cluster.kill_server()
            os.unlink("/dev/shm/somebody")
            cluster.start_server()
            print(cluster.status()["server"]["adopted"]["slots"] == cluster.committed() > 10)
            until(lambda: backing() == (64, False), "the rest is reserved", LONG_S)
            assert engine.ask(wait_up=20.0)["up"]
            print(cluster.prove()["wrong"])
    """
    found = python_in_dev_shm(80, program, instance)
    assert found.returncode == 0, found.stderr
    assert [line for line in found.stdout.splitlines() if line] == [
        "16 True",
        "True 0",
        "No space left on device",
        "16 False",
        "memory    only 16.0 MiB of 64.0 MiB could be reserved: /dev/shm had no room for more",
        "True 0",
        "1 1",
        "True",
        "0",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_before_all_is_reserved(
    instance: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to end it ends in order; killed, it is followed by one that goes on where it was."""
    monkeypatch.setattr(cluster_module, "SERVER", held.PROGRAM + cluster_module.SERVER)
    go = Path(os.environ["LMCACHE_SHM_RUNTIME_DIR"], f"{instance}.go")
    data = shm_path(segment_names(instance)[0]).name
    with Cluster(instance, **{held.GO: str(go)}) as cluster:
        cluster.start_server()
        (engine,) = cluster.add_engines({})
        cluster.prove()
        stored = cluster.committed()
        assert stored > 0
        assert cluster.memory()[data] == held.FIRST
        assert cluster.server is not None
        status = cluster.server.end(number)
        if number == signal.SIGTERM:
            assert (status, cluster.memory()) == (0, {})
            return
        assert cluster.memory()[data] == held.FIRST
        cluster.start_server()
        found = cluster.status()
        assert found is not None
        assert found["server"]["adopted"]["slots"] == stored
        assert (found["arena"]["backed_bytes"], found["arena"]["growing"]) == (held.FIRST, True)
        go.touch()
        until(
            lambda: not (cluster.status() or {})["arena"]["growing"], "the rest is reserved", LONG_S
        )
        assert cluster.memory()[data] == 64 << 20
        assert engine.ask(wait_up=20.0)["up"]
        cluster.prove()


@as_root
@pytest.mark.usefixtures("private_mounts")
def test_a_dev_shm_that_is_too_small_is_one_line_with_the_remedy(instance: str) -> None:
    program = """
        import sys
        sys.argv = ["lmcache-shm", "server", "--instance", sys.argv[1], "--l1-size-gb", "0.0625"]
        from lmcache_shm.cli.app import main
        main()
    """
    found = python_in_dev_shm(32, program, instance)
    assert found.returncode not in {0, -7}  # -7: SIGBUS
    (line,) = found.stderr.splitlines()
    assert "--shm-size" in line


@pytest.fixture
def limits() -> Iterator[None]:
    """A child inherits this process's limits, so they are set around its start."""
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    before = [resource.getrlimit(kind) for kind in kinds]
    yield
    for kind, limit in zip(kinds, before, strict=True):
        resource.setrlimit(kind, limit)


@pytest.mark.usefixtures("limits")
def test_a_server_with_few_descriptors_serves_whom_it_can(instance: str) -> None:
    """More connections than it may open: it neither ends nor spins, and serves those it has."""
    with Cluster(instance) as cluster:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, limit[1]))
        cluster.start_server()
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        (engine,) = cluster.add_engines({})
        cluster.prove()
        path = os.path.join(os.environ["LMCACHE_SHM_RUNTIME_DIR"], f"{instance}.sock")
        with contextlib.ExitStack() as crowd:
            for _ in range(60):
                sock = crowd.enter_context(socket.socket(socket.AF_UNIX))
                sock.settimeout(5)
                sock.connect(path)
            until(lambda: "no file descriptor" in cluster.server.errors, "it says why", LONG_S)
            before = engine.counts
            after = engine.ask(run=10, seconds=20.0)["counts"]
            assert after["operations"] == before["operations"] + 10
            assert after.get("unreachable", 0) == before["unreachable"]
        cluster.prove()


@pytest.mark.usefixtures("limits")
def test_no_locked_memory_is_needed(instance: str) -> None:
    """RLIMIT_MEMLOCK 0: nothing here locks pages (a GPU's driver has its own accounting)."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limit[1]))
    with Cluster(instance) as cluster:
        cluster.start_server()
        cluster.add_engines({})
        cluster.prove()


def test_the_time_of_day_decides_nothing(instance: str) -> None:
    """The server's clock jumps by decades, back and forth: it is shown to people, and that is all."""
    with Cluster(instance, "--checksum", "verify", SABOTAGE="clock") as cluster:
        cluster.start_server()
        (engine,) = cluster.add_engines({})
        cluster.drive(lambda: engine.counts["hits"] > 20, "hits")
        assert cluster.kill_server() > 0
        cluster.start_server()
        before = engine.counts["hits"]
        cluster.drive(lambda: engine.counts["hits"] > before + 20, "hits again")
        assert cluster.prove()["late"] == 0
        status = cluster.status()
        assert status is not None
        assert status["server"]["adopted"]["slots"] > 0
        assert abs(status["server"]["started_at"] - time.time()) > 3600, "the clock did not jump"
        for command in ("status", "ls", "check"):
            shown = python(
                "from lmcache_shm.cli.app import main; main()", command, "--instance", instance
            )
            assert shown.returncode == 0, shown.stderr


@as_root
@pytest.mark.usefixtures("private_mounts")
def test_a_runtime_directory_that_cannot_be_written_serves_engines_and_no_new_server(
    instance: str,
) -> None:
    """As a container sees the host's: engines need only the socket; a server says what to change."""
    program = """
        import os, subprocess, sys
        from tools.harness.cluster import Cluster
        folder = os.environ["LMCACHE_SHM_RUNTIME_DIR"]
        with Cluster(sys.argv[1]) as cluster:
            cluster.start_server()
            for options in (["--bind"], ["-o", "remount,bind,ro"]):
                if subprocess.run(["mount", *options, folder, folder]).returncode:
                    sys.exit(77)
            try:
                (engine,) = cluster.add_engines({})
                engine.ask(document=1, chunks=5)
                print(engine.ask(document=1, chunks=5, look=True)["hit"], engine.counts["wrong"])
                second = subprocess.run(
                    [sys.executable, "-m", "lmcache_shm", "server", "--instance", sys.argv[1] + "-b",
                     "--l1-size-gb", "0.0625"], capture_output=True, text=True)
                print(second.returncode != 0, second.stderr, end="")
            finally:
                cluster.dismiss(engine)
                subprocess.run(["umount", folder])
    """
    found = python(program, instance, before=["unshare", "-m"])
    if found.returncode == 77:
        pytest.skip("mount is not allowed here")
    assert found.returncode == 0, found.stderr
    served, refused = found.stdout.splitlines()
    assert served == "5 0"
    assert refused.startswith("True ")
    assert "cannot write" in refused
    assert "--runtime-dir" in refused
