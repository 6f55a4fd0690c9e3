"""Is this slot still ours? The checks around every copy.

A load trusts what it copied only if the slot was committed with the expected generation before *and
after* the copy (and its checksum agrees, if there is one): whatever went wrong elsewhere, bytes of
another chunk can cost time but never reach a model.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmcache_shm.arena.layout import SlotState
from lmcache_shm.arena.slot import CHECKSUM_BYTES, checksum, read_checksum, write_checksum
from lmcache_shm.transfer.engine import (
    REASON_ARENA,
    REASON_CHECKSUM,
    REASON_GENERATION,
    CopyItem,
    CopyJob,
)
from lmcache_shm.transfer.pages import SlotLayout


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
        self._layouts = layouts

    def refuse(self, job: CopyJob) -> str:
        """Why this job cannot be run at all, or "". Nothing it names is touched."""
        if job.arena_id and job.arena_id != self._arena_id:
            return REASON_ARENA
        for item in job.items:
            wrong = self._wrong_item(item)
            if wrong:
                return f"error: slot {item.row}: {wrong}"
        return ""

    def changed_hands(self, item: CopyItem, kind: str) -> str:
        """REASON_GENERATION unless the slot is still what the lease was given for, else ""."""
        expected = SlotState.RESERVED if kind == "store" else SlotState.COMMITTED
        # The generation is read last: it is what changes first when a slot is given away.
        state = int(self._state[item.row])
        generation = int(self._generation[item.row])
        ours = state == expected and generation == item.generation
        return "" if ours else REASON_GENERATION

    def seal(self, item: CopyItem) -> None:
        """Write the checksum of this rank's region behind the slot, where one is kept."""
        if item.checksum_at >= 0:
            write_checksum(self._bytes, item.checksum_at, self._digest(item))

    def verify(self, item: CopyItem) -> str:
        """REASON_CHECKSUM if a kept checksum disagrees with the region, else ""."""
        if item.checksum_at < 0 or read_checksum(self._bytes, item.checksum_at) == self._digest(
            item
        ):
            return ""
        return REASON_CHECKSUM

    def _digest(self, item: CopyItem) -> int:
        end = item.offset + self._layouts[item.group].region_bytes
        return checksum(self._bytes[item.offset : end])

    def _wrong_item(self, item: CopyItem) -> str:
        if not 0 <= item.group < len(self._layouts):
            return f"no object group {item.group}"
        if not 0 <= item.row < len(self._state):
            return "no such row"
        layout, size = self._layouts[item.group], len(self._bytes)
        if not 0 <= item.offset <= size - layout.region_bytes:
            return f"region at {item.offset} lies outside the arena"
        if not -1 <= item.checksum_at <= size - CHECKSUM_BYTES:
            return f"checksum at {item.checksum_at} lies outside the arena"
        for run in item.runs:
            if not 0 <= run.part < len(layout.parts):
                return f"no part {run.part}"
            part, ids = layout.parts[run.part], run.block_ids
            if run.first < 0 or run.first + len(ids) > part.stored_pages:
                return f"pages {run.first}+{len(ids)} of {part.stored_pages}"
            if len(ids) and not (ids.min() >= 0 and ids.max() < part.pages.num_blocks):
                return f"a block id outside [0, {part.pages.num_blocks})"
        return ""
