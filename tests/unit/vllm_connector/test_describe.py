"""The namespace: equal facts give equal bytes, and any difference gives another namespace."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_shm.arena.layout import ENGINE_ID_BYTES
from lmcache_shm.client.fingerprint import Unidentified
from lmcache_shm.client.plan import make_plan
from lmcache_shm.protocol.keys import describe
from lmcache_shm.vllm.describe import descriptor, facts, loaded_weights
from lmcache_shm.vllm.groups import kv_groups
from lmcache_shm.vllm.layouts import WorkerFacts
from lmcache_shm.vllm.start import engine_id

from .worlds import config, full, window

COMMIT = "0123456789abcdef" * 2 + "01234567"


class HfConfig:
    def __init__(self, **values: Any) -> None:
        self.values = {"hidden_size": 64, "_name_or_path": "/somewhere", **values}

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def engine(**changes: Any) -> Any:
    """A VllmConfig as far as it tells namespaces apart; `changes` are "section.name": value."""
    sections: dict[str, Any] = {
        "model_config": {
            "model": "org/model", "revision": COMMIT, "dtype": torch.bfloat16, "quantization": None,
            "hf_config": HfConfig(), "max_model_len": 4096, "seed": 0,
        },
        "cache_config": {"cache_dtype": "auto", "mamba_cache_mode": "none", "kv_cache_layout": "LBHNC"},
        "load_config": {"load_format": "auto"},
        "parallel_config": {
            "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1, "cp_kv_cache_interleave_size": 1,
        },
    }  # fmt: skip
    for path, value in changes.items():
        section, name = path.split("__")
        sections[section][name] = value
    built = {name: SimpleNamespace(**values) for name, values in sections.items()}
    return SimpleNamespace(**built, speculative_config=None, lora_config=None)


def worker(**groups: Any) -> WorkerFacts:
    entry = {
        "layers": 2, "pages": "x", "backends": ["CPU_ATTN"], "dtypes": [], "scales": "", "kernel_blocks": [32],
        **groups,
    }  # fmt: skip
    return WorkerFacts(0, 1, "cpu", {"0": entry})


def namespace(
    vllm_config: Any = None, *specs: Any, chunk: int = 128, workers: Any = None, replicas: int = 1
) -> bytes:
    kv = config(*(specs or (full(),)), kv_tp_replicas=replicas, kv_cache_layout="LBHNC")
    plan = make_plan(kv_groups(kv)[0], chunk_size=chunk)
    config_ = vllm_config or engine()
    ranks = [worker()] if workers is None else workers
    return descriptor(config_, kv, plan, ranks, loaded_weights(config_))


def test_equal_facts_give_equal_bytes() -> None:
    assert namespace() == namespace()
    assert json.loads(namespace()) == describe(namespace())


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__model": "org/other"},
        {"model_config__revision": COMMIT[::-1]},
        {"model_config__dtype": torch.float16},
        {"model_config__quantization": "fp8"},
        {"model_config__hf_config": HfConfig(rope_theta=5e5)},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__mamba_cache_mode": "align"},
        {"load_config__load_format": "dummy"},
        {"parallel_config__tensor_parallel_size": 2},
        {"parallel_config__pipeline_parallel_size": 2},
        {"parallel_config__decode_context_parallel_size": 2},
        {"parallel_config__cp_kv_cache_interleave_size": 16},
    ],
    ids=lambda change: next(iter(change)),
)
def test_engines_that_differ_never_meet(change: dict[str, Any]) -> None:
    assert namespace(engine(**change)) != namespace()


def test_other_caches_are_other_namespaces() -> None:
    """Block sizes, windows, page layouts, backends, kernel blocks, replication, chunk sizes."""
    seen = [
        namespace(),
        namespace(None, full(64)),
        namespace(None, full(heads=4)),
        namespace(None, full(), window(64)),
        namespace(None, full(), window(128)),
        namespace(chunk=256),
        namespace(replicas=2),
        namespace(workers=[worker(pages="y")]),
        namespace(workers=[worker(backends=["FLASH_ATTN"])]),
        namespace(workers=[worker(kernel_blocks=[16])]),
        namespace(workers=[replace(worker(), device="cuda")]),
        namespace(
            workers=[replace(worker(), environment={"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "True"})]
        ),
        namespace(workers=[worker(dtypes=["fp8_e4m3"])]),
        namespace(workers=[worker(dtypes=["fp8_e5m2"])]),
        namespace(workers=[worker(scales="other")]),
        namespace(workers=[]),
    ]

    assert len(set(seen)) == len(seen)


def test_ranks_that_are_alike_are_told_once() -> None:
    ranks = [replace(worker(), rank=rank, world=4) for rank in range(4)]
    told = json.loads(namespace(workers=ranks))["workers"]

    assert list(told) == ["0"]


def test_where_the_configuration_lies_does_not_matter() -> None:
    elsewhere = engine(
        model_config__hf_config=HfConfig(_name_or_path="/elsewhere", transformers_version="9")
    )

    assert namespace(elsewhere) == namespace()


def test_dummy_weights_are_their_configuration_and_seed() -> None:
    dummy = {"load_config__load_format": "dummy"}

    assert namespace(engine(**dummy, model_config__model="/a")) == namespace(
        engine(**dummy, model_config__model="/b")
    )
    assert namespace(engine(**dummy, model_config__seed=1)) != namespace(engine(**dummy))


def test_the_longest_sequence_counts_only_where_angles_depend_on_it() -> None:
    long = HfConfig(rope_scaling={"rope_type": "longrope"})

    def at(length: int, hf: HfConfig) -> bytes:
        return namespace(engine(model_config__hf_config=hf, model_config__max_model_len=length))

    assert at(4096, HfConfig()) == at(8192, HfConfig())
    assert at(4096, long) != at(8192, long)


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"rope_parameters": {"rope_type": "longrope"}}},
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
        {"rope_scaling": {"type": "su"}},
    ],
    ids=str,
)
def test_the_longest_sequence_counts_wherever_the_rotary_embedding_stands(config: Any) -> None:
    """In the text model inside a multimodal one; in parameters by kind of layer."""
    engines = [
        engine(model_config__hf_config=HfConfig(**config), model_config__max_model_len=length)
        for length in (4096, 8192)
    ]

    assert namespace(engines[0]) != namespace(engines[1])


def speculating(**changes: Any) -> Any:
    draft = {
        "model": "org/draft", "revision": COMMIT, "hf_config": HfConfig(), "seed": 0, "dtype": torch.bfloat16,
        "quantization": None,
    }  # fmt: skip
    found = engine()
    found.speculative_config = SimpleNamespace(
        method="eagle", num_speculative_tokens=3, draft_load_config=changes.pop("load", None),
        draft_model_config=SimpleNamespace(**{**draft, **changes}),
    )  # fmt: skip
    return found


def test_a_draft_model_is_part_of_it_with_all_that_it_computes_with() -> None:
    """Its layers' KV is stored, too."""
    seen = [
        namespace(),
        namespace(speculating()),
        namespace(speculating(dtype=torch.float16)),
        namespace(speculating(quantization="fp8")),
        namespace(speculating(load=SimpleNamespace(load_format="dummy"))),
    ]

    assert len(set(seen)) == len(seen)


def test_the_type_of_the_cache_is_the_one_that_the_workers_have_made_of_it() -> None:
    """A checkpoint, or an attention backend, has it changed in the workers' copy of the configuration; only where
    scheduler and worker are one process does the scheduler's change with it."""
    changed = [worker(dtypes=["fp8"])]
    apart = namespace(engine(cache_config__cache_dtype="auto"), workers=changed)
    together = namespace(engine(cache_config__cache_dtype="fp8"), workers=changed)

    assert apart == together
    assert json.loads(apart)["kv_cache"]["dtype"] == "fp8"
    assert apart != namespace(engine(cache_config__cache_dtype="auto"))


def test_which_layers_a_group_has_counts() -> None:
    """--kv-cache-dtype-skip-layers 3, or 4: the same groups with the same pages, of other layers."""
    kv = config(full(), full(64), kv_cache_layout="LBHNC")
    plan = make_plan(kv_groups(kv)[0], chunk_size=128)
    before = descriptor(engine(), kv, plan, [worker()], "weights")
    for group in kv.kv_cache_groups:
        group.layer_names = [f"other.{name}" for name in group.layer_names]

    assert descriptor(engine(), kv, plan, [worker()], "weights") != before


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__quantization_config": {"linear": "fp8"}},
        {"model_config__model_impl": "transformers"},
        {"model_config__code_revision": "abc"},
        {"load_config__model_loader_extra_config": {"tensorizer_uri": "/weights"}},
        {
            "model_config__multimodal_config": SimpleNamespace(
                mm_processor_kwargs={"num_crops": 4}, media_io_kwargs={}
            )
        },
    ],
    ids=lambda change: next(iter(change)),
)
def test_options_that_change_values_count(change: dict[str, Any]) -> None:
    assert namespace(engine(**change)) != namespace()


def test_drafts_without_a_model_change_no_bytes() -> None:
    """VLLM names the model itself as the one that drafts."""
    itself = engine()
    itself.speculative_config = SimpleNamespace(
        method="ngram", draft_model_config=itself.model_config, num_speculative_tokens=3
    )

    assert namespace(itself) == namespace()


# ------------------------------------------------------------------------------------ the weights
def test_weights_that_may_come_from_anywhere_have_no_identity() -> None:
    """Another loader, or an object store whose content can change under its name."""
    with pytest.raises(Unidentified, match="tensorizer"):
        loaded_weights(engine(load_config__load_format="tensorizer"))
    streamed = engine(load_config__load_format="runai_streamer")
    streamed.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(Unidentified):
        loaded_weights(streamed)


def test_a_repository_is_its_commit_not_its_branch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A branch moves on."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Unidentified, match="commit"):
        loaded_weights(engine(model_config__revision="main"))
    config_ = HfConfig()
    config_._commit_hash = COMMIT
    named = engine(model_config__revision="main", model_config__hf_config=config_)

    assert f"org/model@{COMMIT}" == loaded_weights(named)
    named.model_config.hf_config_path = "org/configurations"
    with pytest.raises(Unidentified, match="commit"):
        loaded_weights(named)


def test_the_tree_has_names_that_people_can_compare() -> None:
    kv = config(full(), window(64))
    plan = make_plan(kv_groups(kv)[0], chunk_size=128)
    tree = facts(engine(), kv, plan, [worker()], "weights")

    assert tree["groups"]["1"]["rule"] == "window"
    assert tree["groups"]["1"]["tokens"] == 64
    assert tree["kv_cache"]["chunk_size"] == 128


# ------------------------------------------------------------------------------ an engine's id
@pytest.mark.parametrize("given", ["short", "x" * 400, "ü" * 200, "\udcff"])
def test_an_engines_id_is_of_one_run_and_fits(given: str) -> None:
    """The same in all processes of a run, another in the next run and for another id; never too long."""

    def run(name: str, number: str) -> str:
        transfer = SimpleNamespace(engine_id=name)
        return engine_id(SimpleNamespace(kv_transfer_config=transfer, instance_id=number))

    assert run(given, "1") == run(given, "1")
    assert 3 == len({run(given, "1"), run(given, "2"), run(given + "_dp1", "1")})
    assert len(run(given, "1").encode()) <= ENGINE_ID_BYTES
