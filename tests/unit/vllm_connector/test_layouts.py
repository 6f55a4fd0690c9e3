"""Registered tensors against the specs: every promised byte, once, or the model is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_shm.client.plan import ModelError, make_plan
from lmcache_shm.vllm.groups import kv_groups
from lmcache_shm.vllm.layouts import (
    LayerFacts,
    environment,
    layer_facts,
    pages_by_group,
    rank_layouts,
    tensors_of,
    worker_facts,
)

from .worlds import config, full, state, uniform, window

BLOCKS = 16


def cache(heads: int = 2, block: int = 32, blocks: int = BLOCKS, split: int = 1) -> torch.Tensor:
    """A layer's tensor as vLLM registers it: [blocks, heads, tokens, key and value]."""
    return torch.zeros(blocks * split, heads, block // split, 32)


def states(padded: int = 1024) -> torch.Tensor:
    """A recurrent layer's: content bytes with the stride of the padded page."""
    raw = torch.zeros(BLOCKS * padded, dtype=torch.int8)
    return torch.as_strided(raw, (BLOCKS, 1, 1, 160), (padded, 160, 160, 1))


def pages_of(kv: Any, caches: dict[str, Any]) -> Any:
    return pages_by_group(kv, caches, kv_groups(kv)[0])


def test_the_bytes_of_a_block_are_those_of_all_its_layers() -> None:
    kv = config(full(), state(160, padded=1024))
    caches = {"0.0": cache(), "0.1": cache(), "1.0": states(), "1.1": states()}

    pages = pages_of(kv, caches)

    assert pages[0].page_bytes == 2 * 2 * 32 * 32 * 4
    assert pages[1].page_bytes == 2 * 160


def test_kernel_blocks_smaller_than_a_block_change_nothing() -> None:
    kv = config(full())

    pages = pages_of(kv, {"0.0": cache(), "0.1": cache(split=4)})

    assert pages[0].page_bytes == 2 * 2 * 32 * 32 * 4


def test_layers_of_one_group_may_have_pages_of_different_size() -> None:
    kv = config(uniform(a=full(heads=2), b=full(heads=4)))

    assert pages_of(kv, {"a": cache(2), "b": cache(4)})[0].page_bytes == 6 * 32 * 32 * 4


def test_missing_bytes_are_refused_with_the_figures() -> None:
    """A layer registered with half of its heads: half of the KV would be lost, silently."""
    kv = config(full())

    with pytest.raises(ModelError) as caught:
        pages_of(kv, {"0.0": cache(), "0.1": cache(heads=1)})

    text = str(caught.value)
    assert text.startswith(
        "KV cache group 0 (full attention, block 32, 2 layers): a block of this group holds"
    )
    assert "12288 bytes in the registered tensors, but its spec says 16384" in text
    assert "it will not guess" in text


def test_more_bytes_than_promised_are_refused() -> None:
    """An index run that the spec does not know of."""
    kv = config(full())

    with pytest.raises(ModelError, match="holds 24576 bytes .* its spec says 16384"):
        pages_of(kv, {"0.0": [cache(), cache()], "0.1": cache()})


def test_a_layer_without_a_tensor_is_refused() -> None:
    with pytest.raises(ModelError, match=r"registered no KV cache tensor for layer 0\.1"):
        pages_of(config(full()), {"0.0": cache()})


def test_the_wrong_number_of_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="does not hold 16 blocks"):
        pages_of(config(full()), {"0.0": cache(blocks=17), "0.1": cache(blocks=17)})


def test_a_layer_that_shares_anothers_cache_is_not_counted_again() -> None:
    """Gemma 3n and 4: registered, but in no group."""
    shared = cache()
    caches = {"0.0": shared, "0.1": cache(), "sharing": shared}

    assert pages_of(config(full()), caches)[0].page_bytes == 2 * 2 * 32 * 32 * 4


def test_a_cache_in_no_group_is_refused() -> None:
    with pytest.raises(
        ModelError, match="layer stray has a KV cache of its own, but is in no KV cache group"
    ):
        pages_of(config(full()), {"0.0": cache(), "0.1": cache(), "stray": cache()})


def test_a_list_of_tensors_is_one_layer() -> None:
    """Key and value registered apart."""
    halves = [torch.zeros(BLOCKS, 2, 32, 16) for _ in range(2)]

    assert tensors_of({"a": halves}, ["a"]) == halves
    assert pages_of(config(full(), layers=1), {"0.0": halves})[0].page_bytes == 2 * 32 * 32 * 4


# ----------------------------------------------------------------------------------- slot layouts
def test_a_region_holds_the_stored_pages_of_all_parts() -> None:
    kv = config(full(), window(64))
    groups = kv_groups(kv)[0]
    pages = pages_of(kv, {f"{g}.{i}": cache() for g in range(2) for i in range(2)})

    both = rank_layouts(make_plan(groups, chunk_size=128), pages)
    one = rank_layouts(make_plan(groups, chunk_size=128, separate=False), pages)

    page = 2 * 2 * 32 * 32 * 4
    assert [layout.region_bytes for layout in both] == [4 * page, 2 * page]
    assert [layout.region_bytes for layout in one] == [6 * page]
    assert [part.pages for part in one[0].parts] == [pages[0], pages[1]]


def test_a_pipeline_stage_without_layers_of_a_group_fills_nothing_there() -> None:
    kv = config(full(), window(64), state(160, padded=1024))
    for group in kv.kv_cache_groups[:2]:
        group.layer_names = []
    groups = kv_groups(kv)[0]
    pages = pages_of(kv, {"2.0": states(), "2.1": states()})

    layouts = rank_layouts(make_plan(groups, chunk_size=160), pages)

    # Each layer begins on 64 bytes.
    assert [layout.region_bytes for layout in layouts] == [0, 0, 2 * 192]


def test_facts_tell_layouts_apart_and_not_places() -> None:
    """Where tensors lie and how many blocks there are does not matter; how the bytes of a page are read does."""

    def facts(tensor: torch.Tensor, blocks: int = BLOCKS) -> dict[str, Any]:
        kv = config(full(), layers=1, num_blocks=blocks)
        caches = {"0.0": tensor}
        groups = kv_groups(kv)[0]
        pages = pages_by_group(kv, caches, groups)
        return worker_facts(
            kv, caches, groups, pages, {"0.0": LayerFacts("CPU_ATTN")}, 0, 1
        ).groups["0"]

    base = facts(cache())

    assert base == facts(cache(blocks=99), 99)
    assert base["backends"] == ["CPU_ATTN"]
    assert base["kernel_blocks"] == [32]
    split = facts(cache(split=2))
    assert split["kernel_blocks"] == [16]
    assert split["pages"] != base["pages"]
    assert facts(cache().view(torch.int32))["pages"] != base["pages"]
    assert facts(torch.zeros(BLOCKS, 32, 2, 32).transpose(1, 2))["pages"] != base["pages"]


def test_layers_say_what_their_cache_is() -> None:
    """Type and scales, which a worker may have taken from the checkpoint; scales only where something is scaled."""

    def layers(dtype: str, scale: float) -> dict[str, LayerFacts]:
        layer = SimpleNamespace(
            kv_cache_dtype=dtype, _k_scale=torch.tensor(scale), _v_scale=torch.tensor(1.0)
        )
        context = {"0.0": layer, "0.1": object()}
        compilation = SimpleNamespace(static_forward_context=context)
        return layer_facts(SimpleNamespace(compilation_config=compilation), context)

    assert layers("fp8", 1.0)["0.0"].dtype == "fp8"
    assert layers("fp8", 1.0) == layers("fp8", 1.0) != layers("fp8", 0.5)
    assert layers("fp8_e4m3", 1.0) != layers("fp8_e5m2", 1.0)
    assert layers("auto", 1.0) == layers("auto", 0.5)
    assert layers("fp8", 1.0)["0.1"] == LayerFacts()


def test_a_workers_own_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", raising=False)
    before = environment()
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")

    assert environment() == {**before, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "True"}
