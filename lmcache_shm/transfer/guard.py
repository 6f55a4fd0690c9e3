"""The checks around every copy: does the slot still belong to the job?

A load trusts what it copied only if the slot was committed with the expected generation before *and
after* the copy (and its checksum agrees, if there is one): whatever went wrong elsewhere, bytes of
another chunk can cost time but never reach a model.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.job import CopyJob
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.arena.slot import CHECKSUM_BYTES, checksum, read_checksum, write_checksum
from lmcache_shm.transfer.engine import (
    REASON_ARENA,
    REASON_CHECKSUM,
    REASON_GENERATION,
    InFlightJob,
    Offsets,
)
from lmcache_shm.transfer.pages import SlotLayout

Mask = npt.NDArray[np.bool_]


class ArenaView(Protocol):
    """What a transfer engine needs of an attached arena."""

    @property
    def data_array(self) -> npt.NDArray[np.uint8]: ...
    @property
    def hot(self) -> npt.NDArray[Any]: ...
    @property
    def arena_id(self) -> bytes: ...
    @property
    def backed_bytes(self) -> int: ...


class SlotGuard:
    """Checks jobs and slots of one arena against one set of layouts."""

    def __init__(self, arena: ArenaView, layouts: Sequence[SlotLayout]) -> None:
        self._arena_id = bytes(arena.arena_id)
        self._bytes = arena.data_array
        self._state = arena.hot["state"]
        self._generation = arena.hot["generation"]
        self._region_bytes = np.array([layout.region_bytes for layout in layouts], np.int64)
        parts = max((len(layout.parts) for layout in layouts), default=0)
        # [object group, part]; -1 pages where an object group has fewer parts.
        self._stored_pages = np.full((len(layouts), parts), -1, np.int64)
        self._blocks = np.full((len(layouts), parts), np.iinfo(np.int64).max)
        for g, layout in enumerate(layouts):
            for p, part in enumerate(layout.parts):
                self._stored_pages[g, p] = part.stored_pages
                if part.pages.runs:  # else this rank touches none of its blocks
                    self._blocks[g, p] = part.pages.num_blocks

    def refuse(self, job: CopyJob, regions: Offsets, checksums: Offsets | None) -> str:
        """Why this job cannot be run at all, or "". Nothing it names is touched."""
        if job.arena_id and job.arena_id != self._arena_id:
            return REASON_ARENA
        lengths = {len(column) for column in (job.rows, job.offsets, job.generations, regions)}
        lengths |= {len(job.groups), len(regions if checksums is None else checksums)}
        if len(lengths) > 1 or job.page_runs["count"].sum() != len(job.block_ids):
            return "error: the columns of the job differ in length"
        for wrong, what in self._wrong(job, regions, checksums):
            if wrong.any():
                return f"error: slot {job.rows[int(wrong.argmax())]}: {what}"
        return ""

    def _wrong(
        self, job: CopyJob, regions: Offsets, checksums: Offsets | None
    ) -> Iterator[tuple[Mask, str]]:
        """Mask of the slots of which something is wrong, and what. Each check relies on those before it."""
        size, groups = len(self._bytes), job.groups
        yield (groups < 0) | (groups >= len(self._region_bytes)), "no such object group"
        yield (job.rows < 0) | (job.rows >= len(self._state)), "no such row"
        fits = (regions >= 0) & (regions <= size - self._region_bytes[groups])
        yield ~fits, "its region lies outside the arena"
        if checksums is not None:
            wrong = (checksums < -1) | (checksums > size - CHECKSUM_BYTES)
            yield wrong, "its checksum lies outside the arena"
        runs = job.page_runs
        slot, part, first, count = (runs[name] for name in ("slot", "part", "first", "count"))
        if len(runs) and not (slot.min() >= 0 and slot.max() < len(job.rows)):
            yield np.ones(len(job.rows), np.bool_), "a run of no slot"

        def slots(wrong: Mask) -> Mask:
            found = np.zeros(len(job.rows), np.bool_)
            found[slot[wrong]] = True
            return found

        group = groups[slot]
        yield slots((part < 0) | (part >= self._stored_pages.shape[1])), "no such part"
        stored = self._stored_pages[group, part]
        wrong = (stored < 0) | (first < 0) | (count < 0) | (first + count > stored)
        yield slots(wrong), "a page that the slot does not have"
        run = np.repeat(np.arange(len(runs)), count)
        limit = self._blocks[group, part][run]
        outside = np.zeros(len(runs), np.bool_)
        outside[run[(job.block_ids < 0) | (job.block_ids >= limit)]] = True
        yield slots(outside), "a block id that no block has"

    def changed_hands(self, job: CopyJob, at: int | slice = slice(None)) -> str:
        """REASON_GENERATION unless the slots are still what they were reserved or acquired for, else "".

        `at`: which slots of the job.
        """
        expected = SlotState.RESERVED if job.kind == "store" else SlotState.COMMITTED
        rows = job.rows[at]
        # The generation is read last: it is what changes first when a slot is given away.
        states = self._state[rows]
        generations = self._generation[rows]
        ours = np.all(states == expected) and np.all(generations == job.generations[at])
        return "" if ours else REASON_GENERATION

    def write_checksum(self, one: InFlightJob, at: int) -> None:
        """Write the checksum of this rank's region of one slot, where one is kept."""
        cell = self._checksum_at(one, at)
        if cell >= 0:
            write_checksum(self._bytes, cell, self._digest(one, at))

    def check_checksum(self, one: InFlightJob, at: int) -> str:
        """REASON_CHECKSUM if a kept checksum disagrees with the region, else ""."""
        cell = self._checksum_at(one, at)
        good = cell < 0 or read_checksum(self._bytes, cell) == self._digest(one, at)
        return "" if good else REASON_CHECKSUM

    def _checksum_at(self, one: InFlightJob, at: int) -> int:
        """Offset of a slot's checksum of this rank; -1 where none is kept."""
        if one.checksums is None or not self._region_bytes[one.job.groups[at]]:
            return -1
        return int(one.checksums[at])

    def _digest(self, one: InFlightJob, at: int) -> int:
        start = int(one.regions[at])
        end = start + int(self._region_bytes[one.job.groups[at]])
        return checksum(self._bytes[start:end])
