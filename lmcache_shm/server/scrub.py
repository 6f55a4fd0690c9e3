"""The scrub of `--checksum verify`: compare stored slots with their checksums while the server is idle.

It goes round the slot table for ever, in the server's thread, a piece at a time: at each tick until RUN_S
have passed or a request arrives. Only slots are checked whose checksums were written, by a known layout (`checks`
in the slot table, set at commit): not those committed under `--checksum off`, nor those of an earlier server whose
layout is not stored with their namespace, before an engine with that layout registers again.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import xxhash

from lmcache_shm.arena.layout import FLAG_DROP, SlotState
from lmcache_shm.arena.segment import Arena
from lmcache_shm.arena.slot import Checked, checks_number, read_checksum
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.stats import EventLog

RUN_S = 0.002
"""Longest time of one run, give or take a piece."""
PIECE = 1 << 20
"""Bytes hashed before looking for requests again: about 0.1 ms."""
ROWS = 4096
"""Rows searched at once, for the same reason."""
MAX_LAYOUTS = 4096
"""Layouts remembered; beyond it the earliest is forgotten."""


class Scrub:
    """Used by the server's thread only. Counts `scrubbed_slots` and `scrub_mismatches`."""

    def __init__(
        self, arena: Arena, catalog: Catalog, counters: Counter[str], events: EventLog
    ) -> None:
        self._arena = arena
        self._catalog = catalog
        self._counters = counters
        self._events = events
        self._layouts: dict[int, list[Checked]] = {}
        self._work = self._rounds()
        for space in catalog.namespaces():
            for group in space.groups:
                self.learn(group.spec.info.get("checked", ()))

    def learn(self, checked: Sequence[Checked]) -> None:
        """Check slots of this layout from now on."""
        number = checks_number(checked)
        if number not in self._layouts and len(self._layouts) >= MAX_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[number] = [(at, nbytes, cell) for at, nbytes, cell in checked]

    def run(self, idle: Callable[[], bool]) -> None:
        """Go on where it stopped: until RUN_S have passed, a round is over, or `idle` is no longer true."""
        end = time.perf_counter() + RUN_S
        while idle() and not next(self._work) and time.perf_counter() < end:
            pass

    def _rounds(self) -> Iterator[bool]:
        """Yields after each piece of work; True at the end of a round."""
        while True:
            for start in range(0, self._arena.max_slots, ROWS):
                for row in self._candidates(start):
                    yield from self._slot(row)
                yield False
            yield True

    def _candidates(self, start: int) -> list[int]:
        hot = self._arena.hot[start : start + ROWS]
        found = np.flatnonzero(
            (hot["state"] == SlotState.COMMITTED) & (hot["flags"] & FLAG_DROP == 0)
        )
        rows: list[int] = (start + found[self._arena.cold["checks"][start + found] != 0]).tolist()
        return rows

    def _slot(self, row: int) -> Iterator[bool]:
        """Compare one slot with its checksums, unless it changes hands meanwhile (between two pieces)."""
        data, generation = self._arena.data_array, int(self._arena.hot["generation"][row])
        checked = self._layouts.get(int(self._arena.cold["checks"][row]))
        if checked is None or not self._is_still(row, generation):
            return
        slot = int(self._arena.cold["offset"][row])
        good = True
        for offset, nbytes, cell in checked:
            digest = xxhash.xxh3_64()
            end = slot + offset + nbytes
            for at in range(slot + offset, end, PIECE):
                digest.update(data[at : min(at + PIECE, end)].data)
                yield False
                if not self._is_still(row, generation):
                    return
            good &= digest.intdigest() == read_checksum(data, slot + cell)
        self._counters["scrubbed_slots"] += 1
        if not good and self._catalog.discard([row]):
            self._counters["scrub_mismatches"] += 1
            self._events.add(
                f"dropped slot {row} (chunk {int(self._arena.cold['chunk'][row])} of namespace "
                f"{int(self._arena.hot['namespace'][row])}): its content does not fit its checksum",
                logging.WARNING,
            )

    def _is_still(self, row: int, generation: int) -> bool:
        """A slot that was freed, or freed and committed again, has another generation."""
        hot = self._arena.hot[row]
        return bool(hot["state"] == SlotState.COMMITTED and hot["generation"] == generation)
