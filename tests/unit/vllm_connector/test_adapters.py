"""LoRA adapters count by what the workers have loaded, whatever lies on the disk meanwhile."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from lmcache_shm.arena.job import Adapter
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.vllm.adapters import PATIENCE, KnownAdapters, LoadedAdapters, digest_of, files_of
from lmcache_shm.vllm.engine_api import WorkerReport

from .rig import Rig, rig_of
from .test_both_sides import Pair, served
from .worlds import full

PROMPT = list(range(1, 301))  # two chunks of 128 and 44 tokens
CONFIG = LoRAConfig(max_lora_rank=8)


def model(number: int = 1, seed: int = 0, **changes: Any) -> LoRAModel:
    """As vLLM has read it; `changes` of the first layer."""
    loras = {}
    for name in ("layers.0.q_proj", "layers.1.q_proj"):
        generator = torch.Generator().manual_seed(seed)
        weights = LoRALayerWeights(
            name,
            8,
            16,
            torch.rand(8, 4, generator=generator),
            torch.rand(4, 8, generator=generator),
        )
        loras[name] = weights
    for name, value in changes.items():
        setattr(loras["layers.0.q_proj"], name, value)
    return LoRAModel(number, 8, loras)


class Manager:
    """VLLM's, as far as a worker's adapters ask it."""

    def __init__(self) -> None:
        self.resident = {1, 2}
        self.lora_config = CONFIG

    def list_adapters(self) -> dict[int, Any]:
        return dict.fromkeys(self.resident)


def request(name: str = "x", number: int = 1, path: str = "/x", **more: Any) -> LoRARequest:
    return LoRARequest(name, number, path, **more)


def report(
    digest: bytes, content: int = 1, *, number: int = 1, ranks: int = 1, answer: int = 0
) -> Any:
    reply = WorkerReport({}, {rank: {number: (content, digest)} for rank in range(ranks)}, answer)
    return SimpleNamespace(finished_recving=(), failed_recving=(), kv_connector_worker_meta=reply)


# ------------------------------------------------------------------------------------ contents
def test_the_digest_is_of_the_content_and_not_of_the_id() -> None:
    assert digest_of(CONFIG, model(1)) == digest_of(CONFIG, model(2)) != b""


@pytest.mark.parametrize(
    "change",
    [
        {"lora_a": torch.zeros(8, 4)},
        {"lora_b": torch.zeros(4, 8)},
        {"lora_b": torch.zeros(4, 8, dtype=torch.bfloat16)},
        {"lora_a": None},
        {"scaling": 3.0},
        {"rank": 4},
        {"module_name": "layers.0.k_proj"},
    ],
    ids=str,
)
def test_any_other_content_has_another_digest(change: dict[str, Any]) -> None:
    assert digest_of(CONFIG, model(**change)) != digest_of(CONFIG, model())


def test_which_modules_an_adapter_is_applied_to_counts() -> None:
    only_q = LoRAConfig(max_lora_rank=8, target_modules=["q_proj"])

    assert digest_of(only_q, model()) != digest_of(CONFIG, model())


def test_something_that_has_no_content_has_no_digest() -> None:
    assert digest_of(CONFIG, model(lora_a=object())) == b""


# ------------------------------------------------------------------------------------ a worker
def test_a_content_has_a_number_that_never_comes_back() -> None:
    """v1, v2, v1: what was computed with parts of each must not pass for v1."""
    loaded = LoadedAdapters(0, CONFIG)
    manager = Manager()
    numbers = []
    for digest in (b"v1", b"v1", b"v2", b"v1", b"", b""):
        loaded.loaded(manager, 1, digest)
        numbers.append(loaded.report(everything=True)[1][0])

    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 5


def test_what_is_resident_is_reported_once_and_when_asked() -> None:
    loaded = LoadedAdapters(0, CONFIG)
    manager = Manager()
    loaded.loaded(manager, 1, b"v1")
    loaded.loaded(manager, 3, b"a dummy, removed again")

    assert loaded.report(everything=False) == {1: (1, b"v1")}
    assert loaded.report(everything=False) == {}
    assert loaded.report(everything=True) == {1: (1, b"v1")}


def test_an_adapter_that_was_evicted_is_computed_with_again_only_if_its_files_are_the_same(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    loaded = LoadedAdapters(0, CONFIG)
    manager = Manager()
    adapter = Adapter(1, b"", (1,), str(tmp_path))
    loaded.loaded(manager, 1, b"v1")
    loaded.read(1, str(tmp_path), settled(tmp_path))
    manager.resident.clear()
    assert loaded.would_compute(adapter)

    weights.write_bytes(b"two")

    assert loaded.same(adapter)
    assert not loaded.would_compute(adapter), "the next request reads something else"
    manager.resident.add(1)
    assert loaded.would_compute(adapter), "what is resident is not read again"
    assert not loaded.would_compute(Adapter(1, b"", (1,), str(tmp_path), reloads=True))
    assert not loaded.would_compute(Adapter(1, b"", (2,), str(tmp_path)))


def settled(folder: Path) -> Any:
    """The files' state once they are old enough."""
    end = time.monotonic() + 10
    while (files := files_of(str(folder))) is None:
        assert time.monotonic() < end
        time.sleep(0.1)
    return files


def test_files_written_just_now_and_repositories_are_not_certain(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")

    assert files_of(str(tmp_path)) is None
    assert files_of("org/adapter") is None


def test_a_file_that_was_replaced_by_one_of_the_same_size_and_time_is_another(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    os.utime(weights, ns=(1, 1))
    before = settled(tmp_path)
    (tmp_path / "new").write_bytes(b"two")
    os.utime(tmp_path / "new", ns=(1, 1))
    (tmp_path / "new").rename(weights)

    assert settled(tmp_path) != before


# -------------------------------------------------------------------------- the scheduler side
def test_an_adapter_is_known_when_every_rank_has_reported_it() -> None:
    known = KnownAdapters(2)
    known.take({0: {1: (1, b"v1")}}, 0)
    assert known.of(request()) is None
    known.take({1: {1: (1, b"v1")}}, 0)

    adapter = known.of(request())

    assert adapter is not None
    assert adapter.contents == (1, 1)


def test_the_same_content_is_the_same_adapter_under_any_name() -> None:
    known = KnownAdapters(1)
    known.take({0: {1: (1, b"v1"), 2: (2, b"v1"), 3: (3, b"v2")}}, 0)
    digests = [known.of(request(f"n{i}", i, f"/{i}")).digest for i in (1, 2, 3)]  # type: ignore[union-attr]

    assert digests[0] == digests[1] != digests[2]


def test_a_rank_that_has_read_something_else_makes_another_adapter() -> None:
    known = KnownAdapters(2)
    known.take({0: {1: (1, b"v1"), 2: (2, b"v1")}, 1: {1: (1, b"v1"), 2: (2, b"v2")}}, 0)

    assert known.of(request(number=1)).digest != known.of(request(number=2)).digest  # type: ignore[union-attr]


def test_vllms_own_blocks_go_by_names_and_are_foreign_once_a_name_has_had_two_contents() -> None:
    known = KnownAdapters(1)
    known.take({0: {1: (1, b"v1"), 2: (2, b"v2")}}, 0)
    assert not known.foreign_blocks(request())
    assert known.foreign_blocks(request(number=2)), "another id under the same name and path"
    assert not known.foreign_blocks(request(path="/elsewhere"))
    known.seen(request(path="/elsewhere"))
    known.take({0: {1: (3, b"v2")}}, 0)
    assert known.foreign_blocks(request(path="/elsewhere"))

    known.local_cache_is_empty()

    assert not known.foreign_blocks(request(path="/elsewhere"))


def test_workers_that_do_not_answer_do_not_hold_a_request_up_for_ever() -> None:
    known = KnownAdapters(1)

    assert sum(known.awaited(request()) for _ in range(100)) == PATIENCE


# ---------------------------------------------------------------------- one request after another
def ready(rig: Rig, digest: bytes = b"v1", content: int = 1) -> None:
    rig.side.output(report(digest, content))


def ask(rig: Rig, req_id: str, **more: Any) -> Any:
    return rig.request(req_id, PROMPT, lora_request=request(), **more)


def test_the_workers_are_asked_about_an_adapter_that_was_added_through_the_api() -> None:
    with rig_of(full()) as rig:
        first = ask(rig, "a")
        assert rig.side.matched_tokens(first, 0) == (None, False)
        question = rig.step({}).question
        assert question > 0

        rig.side.output(report(b"v1", answer=question))

        assert rig.side.matched_tokens(first, 0) == (0, False)
        assert rig.step({}).question == 0
        (job,) = rig.prefill(first).stores
        assert job.adapter == rig.side.adapters.of(request())


def test_an_adapter_that_is_loaded_with_its_first_request_is_stored_a_step_later() -> None:
    with rig_of(full()) as rig:
        first = ask(rig, "a")
        rig.side.matched_tokens(first, 0)
        nothing = WorkerReport({}, {0: {}}, rig.step({}).question)
        rig.side.output(
            SimpleNamespace(
                finished_recving=(), failed_recving=(), kv_connector_worker_meta=nothing
            )
        )
        assert rig.side.matched_tokens(first, 0) == (0, False)
        assert rig.prefill(first, 290).stores == []

        ready(rig)

        (job,) = rig.prefill(first, 10).stores
        assert len(job.rows) == 2


def test_a_request_whose_adapter_is_replaced_underway_stores_nothing_any_more() -> None:
    with rig_of(full()) as rig:
        ready(rig)
        first = ask(rig, "a")
        assert rig.side.matched_tokens(first, 0) == (0, False)
        (job,) = rig.prefill(first, 150).stores
        rig.report(job)

        ready(rig, b"v2", 2)

        assert rig.prefill(first, 150).stores == []
        assert rig.rows(SlotState.COMMITTED) == 1
        # Preempted, it begins anew: all of it is computed with what is loaded now.
        first.num_computed_tokens = 0
        assert rig.side.matched_tokens(first, 0) == (0, False)
        (job,) = rig.prefill(first).stores
        assert job.adapter is not None
        assert job.adapter.contents == (2,)


def test_a_hit_that_waits_is_given_back_when_the_adapter_is_replaced() -> None:
    with rig_of(full()) as rig:
        ready(rig)
        rig.store(ask(rig, "a"))
        second = ask(rig, "b")
        assert rig.side.matched_tokens(second, 0) == (256, True)

        ready(rig, b"v2", 2)
        rig.side.wait_flushed(1)

        assert rig.pins == 0
        assert rig.side.matched_tokens(second, 0) == (0, False)
        ready(rig, b"v1", 3)
        assert rig.side.matched_tokens(second, 0) == (256, True)


def test_nothing_is_stored_on_top_of_vllms_own_blocks_of_the_replaced_adapter() -> None:
    """VLLM's own prefix cache knows names only."""
    with rig_of(full()) as rig:
        ready(rig)
        rig.prefill(ask(rig, "a"))
        ready(rig, b"v2", 2)
        second = ask(rig, "b")
        rig.side.matched_tokens(second, 128)

        second.num_computed_tokens = 128

        assert rig.prefill(second).stores == []
        assert rig.manager.reset_prefix_cache()
        third = ask(rig, "c")
        rig.side.matched_tokens(third, 128)
        assert len(rig.prefill(third).stores) == 1


def test_replicas_that_write_nothing_have_to_agree() -> None:
    """They computed, too, with what they had read."""
    with rig_of(full(), world=2) as rig:
        rig.registration.writers = rig.registration.writers[:1]
        rig.side.output(report(b"v1", ranks=2))
        with_adapter, without = ask(rig, "a"), rig.request("b", PROMPT)
        jobs = [*rig.prefill(with_adapter).stores, *rig.prefill(without).stores]
        for job in jobs:
            rig.report(job, rank=0)
        rig.step({})
        assert rig.rows(SlotState.COMMITTED) == 2
        rig.report(jobs[0], rank=1, ok=False)
        rig.step({})

        assert (rig.rows(SlotState.COMMITTED), rig.rows(SlotState.RESERVED)) == (2, 0)


# ----------------------------------------------------------------------------------- both sides
def loaded(pair: Pair, manager: Manager, digest: bytes) -> None:
    """The worker loads, and says so with its next step."""
    pair.worker.adapters.loaded(manager, 1, digest)


def told(pair: Pair, question: int = 1) -> None:
    reply = SimpleNamespace(
        finished_recving=(),
        failed_recving=(),
        kv_connector_worker_meta=pair.worker.report(question),
    )
    pair.side.output(reply)


def asked(pair: Pair, req_id: str) -> Any:
    found = pair.request(req_id)
    found.lora_request = request()
    return found


def test_a_store_that_was_planned_before_the_adapter_was_replaced_is_refused(instance: str) -> None:
    """The worker knows first: it compares what it has loaded with what the job says."""
    with served(instance, full()) as (server, pair):
        manager = Manager()
        loaded(pair, manager, b"v1")
        told(pair)
        first = asked(pair, "a")
        loaded(pair, manager, b"v2")

        pair.step(first, len(PROMPT))

        assert pair.side.wait_flushed(5)
        assert server.in_state(SlotState.COMMITTED) == []
        assert pair.worker.counts.take()["stores_failed.adapter"] == 1


@pytest.mark.parametrize("late", [False, True])
def test_a_load_fails_when_the_adapter_is_replaced_before_or_during_it(
    late: bool, instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(instance, full()) as (_, pair):
        manager = Manager()
        loaded(pair, manager, b"v1")
        told(pair)
        pair.step(asked(pair, "a"), len(PROMPT))
        assert pair.side.wait_flushed(5)
        second = asked(pair, "b")
        assert pair.side.matched_tokens(second, 0) == (256, True)
        pair.side.allocated(second, pair.tables["b"], 256)
        if late:
            right = pair.worker._submit

            def replaced(*job: Any) -> None:
                loaded(pair, manager, b"v2")
                right(*job)

            monkeypatch.setattr(pair.worker, "_submit", replaced)
        else:
            loaded(pair, manager, b"v2")

        pair.step()

        assert pair.received() == ({"b"}, {"b"})
        second.num_computed_tokens = 0
        pair.side.matched_tokens(second, 0)
        assert pair.side.matched_tokens(second, 0) == (0, False)


def test_a_load_of_what_is_loaded_succeeds(instance: str) -> None:
    with served(instance, full()) as (_, pair):
        manager = Manager()
        loaded(pair, manager, b"v1")
        told(pair)
        pair.step(asked(pair, "a"), len(PROMPT))
        assert pair.side.wait_flushed(5)
        second = asked(pair, "b")
        assert pair.side.matched_tokens(second, 0) == (256, True)
        pair.side.allocated(second, pair.tables["b"], 256)

        pair.step()

        assert pair.received() == ({"b"}, set())
