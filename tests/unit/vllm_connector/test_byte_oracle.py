"""Families that no CPU can run, in the layouts that vLLM gives them: every byte comes back, or no.

The KVCacheConfigs are those of the models' own vLLM code (see ``resolved.py``); the tensors come
from the worker's ``allocate_kv_cache``. The oracle is vLLM's too: the bytes of a block are those that
change when block b of every layer's tensor is written.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, group_kernel_blocks
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from lmcache_shm.arena.job import Pages
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.client.plan import ModelError, make_plan
from lmcache_shm.transfer.cpu import CpuEngine
from lmcache_shm.transfer.pages import GroupPages, SlotLayout
from lmcache_shm.vllm.groups import content_bytes, kv_groups
from lmcache_shm.vllm.layouts import pages_by_group, rank_layouts
from tests.unit.transfer.worlds import FakeArena, Slot, job

from .resolved import BLOCKS, CASES

ROOT = Path(__file__).parents[3]
SLOT = 4 << 20
FILL = 0xEE
_CONTENT: dict[tuple[str, int, int], np.ndarray] = {}  # the oracle's answers, once per case
SLOTS = 3  # of the arena; the middle ones are used, the last stays as it is


pytestmark = pytest.mark.slow  # vLLM builds every model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, resolved by vLLM in one process of their own."""
    out = tmp_path_factory.mktemp("resolved")
    paths = [str(ROOT), str(ROOT / "tools/tiny_models/stubs")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    program = Path(__file__).with_name("resolved.py")
    done = subprocess.run(
        [sys.executable, str(program), str(out)],
        env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return out


class Model:
    """One case: the configuration, the tensors as a worker registers them, and their bytes."""

    def __init__(self, folder: Path, name: str) -> None:
        error = folder / f"{name}.error"
        assert not error.exists(), error.read_text()
        self.name = name
        told = pickle.loads((folder / f"{name}.pickle").read_bytes())
        self.kv: Any = told["config"]
        self.kernel_blocks: list[int] = told["kernel_blocks"]
        self.backends: dict[str, str] = told["backends"]
        self.caches = self.allocate()
        self.memory = storage(self.caches)
        self.groups, self.ignored = kv_groups(self.kv)
        self.plan = make_plan(self.groups, self.ignored)
        self.rng = np.random.default_rng(11)
        self.wipe()

    def allocate(self) -> dict[str, torch.Tensor]:
        layout = KVCacheLayout[self.kv.kv_cache_layout]
        return allocate_kv_cache(self.kv, torch.device("cpu"), layout, self.kernel_blocks)

    def wipe(self) -> None:
        """New random bytes everywhere, in place."""
        self.memory[:] = self.rng.integers(0, 256, len(self.memory), dtype=np.uint8)

    def pages(self) -> dict[int, GroupPages]:
        return pages_by_group(self.kv, self.caches, self.groups)

    def layout(self, pages: dict[int, GroupPages] | None = None) -> list[SlotLayout]:
        return rank_layouts(self.plan, pages or self.pages())

    def spec_of(self, group: int, layer: str) -> Any:
        spec = self.kv.kv_cache_groups[group].kv_cache_spec
        return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec

    def content(self, group: int, block: int) -> np.ndarray:
        """Oracle: offsets of the bytes that writing the block in every layer's tensor changes."""
        key = (self.name, group, block)
        if key not in _CONTENT:
            caches = self.allocate()
            for layer in self.kv.kv_cache_groups[group].layer_names:
                block_of(caches[layer], block).fill_(255)
            _CONTENT[key] = np.flatnonzero(storage(caches)).astype(np.int32)
        return _CONTENT[key]

    def index_layers(self) -> list[str]:
        return [name for name, backend in self.backends.items() if "INDEXER" in backend]


def block_of(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """Bytes of one block of a layer: a view."""
    return group_kernel_blocks(tensor, BLOCKS)[block].view(torch.uint8)


def storage(caches: dict[str, torch.Tensor]) -> np.ndarray:
    """The one allocation under all tensors, as bytes."""
    (raw,) = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in caches.values()}.values()
    return torch.tensor([], dtype=torch.uint8).set_(raw).numpy()


@pytest.fixture(params=list(CASES))
def model(request: pytest.FixtureRequest, folder: Path) -> Model:
    return Model(folder, request.param)


Trip = Callable[..., bool]


@pytest.fixture
def trip(model: Model) -> Iterator[Trip]:
    """Store chunks of an object group, wipe, load into other blocks; True if all is exact."""
    engines: list[CpuEngine] = []

    def go(layouts: list[SlotLayout], group: int = 0, *, adjacent: bool = False) -> bool:
        arena = FakeArena(SLOTS * SLOT)
        arena.data_array[:] = FILL
        engines.append(engine := CpuEngine(arena, layouts))
        (part,) = model.plan.groups[group].parts
        stored, chunks = part.stored_pages, SLOTS - 1
        wanted = stored * chunks
        ids = np.arange(1, BLOCKS)
        source, target = (
            (ids[:wanted], ids[-wanted:])
            if adjacent
            else (model.rng.permutation(ids)[:wanted], model.rng.permutation(ids)[:wanted])
        )

        def move(kind: str, number: int, blocks: np.ndarray) -> None:
            state = SlotState.RESERVED if kind == "store" else SlotState.COMMITTED
            items = []
            for chunk in range(chunks):
                arena.set(chunk, state, 5)
                pages = Pages(0, 0, blocks[chunk * stored :][:stored])
                items.append(Slot(chunk, chunk * SLOT, 5, group, [pages]))
            engine.submit(*job(kind, items, number))
            assert engine.drain(10)
            (result,) = engine.poll()
            assert (result.ok, result.reason) == (True, "")

        of = part.group.index
        before = model.memory.copy()
        move("store", 1, source)
        assert np.array_equal(before, model.memory), "a store changed the KV cache"
        model.wipe()
        expected = model.memory.copy()
        for a, b in zip(source, target, strict=True):
            expected[model.content(of, int(b))] = before[model.content(of, int(a))]
        move("load", 2, target)
        region = layouts[group].region_bytes
        for chunk in range(SLOTS):
            used = region if chunk < chunks else 0
            assert (arena.data_array[chunk * SLOT + used : (chunk + 1) * SLOT] == FILL).all()
        return np.array_equal(expected, model.memory)

    yield go
    for engine in engines:
        engine.close()


# ------------------------------------------------------------------------- what vLLM makes of them
FORMATS = {  # content bytes of a block by layer: how many layers have it
    "glm5": (64, {64 * 576 * 2: 3, 64 * 132: 3}),
    "glm5_shared_index": (64, {64 * 576 * 2: 3, 64 * 132: 2}),
    "glm5_fp8": (64, {64 * 656: 3, 64 * 132: 3}),
    "minimax_m3": (128, {128 * 4 * 256 * 2: 3, 128 * 128 * 2: 2}),
    "minimax_m3_mixed": (128, {128 * 4 * 256 * 2: 1, 128 * 4 * 256: 2, 128 * 128 * 2: 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_layouts_are_those_of_the_models(name: str, folder: Path) -> None:
    """One group of different formats, the index run among them; or the cases prove little."""
    model = Model(folder, name)
    block, pages = FORMATS[name]

    (group,) = model.groups
    assert (group.block_size, model.ignored, model.kv.num_blocks) == (block, [], BLOCKS)
    found = [model.spec_of(0, layer).real_page_size_bytes for layer in group.layers]
    assert {size: found.count(size) for size in set(found)} == pages
    assert model.index_layers()
    assert set(group.layers) == set(model.backends) == set(model.caches)


def test_the_oracle_sees_what_the_spec_promises(model: Model) -> None:
    """Blocks are disjoint, and each holds the bytes of all layers' pages by the placement."""
    for group in model.groups:
        promised = content_bytes(model.kv.kv_cache_groups[group.index].kv_cache_spec, group.layers)
        blocks = [model.content(group.index, block) for block in range(BLOCKS)]
        assert {len(content) for content in blocks} == {promised}
        seen = np.zeros(len(model.memory), dtype=np.uint8)
        for content in blocks:
            seen[content] += 1
        assert seen.max() == 1
        placed = [
            np.arange(size) + tensor.offset + i * tensor.layer_stride + 7 * tensor.block_stride
            for tensor in model.kv.kv_cache_tensors
            for i, layer in enumerate(tensor.layers)
            if (size := model.spec_of(group.index, layer).real_page_size_bytes)
        ]
        assert np.array_equal(np.sort(np.concatenate(placed)), blocks[7])


# ------------------------------------------------------------------------------ store, wipe, load
@pytest.mark.parametrize("adjacent", [False, True], ids=["scattered", "adjacent"])
def test_every_content_byte_survives_and_nothing_else_is_touched(
    model: Model, trip: Trip, adjacent: bool
) -> None:
    layout = model.layout()

    for group in range(len(model.plan.groups)):
        assert trip(layout, group, adjacent=adjacent)


# ------------------------------------------------------------------------------ negative controls
def test_a_layer_that_is_not_registered_is_refused(model: Model) -> None:
    """Each in turn, the index runs among them."""
    whole = model.caches
    for layer in whole:
        model.caches = {name: cache for name, cache in whole.items() if name != layer}
        with pytest.raises(ModelError, match=f"registered no KV cache tensor for layer {layer}$"):
            model.pages()


def test_an_index_lane_registered_in_part_is_refused(model: Model) -> None:
    layer = model.index_layers()[0]
    model.caches[layer] = model.caches[layer][..., :64]

    with pytest.raises(ModelError, match=r"bytes in the registered tensors, but its spec says \d+"):
        model.pages()


def test_an_index_lane_that_no_group_lists_is_refused(model: Model) -> None:
    layer = model.index_layers()[0]
    model.kv.kv_cache_groups[0].layer_names.remove(layer)
    model.groups, _ = kv_groups(model.kv)

    with pytest.raises(ModelError, match=f"layer {layer} has a KV cache of its own, but is in no"):
        model.pages()


def test_the_oracle_notices_any_lane_that_is_not_copied(model: Model, trip: Trip) -> None:
    """One run per layer: dropping a layer, or its index, is never a round trip."""
    ((index, pages),) = model.pages().items()
    assert len(pages.runs) == len(model.caches)

    for i in range(len(pages.runs)):
        short = replace(pages, runs=pages.runs[:i] + pages.runs[i + 1 :])
        assert not trip(model.layout({index: short}))
