"""Loads: when another may begin, and those in flight, from the allocation of their blocks until every worker has reported."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_shm.arena.job import Adapter, CopyJob
from lmcache_shm.client.copy_plan import ChunkCopy
from lmcache_shm.client.counts import Counts
from lmcache_shm.client.in_flight import InFlightStores
from lmcache_shm.client.jobs import StepCopies
from lmcache_shm.client.lookup import Hit
from lmcache_shm.client.plan import KVGroup
from lmcache_shm.protocol.rules import ChunkedLocal, Full, Recurrent, Window

log = logging.getLogger("lmcache_shm")


class Loading:
    """Scheduler thread only. A load keeps its hit, and so its pins, until it has ended."""

    def __init__(self, in_flight: InFlightStores, counts: Counts) -> None:
        self._in_flight = in_flight
        self._counts = counts
        self._underway: dict[str, tuple[int, Hit]] = {}
        self._planned: list[tuple[CopyJob, Hit]] = []
        self._failed: list[str] = []
        self._void: set[str] = set()

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._underway

    def __len__(self) -> int:
        return len(self._underway)

    def begin(
        self, req_id: str, hit: Hit, copies: Sequence[ChunkCopy], adapter: Adapter | None = None
    ) -> None:
        """Plan to read these chunks of `hit`; the job goes into the next step's metadata."""
        arena = hit.registration.arena
        at = [(copy.group, copy.chunk - hit.first[copy.group]) for copy in copies]
        rows = [hit.rows[group][i] for group, i in at]
        job = CopyJob.of(
            self._in_flight.open_load(hit.registration),
            "load",
            hit.registration.arena_id,
            rows,
            arena.cold["offset"][rows],
            [hit.generations[group][i] for group, i in at],
            [copy.group for copy in copies],
            [copy.pages for copy in copies],
            req_id,
            adapter,
        )
        self._underway[req_id] = job.id, hit
        self._planned.append((job, hit))

    def fail(self, req_id: str, why: str) -> None:
        """Let the workers report a load as failed: vLLM waits for it, and will compute the tokens."""
        log.warning("lmcache_shm: a load of %s cannot be done: %s", req_id, why)
        self._counts.add("loads_failed.plan")
        self._failed.append(req_id)

    def cancel(self) -> None:
        """No load in flight may be used, also if it has arrived and vLLM was not told yet."""
        self._void.update(self._underway)

    def hand_over(self, meta: StepCopies) -> None:
        """Put planned, failed and cancelled loads into a step's metadata, each once."""
        for job, hit in self._planned:
            meta.loads.append(job)
            meta.places[job.arena_id] = hit.registration.place
        meta.failed, self._failed = self._failed, []
        self._planned = []

    def ended(self, req_id: str) -> tuple[Hit | None, bool]:
        """Every worker has reported: the hit whose lease can go (None for one that was failed at once), and whether
        the load was cancelled."""
        cancelled = req_id in self._void
        self._void.discard(req_id)
        number, hit = self._underway.pop(req_id, (0, None))
        if hit is not None:
            self._in_flight.close_load(number)
        return hit, cancelled


@dataclass(frozen=True, slots=True)
class Admitted:
    """Blocks that a request holds now, and how many more its first step may take."""

    held: int
    need: int


class LoadAdmission:
    """Room for requests that hold blocks but do not run: those that are being loaded, or wait for their first step.

    vLLM cannot preempt them, and it admits the next one by an estimate that counts blocks before a window as if
    they were still held. So loads can take the last blocks from each other: each waits for the others, nothing
    runs, for ever. Another load is begun only if, with nothing but such requests there, any of them could
    be scheduled.

    Scheduler thread only. `groups` are the cached ones, `scratch` the number of those that are not.
    """

    def __init__(self, vllm_config: Any, groups: Sequence[KVGroup], scratch: int) -> None:
        scheduler = vllm_config.scheduler_config
        budget = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        drafts = int(vllm_config.num_speculative_tokens)
        self._step = int(budget) + 1 + drafts + int(vllm_config.num_lookahead_tokens)
        # A running state, a checkpoint, and one per draft token.
        self._states = 2 + drafts
        self._groups = tuple(groups)
        self._scratch = scratch
        self._admitted: dict[str, Admitted] = {}

    def has_room(self, num_tokens: int, total_tokens: int, blocks: int) -> bool:
        """Whether a request of `num_tokens` may load up to `total_tokens` in a pool of `blocks` usable blocks.

        The first one always may: vLLM has made sure that each request fits by itself.
        """
        if not self._admitted:
            return True
        here = [*self._admitted.values(), self._expected(num_tokens, total_tokens)]
        return blocks - sum(p.held for p in here) >= max(p.need for p in here)

    def enter(
        self,
        req_id: str,
        num_tokens: int,
        total_tokens: int,
        tables: Sequence[Sequence[int]],
        null: int,
    ) -> None:
        """vLLM has allocated the blocks of a load."""
        held = sum(block != null for table in tables for block in table)
        self._admitted[req_id] = Admitted(held, self._need(num_tokens, total_tokens))

    def leave(self, req_id: str) -> None:
        """It is scheduled, has given its blocks back, or has ended."""
        self._admitted.pop(req_id, None)

    def __bool__(self) -> bool:
        return bool(self._admitted)

    def _expected(self, num_tokens: int, total_tokens: int) -> Admitted:
        held = self._scratch
        for group in self._groups:
            pages = -(-total_tokens // group.block_size)
            match group.rule:
                case Full():
                    held += pages
                case Window(tokens) | ChunkedLocal(tokens):
                    held += min(pages, -(-tokens // group.block_size) + 1)
                case Recurrent():
                    held += 1
        return Admitted(held, self._need(num_tokens, total_tokens))

    def _need(self, num_tokens: int, total_tokens: int) -> int:
        """Full attention needs the rest of the prompt (vLLM admits whole prompts), the others one step."""
        need = 0
        step = min(num_tokens, total_tokens + self._step)
        for group in self._groups:
            size = group.block_size
            if isinstance(group.rule, Recurrent):
                need += self._states
            else:
                end = num_tokens if isinstance(group.rule, Full) else step
                need += -(-end // size) - total_tokens // size
        return need
