"""A cache server in a process of its own, and a view of its slot table: for the demo, tests and harnesses."""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.layout import COLD_DTYPE, HOT_DTYPE, PAGE, Header, Regions, SlotState
from lmcache_shm.arena.owner import remove_ours, runtime_dir, segment_names, shm_path
from lmcache_shm.client.connection import Connection
from lmcache_shm.protocol.messages import (
    PROTOCOL,
    Check,
    CheckReply,
    Clear,
    Done,
    Hello,
    Status,
    StatusReply,
)
from tools.harness.wait import until

ROOT = Path(__file__).parent.parent
WATCHED = """
from tools.parent_watch import on_parents_end, terminate_in_order
on_parents_end(terminate_in_order)
from lmcache_shm.cli.app import main
main()
"""


class ServerError(RuntimeError):
    """The server did not start, or ended by itself; the message has the end of its log."""


@dataclass(frozen=True)
class Table:
    """The slot table and the payload, mapped writable: a test changes what only a fault would change."""

    hot: npt.NDArray[Any]
    cold: npt.NDArray[Any]
    data: npt.NDArray[np.uint8]

    def rows(
        self, group: int | None = None, state: SlotState = SlotState.COMMITTED
    ) -> npt.NDArray[np.int64]:
        """Numbers of the rows in that state (of one object group), in the order chunk, row."""
        chosen = self.hot["state"] == state
        if group is not None:
            chosen = chosen & (self.hot["group"] == group)
        rows = np.flatnonzero(chosen)
        return rows[np.argsort(self.cold["chunk"][rows], kind="stable")]

    def pins(self) -> int:
        return int(self.hot["pins"].sum())

    def payload(self, row: int) -> npt.NDArray[np.uint8]:
        """All bytes of a slot: rank regions, checksums, token ids."""
        start = int(self.cold["offset"][row])
        return self.data[start : start + int(self.cold["slot_bytes"][row])]

    def flip(self, row: int, token_offset: int) -> None:
        """Change each value of the first `token_offset` bytes (the pages): the top bit of every second byte.

        That is the sign of every bf16 and fp32 value. Doing it again undoes it.
        """
        self.payload(row)[1:token_offset:2] ^= 0x80


class Output:
    """All that a child writes, kept in memory: a pipe that nobody reads would stop the child when it is full."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("output")
        weakref.finalize(self, os.close, self.fd)

    def __len__(self) -> int:
        return os.fstat(self.fd).st_size

    def text(self, start: int = 0) -> str:
        """From that byte on."""
        return os.pread(self.fd, len(self) - start, start).decode(errors="replace")


class Server:
    """`lmcache-shm server` as a child process, over its restarts. A context manager; `close` ends it."""

    def __init__(
        self,
        instance: str,
        *,
        chunk_size: int | str = "auto",
        size_mb: float = 256,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-c", WATCHED),
        wrap: Sequence[str] = (),
        starts: bool = True,
    ) -> None:
        """Start it (unless not `starts`) and wait until it greets. Raises ServerError.

        `program`: what Python runs, the command as it is typed excepted. `wrap`: words before all of it, as
        in ["unshare", "--pid"].
        """
        self.instance = instance
        self._command = [
            *wrap, sys.executable, *program, "server", "--instance", instance, "--chunk-size", str(chunk_size),
            "--l1-size-gb", str(size_mb / 1024), *flags,
        ]  # fmt: skip
        self.env = dict(os.environ) | {"PYTHONPATH": str(ROOT)} | dict(env or {})
        """Of the next start."""
        folder = self.env.get("LMCACHE_SHM_RUNTIME_DIR")
        self._folder = Path(folder) if folder else runtime_dir()
        self._said, self._logged, self._from = Output(), Output(), 0
        self.process: subprocess.Popen[bytes] | None = None
        try:
            if starts:
                self.start()
        except BaseException:
            self.close()
            raise

    @property
    def socket(self) -> Path:
        return self._folder / f"{self.instance}.sock"

    @property
    def pid(self) -> int:
        """The server's process id (of the last start)."""
        return self.process.pid if self.process is not None else 0

    @property
    def meta(self) -> Path:
        """The file of the segment with the slot table."""
        return shm_path(segment_names(self.instance)[1])

    @property
    def ready(self) -> str:
        """What it has printed since its last start: the greeting."""
        return self._said.text(self._from)

    @property
    def errors(self) -> str:
        """What it has logged since its first start."""
        return self._logged.text()

    def start(
        self, timeout_s: float = 30.0, flags: Sequence[str] = (), *, waits: bool = True
    ) -> None:
        """Start (again), with more flags; returns when it has greeted (at once, unless `waits`)."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._reap()
        self._from = len(self._said)
        self.process = subprocess.Popen(
            [*self._command, *flags], stdin=subprocess.PIPE, stdout=self._said.fd, stderr=self._logged.fd,
            env=self.env, start_new_session=True,  # Ctrl-C reaches only the caller, who ends it in order
        )  # fmt: skip
        process, end = self.process, time.monotonic() + timeout_s
        while waits and "vllm serve" not in self.ready:
            if process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise ServerError(f"the server did not start\n{self.log_tail()}")
            time.sleep(0.01)

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join((self.ready + self.errors).splitlines()[-lines:])

    def ask(self, request: Any, reply: type[Any], timeout_s: float = 5.0) -> Any:
        """One request on a connection of its own. Raises ControlError."""
        hello = Hello(PROTOCOL, "tool", f"tool-{os.getpid()}", os.getpid(), {})
        connection = Connection.open(str(self.socket), hello, timeout_s)
        try:
            return connection.call(request, reply, timeout_s)
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        snapshot: dict[str, Any] = self.ask(Status(), StatusReply).snapshot
        return snapshot

    def check(self) -> list[str]:
        """What the running server finds wrong with its arena: nothing."""
        findings: list[str] = self.ask(Check(), CheckReply, 30.0).findings
        return findings

    def clear(self) -> None:
        self.ask(Clear(-1, None), Done)

    def table(self) -> Table:
        """The slot table as it is now, and stays, in shared memory."""
        meta = _map(self.meta)
        header = Header.unpack(bytes(meta[:PAGE]))
        regions = Regions.of(header.geometry)
        slots = header.geometry.max_slots
        return Table(
            np.frombuffer(meta, HOT_DTYPE, slots, regions.hot),
            np.frombuffer(meta, COLD_DTYPE, slots, regions.cold),
            np.frombuffer(_map(shm_path(segment_names(self.instance)[0])), np.uint8),
        )

    def wait_idle(self, timeout_s: float = 20.0) -> Table:
        """Wait until no store is under way and nothing is pinned. AssertionError when that does not happen."""
        table = self.table()
        busy = partial(table.rows, state=SlotState.RESERVED)
        until(lambda: not len(busy()) and not table.pins(), "no slot reserved or pinned", timeout_s)
        return table

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self._reap()

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send a signal, wait for the end; its exit status. Idempotent; what it leaves stays."""
        process = self.process
        if process is None:
            return 0
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(number)
            process.wait(timeout_s)
        self._reap()
        return process.returncode

    def _reap(self) -> None:
        if self.process is not None:
            self.process.wait()
            if self.process.stdin is not None:
                self.process.stdin.close()

    def close(self) -> None:
        """SIGTERM, then SIGKILL after 15 s; removes what a killed server leaves. Idempotent."""
        try:
            self.end(timeout_s=15)
        except subprocess.TimeoutExpired:
            self.kill()
        for name in segment_names(self.instance):
            remove_ours(shm_path(name), "left alone")
        self.socket.unlink(missing_ok=True)

    def connector(self, **options: Any) -> dict[str, Any]:
        """A kv_transfer_config that uses this server; options without their prefix."""
        extra = {"instance": self.instance} | options
        return {
            "kv_connector": "LMCacheShmConnector",
            "kv_connector_module_path": "lmcache_shm.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                f"lmcache_shm.{name}": value for name, value in extra.items()
            },
        }

    def command_line(self) -> str:
        """The same connector, as `vllm serve` takes it."""
        return f"--kv-transfer-config '{json.dumps(self.connector(), separators=(',', ':'))}'"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
