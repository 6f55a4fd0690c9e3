"""Our own code, broken on purpose in one place: each must make the harness fail."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from lmcache_shm.client import copy_plan, lookup, requests
from lmcache_shm.client import store_planner as planner
from lmcache_shm.client.in_flight import InFlightStores
from lmcache_shm.protocol import rules as hits
from lmcache_shm.protocol.rules import Window
from lmcache_shm.transfer.guard import SlotGuard
from lmcache_shm.vllm import identity, scheduler

Enter = Callable[[ExitStack], None]


@dataclass(frozen=True)
class Mutation:
    """`caught_as`: kinds of violation that show it; `families`: geometries where it can show."""

    enter: Enter
    caught_as: tuple[str, ...]
    families: tuple[str, ...]
    steal: bool = False
    """It only shows when slots are given away under a load."""
    drafts: bool = False
    """It only shows with speculation."""
    calm: bool = False
    """It only shows when nothing else is lost."""
    resets: bool = False
    """It only shows when the engine's cache is reset while there is something in it."""


MUTATIONS: dict[str, Mutation] = {}


def mutation(*caught_as: str, families: tuple[str, ...], **only: bool) -> Callable[[Enter], Enter]:
    def enter_it(enter: Enter) -> Enter:
        MUTATIONS[enter.__name__] = Mutation(enter, caught_as, families, **only)
        return enter

    return enter_it


@contextmanager
def broken(name: str) -> Iterator[None]:
    with ExitStack() as patches:
        MUTATIONS[name].enter(patches)
        yield


# ------------------------------------------------------------------------------------- blocks
@mutation("changed_hands", "store_source", families=("full", "windows", "gdn"))
def hold_no_blocks(patches: ExitStack) -> None:
    """A store reads blocks on which it has no reference."""
    entered = InFlightStores.add

    def forgetting(
        self: Any, registration: Any, job: Any, keys: Any, blocks: Any, **more: Any
    ) -> None:
        blocks[0].pool.free_blocks(blocks)
        entered(self, registration, job, keys, [], **more)

    patches.enter_context(patch.object(InFlightStores, "add", forgetting))


@mutation("changed_hands", "store_source", families=("full", "windows"))
def let_go_before_the_last_copy(patches: ExitStack) -> None:
    """Blocks are released when the job was handed to the workers, not when they have reported."""
    planned = planner.Batch.open_jobs

    def hasty(self: Any, answer: Any) -> Any:
        jobs = planned(self, answer)
        for job in jobs:
            entry = self._in_flight._stores[job.id]
            blocks, entry.blocks = entry.blocks, []
            self._pool.free_blocks(blocks)
        return jobs

    patches.enter_context(patch.object(planner.Batch, "open_jobs", hasty))


@mutation("held_blocks", "engine_died", "stuck", families=("full",))
def never_let_go(patches: ExitStack) -> None:
    """Blocks of ended stores stay referenced."""
    patches.enter_context(
        patch.object(scheduler.SchedulerSide, "_release_blocks", lambda self: False)
    )


@mutation("null_block", "store_source", families=("windows", "local"))
def accept_a_null_block(patches: ExitStack) -> None:
    """A page that has left the window is stored from wherever the table points."""
    checked = copy_plan.storable

    def blind(plan: Any, group: Any, chunk: int, tables: Any, states: Any, null: int = 0) -> Any:
        return checked(plan, group, chunk, tables, states, -1)

    patches.enter_context(patch.object(planner, "storable", blind))


@mutation("store_source", "stored", "load", families=("windows", "deepseek_v4"))
def shift_a_stored_window_by_a_page(patches: ExitStack) -> None:
    """The tail that is stored begins one page too early."""

    def shifted(part: Any, chunk: int, tables: Any) -> Any:
        start = chunk * part.pages_per_chunk
        back = int(isinstance(part.group.rule, Window) and part.first_page > 0)
        table = tables[part.group.index]
        return table[start + part.first_page - back : start + part.pages_per_chunk - back]

    patches.enter_context(patch.object(copy_plan, "_tail", shifted))


@mutation("load", "read", families=("windows", "full"))
def shift_a_load_by_a_page(patches: ExitStack) -> None:
    """Pages arrive in their neighbours' blocks."""
    right = copy_plan._pages

    def shifted(part: Any, chunk: int, local: int, table: Any, null: int) -> Any:
        first, ids = right(part, chunk, local, table, null)
        return first, [*ids[-1:], *ids[:-1]]

    patches.enter_context(patch.object(copy_plan, "_pages", shifted))


@mutation("overwrite", "plan", "load", families=("full", "gdn", "windows"))
def load_over_what_the_engine_has(patches: ExitStack) -> None:
    """The blocks of the local prefix are written again."""
    right = copy_plan.plan_load

    def greedy(
        plan: Any, first: Any, held: int, local: int, total: int, tables: Any, null: int = 0
    ) -> Any:
        return right(
            plan,
            first,
            held,
            max(0, local - plan.groups[0].parts[0].group.block_size),
            total,
            tables,
            null,
        )

    patches.enter_context(patch.object(scheduler, "plan_load", greedy))


# ------------------------------------------------------------------------------------- states, drafts
@mutation("store_source", "stored", "engine_died", families=("gdn", "gdn_any", "gdn_window"))
def store_a_state_from_inside_a_step(patches: ExitStack) -> None:
    """The state at the step's end is taken for the one at the last boundary in it."""
    right = copy_plan.step_states

    def rounded(plan: Any, tables: Any, offers: Any, ends: Any, null: int = 0) -> Any:
        size = plan.chunk_size
        return right(plan, tables, offers, [-(-end // size) * size for end in ends], null)

    patches.enter_context(patch.object(planner, "step_states", rounded))


@mutation(
    "store_source", "stored", "engine_died", families=("gdn", "gdn_fine", "gdn_window"), drafts=True
)
def trust_the_table_while_drafting(patches: ExitStack) -> None:
    """A state is read from its positional place although speculative columns are in use."""

    def trusting(state: Any, start: int, n: int, *, drafts: bool) -> list[int]:
        return [start + n]

    patches.enter_context(patch.object(planner, "exact_ends", trusting))


# ------------------------------------------------------------------------------------- slots
@mutation("load", "read", families=("full", "gdn", "windows"), steal=True)
def ignore_the_generation(patches: ExitStack) -> None:
    """A slot that changed hands under a copy is believed."""
    patches.enter_context(patch.object(SlotGuard, "changed_hands", lambda self, job, at=None: ""))


# "lost_pin": the last rank's copy finds its slot committed already and refuses.
@mutation(
    "changed_hands", "stored", "load", "read", "lost_pin", families=("full_tp2", "windows_tp2")
)
def commit_before_the_last_rank(patches: ExitStack) -> None:
    """One rank's report publishes the slots of all."""
    right = scheduler.SchedulerSide._current

    def hasty(self: Any) -> Any:
        registration = right(self)
        if registration is not None:
            registration.writers = np.arange(1)
        return registration

    patches.enter_context(patch.object(scheduler.SchedulerSide, "_current", hasty))


@mutation("stored", "load", "read", families=("full", "windows", "gdn"))
def commit_what_failed(patches: ExitStack) -> None:
    """A store whose copy failed is published."""
    right = InFlightStores._reported

    def hopeful(self: Any) -> Any:
        return [(job, True) for job, _ in right(self)]

    patches.enter_context(patch.object(InFlightStores, "_reported", hopeful))


@mutation("leak", families=("full", "windows"))
def keep_the_lease(patches: ExitStack) -> None:
    """A look-up's pins are never given back."""
    patches.enter_context(patch.object(InFlightStores, "release", lambda self, lease: None))


@mutation("lost_pin", families=("full", "gdn"))
def unpin_before_the_load(patches: ExitStack) -> None:
    """The lease is given back when blocks were allocated, before anything was copied."""
    right = scheduler.SchedulerSide.allocated

    def hasty(self: Any, request: Any, tables: Any, external: int) -> None:
        state = self._requests.get(request.request_id)
        lease = state.hit.lease if external and state is not None and state.hit is not None else 0
        right(self, request, tables, external)
        if lease:
            self.in_flight.release(lease)
            self.in_flight.flush()

    patches.enter_context(patch.object(scheduler.SchedulerSide, "allocated", hasty))


# ------------------------------------------------------------------------------------- hits
@mutation("invented", "plan", families=("full", "windows"))
def pretend_a_hit(patches: ExitStack) -> None:
    """One chunk more than there is is offered."""
    right = lookup.look_up

    def boastful(
        client: Any, registration: Any, keys: Any, local: int, num: int, *rest: Any
    ) -> Any:
        hit, why = right(client, registration, keys, local, num, *rest)
        if hit is not None and (hit.n_chunks + 1) * registration.plan.chunk_size < num:
            hit = replace(hit, n_chunks=hit.n_chunks + 1)
        return hit, why

    patches.enter_context(patch.object(scheduler, "look_up", boastful))


@mutation("invented", "missed", "load", "read", families=("windows", "deepseek_v4", "windows_tp2"))
def a_window_one_page_too_short(patches: ExitStack) -> None:
    """Hits ask for less than the window."""
    right = hits._first_needed

    def short(rule: Any, chunk_size: int, n: Any, local: int) -> Any:
        if isinstance(rule, Window):
            rule = Window(max(rule.tokens - chunk_size, 1))
        return right(rule, chunk_size, n, local)

    patches.enter_context(patch.object(hits, "_first_needed", short))


@mutation("invented", "missed", families=("gdn", "gdn_any", "mamba2"))
def apply_the_hit_of_attention_to_states(patches: ExitStack) -> None:
    """Recurrent groups are not asked whether they have the state."""
    right = hits._has

    def careless(rule: Any, chunk_size: int, n: Any, local: int, have: Any) -> Any:
        if isinstance(rule, hits.Recurrent):
            have = np.ones_like(have)
        return right(rule, chunk_size, n, local, have)

    patches.enter_context(patch.object(hits, "_has", careless))


@mutation("not_stored", families=("full", "gdn"), calm=True)
def forget_to_store_the_last_chunk(patches: ExitStack) -> None:
    """The writer stops one chunk early: nothing wrong is served, but what could be found is not there."""
    right = requests.RequestState.advance

    def hasty(self: Any, chunk: int) -> None:
        right(self, chunk + 1)

    patches.enter_context(patch.object(requests.RequestState, "advance", hasty))


@mutation("key", "read", "load", families=("full", "windows"))
def leave_the_salt_out_of_the_key(patches: ExitStack) -> None:
    """Two tenants share a prefix."""
    patches.enter_context(patch.object(identity, "extra_of", lambda *_: None))


@mutation("offer", families=("full", "gdn"))
def offer_again_after_a_failed_load(patches: ExitStack) -> None:
    """A request whose load failed is offered the same again."""
    right = scheduler.SchedulerSide.matched_tokens

    def forgetful(self: Any, request: Any, local: int) -> Any:
        state = self.on_new_request(request)
        state.no_external = False
        return right(self, request, local)

    patches.enter_context(patch.object(scheduler.SchedulerSide, "matched_tokens", forgetful))


# ------------------------------------------------------------------------------------- resets
@mutation("engine_died", families=("gdn", "gdn_any", "gdn_window"), resets=True)
def hold_states_over_a_reset(patches: ExitStack) -> None:
    """Recurrent states whose tokens are not known yet stay referenced while the engine's cache is reset."""
    right, giving = scheduler.SchedulerSide._give_up_blocks, [False]

    def give_up(self: Any) -> bool:
        giving[0] = True
        try:
            right(self)
        finally:
            giving[0] = False
        return False  # nor count them as if they were free

    drop = scheduler.SchedulerSide._drop_states
    patches.enter_context(patch.object(scheduler.SchedulerSide, "_give_up_blocks", give_up))
    patches.enter_context(
        patch.object(
            scheduler.SchedulerSide,
            "_drop_states",
            lambda self, state: None if giving[0] else drop(self, state),
        )
    )


@mutation("engine_died", "reset", families=("full", "gdn", "windows_tp2"), resets=True)
def keep_loaded_prefixes_over_a_reset(patches: ExitStack) -> None:
    """A request that does not run keeps the blocks it has loaded a prefix into."""
    right = scheduler.SchedulerSide._holds_for_us

    def running_only(self: Any, req_id: str) -> bool:
        state = self._requests.get(req_id)
        return not (state is not None and state.loading) and bool(right(self, req_id))

    patches.enter_context(patch.object(scheduler.SchedulerSide, "_holds_for_us", running_only))


@mutation("engine_died", families=("full", "gdn", "windows"), resets=True)
def count_blocks_of_steps_under_way(patches: ExitStack) -> None:
    """What vLLM frees when a step has ended is in the way of a reset."""
    right = scheduler.SchedulerSide._give_up_blocks
    patches.enter_context(
        patch.object(scheduler.SchedulerSide, "_give_up_blocks", lambda self: right(self) and False)
    )


@mutation(
    "changed_hands", "store_source", "stored", "load", "read", "overwrite",
    families=("full", "windows", "gdn"), resets=True,
)  # fmt: skip
def reset_under_copies(patches: ExitStack) -> None:
    """Nobody waits for what reads the engine's blocks, or writes into them."""
    right = scheduler.SchedulerSide._give_up_blocks

    def hasty(self: Any) -> bool:
        self.wait_flushed = lambda timeout_s, *, loads: True
        try:
            return bool(right(self))
        finally:
            del self.wait_flushed

    patches.enter_context(patch.object(scheduler.SchedulerSide, "_give_up_blocks", hasty))
