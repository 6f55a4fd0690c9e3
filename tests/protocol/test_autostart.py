"""autostart_gb: one detached server, however many engines ask, and a reason when there can be none."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_shm.cli.top import Source
from lmcache_shm.client.autostart import AutostartError, ensure_server, log_path
from lmcache_shm.config import Config, connector_config
from tests.protocol.harness import ServerProcess
from tools.harness.wait import until


@pytest.fixture
def autostart(instance: str, runtime_dir: Path) -> Iterator[Config]:
    """Options of an engine that starts its own server; ends that server."""
    yield connector_config(
        {
            "lmcache_shm.instance": instance,
            "lmcache_shm.autostart_gb": 0.0625,
            "lmcache_shm.runtime_dir": str(runtime_dir),
        }
    )
    lock = runtime_dir / f"{instance}.lock"
    with contextlib.suppress(OSError):
        pid = int(lock.read_text().split()[0])
        os.kill(pid, signal.SIGTERM)
        until(lambda: not Path(f"/proc/{pid}").exists() and not lock.exists(), "the server ends")
    for path in runtime_dir.glob(f"{instance}.*"):
        path.unlink()


def test_a_server_is_started_when_there_is_none(autostart: Config):
    pid = ensure_server(autostart)

    with contextlib.closing(Source(autostart)) as source:
        found = source.fetch()
    assert found["server"]["pid"] == pid
    assert found["arena"]["data_bytes"] == 1 << 26
    assert ensure_server(autostart) == pid  # and not another one
    assert f"instance {autostart.instance} is ready" in log_path(autostart).read_text()


def test_a_started_server_is_nobodys_child(autostart: Config):
    """An engine's end, or its signals, must not take the server along."""
    pid = ensure_server(autostart)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

    assert int(fields[1]) != os.getpid()  # parent
    assert int(fields[3]) != os.getsid(0)  # session


def test_engines_that_start_together_get_one_server(autostart: Config):
    program = """
import json, sys
from lmcache_shm.config import connector_config
from lmcache_shm.client.autostart import ensure_server
sys.stdin.readline()
print(ensure_server(connector_config(json.loads(sys.argv[1]))))
"""
    extra = {
        f"lmcache_shm.{name}": getattr(autostart, name)
        for name in ("instance", "runtime_dir", "autostart_gb")
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(extra)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    pids = {process.communicate(timeout=60)[0].strip() for process in started}

    assert len(pids) == 1
    assert all(process.returncode == 0 for process in started)


def test_a_running_server_is_used(server: ServerProcess):
    config = server.config(autostart_gb=1.0)

    assert ensure_server(config) == server.pid


def test_a_server_that_cannot_start_says_why(instance: str, runtime_dir: Path):
    config = connector_config(
        {
            "lmcache_shm.instance": instance,
            "lmcache_shm.autostart_gb": 65000,
            "lmcache_shm.runtime_dir": str(runtime_dir),
        }
    )
    with pytest.raises(AutostartError, match="ended at once: .*smaller --l1-size-gb"):
        ensure_server(config)
    for path in runtime_dir.glob(f"{instance}.*"):
        path.unlink()


def test_a_stopped_server_is_an_error_in_time(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lmcache_shm.client.autostart.ANSWER_S", 0.3)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(AutostartError, match="no answer"):
            ensure_server(server.config(autostart_gb=1.0))
        assert time.monotonic() - began < 3
    finally:
        os.kill(server.pid, signal.SIGCONT)
