"""How the catalog's costs grow with the number of slots: the server's work without the socket."""

import os
import shutil
import statistics
import time
from collections.abc import Callable

import numpy as np

from lmcache_shm.arena.memory import SHM_DIR
from lmcache_shm.arena.segment import Arena, create
from lmcache_shm.cli.bench_results import Row, quantiles, quiet, row, samples
from lmcache_shm.protocol.rules import Full
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.catalog.groups import GroupSpec

SMALL, LARGE = 10_000, 1_000_000
PROMPT = 512  # chunks
CHUNK = 256
SLOT_BYTES = 4096
LABELS = 4
"""Parts that `run` announces."""


class Bench:
    """A catalog full of prompts of PROMPT chunks each."""

    def __init__(self, slots: int) -> None:
        self.arena: Arena = create(
            f"bench-{os.getpid()}-{slots}", slots * SLOT_BYTES, chunk_size=CHUNK, max_slots=slots
        )
        self.arena.unlink()  # only this process needs it; nothing stays if it is killed
        self.catalog = Catalog(self.arena)
        self.space = self.catalog.register(b"bench", [GroupSpec("full", Full(), SLOT_BYTES)])
        self.prompts = 0

    def prompt(self, number: int) -> bytes:
        """Keys of one prompt, packed."""
        return np.random.default_rng(number).bytes(16 * PROMPT)

    def store(self) -> float:
        """Reserve and commit one more prompt; seconds that the reservation took."""
        keys = self.prompt(self.prompts)
        self.prompts += 1
        zeros = np.zeros(PROMPT, np.uint64)
        start = time.perf_counter()
        rows = self.catalog.reserve(
            self.space.id,
            np.zeros(PROMPT, np.uint16),
            keys,
            bytes(16) + keys[:-16],
            np.arange(PROMPT, dtype=np.uint32),
            bytes(16 * PROMPT),
            zeros,
            0,
        )
        spent = time.perf_counter() - start
        if (rows < 0).any():
            raise RuntimeError("the catalog refused a slot")
        self.catalog.commit(rows)
        return spent

    def look_up(self, keys: bytes) -> None:
        """A hit of a whole prompt, and its release."""
        hit = self.catalog.acquire(self.space.id, keys, 0, PROMPT * CHUNK + 1)
        if hit.n_chunks != PROMPT:
            raise RuntimeError(f"a hit of {hit.n_chunks} chunks instead of {PROMPT}")
        for rows in hit.rows:
            self.catalog.release(rows)


def run(rounds: int, step: Callable[[str], None]) -> list[Row]:
    """All rows; ``step`` is called with a label before each part."""
    rows: list[Row] = []
    found: dict[int, float] = {}
    large = _that_fit(LARGE)
    for slots in (SMALL, large):
        step(f"filling {slots:,} slots")
        bench = Bench(slots)
        try:
            filled = slots // PROMPT
            reserve = [bench.store() for _ in range(filled)]
            step(f"look-ups and evictions, {slots:,} slots")
            picks = np.random.default_rng(1).integers(0, filled, 20 * rounds).tolist()
            keys = iter([bench.prompt(number) for number in picks])
            lookups = samples(lambda it=keys, b=bench: b.look_up(next(it)), len(picks))  # type: ignore[misc]
            evictions = _evict(bench, 20 * rounds)
        finally:
            bench.arena.close()
        found[slots] = statistics.median(lookups)
        p50, p99 = quantiles(lookups, 1e-3)
        cheap = statistics.median(reserve) / PROMPT / 1e-6
        dear = statistics.mean(evictions) / PROMPT / 1e-6
        name = f"{slots:,} slots: "
        rows += [
            row(f"{name}look-up of {PROMPT} chunks", p50, "ms", p99=p99),
            row(f"{name}reserve, per slot", cheap, "µs"),
            row(f"{name}reserve that evicts, per slot", dear, "µs"),
            row(f"{name}of it eviction", max(0.0, dear - cheap), "µs", 2.0),
            row(f"{name}longest pause", max(evictions + lookups) / 1e-3, "ms", 20.0),
        ]
    growth = found[large] / found[SMALL]
    rows.append(row(f"look-up, {large:,} against {SMALL:,} slots", growth, "x", 1.3))
    return rows


def _evict(bench: Bench, prompts: int) -> list[float]:
    """Store into a full arena, garbage collection held back; seconds per reservation."""
    with quiet():
        return [bench.store() for _ in range(prompts)]


def _that_fit(slots: int) -> int:
    """As many slots as half of the free shared memory can hold."""
    return min(slots, shutil.disk_usage(SHM_DIR).free // 2 // SLOT_BYTES)
