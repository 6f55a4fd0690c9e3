"""Which engine a worker gets, and what it is told where the fast one cannot be had."""

from types import SimpleNamespace

import pytest

from lmcache_shm.config import OPTIONS
from lmcache_shm.transfer import cuda, select
from lmcache_shm.transfer.cpu import CpuEngine
from lmcache_shm.transfer.device import DeviceError
from lmcache_shm.transfer.plan import KERNEL_BELOW, REQUESTED_BACKENDS
from lmcache_shm.transfer.streams import StreamEngine
from tools.harness.simulated_device import SimulatedDevice

from .rig import WAIT, Rig
from .worlds import dense_hnd

torch = pytest.importorskip("torch")


class OnDevice:
    """A CPU tensor that says it lies elsewhere."""

    def __init__(self, memory, kind: str) -> None:
        self.real = torch.from_numpy(memory)
        self.device = SimpleNamespace(type=kind, index=0)


class Pageable(select.TorchDevice):
    """Copies the real tensor."""

    def __init__(self, tensors) -> None:
        super().__init__([tensor.real for tensor in tensors])


@pytest.fixture
def opened(monkeypatch):
    """``opened(kind, **options)``: a rig with the engine that tensors on ``kind`` get."""
    monkeypatch.setattr(select, "TorchDevice", Pageable)
    made: list[Rig] = []

    def make(kind: str, **options) -> Rig:
        world = dense_hnd()
        tensors = [OnDevice(world.memory, kind)]
        made.append(
            Rig(
                world,
                None,
                lambda arena, slots: select.open_engine(arena, slots, tensors, **options),
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


def works(b: Rig) -> bool:
    return b.round_trip(0, b.world.scattered_blocks(4), b.world.scattered_blocks(4))


def test_memory_of_the_cpu_needs_no_device(opened, caplog):
    b = opened("cpu")

    assert isinstance(b.engine, CpuEngine)
    assert works(b)
    assert caplog.text == ""


@pytest.mark.parametrize(("kind", "hip", "name"), [("cuda", "7.1", "ROCm"), ("xpu", None, "xpu")])
def test_rocm_and_xpu_get_pageable_copies_and_one_line_that_says_so(
    kind, hip, name, opened, monkeypatch, caplog
):
    monkeypatch.setattr(torch.version, "hip", hip)
    b = opened(kind)

    assert works(b)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{name} is not supported, using pageable copies")


@pytest.mark.parametrize("error", [DeviceError("cuInit", 100, "no device"), RuntimeError("torch")])
def test_a_cuda_device_that_cannot_be_reached_is_copied_through_torch(
    error, opened, monkeypatch, caplog
):
    def broken(index):
        raise error

    monkeypatch.setattr(cuda, "CudaDevice", broken)
    b = opened("cuda")

    assert works(b)
    (record,) = caplog.records
    assert "pageable copies" in record.getMessage()


@pytest.mark.parametrize("requested", REQUESTED_BACKENDS)
def test_the_option_decides_on_the_back_end(requested, opened, monkeypatch):
    monkeypatch.setattr(cuda, "CudaDevice", lambda index: SimulatedDevice())
    b = opened("cuda", backend=requested)
    assert isinstance(b.engine, StreamEngine)
    b.engine.pinned.join(WAIT)

    assert works(b)
    small_pages = {"batch", "kernel"}  # the stores, the loads
    assert set(b.engine.used) == (small_pages if requested == "auto" else {requested})


def test_the_thresholds_decide_what_goes_by_kernel(opened, monkeypatch):
    monkeypatch.setattr(cuda, "CudaDevice", lambda index: SimulatedDevice())
    monkeypatch.setattr("lmcache_shm.transfer.plan.KERNEL_MIN_RANGES", 1)
    b = opened("cuda", kernel_below={"load": 1, "store": 1 << 20})
    b.engine.pinned.join(WAIT)

    assert works(b)
    assert dict(b.engine.used) == {"kernel": 1, "batch": 1}


def test_options_and_engine_agree_on_names_and_defaults():
    for requested in REQUESTED_BACKENDS:
        assert OPTIONS["copy_backend"].check(requested) == requested
    with pytest.raises(ValueError, match=", ".join(REQUESTED_BACKENDS)):
        OPTIONS["copy_backend"].check("dma")
    limits = {kind: OPTIONS[f"{kind}_kernel_below"].default for kind in ("load", "store")}
    assert limits == KERNEL_BELOW
