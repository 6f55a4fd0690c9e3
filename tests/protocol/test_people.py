"""What people see of a real server: top, doctor, metrics and autostart agree with it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from lmcache_shm.cli.top import Source
from lmcache_shm.protocol.messages import Done, Drain, Report
from tests.protocol.harness import Prefix, ServerProcess, WorkerProcess, engine
from tools.harness.wait import until


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lmcache_shm", *words],
        capture_output=True, text=True, env={**os.environ, **environ}, timeout=60, check=False,
    )  # fmt: skip


def served(server: ServerProcess) -> None:
    """One prefix of four chunks stored, found once whole, and one look-up that finds nothing."""
    with engine(server) as made:
        prefix = Prefix(1, 4)
        made.store(prefix)
        lease = made.acquire(prefix).lease
        made.acquire(Prefix(2, 3))
        made.step(release=[lease])


# ----------------------------------------------------------------------------------------- snapshot
def test_the_snapshot_adds_up(server: ServerProcess):
    served(server)
    found = server.status()

    assert sum(found["arena"]["bytes"].values()) == found["arena"]["data_bytes"]
    assert found["arena"]["slots"]["used"] == 8  # four chunks of two groups
    assert sum(row[6] for row in found["slab_map"]) == found["arena"]["slabs"]
    assert sum(row[3] for row in found["slab_map"]) == 8
    (space,) = found["namespaces"]
    assert (space["name"], space["hits"], space["misses"]) == ("made-up", 1, 1)
    assert [group["slots"] for group in space["groups"]] == [4, 4]
    assert [group["served"] for group in space["groups"]] == [1, 1]
    assert [group["block_size"] for group in space["groups"]] == [16, 16]
    counters = found["counters"]
    assert counters["tokens_committed"] == counters["hit_tokens"] == 64
    assert counters["query_tokens"] == 64 + 48
    assert found["misses"]["never_seen"] == 1


def test_the_coldest_age_is_that_of_the_last_use(server: ServerProcess):
    assert server.status()["arena"]["coldest_age_s"] is None
    with engine(server) as made:
        prefix = Prefix(1, 2)
        made.store(prefix)
        first = server.status()["arena"]["coldest_age_s"]
        until(lambda: server.status()["arena"]["coldest_age_s"] > first + 1.2, "it grows")
        lease = made.acquire(prefix).lease
        made.step(release=[lease])
        assert server.status()["arena"]["coldest_age_s"] < 1.0


def test_what_clients_report_is_counted_in_its_place(server: ServerProcess):
    with engine(server) as made:
        made.scheduler.call(Report({"no_server": 3, "collision": 2, "load_failed": 1}), Done)
    found = server.status()

    assert found["misses"]["no_server"] == 3
    assert (found["counters"]["collisions"], found["counters"]["loads_failed"]) == (2, 1)
    assert "collision" not in found["misses"]


# ---------------------------------------------------------------------------------------------- top
def test_top_prints_one_frame(server: ServerProcess):
    served(server)
    done = command("top", "--once", "--instance", server.instance, COLUMNS="100", LC_ALL="C.UTF-8")

    assert done.returncode == 0, done.stderr
    assert "made-up" in done.stdout
    assert re.search(r"window +window +40", done.stdout)
    assert {len(line) for line in done.stdout.splitlines()} == {100}


def test_top_streams_json_over_a_restart(server: ServerProcess):
    watcher = subprocess.Popen(
        [sys.executable, "-m", "lmcache_shm", "top", "--json", "--interval", "0.1", "--instance", server.instance],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watcher.stdout is not None
    try:
        first = json.loads(watcher.stdout.readline())
        server.end(signal.SIGKILL)
        while "error" not in (line := json.loads(watcher.stdout.readline())):
            pass
        assert line["error"]
        again = ServerProcess(server.instance)
        while "error" in (line := json.loads(watcher.stdout.readline())):
            pass
        assert line["server"]["boot"] != first["server"]["boot"]
        assert line["server"]["restarts"] == 1
        again.end()
    finally:
        watcher.kill()
        watcher.communicate()


def test_top_without_a_server_says_so(instance: str):
    done = command("top", "--once", "--instance", instance)

    assert done.returncode == 1
    assert "no server at" in done.stderr


def test_a_source_dials_again(server: ServerProcess):
    source = Source(server.config())
    with contextlib.closing(source):
        before = source.fetch()["server"]["boot"]
        server.end(signal.SIGKILL)
        with pytest.raises(Exception, match="no server|closed|broke"):
            source.fetch()
        again = ServerProcess(server.instance)
        try:
            assert source.fetch()["server"]["boot"] != before
        finally:
            again.end()


def test_top_in_a_terminal_draws_reacts_and_restores(server: ServerProcess):
    """A pseudo-terminal of 80×24: a frame is drawn, keys work, a resize is followed, q ends it."""
    import fcntl
    import pty
    import struct
    import termios

    served(server)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    told = ("COLUMNS", "LINES")  # by whoever runs the tests; they would hide a resize
    env = {name: value for name, value in os.environ.items() if name not in told}
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache_shm", "top", "--interval", "0.2", "--instance", server.instance],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**env, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    screen = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(ours, 65536):
                screen.extend(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def shows(text: str) -> bool:
        plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", bytes(screen)).decode(errors="replace")
        return text in plain

    try:
        until(lambda: shows("sort: slots"), "the first frame")
        os.write(ours, b"s")
        until(lambda: shows("sort: hits"), "s sorts")
        os.write(ours, b"p")
        until(lambda: shows("paused"), "p pauses")
        screen.clear()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 140, 0, 0))
        os.kill(process.pid, signal.SIGWINCH)
        until(lambda: shows("─  ── misses"), "two columns after a resize")
        os.write(ours, b"q")
        assert process.wait(10) == 0
        assert termios.tcgetattr(theirs) == before
        assert b"\x1b[?1049l" in screen  # the terminal's own screen is back
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)
        reader.join(5)


# ------------------------------------------------------------------------------------------- metrics
@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_metrics_are_what_status_says(port: int, instance: str):
    server = ServerProcess(instance, "--metrics-port", str(port))
    try:
        served(server)
        found, status = scrape(port), server.status()
    finally:
        server.end()
    assert found["lmcache_shm_hit_tokens_total"] == status["counters"]["hit_tokens"] == 64
    assert found["lmcache_shm_stored_bytes_total"] == status["counters"]["bytes_committed"]
    assert found['lmcache_shm_arena_slots{state="used"}'] == status["arena"]["slots"]["used"]
    assert found['lmcache_shm_misses_total{reason="never_seen"}'] == 1
    assert found["lmcache_shm_lookup_duration_seconds_count"] == 2


def test_a_metrics_port_in_use_is_one_line_and_leaves_nothing(
    port: int, instance: str, runtime_dir: Path
):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        done = command(
            "server", "--instance", instance, "--l1-size-gb", "0.0625", "--metrics-port", str(port)
        )
    assert done.returncode == 1
    assert "--metrics-port" in done.stderr.splitlines()[-1]
    assert not list(runtime_dir.glob(f"{instance}.sock"))


def test_a_start_that_fails_keeps_what_an_earlier_server_left(port: int, instance: str):
    ServerProcess(instance, "--keep-arena").end()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        words = ("--instance", instance, "--l1-size-gb", "0.0625", "--metrics-port", str(port))
        assert command("server", *words).returncode == 1
    server = ServerProcess(instance)
    server.end()
    assert "adopted" in server.ready


# -------------------------------------------------------------------------------------------- doctor
def test_doctor_is_content_with_a_sound_server(server: ServerProcess):
    served(server)
    done = command("doctor", "-q", "--instance", server.instance)

    assert not re.search(rf"{server.instance}|slot table|look-ups", done.stdout)


def test_doctor_finds_a_stopped_server(server: ServerProcess):
    os.kill(server.pid, signal.SIGSTOP)
    try:
        done = command("doctor", "-q", "--instance", server.instance)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert f"kill -CONT {server.pid}" in done.stdout
    assert done.returncode == 1


def test_doctor_finds_a_server_with_another_runtime_directory(
    server: ServerProcess, tmp_path: Path
):
    tmp_path.chmod(0o700)
    done = command("doctor", "-q", "--instance", server.instance, "--runtime-dir", str(tmp_path))

    assert f"server {server.pid} owns instance" in done.stdout
    assert f"export LMCACHE_SHM_RUNTIME_DIR={Path(server.path).parent}" in done.stdout


def test_doctor_finds_an_engine_that_looks_for_another_instance(server: ServerProcess):
    wanted = {
        "kv_connector": "LMCacheShmConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache_shm.instance": server.instance + "x"},
    }  # fmt: skip
    done = command("doctor", "-q", "--kv-transfer-config", json.dumps(wanted))

    assert f"no server of instance {server.instance}x is running; running here: " in done.stdout
    assert server.instance in done.stdout


def test_doctor_finds_what_a_killed_server_left(server: ServerProcess):
    server.end(signal.SIGKILL)
    done = command("doctor", "--instance", server.instance)

    assert f"instance {server.instance} has no server" in done.stdout
    assert "lmcache-shm purge" in done.stdout
    again = ServerProcess(server.instance)
    again.end()


def test_doctor_finds_a_draining_server(server: ServerProcess):
    with contextlib.closing(server.tool()) as tool:
        tool.call(Drain(), Done)

    assert "draining" in command("doctor", "-q", "--instance", server.instance).stdout


def test_doctor_compares_namespaces_of_one_model(server: ServerProcess):
    for number, dtype in enumerate(("auto", "fp8")):
        with engine(
            server, f"e{number}", descriptor=json.dumps({"kv_cache": {"dtype": dtype}}).encode()
        ):
            pass

    assert "kv_cache.dtype (auto / fp8)" in command("doctor", "--instance", server.instance).stdout


def test_doctor_finds_a_stopped_worker(server: ServerProcess):
    worker = WorkerProcess(server, "engine")
    try:
        os.kill(worker.process.pid, signal.SIGSTOP)
        done = command("doctor", "-q", "--instance", server.instance)
        assert f"kill -CONT {worker.process.pid}" in done.stdout
    finally:
        os.kill(worker.process.pid, signal.SIGCONT)
        worker.end()
