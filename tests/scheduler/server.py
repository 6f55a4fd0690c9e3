"""A cache server in a thread of this process: the real socket, catalog and arena, within reach of a test."""

import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from lmcache_shm.arena.layout import FLAG_DROP, SlotState
from lmcache_shm.arena.segment import create
from lmcache_shm.client.reconnect import socket_path
from lmcache_shm.config import Config, server_config
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.handlers import Service
from lmcache_shm.server.loop import Server

T = TypeVar("T")


class CacheServer:
    """Serves from construction to `close`."""

    def __init__(self, instance: str, data_bytes: int, *, separate: bool = True) -> None:
        self.config: Config = server_config(
            {"instance": instance, "separate_object_groups": separate, "quarantine_grace_s": 0.5}
        )
        self.arena = create(instance, data_bytes, separate=separate)
        self._serve(fresh=True)

    def _serve(self, *, fresh: bool) -> None:
        self.catalog = Catalog(self.arena)
        if not fresh:
            self.catalog.recover()
        self.service = Service(self.arena, self.catalog, self.config)
        self.arena.set_owner(self.service.boot)
        self._server = Server(self.service, socket_path(self.config))
        self._thread = threading.Thread(target=self._server.run, name="cache-server", daemon=True)
        self._thread.start()

    def ask(self, question: Callable[[], T]) -> T:
        """Its answer, computed in the server's thread."""
        answers: list[T | BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                answers.append(question())
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                answers.append(error)
            done.set()

        self._server.ask(run)
        assert done.wait(10), "the server does not answer"
        answer = answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        """End serving; the arena stays as it is, with whatever was reserved or pinned."""
        self._server.stop(0.0)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def restart(self) -> None:
        """Another server takes over the arena, as after a crash."""
        self._serve(fresh=False)

    def close(self) -> None:
        if self._thread.is_alive():
            self.stop()
        for engine in self.service.engines:  # a server's end would close these
            for _, process in engine.processes.values():
                process.close()
        self.arena.unlink()
        self.arena.close()

    # ---------------------------------------------------------------------------- what there is
    def in_state(self, state: SlotState) -> list[int]:
        return [int(row) for row in np.flatnonzero(self.arena.hot["state"] == state)]

    @property
    def pins(self) -> int:
        return int(self.arena.hot["pins"].sum())

    def check(self) -> list[str]:
        return self.ask(self.catalog.check)

    def evict(self, rows: list[int]) -> int:
        """Committed and unpinned rows among these leave the cache, as if others had needed the room."""

        def evict() -> int:
            hot = self.arena.hot
            good = [
                r for r in rows if hot["state"][r] == SlotState.COMMITTED and hot["pins"][r] == 0
            ]
            self.catalog._slots.evict(np.array(good, np.int32))
            return len(good)

        return self.ask(evict)

    def steal(self, row: int) -> None:
        """A bug in eviction: a slot is given away even if it is pinned, and filled with something else."""

        def steal() -> None:
            hot, cold, slots = self.arena.hot, self.arena.cold, self.catalog._slots
            rows = np.array([row], np.int32)
            if hot["state"][row] != SlotState.COMMITTED or slots.is_dropped(rows)[0]:
                return
            if hot["pins"][row]:
                slots.forget(rows)
                hot["flags"][row] |= FLAG_DROP
                hot["generation"][row] += 1
            else:
                slots.evict(rows)
            start, size = int(cold["offset"][row]), int(cold["slot_bytes"][row])
            self.arena.data_array[start : start + size] = 0xA5

        self.ask(steal)
