"""The connector under observation: checks around every plan, copy and look-up."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.request import RequestStatus

from lmcache_shm.arena.job import CopyJob
from lmcache_shm.arena.layout import SlotState
from tests.scheduler.content import Stream
from tests.scheduler.contents import Contents
from tests.scheduler.late import Pace
from tests.scheduler.prefixes import Known
from tests.scheduler.server import CacheServer
from tests.scheduler.wiring import plan_in
from tests.scheduler.worker import Step


@dataclass
class Planned:
    """A job as the scheduler side planned it, with the world as it was then."""

    job: Any
    generation: npt.NDArray[np.int64]
    stream: Stream | None
    """Of a load: the prefix that the request needs."""


class Cache(Contents):
    """One per Engine. `known`: what keys stand for, shared by engines that share the arena. `own_threads`: the
    connector's threads report and flush by themselves, as in an engine."""

    def __init__(
        self,
        server: CacheServer,
        rng: random.Random,
        pace: Pace | None = None,
        *,
        known: Known | None = None,
        own_threads: bool = False,
    ) -> None:
        super().__init__(server, rng, pace, known, own_threads=own_threads)
        self.plans: dict[int, Planned] = {}
        self.spoiled: set[str] = set()
        """Requests that had a failed load: nothing may be offered to them again, and need not."""
        self.lossy = False
        """Slots are taken away on purpose, or the server is: copies may find them changed."""
        self.blind = False
        """The server is away: misses are no surprise."""
        self.stores = self.loads = self.failed_loads = 0
        self._void_up_to = 0
        """Jobs planned before the last external reset: it ended the registration that their slots were leased under."""
        self._loading: set[str] = set()
        self._holding: set[str] = set()

    def attached(self) -> None:
        super().attached()
        matched = self.scheduler_side.get_num_new_matched_tokens

        def checked(request: Any, local_tokens: int) -> tuple[int | None, bool]:
            before = self._acquires()
            answer: tuple[int | None, bool] = matched(request, local_tokens)
            self._check_offer(request, local_tokens, answer, asked=self._acquires() > before)
            return answer

        self.scheduler_side.get_num_new_matched_tokens = checked

    # ---------------------------------------------------------------------------- plans
    def planned(self, step: Step) -> None:
        """A schedule() is over: note what was planned in it, and what must hold from the start."""
        meta = plan_in(step.output.kv_connector_metadata)
        for job in meta.stores:
            self.stores += 1
            self._plan(job, step, None)
        for job in meta.loads:
            self.loads += 1
            request = self.engine.scheduler.requests[job.req_id]
            stream = Stream(self.engine.asked[job.req_id].identity, list(request.all_token_ids))
            self._plan(job, step, stream)
            pool = self.oracle.pool
            for _, block in self._blocks(job):
                if pool.blocks[block].block_hash is not None or pool.blocks[block].ref_cnt != 1:
                    self.oracle.fail(
                        "overwrite",
                        f"load {job.id} of {job.req_id} writes block {block}, which vLLM uses",
                    )

    def _plan(self, job: Any, step: Step, stream: Stream | None) -> None:
        if job.id in self.plans:
            self.oracle.fail("plan", f"job {job.id} is planned twice")
        self.plans[job.id] = Planned(job, step.generation, stream)
        for group, block in self._blocks(job):
            if block == 0:
                self.oracle.fail(
                    "null_block", f"job {job.id} takes the null block for a page of group {group}"
                )
            if self.oracle.pool.blocks[block].ref_cnt < 1:
                self.oracle.fail(
                    "changed_hands", f"job {job.id} names block {block}, which nobody holds"
                )

    def _pages(self, job: CopyJob, slot: int) -> list[tuple[int, int, npt.NDArray[np.int64]]]:
        """(KV cache group, first stored page, blocks) of one slot of a job."""
        parts = self.side.start.latest.plan.groups[int(job.groups[slot])].parts
        pages = job.pages()[slot]
        return [(parts[part].group.index, first, blocks) for part, first, blocks in pages]

    def _blocks(self, job: CopyJob) -> list[tuple[int, int]]:
        """(KV cache group, block) of a job."""
        return [
            (group, int(block))
            for slot in range(len(job.rows))
            for group, _, blocks in self._pages(job, slot)
            for block in blocks
        ]

    def updated(self, reply: Any) -> None:
        """A step's result has reached the scheduler."""
        self.failed_loads += len(reply.failed_recving or ())
        self.spoiled |= set(reply.failed_recving or ())

    # ---------------------------------------------------------------------------- copies
    def watch(self, rank: int, job: CopyJob, slot: int, when: str) -> None:
        """Around the copy of one slot on one rank (see LateEngine)."""
        if not self.watching:
            return
        planned = self.plans.get(job.id)
        if planned is None:
            self.oracle.fail(
                "plan", f"rank {rank} copies for job {job.id}, which was never planned"
            )
        pages = self._pages(job, slot)
        for group, _, blocks in pages:
            for block in blocks:
                if not self.oracle.owned(int(block), int(planned.generation[block])):
                    self.oracle.fail(
                        "changed_hands",
                        f"{job.kind} {job.id} {when} its copy: block {block} of group {group} belongs to "
                        "someone else by now",
                    )
        row = int(job.rows[slot])
        chunk = int(self.server.arena.cold["chunk"][row])
        if job.kind == "store" and when == "before":
            stream, chunk = self.demanded(row)
            self.compare(rank, "store_source", f"store {job.id}", pages, stream, chunk)
        elif job.kind == "load" and when == "after":
            assert planned.stream is not None
            what = f"load {job.id} of {planned.job.req_id}"
            self.compare(rank, "load", what, pages, planned.stream, chunk)

    def refused(self, job: CopyJob, slot: int, reason: str) -> None:
        """The real engine did not copy a slot."""
        leased = job.id > self._void_up_to
        if self.watching and reason == "generation" and leased and not self.lossy:
            self.oracle.fail(
                "lost_pin",
                f"{job.kind} {job.id}: row {job.rows[slot]} changed hands although it was {job.kind}d under a lease",
            )
        if self.watching and reason not in ("generation", "arena"):
            self.oracle.fail("copy", f"{job.kind} {job.id}: row {job.rows[slot]}: {reason}")

    # ---------------------------------------------------------------------------- resets
    def before_reset(self) -> None:
        """Note whose load is under way, and who has a prefix and does not run: a reset takes it from them."""
        requests = self.engine.scheduler.requests.values()
        self._loading = {r.request_id for r in requests if r.request_id in self.side._loading}
        self._holding = self._loading | {
            r.request_id
            for r in requests
            if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            or (r.status != RequestStatus.RUNNING and r.num_computed_tokens > 0)
        }

    def after_reset(self, *, done: bool, external: bool) -> None:
        """They are computed from their beginning."""
        if done:
            self.spoiled |= self._holding
        elif external:
            self.spoiled |= self._loading
        if external:
            self._void_up_to = max(self.plans, default=0)

    # ---------------------------------------------------------------------------- hits
    def _acquires(self) -> int:
        return int(self.server.service.stats.latency["acquire"].count)

    def _check_offer(
        self, request: Any, local: int, answer: tuple[int | None, bool], *, asked: bool
    ) -> None:
        """What is offered is what the arena has; an earlier answer may be kept while its rows are pinned."""
        tokens, asynchronous = answer
        req_id = request.request_id
        self.oracle.note(f"offer {req_id}: {tokens} beyond {local} of {request.num_tokens}")
        if tokens is None or (not tokens and self.side._recomputing):
            return  # to be asked again, or nothing is loaded until a failed load was made good
        if tokens and not asynchronous:
            self.oracle.fail("offer", f"{req_id}: a synchronous load is offered")
        if tokens and req_id in self.spoiled:
            self.oracle.fail(
                "offer", f"{req_id} had a failed load and is offered {tokens} tokens again"
            )
        if self.blind or req_id in self.spoiled or request.skip_reading_prefix_cache:
            return
        best = max(
            self.usable(req_id, local, request.num_tokens, kept=not asked) * self.chunk - local, 0
        )
        given = tokens or 0
        if given > best or (given < best and (asked or not given)):
            self.oracle.fail(
                "invented" if given > best else "missed",
                f"{req_id} with {local} of {request.num_tokens} tokens is offered {given}, the arena has {best}",
            )

    # ---------------------------------------------------------------------------- the end
    def drained(self) -> None:
        """Nothing is underway: nothing may be held, and every stored byte is right."""
        if self.errors.lines:
            self.oracle.fail("error_logged", "; ".join(self.errors.lines))
        self.oracle.all_free()
        server = self.server
        if server.pins:
            self.oracle.fail("leak", f"{server.pins} pins are left")
        for state in (SlotState.RESERVED, SlotState.QUARANTINED):
            if rows := server.in_state(state):
                self.oracle.fail("leak", f"rows {rows[:10]} are still {state.name}")
        if findings := server.check():
            self.oracle.fail("check", "; ".join(findings))
        self.check_arena()
