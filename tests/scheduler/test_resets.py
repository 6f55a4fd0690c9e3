"""Every way to reset or pause an engine, at any moment, with both schedulers: as if there were no cache."""

import random
from dataclasses import replace

import pytest

from lmcache_shm.arena.layout import SlotState
from tests.scheduler import workload
from tests.scheduler.families import FAMILIES
from tests.scheduler.lab import MIB, Lab
from tests.scheduler.late import Pace
from tests.scheduler.server import CacheServer
from tests.scheduler.workload import Chances, Workload
from tools.harness.wait import until

SEEDS = 4
"""Per geometry and scheduler."""
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def restless(seed: int, family: str, *, asynchronous: bool) -> Workload:
    """A workload in which the engine is reset and paused all the time, with copies late."""
    drawn, rng = workload.make(seed, family), random.Random(seed)
    return replace(
        drawn,
        setup=replace(drawn.setup, asynchronous=asynchronous),
        requests=10,
        pace=Pace(rng.choice([0, 3, 12]), rng.choice([1, 0.3]), rng.choice([0, 0.2])),
        chances=Chances(0.3, 0.02, 0, 0, 0.08, 0, 0.1, 0.04),
    )


def begun(lab: Lab, kind: str) -> None:
    """The engine goes on until workers copy something of this kind."""
    for _ in range(50):
        if lab.pending(kind):
            return
        lab.turns(1)
    raise AssertionError(f"no {kind} has begun: {lab.engine.state()}")


@BOTH
@pytest.mark.parametrize("family", FAMILIES)
def test_resets_and_pauses_at_any_moment_keep_every_promise(
    family: str, asynchronous: bool, instance: str
) -> None:
    """reset_running_requests never fails, with steps, loads, stores and held states under way; a pause comes to
    rest; while the engine sleeps its blocks lose what they held; no answer is wrong and nothing leaks."""
    resets = pauses = 0
    for seed in range(SEEDS):
        drawn = restless(seed, family, asynchronous=asynchronous)
        outcome = workload.run(drawn, f"{instance}-{seed}")
        resets, pauses = resets + outcome.resets, pauses + outcome.pauses
    assert resets > 0
    assert pauses > 0


@pytest.mark.parametrize("family", ["gdn", "gdn_window", "gdn_one_object", "mamba2"])
@pytest.mark.parametrize("external", [False, True])
def test_states_that_are_held_are_given_up_before_a_reset(
    family: str, external: bool, instance: str
) -> None:
    """Asynchronous scheduling runs ahead of its tokens: a state waits for those of its chunk, then comes a reset."""
    with Lab(family, instance, asynchronous=True) as lab:
        held = 0
        for n in range(8):
            req_id = lab.add(lab.prompt(2 * lab.chunk - 3, seed=n), 3 * lab.chunk)
            while lab.engine.unfinished():
                lab.turns(1)
                if any(state.held for state in lab.cache.side._requests.values()):
                    held += 1
                    assert lab.engine.reset(running=True, external=external)
                    break
            lab.run()
            assert "length" == lab.engine.asked[req_id].finish
        assert held > 0


@BOTH
@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("family", ["full", "gdn", "windows_tp2", "deepseek_v4"])
def test_a_load_that_is_underway_does_not_stand_in_the_way_of_a_reset(
    family: str, external: bool, asynchronous: bool, instance: str
) -> None:
    """The reset waits for the copy, takes the blocks from its request, and the request is computed."""
    with Lab(family, instance, asynchronous=asynchronous, arena_bytes=8 << 20) as lab:
        prompt = lab.prompt(3 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        lab.hold()
        again = lab.add(prompt, 3)
        begun(lab, "load")
        assert "WAITING_FOR_REMOTE_KVS" == lab.status(again)
        assert lab.engine.reset(running=True, external=external)
        lab.release()
        lab.run()

        assert "length" == lab.engine.asked[again].finish
        assert 0 == lab.cache.failed_loads


@BOTH
@pytest.mark.parametrize("moment", ["loading", "loaded", "told"])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_an_engine_can_be_paused_while_it_loads(
    mode: str, moment: str, asynchronous: bool, instance: str
) -> None:
    """Also a moment before vLLM goes on with what was loaded."""
    with Lab("gdn", instance, asynchronous=asynchronous) as lab:
        prompt = lab.prompt(3 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        lab.hold()
        again = lab.add(prompt, 3)
        begun(lab, "load")
        assert "WAITING_FOR_REMOTE_KVS" == lab.status(again)
        if moment != "loading":
            lab.finish("load")
        if moment == "told":
            while again not in lab.scheduler.finished_recving_kv_req_ids:
                if lab.engine.queue and lab.engine.queue[0].result is not None:
                    lab.engine.update()
                elif lab.engine.queue:
                    lab.engine.execute()
                else:
                    lab.engine.schedule()
        lab.engine.pause(mode, lab.finish)
        lab.engine.resume()
        lab.release()
        lab.run()

        assert ("abort" if mode == "abort" else "length") == lab.engine.asked[again].finish


@BOTH
def test_a_paused_engine_does_not_rest_before_its_loads_have_ended(
    asynchronous: bool, instance: str
) -> None:
    """They write into its blocks: before it sleeps, and their memory goes, they must be over."""
    with Lab("full", instance, asynchronous=asynchronous) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        lab.hold()
        again = lab.add(prompt)
        begun(lab, "load")
        turns = 0

        def later() -> None:
            nonlocal turns
            turns += 1
            if turns == 40:
                lab.finish("load")

        lab.engine.pause("keep", later, clear=False)
        assert 0 == lab.pending("load")
        lab.engine.resume()
        lab.release()
        lab.run()
        assert 4 * lab.chunk == lab.engine.asked[again].external_tokens


@BOTH
def test_a_reset_that_cannot_be_done_takes_nothing_away(asynchronous: bool, instance: str) -> None:
    """Without reset_running_requests a running request is in the way: what others have loaded stays theirs."""
    with Lab("full", instance, asynchronous=asynchronous, room=6.0) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        lab.hold()
        lab.add(lab.prompt(100, seed=3), 100)
        again = lab.add(prompt)
        begun(lab, "load")
        assert "WAITING_FOR_REMOTE_KVS" == lab.status(again)
        assert not lab.engine.reset()
        lab.finish("load")
        lab.run(idle_too=False)

        assert 4 * lab.chunk == lab.engine.asked[again].external_tokens


@pytest.mark.parametrize("family", ["full", "gdn", "windows_tp2"])
def test_an_engine_may_end_in_the_middle_of_its_copies(family: str, instance: str) -> None:
    """Workers first, then the scheduler, as EngineCore ends them: nothing is pinned or reserved afterwards."""
    server = CacheServer(instance, 4 * MIB)
    lab = Lab(family, instance, server=server)
    try:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        lab.hold()
        lab.add(prompt)
        begun(lab, "load")
        lab.add(lab.prompt(5 * lab.chunk, seed=3), 5)
        begun(lab, "store")
        for connector in lab.engine.workers.connectors:
            connector.shutdown()
        lab.scheduler.shutdown()

        until(lambda: not (server.pins or server.in_state(SlotState.RESERVED)))
        until(lambda: not server.in_state(SlotState.QUARANTINED))
        assert server.check() == []
    finally:
        lab.cache.close()
        server.close()
