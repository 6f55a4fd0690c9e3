"""A cache server in a process of its own, and a view of its slot table: for the demo, tests and harnesses."""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.layout import COLD_DTYPE, HOT_DTYPE, PAGE, Header, Regions, SlotState
from lmcache_shm.arena.owner import remove_ours, runtime_dir, segment_names, shm_path
from lmcache_shm.client.connection import Connection, ControlError
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

ROOT = Path(__file__).parent.parent
START = """
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


class Server:
    """`lmcache-shm server` as a child process. A context manager; `close` ends it."""

    def __init__(
        self,
        instance: str,
        *,
        chunk_size: int | str = "auto",
        size_mb: float = 256,
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        """Start it and wait until it greets. Raises ServerError."""
        self.instance = instance
        self._command = [
            sys.executable, "-c", START, "server", "--instance", instance, "--chunk-size", str(chunk_size),
            "--l1-size-gb", str(size_mb / 1024), *flags,
        ]  # fmt: skip
        self._env = dict(os.environ) | {"PYTHONPATH": str(ROOT)} | (env or {})
        folder = self._env.get("LMCACHE_SHM_RUNTIME_DIR")
        self._folder = Path(folder) if folder else runtime_dir()
        self.log = self._folder / f"{instance}.log"
        self.process: subprocess.Popen[bytes] | None = None
        try:
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

    def start(self, timeout_s: float = 30.0, flags: tuple[str, ...] = ()) -> None:
        """Start (again), with more flags; returns when it answers."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._command, *flags], stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._env,
                start_new_session=True,  # Ctrl-C reaches only the caller, who ends it in order
            )  # fmt: skip
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.ask(Status(), StatusReply)
            except ControlError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise ServerError(f"the server did not start\n{self.log_tail()}") from None
                time.sleep(0.02)
            else:
                return

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

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
        """Wait until no store is under way and nothing is pinned. Raises ServerError when that does not happen."""
        table = self.table()
        deadline = time.monotonic() + timeout_s
        while len(table.rows(state=SlotState.RESERVED)) or table.pins():
            if time.monotonic() > deadline:
                reserved = len(table.rows(state=SlotState.RESERVED))
                raise ServerError(
                    f"{reserved} slots reserved, {table.pins()} pins after {timeout_s} s\n{self.log_tail()}"
                )
            time.sleep(0.005)
        return table

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self._reap()

    def _reap(self) -> None:
        if self.process is not None:
            self.process.wait()
            if self.process.stdin is not None:
                self.process.stdin.close()

    def close(self) -> None:
        """SIGTERM, then SIGKILL after 15 s; removes what a killed server leaves. Idempotent."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reap()
        for name in segment_names(self.instance):
            remove_ours(shm_path(name), "left alone")
        self.socket.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)

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
