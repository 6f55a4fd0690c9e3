"""Weights that change under a running engine, beside engines whose weights do not: vLLM's scheduler, the real connector."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from lmcache_shm.client.weights import weights_of
from lmcache_shm.vllm import hooks, start
from lmcache_shm.vllm import worker as worker_module
from tests.scheduler.lab import Lab
from tests.scheduler.wiring import Wiring


@contextmanager
def engine(family: str, instance: str, other: Lab | None = None, **setup: Any) -> Iterator[Lab]:
    """An engine, on the server of `other` if there is one; its workers' weights are counted by themselves, as in
    processes of their own."""
    changes = hooks.Changes()
    if other is not None:
        setup |= {"server": other.server, "known": other.cache.known}
    with (
        patch.object(worker_module, "CHANGES", changes),
        Lab(family, instance, engine_id=setup.pop("engine_id", "engine"), **setup) as lab,
    ):
        lab.changes = changes  # type: ignore[attr-defined]
        yield lab


def update(lab: Lab) -> None:
    """What a worker notices of new weights."""
    lab.changes.note()  # type: ignore[attr-defined]


def reset(lab: Lab) -> None:
    """POST /reset_prefix_cache?reset_external=true"""
    lab.rest()
    assert lab.scheduler.reset_prefix_cache(False, True)


def sleep(lab: Lab, level: int) -> None:
    """What EngineCore.sleep does with the scheduler."""
    (weights,) = weights_of(lab.engine.config.instance_id)
    weights.sleep_begins()
    reset(lab)
    weights.sleeps(level)


def ask(lab: Lab, prompt: list[int]) -> int:
    """Tokens from the arena; vLLM's own cache is emptied first."""
    lab.wipe()
    return lab.ask(prompt).external_tokens


# ----------------------------------------------------------------------------- reset, two engines
@pytest.mark.parametrize("family", ["full", "gdn"])
def test_an_engine_that_was_reset_meets_no_replica_that_was_not(family: str, instance: str) -> None:
    """A is updated and reset, B serves on with the old weights; neither finds what the other computes from then on."""
    with engine(family, instance) as a, engine(family, instance, a, engine_id="b") as b:
        old, new = a.prompt(3 * a.chunk + 1), a.prompt(3 * a.chunk + 1, seed=8)
        ask(a, old)
        assert 3 * a.chunk == ask(b, old)
        reset(a)
        ask(b, new)

        assert 0 == ask(a, old)
        assert 0 == ask(a, new)
        assert 3 * a.chunk == ask(b, old), "a reset empties nobody else's cache"
        assert 3 * a.chunk == ask(a, new), "what it stored itself is its own"
        assert 3 * a.chunk == ask(b, new)
        assert len({lab.cache.namespace() for lab in (a, b)}) == 2


def test_an_engine_that_starts_anew_on_the_checkpoint_meets_nothing_of_updated_weights(
    instance: str,
) -> None:
    with engine("full", instance) as first:
        prompt = first.prompt(4 * first.chunk + 1)
        reset(first)
        ask(first, prompt)
        assert 4 * first.chunk == ask(first, prompt)
        with engine("full", instance, first, engine_id="next") as again:
            assert 0 == ask(again, prompt)


def test_what_an_engine_had_for_itself_is_cleared_when_it_moves_on(instance: str) -> None:
    """Nobody else could ever find it, and an update may come every few minutes."""
    with engine("full", instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        ask(lab, prompt)
        shared = lab.cache.stored()
        for _ in range(3):
            reset(lab)
            assert 0 == ask(lab, prompt)
            lab.rest()

            assert len(lab.cache.stored()) == 2 * len(shared)
            assert shared.keys() < lab.cache.stored().keys()


def test_what_an_engine_had_for_itself_is_cleared_when_it_ends(instance: str) -> None:
    with engine("full", instance) as stays:
        prompt = stays.prompt(4 * stays.chunk + 1)
        ask(stays, prompt)
        shared = stays.cache.stored()
        with engine("full", instance, stays, engine_id="ends") as ends:
            reset(ends)
            ask(ends, prompt)
            ends.rest()
            assert len(stays.cache.stored()) == 2 * len(shared)

        assert stays.cache.stored() == shared


def test_an_updated_engine_keeps_its_namespace_over_a_restart_of_the_server(instance: str) -> None:
    """The new server adopts the arena; the engine is still who it was, and not who it was at its start."""
    with engine("full", instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        reset(lab)
        ask(lab, prompt)
        lab.rest()
        client = lab.cache.side.start.client
        lab.server.stop()
        lab.server.restart()
        assert client.wait(10)

        assert 4 * lab.chunk == ask(lab, prompt)


# ------------------------------------------------------------------------------------------ sleep
@pytest.mark.parametrize("updated", [False, True])
def test_a_sleep_that_keeps_the_weights_keeps_what_was_stored(updated: bool, instance: str) -> None:
    with engine("full", instance) as a, engine("full", instance, a, engine_id="b") as b:
        prompt = a.prompt(4 * a.chunk + 1)
        if updated:
            reset(a)
        ask(a, prompt)
        stored = a.cache.stored()
        sleep(a, 1)

        assert 4 * a.chunk == ask(a, prompt)
        assert a.cache.stored() == stored
        assert (0 if updated else 4 * a.chunk) == ask(b, prompt)


def test_a_sleep_that_throws_the_weights_away_does_not(instance: str) -> None:
    with engine("full", instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        ask(lab, prompt)
        sleep(lab, 2)

        assert 0 == ask(lab, prompt)


# ------------------------------------------------------- changes that nobody tells the scheduler
@pytest.mark.parametrize("family", ["full", "gdn", "windows_tp2"])
def test_an_update_that_the_scheduler_does_not_see_is_noticed_by_the_workers(
    family: str, instance: str
) -> None:
    """Nothing that new weights computed is stored among the old, and nothing of the old is served to them."""
    with engine(family, instance) as lab:
        old, new = lab.prompt(3 * lab.chunk + 1), lab.prompt(3 * lab.chunk + 1, seed=8)
        ask(lab, old)
        before, namespace = lab.cache.stored(), lab.cache.namespace()
        lab.wipe()
        update(lab)
        lab.cache.blind = True  # the load that is offered before workers could tell is refused
        ask(lab, new)
        lab.cache.blind = False

        assert namespace != lab.cache.namespace()
        assert {key for key in lab.cache.stored() if key[0] == namespace} == before.keys()
        assert 0 == ask(lab, old)
        assert 3 * lab.chunk == ask(lab, old)


def test_a_load_that_is_offered_before_the_workers_could_tell_is_computed(instance: str) -> None:
    with engine("full", instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        ask(lab, prompt)
        lab.wipe()
        update(lab)
        req_id = lab.add(prompt)
        lab.run()

        assert lab.cache.failed_loads == 1
        assert "length" == lab.engine.asked[req_id].finish


def test_a_load_that_is_underway_when_the_weights_change_is_computed(instance: str) -> None:
    with engine("full", instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        ask(lab, prompt)
        lab.wipe()
        lab.hold()
        req_id = lab.add(prompt)
        lab.turns(3)
        assert lab.pending("load") == 1
        update(lab)
        lab.release()
        lab.run()

        assert lab.cache.failed_loads == 1
        assert "length" == lab.engine.asked[req_id].finish


def test_a_store_that_is_underway_when_the_weights_change_is_not_found_after(instance: str) -> None:
    """It was computed before; a request that goes on is of both, and belongs to neither."""
    with engine("full", instance) as lab:
        lab.hold()
        lab.add(lab.prompt(4 * lab.chunk + 1), 2 * lab.chunk)
        lab.turns(6)
        assert lab.pending("store") > 0
        namespace = lab.cache.namespace()
        update(lab)
        lab.release()
        lab.run()
        lab.rest()

        assert namespace != lab.cache.namespace()
        assert {key for key in lab.cache.stored() if key[0] == lab.cache.namespace()} == set()


def test_after_an_update_and_a_reset_the_first_prompt_is_stored(instance: str) -> None:
    """The scheduler knows from the reset; that it did not know the workers' count costs one step."""
    with engine("full", instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        ask(lab, prompt)
        for _ in range(3):
            update(lab)
            update(lab)
            reset(lab)
            assert 0 == lab.ask(prompt, 4).external_tokens

            assert 4 * lab.chunk == ask(lab, prompt)


# ----------------------------------------------------------------------------- replicas that agree
def test_replicas_that_were_told_the_same_version_share_again(
    instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before both were: the name is of what is in memory, not of what will be."""
    named = {"lmcache_shm.weight_version": "run"}
    plain = Wiring.options
    monkeypatch.setattr(Wiring, "options", lambda self, setup: {**plain(self, setup), **named})
    with engine("full", instance) as a, engine("full", instance, a, engine_id="b") as b:
        prompt = a.prompt(4 * a.chunk + 1)
        ask(a, prompt)
        assert 4 * a.chunk == ask(b, prompt)
        for lab in (a, b):
            assert 0 == ask_updated(lab, prompt)
        ask(a, prompt)

        assert 4 * a.chunk == ask(b, prompt)


def ask_updated(lab: Lab, prompt: list[int]) -> int:
    """Update, reset, and, last, say which version it is; then ask for something."""
    update(lab)
    reset(lab)
    (weights,) = weights_of(lab.engine.config.instance_id)
    weights.name("2")
    return ask(lab, prompt[: lab.chunk // 2])


# ------------------------------------------------------------------------------ negative controls
def serves_stale(instance: str) -> bool:
    """The story of a replica that was reset and one that was not: whether one finds the other's."""
    with engine("full", instance) as a, engine("full", instance, a, engine_id="b") as b:
        prompt = a.prompt(4 * a.chunk + 1)
        reset(a)
        ask(b, prompt)
        return ask(a, prompt) > 0


def test_without_the_token_stale_bytes_are_served(
    instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: an engine that stays in its namespace meets the other one."""
    assert not serves_stale(f"{instance}-right")
    monkeypatch.setattr(start.Weights, "reset", lambda self: None)

    assert serves_stale(f"{instance}-wrong")


def test_without_the_workers_count_new_bytes_are_stored_among_the_old(
    instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: workers that do not compare it take part in what was planned before."""
    monkeypatch.setattr(worker_module.WorkerSide, "changes", 0)
    with engine("full", instance) as lab:
        namespace = lab.cache.namespace()
        update(lab)
        ask(lab, lab.prompt(4 * lab.chunk + 1))

        assert len({key for key in lab.cache.stored() if key[0] == namespace}) == 4
