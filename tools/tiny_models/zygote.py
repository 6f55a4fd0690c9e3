"""Processes that have imported vLLM already, and fork an engine's process for each start.

Of the 10 s of CPU time until an engine answers, 8 s are imports. A zygote pays them once: it imports, starts nothing, and
forks. What it forks runs `runner.main` as a fresh interpreter would, in a session of its own. Engines share a zygote
only when their environments differ in nothing that is read by an import.

As a program (`python -m tools.tiny_models.zygote`) it is the zygote; its standard input is a socket to whoever started it.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from .family import python
from .hooks import VARIABLE

IMPORTED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.model_loader.dummy_loader",
)
"""By the zygote. No model and nothing of the connector: what vLLM's plugins and configuration import stays theirs."""
LATE = (
    "LMCACHE_SHM_",
    "FAULT_",
    "PYTEST_CURRENT_TEST",
    "VLLM_RPC_BASE_PATH",
    "VLLM_CPU_OMP_THREADS_BIND",
    VARIABLE,
)
"""Variables (or how they begin) that are read when an engine starts, not by an import."""
EARLY_HOOKS = {"triton_interpret"}
"""Hooks that have to be installed before vLLM is imported."""
MOST = 3  # zygotes at a time: each holds 0.4 GiB
MESSAGE = 1 << 17  # bytes: an environment and an engine's options


class Forked:
    """A process that a zygote has forked: what `subprocess.Popen` would give of it."""

    def __init__(self, pid: int, pidfd: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb")
        self.stdout = os.fdopen(stdout, "rb")
        self._pidfd = pidfd

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(["(forked)"], timeout or 0.0)

    def ended(self) -> bool:
        """Whether it has ended."""
        try:
            self.wait(0)
        except subprocess.TimeoutExpired:
            return False
        return True

    def __del__(self) -> None:
        os.close(self._pidfd)


class Zygote:
    """One zygote. It imports while its maker goes on."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with it
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python(), "-m", __name__],
                stdin=theirs,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only the caller
            )
        self.pid = self._process.pid

    def fork(self, argument: str, environment: dict[str, str], log: int) -> Forked:
        """A process that runs `runner.main` with that argument; `log` becomes its stderr. Raises OSError."""
        their_input, stdin = os.pipe()
        stdout, their_output = os.pipe()
        try:
            request = json.dumps({"argument": argument, "environment": environment}).encode()
            socket.send_fds(self._socket, [request], [their_input, their_output, log])
            reply, fds, _, _ = socket.recv_fds(self._socket, MESSAGE, 1)
            if not reply:
                self._log.seek(0)
                said = self._log.read().decode(errors="replace")[-3000:]
                raise ConnectionResetError(f"the process that forks engines has ended\n{said}")
        except OSError:
            os.close(stdin)
            os.close(stdout)
            raise
        finally:
            os.close(their_input)
            os.close(their_output)
        return Forked(int(reply), fds[0], stdin, stdout)

    def close(self) -> None:
        """End it. What it has forked lives on."""
        self._socket.close()
        self._process.wait()
        self._log.close()


class Zygotes:
    """The zygotes of a test run, by environment."""

    def __init__(self, started: Callable[[int], None]) -> None:
        """`started` is told the pid of each new zygote."""
        self._started = started
        self._by_imports: dict[frozenset[tuple[str, str]], Zygote] = {}

    def fork(self, argument: str, environment: dict[str, str], log: int) -> Forked | None:
        """See `Zygote.fork`; None when this environment needs an interpreter of its own."""
        if EARLY_HOOKS & set(environment.get(VARIABLE, "").split(",")):
            return None
        imports = frozenset(item for item in environment.items() if not item[0].startswith(LATE))
        zygote = self._by_imports.pop(imports, None)
        if zygote is None:
            zygote = Zygote({**environment, VARIABLE: ""})
            self._started(zygote.pid)
        self._by_imports[imports] = zygote  # the last used at the end
        while len(self._by_imports) > MOST:
            self._by_imports.pop(next(iter(self._by_imports))).close()
        return zygote.fork(argument, environment, log)

    def close(self) -> None:
        """End them all."""
        while self._by_imports:
            self._by_imports.popitem()[1].close()


_current: list[Zygotes] = []


def current() -> Zygotes | None:
    """Where `process.Engine` starts its processes; None: each in a fresh interpreter."""
    return _current[-1] if _current else None


@contextmanager
def zygotes(started: Callable[[int], None] = lambda _: None) -> Iterator[None]:
    """Within, engines are forked from zygotes."""
    _current.append(Zygotes(started))
    try:
        yield
    finally:
        _current.pop().close()


def serve() -> str | None:
    """Fork one process for each request: its argument, in the forked process; None at the end of requests."""
    control = socket.socket(fileno=os.dup(0))
    poll = select.poll()
    poll.register(control, select.POLLIN)
    children: set[int] = set()  # pidfds
    while True:
        for fd, _ in poll.poll():
            if fd in children:
                os.waitid(os.P_PIDFD, fd, os.WEXITED)
                poll.unregister(fd)
                children.discard(fd)
                os.close(fd)
                continue
            message, fds, _, _ = socket.recv_fds(control, MESSAGE, 3)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                control.close()
                for child in children:
                    os.close(child)
                request = json.loads(message)
                become(fds, request["environment"])
                return str(request["argument"])
            pidfd = os.pidfd_open(pid)  # not reaped before: so surely this one's
            for theirs in fds:
                os.close(theirs)
            children.add(pidfd)
            poll.register(pidfd, select.POLLIN)
            socket.send_fds(control, [str(pid).encode()], [pidfd])


def become(fds: list[int], environment: dict[str, str]) -> None:
    """In a forked process: its own session, standard files and environment, as after an exec."""
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)


@contextmanager
def ended_with_its_maker() -> Iterator[None]:
    """Within, which takes long, this process ends when nobody holds the socket's other end. (No thread: it forks.)"""
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1) if poll.poll(0) else None)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def main() -> None:
    """The zygote, and what it forks."""
    with ended_with_its_maker():
        for name in IMPORTED:
            importlib.import_module(name)
    runner: ModuleType = importlib.import_module("tools.tiny_models.runner")
    gc.collect()
    gc.freeze()  # the forked need not look at, and so copy, all that was imported
    argument = serve()
    if argument is not None:
        sys.argv = [runner.__file__ or "", argument]
        runner.main()


if __name__ == "__main__":
    main()
