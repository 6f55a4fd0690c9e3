"""A server, some simulated engines, faults, and the proof at the end."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from lmcache_shm.arena.check import check
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.arena.segment import attach
from lmcache_shm.config import Config
from lmcache_shm.control.connection import Connection, ControlError
from lmcache_shm.control.link import socket_path
from lmcache_shm.control.messages import PROTOCOL, Hello, Status, StatusReply
from tests.faults import failpoints

SERVER = (
    "import ctypes; ctypes.CDLL(None).prctl(1, 15)\n"
    "from tests.faults.failpoints import install; install()\n"
    "from tests.faults.sabotage import install; install()\n"
    "from lmcache_shm.cli.app import main; main()"
)
SIZE_GB = "0.0625"
WAIT_S = 30.0


def until(condition: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    """The condition's value once it is true; fails after the time. For what sends no event here."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """The process's state letter; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class EngineProcess:
    """engine.py in a process of its own."""

    def __init__(self, instance: str, engine_id: str, seed: int, faults: str = "[]", **options: Any) -> None:
        self.options = {
            "instance": instance, "engine_id": engine_id, "seed": seed, "world": 2, **options,
        }  # fmt: skip
        self.counts: Counter[str] = Counter()
        self.workers: list[int] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.engine", json.dumps(self.options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env=os.environ | {failpoints.VARIABLE: faults},
        )  # fmt: skip

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it is dead; the answer will not come either

    def answer(self, seconds: float = 120.0) -> dict[str, Any] | None:
        """The next answer; None when the engine has ended."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        assert ready, f"engine {self.options['engine_id']} does not answer"
        line = self.process.stdout.readline()
        if not line:
            return None
        reply: dict[str, Any] = json.loads(line)
        self.counts = Counter(reply["counts"])
        self.workers = reply["workers"]
        return reply

    def ask(self, **order: Any) -> dict[str, Any] | None:
        self.tell(**order)
        return self.answer()

    def end(self, number: int = 0) -> None:
        """Ask it to quit, or send a signal; wait."""
        if number:
            self.process.send_signal(number)
        else:
            self.tell(quit=True)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Cluster:
    """A context manager; everything it started is gone after it."""

    def __init__(self, instance: str, *flags: str, **environment: str) -> None:
        self.instance = instance
        self.flags = flags
        self.environment = environment
        self.engines: list[EngineProcess] = []
        self.ended: Counter[str] = Counter()
        self.strikes = 0
        """Processes that were found stopped or dead."""
        self.server: subprocess.Popen[bytes] | None = None
        self.log = Path(os.environ["LMCACHE_SHM_RUNTIME_DIR"]) / f"{instance}.log"

    # ------------------------------------------------------------------------------------ server
    def start_server(self, faults: str = "[]") -> None:
        """Start it (again) and wait until it greets, or has died of its failpoint."""
        with self.log.open("ab") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-c", SERVER, "server", "--instance", self.instance,
                 "--l1-size-gb", SIZE_GB, "--chunk-size", "64", "--keep-arena", *self.flags],
                env=os.environ | {failpoints.VARIABLE: faults} | self.environment,
                stdout=log, stderr=log,
            )  # fmt: skip
        until(lambda: self.greets() or self.server_state() in {"", "Z", "T"}, "the server greets")

    def greets(self) -> bool:
        try:
            return self.status() is not None
        except (ControlError, AssertionError):
            return False

    def status(self, seconds: float = 2.0) -> dict[str, Any] | None:
        """The server's snapshot. Raises ControlError."""
        if self.server_state() in {"", "Z", "T"}:
            return None
        connection = Connection.open(
            str(socket_path(Config(instance=self.instance))), Hello(PROTOCOL, "tool", pid=os.getpid()), seconds
        )
        try:
            return connection.call(Status(), StatusReply, seconds).snapshot
        finally:
            connection.close()

    def server_state(self) -> str:
        return state_of(self.server.pid) if self.server is not None else ""

    def kill_server(self) -> int:
        """SIGKILL; the number of committed slots that its arena held."""
        assert self.server is not None
        committed = self.committed()
        self.server.kill()
        self.server.wait()
        return committed

    def committed(self) -> int:
        arena = attach(self.instance, writable_data=False)
        try:
            return int(np.count_nonzero(arena.hot["state"] == SlotState.COMMITTED))
        finally:
            arena.close()

    def wake(self) -> None:
        """Wake what is stopped (after a while), restart a dead server."""
        for pid in self.all_pids():
            if state_of(pid) == "T":
                time.sleep(0.6)  # longer than the deadline: others must have given up on it by now
                os.kill(pid, signal.SIGCONT)
                self.strikes += 1
        if self.server is not None and self.server_state() in {"", "Z"}:
            self.server.wait()
            self.strikes += 1
            self.start_server()

    def revive(self) -> None:
        """Whatever a failpoint did: wake and restart everything."""
        self.wake()
        for engine in [e for e in self.engines if state_of(e.process.pid) in {"", "Z"}]:
            self.strikes += 1
            self.bury(engine)
            self.add_engine(engine.options["engine_id"] + "+", engine.options["seed"] + 1000)

    def all_pids(self) -> list[int]:
        pids = [self.server.pid] if self.server is not None else []
        for engine in self.engines:
            pids += [engine.process.pid, *engine.workers]
        return pids

    # ----------------------------------------------------------------------------------- engines
    def add_engine(self, engine_id: str, seed: int, faults: str = "[]", **options: Any) -> EngineProcess:
        engine = EngineProcess(self.instance, f"{self.instance}-{engine_id}", seed, faults, **options)
        self.engines.append(engine)
        engine.ask(wait_up=10.0)
        return engine

    def bury(self, engine: EngineProcess) -> None:
        """Forget an engine that has died; its counts stay."""
        self.engines.remove(engine)
        self.ended += engine.counts
        engine.end()

    def run(self, operations: int, seconds: float = 20.0) -> None:
        """All engines work at the same time; a stopped process is woken, a dead one replaced meanwhile."""
        for engine in self.engines:
            engine.tell(run=operations, seconds=seconds)
        waiting = list(self.engines)
        end = time.monotonic() + seconds + 60
        while waiting:
            assert time.monotonic() < end, "engines do not come to an end"
            fds = {e.process.stdout: e for e in waiting}
            ready, _, _ = select.select(list(fds), [], [], 0.05)
            for stream in ready:
                fds[stream].answer()
                waiting.remove(fds[stream])
            if not ready and (
                self.server_state() in {"", "Z"}
                or any(state_of(pid) == "T" for pid in self.all_pids())
            ):
                self.wake()
        self.revive()

    def total(self) -> Counter[str]:
        return sum((e.counts for e in self.engines), self.ended)

    # ------------------------------------------------------------------------------------- proof
    def prove(self) -> Counter[str]:
        """Survivors work, nothing was wrong or stuck, all leases drain, the tables are consistent."""
        before = self.total()["operations"]
        self.run(8)
        total = self.total()
        assert total["operations"] > before, "survivors do not work"
        for engine in list(self.engines):
            engine.end()
            self.engines.remove(engine)
        self.ended = total
        until(self.drained, "pins, reservations and quarantine drain")
        arena = attach(self.instance, writable_data=False)
        try:
            assert check(arena) == []
        finally:
            arena.close()
        assert total["wrong"] == 0, f"wrong bytes were served: {dict(total)}"
        assert total["stuck"] == 0, f"stuck requests: {dict(total)}"
        return total

    def drained(self) -> bool:
        snapshot = self.status()
        if snapshot is None:
            return False
        slots = snapshot["arena"]["slots"]
        return not (slots["pinned"] or slots["reserved"] or slots["quarantined"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self.engines:
            for pid in (engine.process.pid, *engine.workers):
                if state_of(pid) == "T":
                    os.kill(pid, signal.SIGCONT)
            engine.process.kill()
            engine.process.wait()
        if self.server is not None:
            if self.server_state() == "T":
                self.server.send_signal(signal.SIGCONT)
            self.server.send_signal(signal.SIGTERM)
            self.server.wait(30)
        subprocess.run(
            [sys.executable, "-m", "lmcache_shm", "purge", "--yes"], check=False, capture_output=True
        )
