"""What one connection owns: leases to read, reservations to write. They die with it."""

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.allocator import NO_ROWS
from lmcache_shm.arena.processes import Process

if TYPE_CHECKING:
    from lmcache_shm.server.engines import Engine

Rows = npt.NDArray[np.int32]


class Denied(Exception):
    """A request that is answered by an Error and does nothing; `code` as in messages.Error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Session:
    """One connection; `number` is unique within a server's life and is the upper half of its leases."""

    def __init__(self, number: int, process: Process) -> None:
        self.number = number
        self.process = process
        self.role = ""  # until Hello
        self.engine_id = ""
        self.info: dict[str, str | int | float | bool] = {}
        self.opened = self.last_activity = time.monotonic()
        self.engine: Engine | None = None
        # Set when an engine is registered.
        self.namespace = -1
        self.client = -1
        self.groups = 0
        self.checks: list[int] = []
        """By group, the layout of the checksums that its workers write; [] when they write none."""
        self.leases: dict[int, list[Rows]] = {}
        self.reserved: set[int] = set()
        """Rows reserved on this connection, neither committed nor aborted yet."""
        self.in_doubt: set[int] = set()
        """Quarantined rows of this engine that it said it may still be writing; only to be aborted."""
        self.hang_up = False
        self._last_lease = 0

    @property
    def title(self) -> str:
        engine = f" of engine {self.engine_id}" if self.engine_id else ""
        return f"{self.role or 'client'}{engine} (pid {self.process.pid})"

    # ------------------------------------------------------------------------------------- leases
    def new_lease(self, rows: list[Rows]) -> int:
        self._last_lease += 1
        lease = self.number << 32 | self._last_lease
        self.leases[lease] = rows
        return lease

    def check_leases(self, leases: list[int]) -> None:
        """Raises Denied for a lease that this connection never got; one released before is fine."""
        for lease in leases:
            if lease >> 32 != self.number or not 0 < lease & 0xFFFFFFFF <= self._last_lease:
                raise Denied("not_yours", f"lease {lease} is not of this connection")

    @property
    def pinned(self) -> int:
        return sum(len(rows) for lease in self.leases.values() for rows in lease)

    # --------------------------------------------------------------------------------------- rows
    def own_rows(self, packed: bytes, what: str, *, doubtful: bool) -> Rows:
        """Rows of a commit or abort, each one reserved here and named once (else Denied).

        `doubtful`: those it came back for after a broken connection are allowed, too.
        """
        if not packed:
            return NO_ROWS
        if len(packed) % 4:
            raise Denied("invalid", f"{what}: {len(packed)} bytes are no rows of 4 bytes")
        rows = np.frombuffer(packed, "<i4")
        named = set(rows.tolist())
        if len(named) != len(rows):
            raise Denied("invalid", f"{what}: a row is named twice")
        strange = named - self.reserved
        if doubtful:
            strange -= self.in_doubt
        if strange:
            raise Denied("not_yours", f"{what}: row {min(strange)} is not reserved by you")
        return rows
