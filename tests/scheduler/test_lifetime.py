"""Blocks, leases and requests from beginning to end: preempted, aborted, evicted, late, failed, restarted."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
from vllm.v1.request import RequestStatus

from lmcache_shm.client.loads import LoadAdmission
from tests.scheduler.lab import Lab
from tests.scheduler.late import Pace
from tests.scheduler.oracle import Violation
from tools.harness.wait import until


# ------------------------------------------------------------------------------------- stores
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_block_that_is_being_stored_is_given_to_nobody(asynchronous: bool, instance: str) -> None:
    """The request has ended, the copy has not: other requests run meanwhile, and the bytes are still right."""
    with Lab("full", instance, asynchronous=asynchronous, room=3.0) as lab:
        first = lab.prompt(20 * lab.chunk + 1, seed=1)
        lab.hold()
        lab.add(first)
        lab.run(idle_too=False)
        held = [b for b in lab.engine.oracle.pool.blocks if b.ref_cnt and not b.is_null]
        assert 20 == len(held)
        for seed in range(2, 6):
            lab.add(lab.prompt(300, seed=seed))
        lab.run(idle_too=False)

        lab.wipe()
        assert 20 * lab.chunk == lab.ask(first).external_tokens


def test_a_preempted_requests_blocks_are_kept_until_they_are_stored(instance: str) -> None:
    """Preemption frees blocks at once; what was planned to be copied from them stays, then is found."""
    with Lab("full", instance, pace=Pace(40, 0.2), room=1.2, max_len=320, step=64) as lab:
        requests = [lab.add(lab.prompt(100, seed=n), 120) for n in range(4)]
        lab.run()
        assert lab.engine.resumed > 0, "nobody was preempted"

        lab.rest()
        for n, _ in enumerate(requests):
            lab.wipe()
            assert 96 <= lab.ask(lab.prompt(100, seed=n)).external_tokens


def test_waiting_for_copies_is_preferred_to_preempting_somebody(instance: str) -> None:
    """When only copies keep blocks from being free, the engine does not throw a running request out."""
    with Lab("full", instance, room=1.0, max_len=320, step=128) as lab:
        lab.hold()
        lab.add(lab.prompt(161, seed=1))
        lab.run(idle_too=False)
        running = lab.add(lab.prompt(100, seed=2), 150)
        lab.turns(140)
        assert "RUNNING" == lab.status(running)
        assert 0 == lab.engine.resumed

        lab.release()
        lab.run()
        assert 0 == lab.engine.resumed


@pytest.mark.parametrize("family", ["full", "gdn", "windows"])
def test_a_store_that_fails_leaves_nothing_behind(family: str, instance: str) -> None:
    """Its slots are free again, its blocks too, and the next request may store them."""
    with Lab(family, instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.hold()
        lab.add(prompt)
        lab.run(idle_too=False)
        lab.finish("store", fail="deadline")
        lab.rest()
        assert {} == lab.cache.stored()
        lab.wipe()
        lab.ask(prompt)
        lab.wipe()

        assert 4 * lab.chunk == lab.ask(prompt).external_tokens


def test_an_idle_engine_commits_and_lets_go_without_a_step(instance: str) -> None:
    """The last request has ended and nobody steps the engine: its stores become visible, its prefix cache can be reset."""
    with Lab("full", instance, own_threads=True) as lab:
        lab.hold()
        lab.add(lab.prompt(4 * lab.chunk + 1))
        lab.run(idle_too=False)
        for engine in lab.cache.engines:
            engine.finish()
        until(lambda: len(lab.cache.stored()) == 4)

        assert lab.scheduler.reset_prefix_cache()


# ------------------------------------------------------------------------------------- look-ups
def test_look_ups_that_are_repeated_for_lack_of_blocks_cost_one_lease(instance: str) -> None:
    """A request that cannot be admitted is asked about in every step: the answer and the pins stay the same,
    and what it computes later is stored from the right place on."""
    with Lab("full", instance, room=1.0, max_len=320, step=128) as lab:
        wanted = lab.prompt(161, seed=1)
        lab.ask(wanted)
        lab.wipe()
        running = lab.add(lab.prompt(250, seed=2), 60)
        lab.turns(3)
        waiting = lab.add([*wanted, *lab.prompt(48, seed=9)])
        before = lab.server.service.stats.latency["acquire"].count
        lab.turns(20)
        assert ("RUNNING", "WAITING") == (lab.status(running), lab.status(waiting))
        assert 1 == lab.server.service.stats.latency["acquire"].count - before
        assert 20 == lab.server.pins

        lab.run()
        lab.rest()
        assert 160 == lab.engine.asked[waiting].external_tokens
        assert set(range(26)) <= set(lab.stored_chunks()[0])


@pytest.mark.parametrize("family", ["full", "gdn", "windows_one_object"])
def test_nothing_leaves_the_arena_between_look_up_and_load(family: str, instance: str) -> None:
    """Pins last until the copy has ended, whatever else is evicted meanwhile."""
    with Lab(family, instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        lab.hold()
        again = lab.add(prompt)
        lab.turns(2)
        assert "WAITING_FOR_REMOTE_KVS" == lab.status(again)
        lab.server.evict(list(lab.cache.stored().values()))
        lab.finish("load")
        lab.run(idle_too=False)

        assert 4 * lab.chunk == lab.engine.asked[again].external_tokens
        assert 0 == lab.cache.failed_loads


@pytest.mark.parametrize("family", ["full", "gdn", "windows", "deepseek_v4", "mla_tp2"])
def test_a_slot_that_was_given_away_under_a_load_is_noticed(family: str, instance: str) -> None:
    """A bug elsewhere breaks a pin: the load fails, the request is computed from its beginning."""
    with Lab(family, instance, arena_bytes=8 << 20) as lab:
        prompt = lab.prompt(3 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        lab.hold()
        again = lab.add(prompt, 3)
        lab.turns(2)
        lab.cache.lossy = True
        lab.server.steal(next(iter(lab.cache.stored().values())))
        lab.finish("load")
        lab.run(idle_too=False)

        assert 1 == lab.cache.failed_loads
        assert "length" == lab.engine.asked[again].finish


@pytest.mark.parametrize("family", ["full", "gdn", "windows_tp2"])
def test_a_request_whose_load_failed_is_computed_and_not_offered_anything_again(
    family: str, instance: str
) -> None:
    """Also if only one rank failed, and after some of the pages had arrived."""
    with Lab(family, instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        lab.hold()
        again = lab.add(prompt, 3)
        lab.turns(2)
        lab.cache.engines[-1].finish("load", fail="deadline")
        lab.finish("load")
        lab.run(idle_too=False)

        assert {again} == lab.cache.spoiled
        assert "length" == lab.engine.asked[again].finish


# ------------------------------------------------------------------------------------- the end of requests
def _waiting(lab: Lab, prompt: list[int]) -> str:
    return lab.add(prompt)


def _looked_up(lab: Lab, prompt: list[int]) -> str:
    """Looked up, but there are no blocks for it."""
    lab.add(lab.prompt(250, seed=99), 60)
    lab.turns(3)
    req_id = lab.add(prompt)
    lab.turns(3)
    return req_id


def _loading(lab: Lab, prompt: list[int]) -> str:
    req_id = lab.add(prompt)
    lab.turns(2)
    assert "WAITING_FOR_REMOTE_KVS" == lab.status(req_id)
    return req_id


def _loaded(lab: Lab, prompt: list[int]) -> str:
    """The load has ended, the scheduler has not been told."""
    req_id = _loading(lab, prompt)
    lab.finish("load")
    return req_id


def _failed(lab: Lab, prompt: list[int]) -> str:
    req_id = _loading(lab, prompt)
    lab.finish("load", fail="deadline")
    lab.turns(1)
    return req_id


def _running(lab: Lab, prompt: list[int]) -> str:
    req_id = lab.add([*prompt, *lab.prompt(100, seed=5)], 50)
    lab.turns(2)
    lab.finish("load")
    lab.turns(4)
    assert "RUNNING" == lab.status(req_id)
    return req_id


def _between(lab: Lab, prompt: list[int]) -> str:
    """Scheduled, not executed yet."""
    req_id = lab.add(lab.prompt(90, seed=6), 5)
    lab.engine.schedule()
    return req_id


@pytest.mark.parametrize(
    "state", [_waiting, _looked_up, _loading, _loaded, _failed, _running, _between]
)
@pytest.mark.parametrize("family", ["full", "gdn", "windows_tp2"])
def test_a_request_may_be_aborted_in_any_state(
    family: str, state: Callable[[Lab, list[int]], str], instance: str
) -> None:
    """The engine never hears of a request it no longer knows, and nothing stays pinned or held."""
    with Lab(family, instance, room=1.2, max_len=320) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        lab.hold()
        req_id = state(lab, prompt)
        lab.engine.abort(req_id)
        lab.release()
        lab.run()
        assert "gone" == lab.status(req_id)


def test_a_request_that_ends_while_it_is_stored_is_not_waited_for(instance: str) -> None:
    """Its id is free at once: only the blocks that are being read are kept."""
    with Lab("windows", instance) as lab:
        lab.hold()
        req_id = lab.add(lab.prompt(100))
        lab.run(idle_too=False)
        assert lab.pending("store") > 0
        assert "gone" == lab.status(req_id)


def test_behind_a_failed_load_others_go_on(instance: str) -> None:
    """There is no room for a request whose load failed: one behind it that has its blocks runs all the same.

    vLLM leaves the failed one at the head of the queue of block holders although it holds none.
    """
    with Lab("full", instance, chunk=8, room=2.0, max_len=320, step=64) as lab:
        large, small = lab.prompt(300, seed=1), lab.prompt(100, seed=2)
        lab.ask(large[:161])
        lab.ask(small)
        lab.wipe()
        running = lab.add(lab.prompt(200, seed=3), 110)
        lab.turns(6)
        lab.hold()
        failing, loading = lab.add(large), lab.add(small, 40)
        lab.turns(2)
        assert 2 == lab.pending("load")
        while len(lab.engine.asked[running].output) < 100:
            lab.turns(1)
        lab.cache.engines[0].pending[0].fail = "deadline"
        lab.finish("load")
        lab.turns(4)

        assert ("RUNNING", "WAITING", "RUNNING") == tuple(
            map(lab.status, (running, failing, loading))
        )


def _two_loads(lab: Lab) -> list[str]:
    """Two requests whose prefixes fill the pool; how they ended."""
    prompts = [lab.prompt(n, seed=n) for n in (96, 108)]
    for prompt in prompts:
        lab.ask(prompt[:65])
        lab.wipe()
    lab.hold()
    ids = [lab.add(prompt) for prompt in prompts]
    lab.turns(2)
    lab.release()
    lab.run()
    return [lab.engine.asked[r].finish for r in ids]


def test_two_loads_that_leave_no_room_for_each_other_do_not_wait_for_ever(instance: str) -> None:
    """Both have their prefix, neither has blocks for its next step: nobody would ever free any.

    vLLM sets blocks aside for loads, but counts those before a window as if they were still held.
    """
    with Lab("sliding_only", instance, chunk=16, room=1.0, max_len=128, step=32) as lab:
        assert ["length", "length"] == _two_loads(lab)


def test_without_load_admission_they_would(instance: str) -> None:
    """The negative control of the test above; when vLLM fixes it, LoadAdmission can go."""
    with (
        patch.object(LoadAdmission, "has_room", lambda *_: True),
        pytest.raises(Violation, match="stuck"),
        Lab("sliding_only", instance, chunk=16, room=1.0, max_len=128, step=32) as lab,
    ):
        _two_loads(lab)


def test_statuses_that_these_tests_rely_on_exist() -> None:
    """A renamed status of vLLM would make the tests above vacuous."""
    names = {"WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING", "PREEMPTED"}
    assert names <= {status.name for status in RequestStatus}
