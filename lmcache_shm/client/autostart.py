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

from lmcache_shm.arena.errors import RuntimeDirError
from lmcache_shm.arena.owner import safe_dir
from lmcache_shm.arena.processes import stat
from lmcache_shm.client.connection import Connection, ControlError, Unavailable
from lmcache_shm.client.reconnect import socket_path
from lmcache_shm.config import Config
from lmcache_shm.protocol.messages import PROTOCOL, Hello

ANSWER_S = 5.0
LOOK_S = 0.02
START_S = 30.0
PER_GB_S = 2.0
"""Memory is reserved at the start, which takes a moment for each GiB."""
# Run by an interpreter without site packages: starts the server and ends, so that the server's parent
# is not the engine, which may kill its whole process tree.
_DETACH = """
import subprocess, sys
with open(sys.argv[1], "ab") as log:
    print(subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
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
    pid = _running(config)
    if pid:
        return pid
    try:
        folder = safe_dir(socket_path(config).parent)
    except RuntimeDirError as error:
        raise AutostartError(str(error)) from None
    with _turn(folder / f"{config.instance}.autostart", end):
        return _running(config) or _start(config, end)


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
    """Hold the lock on `path`. Raises AutostartError when others hold it until `end`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
    log.unlink(missing_ok=True)
    command = [sys.executable, "-I", "-S", "-c", _DETACH, str(log), *_server_command(config)]
    try:
        started = subprocess.run(
            command, env=_environment(), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
            check=True, timeout=ANSWER_S, text=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise AutostartError(f"cannot start a server: {error}") from None
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
