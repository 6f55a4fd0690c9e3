"""The client table: the processes of each engine that may still write into its reserved slots.

It outlives the server, so that the next one keeps half-written slots of living processes in quarantine.
"""

from dataclasses import dataclass, field

from lmcache_shm.arena.layout import ENGINE_ID_BYTES, MAX_PROCESSES
from lmcache_shm.arena.processes import process_alive
from lmcache_shm.arena.segment import Arena


@dataclass
class ClientRecord:
    """One engine. `processes`: (rank, pid, start time in clock ticks since boot; 0: unknown)."""

    engine_id: str
    world: int
    replicas: int = 1
    processes: list[tuple[int, int, int]] = field(default_factory=list)

    def alive(self) -> bool:
        """Whether any of the processes still runs (one in another pid namespace counts as running)."""
        return any(process_alive(pid, start) for _, pid, start in self.processes)


def write_client(arena: Arena, index: int, record: ClientRecord) -> None:
    """Enter an engine. Beyond MAX_PROCESSES the earliest processes are left out."""
    row = arena.clients[index : index + 1]
    row["used"] = 0  # a reader of a half-written record must not trust it
    row["world"], row["replicas"] = record.world, record.replicas
    row["engine_id"] = record.engine_id.encode()[:ENGINE_ID_BYTES]
    kept = record.processes[-MAX_PROCESSES:]
    row["processes"] = len(kept)
    for i, (rank, pid, start) in enumerate(kept):
        row["ranks"][0, i], row["pids"][0, i], row["starts"][0, i] = rank, pid, start
    row["used"] = 1


def erase_client(arena: Arena, index: int) -> None:
    arena.clients[index : index + 1]["used"] = 0


def read_clients(arena: Arena) -> dict[int, ClientRecord]:
    """Index → record of every engine in the table."""
    found = {}
    for index, row in enumerate(arena.clients):
        if row["used"] != 1:
            continue
        n = min(int(row["processes"]), MAX_PROCESSES)
        columns = (row[name][:n].tolist() for name in ("ranks", "pids", "starts"))
        processes = list(zip(*columns, strict=True))
        engine_id = bytes(row["engine_id"]).decode(errors="replace")
        record = ClientRecord(engine_id, int(row["world"]), int(row["replicas"]), processes)
        found[index] = record
    return found
