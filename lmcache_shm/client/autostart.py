"""Start a detached server when none is running (``lmcache_shm.autostart_gb``).

Any number of engines may ask at once: a file lock lets one of them start the server, the others find it.
The server is nobody's child, so it outlives the engine that asked for it; `lmcache-shm stop` ends it.
"""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache_shm.arena.errors import ArenaError
from lmcache_shm.arena.owner import open_ours, remove_ours
from lmcache_shm.arena.processes import stat
from lmcache_shm.client.connection import Connection, ControlError, Unavailable
from lmcache_shm.client.reconnect import socket_path
from lmcache_shm.config import Config, ConfigError
from lmcache_shm.protocol.messages import PROTOCOL, Hello

ANSWER_S = 5.0
LOOK_S = 0.02
START_S = 30.0
PER_GB_S = 2.0
"""Memory is reserved at the start, which takes a moment for each GiB."""
# Run by an interpreter without site packages: starts the server and ends, so that the server's parent
# is not the engine, which may kill its whole process tree. Its stderr is the server's log.
_DETACH = """
import subprocess, sys
print(subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr,
                       cwd="/", start_new_session=True).pid)
"""


class AutostartError(RuntimeError):
    """No server answers and none could be started; one line with the reason."""


def log_path(config: Config) -> Path:
    """Where a server that was started here writes its log."""
    return socket_path(config).with_suffix(".log")


def ensure_server(config: Config, timeout_s: float | None = None) -> int:
    """Pid of the instance's server, started with ``config.autostart_gb`` GiB if there is none.

    Waits at most `timeout_s` (None: by size). Raises AutostartError.
    """
    if timeout_s is None:
        timeout_s = START_S + PER_GB_S * config.autostart_gb
    end = time.monotonic() + timeout_s
    try:
        if pid := _running(config):
            return pid
        with _turn(socket_path(config).with_suffix(".autostart"), end):
            return _running(config) or _start(config, end)
    except (ArenaError, ConfigError) as error:
        raise AutostartError(str(error)) from None
    except OSError as error:
        raise AutostartError(f"cannot write {error.filename}: {error.strerror}") from None


def _running(config: Config) -> int:
    """Pid of the server that answers, 0 if nobody listens. Raises AutostartError for one that will not talk."""
    hello = Hello(PROTOCOL, "tool", "", os.getpid(), {"command": "autostart"})
    try:
        connection = Connection.open(str(socket_path(config)), hello, ANSWER_S)
    except Unavailable:
        return 0
    except ControlError as error:
        raise AutostartError(f"the server that is running is of no use: {error}") from None
    connection.close()
    return connection.hello.pid


@contextmanager
def _turn(path: Path, end: float) -> Iterator[None]:
    """Hold the lock on `path`. Raises AutostartError when others hold it until `end`, NotOurs, or OSError."""
    fd = open_ours(path, os.O_RDWR | os.O_CREAT, f"remove it: rm -r {path}")
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise AutostartError(
                        f"another process is starting a server for too long ({path})"
                    ) from None
                time.sleep(LOOK_S)
        yield
    finally:
        os.close(fd)


def _start(config: Config, end: float) -> int:
    log = log_path(config)
    remedy = f"remove it: rm -r {log}"
    remove_ours(log, remedy)  # not emptied: an earlier server may still write into it
    written = open_ours(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, remedy)
    command = [sys.executable, "-I", "-S", "-c", _DETACH, *_server_command(config)]
    try:
        started = subprocess.run(
            command, env=_environment(), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
            stderr=written, check=True, timeout=ANSWER_S, text=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise AutostartError(f"cannot start a server: {error}") from None
    finally:
        os.close(written)
    child = int(started.stdout)
    while True:
        # Looked at before the socket: a server that ended because another was faster leaves one that answers.
        gone = stat(child)[0] in {"", "Z", "X"}
        pid = _running(config)
        if pid:
            return pid
        if gone:
            raise AutostartError(f"the server ended at once: {_last_line(log)} (log: {log})")
        if time.monotonic() > end:
            raise AutostartError(f"server {child} does not answer yet (log: {log})")
        time.sleep(LOOK_S)


def _server_command(config: Config) -> list[str]:
    command = [
        sys.executable, "-m", "lmcache_shm", "server", "--instance", config.instance,
        "--l1-size-gb", f"{config.autostart_gb:g}", "--runtime-dir", str(socket_path(config).parent),
    ]  # fmt: skip
    if config.chunk_size:
        command += ["--chunk-size", str(config.chunk_size)]
    return command


def _environment() -> dict[str, str]:
    """Ours, with this very package on the path (the engine may have found it in its working directory)."""
    here = str(Path(__file__).parents[2])
    rest = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([here, rest] if rest else [here])}


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "without a word"
    return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")
