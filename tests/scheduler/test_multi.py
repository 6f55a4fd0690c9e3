"""Our connector as a child of vLLM's MultiConnector, by itself and beside another one."""

import json
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from lmcache_shm.config import ConfigError
from lmcache_shm.vllm import connector as connector_module
from lmcache_shm.vllm import plugin
from tests.scheduler import families, workload
from tests.scheduler.families import fork
from tests.scheduler.lab import Lab
from tests.scheduler.neighbour import Neighbour
from tests.scheduler.oracle import Violation
from tests.scheduler.test_resets import restless
from tests.unit.docs_pages import ROOT, transfer_configs

PAGE = ROOT / "docs" / "multiconnector.md"
PLACES = pytest.mark.parametrize("place", ["only", "first", "second"])
SEEDS = 3


@PLACES
@pytest.mark.parametrize("family", ["full", "gdn", "windows_tp2", "mla_tp2", "deepseek_v4"])
def test_random_workloads_keep_every_promise(family: str, place: str, instance: str) -> None:
    """Loads and stores, failures, preemption, aborts: as without a connector around ours."""
    for seed in range(SEEDS):
        drawn = workload.make(seed, family)
        drawn = replace(drawn, setup=replace(drawn.setup, place=place))
        workload.run(drawn, f"{instance}-{seed}")


@PLACES
@pytest.mark.parametrize("asynchronous", [False, True])
def test_resets_and_pauses_end_as_they_should(
    place: str, asynchronous: bool, instance: str
) -> None:
    """What we hold is given up for them. vLLM itself gives up only where it would with the other one alone."""
    for seed in range(SEEDS):
        drawn = restless(seed, "gdn", asynchronous=False)
        setup = replace(drawn.setup, place=place, asynchronous=asynchronous)
        chances = replace(drawn.chances, reset=0 if asynchronous or place != "only" else 0.08)
        workload.run(replace(drawn, setup=setup, chances=chances), f"{instance}-{seed}")


def _load_fails(lab: Lab) -> str:
    """How a request ends whose load fails."""
    prompt = lab.prompt(4 * lab.chunk + 1)
    lab.ask(prompt)
    lab.wipe()
    lab.hold()
    again = lab.add(prompt, 3)
    lab.turns(2)
    lab.finish("load", fail="deadline")
    lab.run(idle_too=False)
    assert {again} == lab.cache.spoiled
    return lab.engine.asked[again].finish


@PLACES
@pytest.mark.parametrize("family", ["full", "gdn"])
def test_a_failed_load_is_computed(family: str, place: str, instance: str) -> None:
    """A child's kv_load_failure_policy does not reach the scheduler: ours sets the one that does."""
    with Lab(family, instance, place=place) as lab:
        assert "length" == _load_fails(lab)


def test_with_the_policy_of_the_child_alone_it_would_be_an_error(instance: str) -> None:
    """The negative control: as soon as vLLM looks at the children's policy, lmcache_shm.vllm.parent can go."""
    with (
        patch.object(connector_module, "obeyed_config", lambda own: own),
        pytest.raises(Violation, match="ended as error"),
        Lab("full", instance, place="only") as lab,
    ):
        _load_fails(lab)


@PLACES
@pytest.mark.parametrize("family", ["full", "windows_tp2"])
def test_what_only_workers_know_is_part_of_the_namespace(
    family: str, place: str, instance: str
) -> None:
    """Byte layout and back ends of every rank, wherever ours stands; and the same namespace as without the others."""
    with Lab(family, instance) as alone:
        known = alone.cache.known
        with Lab(
            family, instance, server=alone.server, engine_id="other", known=known, place=place
        ) as lab:
            names = [json.loads(s.descriptor) for s in lab.server.catalog.namespaces()]
            assert 1 == len(names)
            (worker,) = names[0]["workers"].values()
            assert "cpu" == worker["device"]
            assert all(len(group["pages"]) == 24 for group in worker["groups"].values())


def test_a_child_that_loads_needs_an_engine_that_expects_loads(instance: str) -> None:
    """MultiConnector as kv_producer: vLLM would not put off the frees of blocks that a step still writes."""
    wrapped = families._in_multi

    def producer(ours: Any, place: str) -> Any:
        return fork(wrapped(ours, place), kv_role="kv_producer")

    with (
        patch.object(families, "_in_multi", producer),
        pytest.raises(ConfigError, match='expected "kv_role":"kv_both" of MultiConnector'),
        Lab("full", instance, place="only"),
    ):
        pass


@pytest.mark.parametrize("place", ["first", "second"])
def test_the_other_connector_gets_its_own_handshake(place: str, instance: str) -> None:
    """MultiConnector hands every child the first metadata that it finds: ours is none, NixlConnector would raise."""
    with Lab("full", instance, place=place) as lab:
        other = next(c for c in lab.scheduler.connector.sub_connectors if isinstance(c, Neighbour))
        assert [(0, 0)] == list(other.met)


@pytest.mark.parametrize("place", ["first", "second"])
def test_a_load_of_the_other_connector_is_left_alone(place: str, instance: str) -> None:
    """It still writes into its request's blocks: a reset takes them from nobody, and fails as it would without us."""
    with Lab("full", instance, place=place) as lab, patch.object(Neighbour, "offers", 16):
        req_id = lab.add(lab.prompt(4 * lab.chunk + 1))
        lab.turns(2)
        assert "WAITING_FOR_REMOTE_KVS" == lab.status(req_id)
        before = lab.scheduler.kv_cache_manager.get_block_ids(req_id)
        with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
            lab.scheduler.reset_prefix_cache(True, True)
        assert before == lab.scheduler.kv_cache_manager.get_block_ids(req_id)
        lab.engine.abort(req_id)
        with patch.object(Neighbour, "deliver", True):
            lab.run()


@PLACES
def test_its_figures_reach_the_engine(place: str, instance: str) -> None:
    """Counts of both sides, also after they went from one process to another, and in Prometheus's form."""
    plugin.register()  # as vLLM does in each of its processes
    with Lab("full", instance, place=place) as lab:
        told: list[Any] = []
        make_stats = lab.scheduler.make_stats

        def observing(*given: object, **more: object) -> object:
            stats = make_stats(*given, **more)
            if stats is not None and stats.kv_connector_stats:
                told.append(stats.kv_connector_stats)
            return stats

        lab.scheduler.make_stats = observing
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        lab.ask(prompt)
        counts: dict[str, float] = {}
        for data in told:
            again = MultiConnector.build_kv_connector_stats(json.loads(json.dumps(data)))
            assert again is not None
            for name, n in again.data["LMCacheShmConnector"].data["counts"].items():
                counts[name] = counts.get(name, 0) + n
        assert 4 * lab.chunk == counts["hit_tokens"]
        assert {"stored_chunks", "loads", "stores", "loaded_bytes"} <= counts.keys()


@pytest.mark.parametrize("text", [text for _, text in transfer_configs(PAGE)])
def test_what_the_page_says_to_type_starts_an_engine(text: str, instance: str) -> None:
    """Each --kv-transfer-config of docs/multiconnector.md, with Neighbour in NixlConnector's place."""
    given = json.loads(text)
    for child in given["kv_connector_extra_config"]["connectors"]:
        if child["kv_connector"] == "NixlConnector":
            child |= {
                "kv_connector": "Neighbour",
                "kv_connector_module_path": "tests.scheduler.neighbour",
            }

    def as_typed(ours: Any, place: str) -> KVTransferConfig:
        for child in given["kv_connector_extra_config"]["connectors"]:
            if child["kv_connector"] == ours.kv_connector:
                child["kv_connector_extra_config"] = ours.kv_connector_extra_config
        return KVTransferConfig(**given, engine_id=ours.engine_id)

    with patch.object(families, "_in_multi", as_typed), Lab("gdn", instance, place="typed") as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        reads = lab.cache.side.start.reads
        lab.cache.blind = not reads
        assert (4 * lab.chunk if reads else 0) == lab.ask(prompt).external_tokens
