"""Every step at which a process is struck, and what makes it come to that step."""

from typing import NamedTuple

CATALOG = "lmcache_shm.server.catalog.catalog:Catalog."
SERVER_SIDE = "lmcache_shm.server."
CLIENT = "lmcache_shm.client."
ARENA = "lmcache_shm.arena."
TRANSFER = "lmcache_shm.transfer."


class Point(NamedTuple):
    """`process`: server, restart (the server while it starts over a dead one's arena), scheduler, worker.

    `nth`: which call from now on. `by`: what the harness does to bring it about, beside the load.
    """

    process: str
    at: str
    nth: int = 3
    by: str = ""

    @property
    def name(self) -> str:
        return f"{self.process}:{self.at.rpartition(':')[2].lstrip('_')}"


SERVER = [
    Point("server", CATALOG + "acquire"),
    Point("server", CATALOG + "release"),
    Point("server", CATALOG + "reserve"),
    Point("server", CATALOG + "commit"),
    Point("server", CATALOG + "abort", 1, "kill worker"),
    Point("server", CATALOG + "quarantine", 1, "lose scheduler"),
    Point("server", CATALOG + "unquarantine", 1, "lose scheduler"),
    Point("server", CATALOG + "clear", 1, "clear"),
    Point("server", CATALOG + "register", 1, "reconnect"),
    Point("server", CATALOG + "leave", 1, "reconnect"),
    Point("server", "lmcache_shm.server.catalog.slots:Slots.evict", 2),
    Point("server", "lmcache_shm.server.catalog.slots:Slots.free", 2),
    Point("server", "lmcache_shm.server.catalog.eviction:Allocation.make", 2),
    Point("server", "lmcache_shm.server.catalog.eviction:Allocation._take_over", 1, "another size"),
    Point("server", "lmcache_shm.server.catalog.reservation:Reserver._write", 2),
    Point("server", ARENA + "allocator:SlabAllocator.alloc", 2),
    Point("server", ARENA + "allocator:SlabAllocator.bind", 1, "clear"),
    Point("server", ARENA + "allocator:SlabAllocator.unbind", 1, "clear"),
    Point("server", SERVER_SIDE + "engines:write_client", 1, "reconnect"),
    Point("server", SERVER_SIDE + "engines:Engines.attach", 2, "reconnect"),
    Point("server", SERVER_SIDE + "engines:Engines.leave", 1, "reconnect"),
    Point("server", SERVER_SIDE + "engines:Session.new_lease", 2),
    Point("server", SERVER_SIDE + "loop:Server._reply", 5),
    Point("server", SERVER_SIDE + "loop:Server._drop", 2, "reconnect"),
]
RESTART = [
    Point("restart", "lmcache_shm.server.process:adopt", 1),
    Point("restart", "lmcache_shm.server.catalog.consistency:_rewrite", 1),
    Point("restart", "lmcache_shm.server.catalog.consistency:_index", 1),
    Point("restart", ARENA + "segment:Arena.set_owner", 1),
    Point("restart", SERVER_SIDE + "loop:listen", 1),
]
SCHEDULER = [
    Point("scheduler", CLIENT + "client:CacheClient.acquire"),
    Point("scheduler", CLIENT + "client:CacheClient.step"),
    Point("scheduler", CLIENT + "client:CacheClient._greet", 1, "reconnect"),
    Point("scheduler", CLIENT + "client:CacheClient._lost", 1, "reconnect"),
    Point("scheduler", CLIENT + "reconnect:Link._map", 1, "reconnect"),
    Point("scheduler", CLIENT + "connection:Connection._send", 4),
    Point("scheduler", CLIENT + "connection:Connection._receive", 4),
    Point("scheduler", "__main__:Engine._load", 1),
    Point("scheduler", "__main__:Engine._order"),
    Point("scheduler", CLIENT + "in_flight:InFlightStores._reported", 2),
]
WORKER = [
    Point("worker", CLIENT + "client:WorkerClient._greet", 1, "reconnect"),
    Point("worker", TRANSFER + "cpu:CpuEngine.submit"),
    Point("worker", TRANSFER + "cpu:CpuEngine._copy", 7),
    Point("worker", TRANSFER + "guard:SlotGuard.changed_hands", 7),
    Point("worker", TRANSFER + "strided:RunCopier.store", 7),
    Point("worker", TRANSFER + "strided:RunCopier.load", 7),
    Point("worker", "__main__:Worker._tick"),
]
POINTS = SERVER + RESTART + SCHEDULER + WORKER
