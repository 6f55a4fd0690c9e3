"""Which KV cache groups are cached, by which rule, in blocks of how many tokens."""

from dataclasses import replace

import pytest
import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec, CrossAttentionSpec, RSWASpec

from lmcache_shm.client.plan import ModelError, unified_block_size
from lmcache_shm.protocol.rules import ChunkedLocal, Full, Recurrent, Window
from lmcache_shm.vllm.groups import content_bytes, kv_groups

from .worlds import config, full, groups_of, local, mla, state, uniform, window


def test_each_kind_of_cache_has_its_rule() -> None:
    groups = groups_of(full(), window(64), local(8192), state(), mla())

    assert [g.rule for g in groups] == [Full(), Window(64), ChunkedLocal(8192), Recurrent(), Full()]


def test_a_window_reaches_as_far_as_vllm_keeps_blocks() -> None:
    """Multi-module speculation keeps some tokens below the window."""
    (group,) = groups_of(window(64, extra_retained_tokens=3))

    assert group.rule == Window(67)


def test_full_attention_that_remembers_a_window_is_full() -> None:
    """Without the hybrid allocator vLLM keeps all blocks of a sliding layer."""
    (group,) = groups_of(full(sliding_window=64))

    assert group.rule == Full()


def test_a_subclass_follows_its_parent() -> None:
    spec = RSWASpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32, rswa_window=8)

    assert groups_of(spec)[0].rule == Full()


def test_layers_of_different_page_size_in_one_group_are_one_group() -> None:
    (group,) = groups_of(uniform(a=full(heads=2), b=full(heads=4)))

    assert group.rule == Full()
    assert group.layers == ("a", "b")


def test_context_parallelism_spreads_a_block_over_ranks() -> None:
    """A block id covers the tokens of all ranks, where the layer is sharded at all."""
    sharded, whole = groups_of(full(32), state(160), dcp=4)

    assert (sharded.block_size, whole.block_size) == (128, 160)


def test_scratch_groups_are_named_with_the_reason() -> None:
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=16, dtype=torch.float32)
    kv = config(full(), ring, full())
    kv.kv_cache_groups[2].enable_kv_transfer = False

    cached, ignored = kv_groups(kv)

    assert [g.index for g in cached] == [0]
    assert [(g.index, g.why) for g in ignored] == [
        (1, "scratch memory of one request, not prefix-cacheable"),
        (2, "the engine rebuilds it from another group"),
    ]


def test_a_kind_without_a_rule_is_refused() -> None:
    spec = CrossAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32)

    with pytest.raises(
        ModelError, match=r"KV cache group 0 \(0\.0, 0\.1, …\) is a CrossAttentionSpec"
    ):
        groups_of(spec)


def test_n_ends_a_block_in_every_group() -> None:
    assert unified_block_size(groups_of(full(64), window(64, 32), state(160))) == 320


def test_content_is_counted_without_padding() -> None:
    padded, plain = state(160, padded=4096), state(160)

    assert content_bytes(padded, ["a", "b"]) == content_bytes(plain, ["a", "b"]) == 2 * (96 + 64)
    assert (
        content_bytes(uniform(a=full(heads=2), b=full(heads=4)), ["a", "b"]) == 3 * 32 * 2 * 32 * 4
    )
    assert content_bytes(replace(full(), page_size_padded=1 << 20), ["a"]) == 32 * 2 * 32 * 4


def test_a_group_says_what_it_is() -> None:
    texts = [str(g) for g in groups_of(full(), window(64), local(8192), state())]

    assert texts == [
        "full attention, block 32, 2 layers",
        "sliding window, window 64, block 32, 2 layers",
        "chunked local attention, span 8192, block 32, 2 layers",
        "recurrent state (mamba2), block 160, 2 layers",
    ]


def test_layers_of_different_reach_in_one_group_are_refused() -> None:
    """vLLM makes no such group today; one rule for both would be wrong for one of them."""
    spec = uniform(a=full(), b=full())
    spec.kv_cache_specs["b"] = window(64)

    with pytest.raises(
        ModelError, match=r"group 0 mixes layers of different reach .*cannot be cached"
    ):
        groups_of(spec)
