"""A server, some simulated engines, faults, and the proof that nothing was wrong, stuck or leaked."""

import contextlib
import json
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from lmcache_shm.arena.check import check
from lmcache_shm.arena.layout import FLAG_DROP, SlotState
from lmcache_shm.arena.leftovers import leftovers, purge
from lmcache_shm.arena.segment import attach, segment_names, shm_path
from lmcache_shm.client.connection import ControlError
from tools.harness import failpoints
from tools.harness.engines import EngineProcess, state_of
from tools.harness.wait import LONG_S, until
from tools.server_process import Server

SERVER = (
    "import ctypes; ctypes.CDLL(None).prctl(1, 15)\n"
    "from tools.harness.failpoints import install; install()\n"
    "from tools.harness.sabotage import install; install()\n"
    "from lmcache_shm.cli.app import main; main()"
)
SIZE_MB = 64  # about 60 chunks, a quarter of what the engines want
STOP_S = 0.6
"""How long a process stays stopped: longer than any deadline, so that others must have given up on it."""
SHM = Path("/dev/shm")


class Cluster:
    """A context manager; everything it started is gone after it."""

    def __init__(
        self, instance: str, *flags: str, size_mb: float = SIZE_MB, **environment: str
    ) -> None:
        self.instance = instance
        self.flags, self.size_mb = flags, size_mb
        base = Path(os.environ["LMCACHE_SHM_RUNTIME_DIR"]) / instance
        self.marks, self.later = base.with_suffix(".marks"), base.with_suffix(".fault")
        self.environment = {failpoints.MARKS: str(self.marks), **environment}
        self.engines: list[EngineProcess] = []
        self.ended: Counter[str] = Counter()
        """Counts of engines that are gone."""
        self.server: Server | None = None
        self.restarts = 0
        self.kept: list[tuple[int, int]] = []
        """At each restart after a kill: slots committed before, slots adopted."""
        self._started = 0
        self._stopped: dict[int, float] = {}  # pid → when to wake it
        self._read = 0

    # ------------------------------------------------------------------------------------ server
    def start_server(self, fault: dict[str, Any] | None = None) -> None:
        """Start it (again) and wait until it greets, or has died of its failpoint."""
        if self.server is None:
            self.server = Server(
                self.instance, chunk_size=64, size_mb=self.size_mb, flags=self.flags, env=self.environment,
                program=("-c", SERVER), starts=False,
            )  # fmt: skip
        self.server.env |= {
            failpoints.AT_START: json.dumps(fault),
            failpoints.LATER: str(self.later),
        }
        self.server.start(waits=False)
        until(
            lambda: self.status() or self.server_state() in {"", "Z", "T"},
            "the server greets",
            LONG_S,
        )
        if fault is None and self.server_state() in {"", "Z"}:
            raise AssertionError(f"the server ended: {self.server.log_tail()}")

    def status(self) -> dict[str, Any] | None:
        """The server's snapshot; None when it cannot be reached."""
        if self.server is None or self.server_state() in {"", "Z", "T"}:
            return None
        try:
            return self.server.status()
        except ControlError:
            return None

    def slots(self) -> dict[str, int]:
        status = self.status()
        assert status is not None
        slots: dict[str, int] = status["arena"]["slots"]
        return slots

    def server_state(self) -> str:
        return state_of(self.server.pid) if self.server is not None else ""

    def kill_server(self) -> int:
        """SIGKILL it; the number of committed slots that its arena holds."""
        assert self.server is not None
        self.server.kill()
        return self.committed()

    def committed(self) -> int:
        with self.arena() as arena:
            found = arena.hot["flags"] & FLAG_DROP == 0  # the others were cleared while in use
            return int(np.count_nonzero(found & (arena.hot["state"] == SlotState.COMMITTED)))

    @contextlib.contextmanager
    def arena(self, *, writable: bool = False) -> Iterator[Any]:
        arena = attach(self.instance, writable_data=writable)
        try:
            yield arena
        finally:
            arena.close()

    def memory(self) -> dict[str, int]:
        """Bytes that each of our names in /dev/shm takes: what `df` would say, whoever else is busy there."""
        paths = [shm_path(name) for name in segment_names(self.instance)]
        return {path.name: path.stat().st_blocks * 512 for path in paths if path.exists()}

    def arm_server(self, fault: dict[str, Any]) -> None:
        assert self.server is not None
        self.later.write_text(json.dumps(fault))
        os.kill(self.server.pid, signal.SIGUSR1)

    # ----------------------------------------------------------------------------------- engines
    def add_engines(self, *options: dict[str, Any]) -> list[EngineProcess]:
        """Start engines side by side; they are up afterwards, unless the server is struck."""
        new = []
        for one in options:
            self._started += 1
            engine_id = f"{self.instance}-{self._started}"
            options_ = {
                "instance": self.instance,
                "engine_id": engine_id,
                "seed": self._started,
            } | one
            new.append(EngineProcess(options_, self.environment))
        self.engines += new
        for engine in new:
            engine.tell(wait_up=10.0)
        return new

    def dismiss(self, engine: EngineProcess) -> None:
        """An engine ends as engines should."""
        if engine in self.engines:
            self.engines.remove(engine)
            self.ended += engine.counts
            engine.end()

    def _bury(self, engine: EngineProcess) -> None:
        """Forget an engine that has died; its counts stay."""
        self.engines.remove(engine)
        self.ended += engine.counts
        engine.end()

    def total(self) -> Counter[str]:
        return sum((e.counts for e in self.engines), self.ended)

    # -------------------------------------------------------------------------------------- faults
    def struck(self) -> list[dict[str, Any]]:
        """Every strike of a failpoint so far."""
        if not self.marks.exists():
            return []
        return [json.loads(line) for line in self.marks.read_text().splitlines()]

    def stop(self, pid: int, seconds: float = STOP_S) -> None:
        """SIGSTOP from outside; it is woken after the time."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._stopped[pid] = time.monotonic() + seconds

    def attend(self) -> None:
        """Wake what has been stopped long enough, restart a dead server, replace dead engines."""
        strikes = self.struck()
        for one in strikes[self._read :]:
            if one["do"] == "stop":
                self._stopped[one["pid"]] = time.monotonic() + STOP_S
        self._read = len(strikes)
        for pid, due in list(self._stopped.items()):
            if time.monotonic() > due:
                self.wake(pid)
        if self.server is not None and self.server_state() in {"", "Z"}:
            self._restart()
        for engine in [e for e in self.engines if state_of(e.process.pid) in {"", "Z"}]:
            self._bury(engine)
            self.add_engines(
                {k: v for k, v in engine.options.items() if k not in {"engine_id", "seed"}}
            )

    def wake(self, pid: int) -> None:
        self._stopped.pop(pid, None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _restart(self) -> None:
        self.restarts += 1
        before = self.committed()
        self.start_server()
        status = self.status()
        if status is not None and status["server"]["adopted"]:
            self.kept.append((before, status["server"]["adopted"]["slots"]))

    def drive(self, over: Callable[[], Any], what: str, seconds: float = LONG_S) -> None:
        """All engines work side by side, and what is dead or stopped is tended, until `over`."""
        assert self.work(over, seconds), f"not within {seconds} s: {what}; {dict(self.total())}"

    def work(self, over: Callable[[], Any], seconds: float) -> bool:
        """The same, for so long at most; whether it was `over`."""
        end = time.monotonic() + seconds
        while not over():
            if time.monotonic() > end:
                return False
            self.attend()
            for engine in self.engines:
                if engine.asked == 0:
                    engine.tell(run=2, seconds=0.5)
            self.collect(0.02)
        return True

    def settle(self) -> None:
        """Let the engines finish what they are at; tend what is dead or stopped."""
        end = time.monotonic() + LONG_S
        self.attend()
        while self._stopped or any(engine.asked for engine in self.engines):
            assert time.monotonic() < end, "engines do not come to an end"
            self.collect(0.02)
            self.attend()

    def collect(self, seconds: float) -> None:
        """Take answers of engines, waiting so long for the first."""
        fds = {engine.fd: engine for engine in self.engines if engine.asked}
        ready, _, _ = select.select(list(fds), [], [], seconds)
        for fd in ready:
            fds[fd].receive()

    # ------------------------------------------------------------------------------------- proof
    def prove(self, operations: int = 4) -> Counter[str]:
        """Every engine works, nothing was wrong or stuck, all leases drain, the tables are consistent."""
        self.settle()
        goal = {engine: engine.counts["operations"] + operations for engine in self.engines}

        def all_work() -> bool:
            return all(e.counts["operations"] >= goal.get(e, operations) for e in self.engines)

        self.drive(all_work, "every engine works")
        self.settle()
        until(self.drained, "pins, reservations and quarantine drain", LONG_S)
        with self.arena() as arena:
            assert check(arena) == []
        total = self.total()
        assert total["wrong"] == 0, f"wrong bytes were served: {dict(total)}"
        assert total["stuck"] == 0, f"stuck requests: {dict(total)}"
        return total

    def drained(self) -> bool:
        status = self.status()
        if status is None:
            return False
        slots = status["arena"]["slots"]
        return not (slots["pinned"] or slots["reserved"] or slots["quarantined"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pid in {*self._stopped, *(one["pid"] for one in self.struck() if one["do"] == "stop")}:
            self.wake(pid)
        workers = [pid for engine in self.engines for pid in engine.workers]
        for engine in self.engines:
            for pid in (engine.process.pid, *engine.workers):
                self.wake(pid)
            engine.end(signal.SIGKILL)
        if self.server is not None:
            self.server.end()
        # They end by themselves at the end of their pipe, which a busy machine may put off.
        until(lambda: all(state_of(pid) in {"", "Z"} for pid in workers), "workers end", LONG_S)
        entries = leftovers(Path(os.environ["LMCACHE_SHM_RUNTIME_DIR"]))
        purge(entry for entry in entries if self.instance in entry.path.name)
