"""Resets, restarts, and several engines on one arena, and the figures that the engine publishes."""

import time
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.scheduler.lab import Lab
from tests.scheduler.late import Pace
from tools.harness.wait import until


# ------------------------------------------------------------------------------------- resets, restarts
def test_a_reset_of_the_engines_cache_leaves_the_arena_alone(instance: str) -> None:
    """And so does one with reset_external; but the engine finds nothing of it any more, since its weights are others."""
    with Lab("full", instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        assert 4 * lab.chunk == lab.ask(prompt).external_tokens
        before = lab.cache.stored()
        assert lab.scheduler.reset_prefix_cache(False, True)

        assert 0 == lab.ask(prompt).external_tokens
        assert before.keys() < lab.cache.stored().keys()


@pytest.mark.parametrize("family", ["full", "gdn"])
def test_what_was_computed_before_the_weights_changed_is_not_stored_after(
    family: str, instance: str
) -> None:
    """A request that runs through a reset_external stores nothing of its older tokens."""
    with Lab(family, instance) as lab:
        lab.hold()
        old = lab.add(lab.prompt(6 * lab.chunk + 1), 40)
        lab.turns(4)
        assert lab.pending("store") > 0
        lab.scheduler.reset_connector_cache()
        lab.release()
        lab.run()
        lab.rest()

        assert {} == lab.cache.stored()
        assert "length" == lab.engine.asked[old].finish


def test_running_requests_are_preempted_by_a_reset_and_end(instance: str) -> None:
    """reset_running_requests: their blocks are all free for it, also those that were just stored."""
    with Lab("gdn", instance) as lab:
        ids = [lab.add(lab.prompt(100, seed=n), 20) for n in range(3)]
        lab.turns(8)
        lab.cache.catch_up()
        assert lab.scheduler.reset_prefix_cache(reset_running_requests=True)
        lab.run()

        assert {"length"} == {lab.engine.asked[r].finish for r in ids}


def test_an_engine_whose_server_restarted_gets_misses_then_hits_again(instance: str) -> None:
    """No step waits, nothing is lost that was committed, and the engine registers anew by itself."""
    with Lab("full", instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        lab.server.stop()
        lab.cache.blind = True
        began = time.monotonic()
        assert 0 == lab.ask(prompt).external_tokens
        assert time.monotonic() - began < 2
        lab.wipe()
        lab.server.restart()
        until(lambda: lab.cache.side.start.client.up)
        lab.cache.blind = False

        assert 4 * lab.chunk == lab.ask(prompt).external_tokens


def test_copies_that_outlive_their_server_are_never_served(instance: str) -> None:
    """A store is underway when the server dies: its slots are quarantined, and free once the copy has ended."""
    with Lab("full", instance) as lab:
        lab.hold()
        lab.add(lab.prompt(4 * lab.chunk + 1))
        lab.run(idle_too=False)
        lab.cache.lossy = True
        lab.server.stop()
        lab.server.restart()
        until(lambda: lab.cache.side.start.client.up)
        assert {} == lab.cache.stored()
        lab.release()
        lab.run()
        lab.rest()

        assert {} == lab.cache.stored()


# ------------------------------------------------------------------------------------- sharing
@pytest.mark.parametrize("family", ["windows", "gdn", "deepseek_v4"])
def test_two_engines_share_one_arena(family: str, instance: str) -> None:
    """What one has stored the other finds, and while one is writing a chunk the other leaves it alone."""
    with Lab(family, instance, arena_bytes=8 << 20) as one:
        known = one.cache.known
        with Lab(family, instance, server=one.server, engine_id="other", known=known) as two:
            prompt = two.prompt(3 * two.chunk + 1)
            one.hold()
            one.add(prompt)
            one.run(idle_too=False)
            assert 0 == two.ask(prompt).external_tokens
            assert {} == one.cache.stored()
            one.release()
            one.run()
            one.rest()
            two.wipe()

            assert 3 * two.chunk == two.ask(prompt).external_tokens


def test_an_engine_that_starts_anew_finds_what_the_last_one_stored(instance: str) -> None:
    """Nothing of the keys depends on the engine or its process."""
    with Lab("gdn", instance) as first:
        prompt = first.prompt(4 * first.chunk + 1)
        first.ask(prompt)
        first.rest()
        known = first.cache.known
        with Lab("gdn", instance, server=first.server, engine_id="next", known=known) as second:
            assert 4 * second.chunk == second.ask(prompt).external_tokens


@pytest.mark.parametrize("family", ["full", "windows_tp2"])
def test_engines_of_one_id_do_not_take_each_others_place(family: str, instance: str) -> None:
    """The id that a user gives an engine may still be held by an orphan: both are served, each with its own ranks."""
    with Lab(family, instance, engine_id="same") as orphan:
        known = orphan.cache.known
        with Lab(family, instance, server=orphan.server, engine_id="same", known=known) as lab:
            ids = [engine.engine_id for engine in lab.server.service.engines]
            assert 2 == len(set(ids))
            assert all(engine_id.startswith("same-") for engine_id in ids)
            prompt = lab.prompt(4 * lab.chunk + 1)
            orphan.ask(prompt)
            assert 4 * lab.chunk == lab.ask(prompt).external_tokens
            assert orphan.cache.side.start.client.up


# ------------------------------------------------------------------------------------- figures
def test_counters_only_grow(instance: str) -> None:
    """Preemption, failed loads and resets never subtract: a Prometheus counter would end the engine."""
    with Lab("full", instance, pace=Pace(3, 0.5, fail_loads=0.5), room=1.1, max_len=320) as lab:
        registry = CollectorRegistry()
        metrics = lab.scheduler.connector.build_prom_metrics(
            lab.engine.config,
            {kind: _in(kind, registry) for kind in (Counter, Gauge, Histogram)},
            ["model_name", "engine"],
            {0: ["m", "0"]},
        )
        told: list[dict[str, float]] = []
        make_stats = lab.scheduler.make_stats

        def observing(*given: object, **more: object) -> object:
            stats = make_stats(*given, **more)
            if stats is not None and stats.kv_connector_stats:
                told.append(stats.kv_connector_stats)
                metrics.observe(stats.kv_connector_stats)
            return stats

        lab.scheduler.make_stats = observing
        for n in range(12):
            lab.add(lab.prompt(120, seed=n % 3), 60)
            lab.run(idle_too=False)
            if n % 4 == 3:
                lab.wipe()
        assert told


def _in(kind: type, registry: CollectorRegistry) -> Callable[..., object]:
    return lambda *given, **more: kind(*given, **{**more, "registry": registry})
