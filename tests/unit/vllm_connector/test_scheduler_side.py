"""Lookups, loads, stores and block references, step by step."""

import time
from types import SimpleNamespace

import pytest

from lmcache_shm.arena.job import CopyJob
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.client import in_flight
from lmcache_shm.protocol.keys import encode_tokens
from lmcache_shm.vllm.engine_api import WorkerReport
from tools.harness.wait import until

from .rig import TOKENS_AT, Rig, rig_of
from .worlds import full, state, window

PROMPT = list(range(1, 301))  # two chunks of 128 and 44 tokens


def finished(
    *received: str, failed: tuple[str, ...] = (), refused: dict | None = None
) -> SimpleNamespace:
    meta = WorkerReport(refused) if refused else None
    return SimpleNamespace(
        finished_recving=set(received), failed_recving=set(failed), kv_connector_worker_meta=meta
    )


def blocks(job: CopyJob) -> list[tuple[int, list[int]]]:
    """(object group, blocks) of each run of pages."""
    pages = zip(job.groups.tolist(), job.pages(), strict=True)
    return [(group, ids.tolist()) for group, runs in pages for _, _, ids in runs]


# --------------------------------------------------------------------------------------- stores
def test_what_a_step_completes_is_reserved_written_and_held() -> None:
    with rig_of(full(32)) as rig:
        request = rig.request("a", PROMPT)

        meta = rig.prefill(request)

        (job,) = meta.stores
        assert blocks(job) == [(0, rig.tables["a"][0][:4]), (0, rig.tables["a"][0][4:8])]
        assert rig.client.asked == ["step"]
        assert rig.rows(SlotState.RESERVED) == 2
        assert rig.held() == 8
        tokens = encode_tokens(PROMPT[:128])
        at = int(job.offsets[0]) + TOKENS_AT
        assert rig.arena.data[at : at + len(tokens)] == tokens
        assert meta.places[job.arena_id].client == 0


def test_blocks_are_released_and_rows_committed_when_every_writer_has_reported() -> None:
    with rig_of(full(32), world=2) as rig:
        (job,) = rig.prefill(rig.request("a", PROMPT)).stores
        rig.report(job, rank=0)
        rig.step({})
        assert (rig.held(), rig.rows(SlotState.COMMITTED)) == (8, 0)

        rig.report(job, rank=1)
        rig.step({})

        assert (rig.held(), rig.rows(SlotState.COMMITTED)) == (0, 2)


def test_one_failed_rank_is_enough_to_drop_the_rows() -> None:
    with rig_of(full(32), world=2) as rig:
        (job,) = rig.prefill(rig.request("a", PROMPT)).stores
        rig.report(job, rank=0)
        rig.report(job, rank=1, ok=False)

        rig.step({})

        assert (rig.held(), rig.rows(SlotState.COMMITTED), rig.rows(SlotState.RESERVED)) == (
            0,
            0,
            0,
        )


def test_a_rank_that_could_not_begin_counts_as_done() -> None:
    """Its arena was replaced: there is no board to report on, but the blocks must come back."""
    with rig_of(full(32), world=2) as rig:
        (job,) = rig.prefill(rig.request("a", PROMPT)).stores
        rig.report(job, rank=0)

        rig.side.output(finished(refused={job.id: {1}}))
        rig.step({})

        assert (rig.held(), rig.rows(SlotState.COMMITTED)) == (0, 0)


def test_a_finished_request_keeps_only_what_is_being_copied() -> None:
    with rig_of(full(32)) as rig:
        request = rig.request("a", PROMPT)
        rig.prefill(request)

        rig.side.request_finished(request)
        rig.pool.free_blocks([rig.pool.blocks[i] for i in rig.tables.pop("a")[0]])

        assert rig.held() == 8


def test_blocks_come_back_without_a_step() -> None:
    """An idle engine asks how many blocks are free, or resets its cache."""
    with rig_of(full(32)) as rig:
        (job,) = rig.prefill(rig.request("a", PROMPT)).stores
        free = rig.pool.get_num_free_blocks()
        rig.report(job)

        assert rig.manager.reset_prefix_cache()

        assert rig.held() == 0
        assert rig.rows(SlotState.COMMITTED) == 2
        assert rig.pool.get_num_free_blocks() == free  # the request still has its own


def test_blocks_are_not_released_while_vllm_allocates() -> None:
    """VLLM counts what a prefix takes from the free blocks, then the free blocks: nothing may change in between."""
    with rig_of(full(32)) as rig:
        (job,) = rig.prefill(rig.request("a", PROMPT)).stores
        rig.pool.free_blocks([rig.pool.blocks[i] for i in rig.tables.pop("a")[0]])
        counts = []

        def allocate() -> str:
            counts.append(rig.pool.get_num_free_blocks())
            rig.report(job)
            rig.side.in_flight.flush()  # as the thread might, just now
            counts.append(rig.pool.get_num_free_blocks())
            return "blocks"

        rig.allocate = allocate
        assert rig.manager.allocate_slots() == "blocks"

        assert counts[0] == counts[1] == 255 - 8
        assert rig.pool.get_num_free_blocks() == 255


def test_an_idle_engine_commits_by_itself() -> None:
    with rig_of(full(32)) as rig:
        (job,) = rig.prefill(rig.request("a", PROMPT)).stores
        rig.report(job)

        until(lambda: rig.rows(SlotState.COMMITTED) >= 2, "the commit")


def test_a_chunk_is_stored_by_the_step_that_completes_it() -> None:
    """Chunked prefill, then decoding: 100 + 100 + 100 tokens, then one by one."""
    with rig_of(full(32)) as rig:
        request = rig.request("a", PROMPT)
        chunks = [len(rig.prefill(request, 100).stores) for _ in range(3)]
        assert chunks == [0, 1, 1]

        for i in range(84):
            request.all_token_ids.append(1000 + i)
            request.num_tokens += 1
            stores = rig.prefill(request, 1).stores
            assert (len(stores), rig.client.asked) == ((1, ["step"]) if i == 83 else (0, []))


def test_draft_tokens_are_never_stored() -> None:
    """Tokens 383 is sampled, 384 … are drafts: the chunk ends at 384, whose token is not known."""
    with rig_of(full(32)) as rig:
        request = rig.request("a", [*PROMPT, *range(83)])
        rig.prefill(request, 382)
        rig.give_blocks(request, 400)

        meta = rig.step({request: 5}, drafts={"a": [7, 7, 7, 7]})
        assert meta.stores == []

        request.num_computed_tokens = 383  # all rejected
        request.all_token_ids.append(5)
        request.num_tokens += 1
        assert len(rig.step({request: 3}, drafts={"a": [7, 7]}).stores) == 1


def test_what_is_there_already_is_not_stored_again() -> None:
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))

        meta = rig.prefill(rig.request("b", PROMPT))

        assert meta.stores == []
        assert rig.side.counts.total["stores_skipped.exists"] == 2
        assert rig.held() == 0


def test_a_prefix_from_a_cache_is_stored_only_where_it_is_not_known_to_be() -> None:
    """A hot prefix that the engine always finds itself: a new arena gets it nevertheless."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        known = rig.request("b", PROMPT)
        rig.side.matched_tokens(known, 256)
        known.num_computed_tokens = 256
        assert rig.prefill(known).stores == []
        assert "step" not in rig.client.asked

        rig.catalog.clear(rig.space.id)
        rig.registration.known[0].clear()  # as a new registration would
        again = rig.request("c", PROMPT)
        rig.side.matched_tokens(again, 256)
        again.num_computed_tokens = 256
        assert len(rig.prefill(again).stores[0].rows) == 2


def test_each_group_is_stored_by_what_is_in_its_table() -> None:
    """The window's tail of chunk 0 has gone (a local hit of 160 tokens), chunk 1's is there."""
    with rig_of(full(32), window(64, 32)) as rig:
        request = rig.request("a", PROMPT)
        rig.give_blocks(request, 160)
        rig.tables["a"][1] = [0, 0, 0, 0, rig.tables["a"][1][4]]
        request.num_computed_tokens = 160

        (job,) = rig.prefill(request).stores

        assert sorted((group, len(ids)) for group, ids in blocks(job)) == [(0, 4), (0, 4), (1, 2)]


def test_states_are_stored_where_steps_end_or_vllm_offers_them() -> None:
    with rig_of(full(64), state(64)) as rig:
        request = rig.request("a", PROMPT)
        ends = rig.prefill(request, 128).stores
        assert sorted(ends[0].groups.tolist()) == [0, 1]

        rig.give_blocks(request, 300)
        offered = rig.tables["a"][1][3]
        meta = rig.step({request: 172}, offers={"a": [(1, offered, 256)]})

        assert [ids for group, ids in blocks(meta.stores[0]) if group == 1] == [[offered]]


def test_a_state_that_no_step_ended_on_is_not_stored() -> None:
    with rig_of(full(64), state(64)) as rig:
        (job,) = rig.prefill(rig.request("a", PROMPT)).stores

        assert set(job.groups.tolist()) == {0}
        assert rig.side.counts.total["stores_skipped.no_state"] == 2


def test_an_offer_that_comes_late_is_still_taken() -> None:
    """The chunk's pages were stored by an earlier step."""
    with rig_of(full(64), state(64)) as rig:
        request = rig.request("a", PROMPT)
        rig.prefill(request, 200)
        rig.give_blocks(request, 300)
        block = rig.tables["a"][1][1]

        (job,) = rig.step({request: 10}, offers={"a": [(1, block, 128)]}).stores

        assert blocks(job) == [(1, [block])]
        assert rig.step({request: 10}, offers={"a": [(1, block, 128)]}).stores == []


def test_a_state_whose_tokens_are_still_being_sampled_waits_for_them() -> None:
    """Asynchronous scheduling: the step that ends on the boundary does not know its last token yet."""
    with rig_of(full(64), state(64)) as rig:
        request = rig.request("a", PROMPT[:127])
        rig.prefill(request)
        assert rig.held() == 0

        rig.give_blocks(request, 128)
        assert rig.step({request: 1}).stores == []  # token 128 is a placeholder
        assert rig.held() == 1

        request.all_token_ids.append(5)
        request.num_tokens += 1
        rig.give_blocks(request, 129)
        block, rig.tables["a"][1][1] = rig.tables["a"][1][1], 0  # vLLM has let go of it
        (job,) = rig.step({request: 1}).stores

        assert [ids for group, ids in blocks(job) if group == 1] == [[block]]
        assert (
            rig.pool.blocks[block].ref_cnt == 2
        )  # the request's, which this test kept, and the copy's


@pytest.mark.parametrize("how", ["finish", "preempt"])
def test_a_waiting_state_is_released_with_its_request(how: str) -> None:
    with rig_of(full(64), state(64)) as rig:
        request = rig.request("a", PROMPT[:127])
        rig.prefill(request)
        rig.give_blocks(request, 128)
        rig.step({request: 1})

        if how == "finish":
            rig.side.request_finished(request)
        else:
            rig.step({}, preempted={"a"})

        assert rig.held() == 0


def test_a_full_arena_skips_and_counts() -> None:
    with rig_of(full(32), slots=16) as rig:
        long = rig.request("a", list(range(128 * 20)))
        (job,) = rig.prefill(long).stores

        assert len(job.rows) < 20
        assert rig.side.counts.total["stores_skipped.full"] == 20 - len(job.rows)


# -------------------------------------------------------------------------------------- lookups
def test_a_lookup_is_one_message_and_idempotent() -> None:
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        request = rig.request("b", PROMPT)
        rig.client.asked.clear()

        assert rig.side.matched_tokens(request, 0) == (256, True)
        assert rig.side.matched_tokens(request, 0) == (256, True)

        assert rig.client.asked == ["acquire"]
        assert rig.pins == 2


def test_another_local_hit_asks_again_and_keeps_one_lease() -> None:
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        request = rig.request("b", PROMPT)
        rig.side.matched_tokens(request, 0)

        assert rig.side.matched_tokens(request, 128) == (128, True)

        assert (len(rig.client.leases), rig.pins) == (1, 1)


def test_what_is_not_wanted_is_unpinned() -> None:
    """The request ends, or vLLM allocates without the offered tokens."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        ended, refused = rig.request("b", PROMPT), rig.request("c", PROMPT)
        rig.side.matched_tokens(ended, 0)
        rig.side.matched_tokens(refused, 0)

        rig.side.request_finished(ended)
        rig.side.allocated(refused, (), 0)
        rig.step({})

        assert rig.pins == 0


def test_at_least_one_token_is_left_to_compute() -> None:
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT[:256]))

        assert rig.side.matched_tokens(rig.request("b", PROMPT[:256]), 0) == (128, True)


def test_a_request_that_must_not_read_is_not_looked_up() -> None:
    """Prompt logprobs, for one. What it computes is stored all the same."""
    with rig_of(full(32)) as rig:
        request = rig.request("b", PROMPT, skip_reading_prefix_cache=True)

        assert rig.side.matched_tokens(request, 0) == (0, False)
        assert rig.client.asked == []
        assert len(rig.prefill(request).stores) == 1


def test_tenants_do_not_meet() -> None:
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT, cache_salt="one"))

        assert rig.side.matched_tokens(rig.request("b", PROMPT), 0) == (0, False)
        assert rig.side.matched_tokens(rig.request("c", PROMPT, cache_salt="two"), 0) == (0, False)
        assert rig.side.matched_tokens(rig.request("d", PROMPT, cache_salt="one"), 0) == (256, True)


def test_a_request_without_identity_is_left_alone() -> None:
    with rig_of(full(32)) as rig:
        image = SimpleNamespace(
            identifier=None, modality="image", mm_position=SimpleNamespace(offset=0, length=9)
        )
        request = rig.request("a", PROMPT, mm_features=[image])

        assert rig.side.matched_tokens(request, 0) == (0, False)
        assert rig.prefill(request).stores == []
        assert rig.client.asked == []


@pytest.mark.parametrize("what", ["tokens", "digest", "key", "namespace", "group"])
def test_a_slot_that_is_not_what_it_should_be_is_a_miss(what: str) -> None:
    """A collision of keys, or worse: the slots themselves must confirm the hit."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        hot, cold = rig.arena.hot, rig.arena.cold
        row = int((hot["state"] == SlotState.COMMITTED).nonzero()[0][1])
        if what == "tokens":
            at = int(cold["offset"][row]) + TOKENS_AT + 20
            rig.arena.data[at] ^= 1
        elif what == "digest":
            cold["extra_digest"][row] = 1
        elif what == "key":
            cold["key"][row] ^= 1
        else:
            hot[what][row] += 1

        assert rig.side.matched_tokens(rig.request("b", PROMPT), 0) == (0, False)

        assert rig.side.counts.total["misses.collision"] == 1
        rig.side.in_flight.flush()
        assert rig.client.leases == {}


def test_an_unreachable_server_is_a_miss() -> None:
    with rig_of(full(32)) as rig:
        rig.client.up = False
        request = rig.request("a", PROMPT)

        assert rig.side.matched_tokens(request, 0) == (0, False)
        assert rig.prefill(request).stores == []


def test_a_producer_only_stores_and_a_consumer_only_loads() -> None:
    """VLLM's kv_role."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        rig.start.reads = False
        assert rig.side.matched_tokens(rig.request("b", PROMPT), 0) == (0, False)

        rig.start.reads, rig.start.writes = True, False
        assert rig.side.matched_tokens(rig.request("c", PROMPT), 0) == (256, True)
        assert rig.prefill(rig.request("d", PROMPT[::-1])).stores == []


def test_a_bug_of_ours_does_not_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose stores cannot be planned still carries its loads."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        request = rig.request("b", PROMPT)
        rig.side.matched_tokens(request, 0)
        rig.side.allocated(request, rig.give_blocks(request, 256), 256)
        monkeypatch.setattr(rig.side.planner, "plan", lambda *_: 1 / 0)

        meta = rig.step({})

        assert len(meta.loads) == 1
        assert rig.side.counts.total["errors"] == 1


# ---------------------------------------------------------------------------------------- loads
def test_a_load_names_rows_generations_and_blocks() -> None:
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        request = rig.request("b", PROMPT)
        rig.side.matched_tokens(request, 0)
        tables = rig.give_blocks(request, 256)

        rig.side.allocated(request, tables, 256)
        (job,) = rig.step({}).loads

        assert job.req_id == "b"
        assert job.id == 2  # counted with the stores
        assert job.generations.tolist() == rig.arena.hot["generation"][job.rows].tolist()
        assert blocks(job) == [(0, tables[0][:4]), (0, tables[0][4:])]


def test_a_step_says_so_where_nothing_can_go_on_before_a_load_has_ended() -> None:
    """Only then the workers may rest: nobody is kept waiting by it."""
    with rig_of(full(32)) as rig:
        stored = rig.request("a", PROMPT)
        rig.store(stored)
        assert not rig.step({}).waiting
        rig.side.request_finished(stored)
        assert not rig.step({}).waiting  # without any request
        request = rig.request("b", PROMPT)
        rig.side.matched_tokens(request, 0)
        rig.side.allocated(request, rig.give_blocks(request, 256), 256)

        assert rig.step({}).waiting
        another = rig.request("c", PROMPT[::-1])
        assert not rig.step({}).waiting
        assert not rig.prefill(another).waiting
        rig.side.request_finished(another)
        assert rig.step({}).waiting

        rig.side.output(finished("b"))
        assert not rig.step({}).waiting


def test_pins_last_until_the_workers_have_reported() -> None:
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        request = rig.request("b", PROMPT)
        rig.side.matched_tokens(request, 0)
        rig.side.allocated(request, rig.give_blocks(request, 256), 256)
        rig.step({})
        rig.side.request_finished(request)  # aborted meanwhile: the copy goes on
        rig.step({})
        assert rig.pins == 2

        rig.side.output(finished("b"))
        rig.step({})

        assert rig.pins == 0


def loaded(rig: Rig) -> None:
    """Request b got two chunks from the arena, and the workers say so."""
    rig.store(rig.request("a", PROMPT))
    request = rig.request("b", PROMPT)
    rig.side.matched_tokens(request, 0)
    rig.side.allocated(request, rig.give_blocks(request, 256), 256)
    rig.step({})
    rig.client.asked.clear()
    rig.side.output(finished("b"))


def test_a_lease_goes_with_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no round trip of its own between a load and the first token."""
    monkeypatch.setattr(in_flight, "RELEASE_S", 60.0)
    with rig_of(full(32)) as rig:
        loaded(rig)
        rig.step({})
        rig.step({})
        assert (rig.pins, rig.client.asked) == (2, [])

        rig.prefill(rig.request("c", [*PROMPT[:-1], 7, 8]))

        assert (rig.pins, rig.client.asked) == (0, ["step"])


def test_a_lease_is_not_deferred_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "RELEASE_S", 0.05)
    monkeypatch.setattr(in_flight, "IDLE_S", 60.0)  # the steps themselves have to do it
    with rig_of(full(32)) as rig:
        loaded(rig)
        end = time.monotonic() + 5
        while rig.pins and time.monotonic() < end:
            rig.step({})
            time.sleep(0.002)

        assert (rig.pins, rig.client.asked) == (0, ["step"])


def test_vllm_may_ask_about_allocation_twice() -> None:
    """The second call, after the load, names no external tokens."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        request = rig.request("b", PROMPT)
        rig.side.matched_tokens(request, 0)
        rig.side.allocated(request, rig.give_blocks(request, 256), 256)
        rig.side.output(finished("b"))

        rig.side.allocated(request, rig.tables["b"], 0)

        assert len(rig.step({}).loads) == 1


def test_a_failed_load_is_never_offered_again() -> None:
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        request = rig.request("b", PROMPT)
        rig.side.matched_tokens(request, 0)
        rig.side.allocated(request, rig.give_blocks(request, 256), 256)
        rig.step({})

        rig.side.output(finished("b", failed=("b",)))

        assert rig.side.matched_tokens(request, 0) == (None, False)  # passed over once
        assert rig.side.matched_tokens(request, 0) == (0, False)
        rig.step({})
        assert rig.pins == 0


@pytest.mark.parametrize("tokens", [100, 512])
def test_a_load_that_cannot_be_planned_fails_instead_of_hanging(tokens: int) -> None:
    """VLLM waits for what it allocated for: the workers are told to report it as failed."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        request = rig.request("b", PROMPT)
        rig.side.matched_tokens(request, 0)

        rig.side.allocated(request, rig.give_blocks(request, 256), tokens)
        meta = rig.step({})

        assert (meta.failed, meta.loads) == (["b"], [])
        assert rig.pins == 0


# ------------------------------------------------------------------------------- resets, restarts
def test_a_reset_forgets_everything_and_stores_nothing_older() -> None:
    """Weights have changed: what a running request has computed must not be found later."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        running, loading = rig.request("b", PROMPT[:200]), rig.request("c", PROMPT)
        rig.prefill(running, 100)
        rig.side.matched_tokens(loading, 0)
        rig.side.allocated(loading, rig.give_blocks(loading, 256), 256)
        rig.step({})

        assert rig.side.reset()

        assert rig.rows(SlotState.COMMITTED) == 2  # pinned until the load ends
        assert rig.side.matched_tokens(rig.request("d", PROMPT), 0) == (0, False)
        meta = rig.prefill(running)
        assert meta.stores == []
        rig.side.output(finished("c"))
        assert rig.freed == ["c"]


def test_a_reset_while_the_server_is_away_is_done_before_anything_else() -> None:
    """What comes first after it is asked for, and stored, in another namespace; the old one keeps what it has."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        old = rig.start.latest
        rig.client.up = False
        assert rig.side.reset()
        rig.client.up = True

        assert rig.side.matched_tokens(rig.request("b", PROMPT), 0) == (0, False)
        assert rig.start.latest.namespace != old.namespace
        assert rig.rows(SlotState.COMMITTED) == 2
        rig.store(rig.request("c", PROMPT))
        assert rig.rows(SlotState.COMMITTED) == 4


def changed(rig: Rig, count: int, at: float, *, refused: int = 0) -> None:
    """A step's report of rank 0: its weights were changed."""
    told = WorkerReport({refused: {0}} if refused else {}, weights={0: (count, at)})
    rig.side.output(
        SimpleNamespace(failed_recving=None, finished_recving=None, kv_connector_worker_meta=told)
    )


def test_a_change_that_a_worker_tells_of_moves_the_engine_on() -> None:
    """Nobody reset anything: what was computed and what is being loaded is of older weights."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        old = rig.start.latest
        running, loading = rig.request("b", PROMPT[:200]), rig.request("c", PROMPT)
        rig.prefill(running, 100)
        rig.side.matched_tokens(loading, 0)
        rig.side.allocated(loading, rig.give_blocks(loading, 256), 256)
        assert rig.step({}).loads
        changed(rig, 1, time.monotonic())

        meta = rig.prefill(running)

        assert (meta.stores, meta.weights) == ([], {0: 1})
        _, cancelled = rig.side._loading.ended("c")
        assert cancelled
        assert rig.start.latest.namespace != old.namespace
        assert rig.side.matched_tokens(rig.request("d", PROMPT), 0) == (0, False)


def test_a_change_of_before_the_reset_that_followed_it_moves_nothing() -> None:
    """The usual order: update, reset, serve. What was refused for the wrong count is stored after all."""
    with rig_of(full(32)) as rig:
        at = time.monotonic()
        rig.side.reset()
        request = rig.request("a", PROMPT[:300])
        rig.side.matched_tokens(request, 0)
        (job,) = rig.prefill(request, 200).stores
        here = rig.start.latest
        changed(rig, 3, at, refused=job.id)

        meta = rig.prefill(request, 50)

        assert rig.start.latest is here
        assert meta.weights == {0: 3}
        (job,) = meta.stores
        assert len(job.rows) == 1
        rig.report(job)
        rig.step({})
        assert rig.rows(SlotState.COMMITTED) == 1


def test_blocks_of_vllms_own_cache_that_survive_a_change_are_not_stored() -> None:
    """Until it is emptied, too; what is computed after that may be stored."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        changed(rig, 1, time.monotonic())
        old = rig.request("b", PROMPT)
        rig.side.matched_tokens(old, 64)
        assert rig.prefill(old).stores == []
        assert rig.manager.reset_prefix_cache()
        new = rig.request("c", PROMPT)
        rig.side.matched_tokens(new, 64)

        assert len(rig.prefill(new).stores) == 1


def test_vllms_own_cache_that_was_emptied_before_the_change_holds_nothing_old() -> None:
    """The order of vLLM's own API: pause (which empties it), update, resume."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        assert rig.manager.reset_prefix_cache()
        at = time.monotonic()
        rig.side.matched_tokens(rig.request("b", PROMPT), 0)
        rig.prefill(rig.request("c", PROMPT))
        changed(rig, 1, at)
        new = rig.request("d", PROMPT)
        rig.side.matched_tokens(new, 64)

        assert len(rig.prefill(new).stores) == 1


def test_a_request_that_is_computed_anew_after_a_reset_is_stored() -> None:
    with rig_of(full(32)) as rig:
        request = rig.request("a", PROMPT)
        rig.prefill(request, 100)
        rig.side.reset()

        request.num_computed_tokens = 0  # preempted
        rig.side.matched_tokens(request, 0)

        assert len(rig.prefill(request).stores) == 1


def test_answers_of_another_server_are_not_used() -> None:
    """It was restarted between two steps; the new registration comes with the next call."""
    with rig_of(full(32)) as rig:
        rig.store(rig.request("a", PROMPT))
        rig.client.boot = b"another"

        assert rig.side.matched_tokens(rig.request("b", PROMPT), 0) == (0, False)
        meta = rig.prefill(rig.request("c", list(range(900, 1200))))

        assert meta.stores == []
        assert rig.rows(SlotState.RESERVED) == 0
        assert rig.held() == 0
        rig.side.in_flight.flush()
        assert rig.client.leases == {}


def test_waiting_for_copies_is_proposed_only_if_it_frees_blocks() -> None:
    with rig_of(full(32)) as rig:
        request = rig.request("a", PROMPT)
        (job,) = rig.prefill(request).stores
        assert not rig.side.has_pending_block_frees()  # the request has them, too

        rig.pool.free_blocks([rig.pool.blocks[i] for i in rig.tables.pop("a")[0]])
        assert rig.side.has_pending_block_frees()
        rig.report(job)
        assert rig.side.has_pending_block_frees(), "what was released just now helps the next step"
        assert not rig.side.has_pending_block_frees()
        assert rig.held() == 0


def test_the_engine_steps_on_while_blocks_are_held() -> None:
    with rig_of(full(32)) as rig:
        assert not rig.side.has_pending_work()
        (job,) = rig.prefill(rig.request("a", PROMPT)).stores
        assert rig.side.has_pending_work()
        rig.report(job)
        rig.step({})
        assert not rig.side.has_pending_work()


# --------------------------------------------------------------------------------------- budget
def test_a_step_without_a_completed_chunk_costs_next_to_nothing() -> None:
    """64 decoding requests: at most 100 µs of the scheduler's time, and no message."""
    with rig_of(full(32), blocks=4096) as rig:
        requests = [rig.request(f"r{i}", [i, *PROMPT[:129]]) for i in range(64)]
        for request in requests:
            for job in rig.prefill(request).stores:
                rig.report(job)
        rig.step({})
        took = []
        for _ in range(50):
            begin = time.perf_counter()
            rig.step(dict.fromkeys(requests, 1))
            took.append(time.perf_counter() - begin)
            for request in requests:
                request.num_tokens += 1

        assert rig.client.asked == []
        assert min(took) < 100e-6 + 64 * 1e-6, "the test's own work on 64 requests is counted, too"
