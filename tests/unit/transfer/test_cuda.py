"""The CUDA device: what can be checked without one, and (marked gpu) what cannot."""

import contextlib
import ctypes
import inspect
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from lmcache_shm.transfer import cuda
from lmcache_shm.transfer.cuda import CudaDevice, Driver
from lmcache_shm.transfer.device import DeviceError, Ranges, Rows

from .libcuda import PROTOTYPES, Library


@pytest.fixture
def device(monkeypatch):
    """``device(library)``: a CudaDevice over a fake driver and as much of torch as it takes to make one."""

    def make(library: Library, index: int = 0) -> CudaDevice:
        torch = SimpleNamespace(
            cuda=SimpleNamespace(
                get_device_name=lambda index: f"card {index}",
                ExternalStream=lambda handle, device: (handle, device),
            )
        )
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setattr(cuda, "Driver", lambda: Driver(library))
        return CudaDevice(index)

    return make


def test_structures_have_the_layout_of_cuda_h():
    """Sizes and offsets as a C compiler found them with the headers of CUDA 12.8 and 13.0, 64-bit Linux."""
    side = ["x", "y", "type", "host", "device", "array", "pitch"]
    names = [
        *(f"src_{name}" for name in side),
        *(f"dst_{name}" for name in side),
        "width",
        "height",
    ]
    assert offsets(cuda._Memcpy2D) == {name: 8 * number for number, name in enumerate(names)}
    assert ctypes.sizeof(cuda._Memcpy2D) == 128
    names = ["src_access_order", "src_location", "dst_location", "flags"]
    assert offsets(cuda._CopyAttributes) == dict(zip(names, (0, 4, 12, 20), strict=True))
    assert ctypes.sizeof(cuda._CopyAttributes) == 24


def offsets(structure: type[ctypes.Structure]) -> dict[str, int]:
    return {name: getattr(structure, name).offset for name, _ in structure._fields_}


def test_the_fake_driver_knows_every_call_and_refuses_wrong_arguments():
    """Negative control: what would be a crash on a GPU is a failed test here."""
    named = set(re.findall(r'"(cu[A-Z]\w+)"', inspect.getsource(cuda)))
    assert named - {"cuMemcpyBatchAsync"} <= set(PROTOTYPES)
    library = Library()
    with pytest.raises(AssertionError, match="2 arguments, not 1"):
        library.cuDeviceGet(ctypes.c_int(0))
    with pytest.raises(AssertionError, match="argument 1"):
        library.cuMemHostRegister_v2(ctypes.c_void_p(1), ctypes.c_int(1), ctypes.c_uint(3))
    with pytest.raises(AssertionError, match="points to"):
        library.cuMemHostGetDevicePointer_v2(
            ctypes.byref(ctypes.c_uint()), ctypes.c_void_p(1), ctypes.c_uint(0)
        )


def test_directions_of_single_copies(device):
    """Stores go device → host on the store stream, loads the other way on the other stream."""
    library = Library()
    one = device(library)
    one.copy("store", device=1000, host=2000, nbytes=30)
    one.copy("load", device=1000, host=2000, nbytes=30)

    (store, to_host), (load, to_device) = library.calls[-2:]
    assert store == "cuMemcpyDtoHAsync_v2"
    assert [a.value for a in to_host] == [2000, 1000, 30, 11]
    assert load == "cuMemcpyHtoDAsync_v2"
    assert [a.value for a in to_device] == [1000, 2000, 30, 22]


def test_directions_and_pitches_of_2d_copies(device):
    library = Library()
    one = device(library)
    rows = Rows(device=1000, device_pitch=64, host=2000, host_pitch=32, width=16, height=3)
    one.copy_rows("store", rows)
    copy = library.calls[-1][1][0]._obj
    assert (copy.src_type, copy.src_device, copy.src_pitch) == (2, 1000, 64)
    assert (copy.dst_type, copy.dst_host, copy.dst_pitch) == (1, 2000, 32)
    assert (copy.width, copy.height) == (16, 3)

    one.copy_rows("load", rows._replace(height=1, device_pitch=1 << 40))
    copy = library.calls[-1][1][0]._obj
    assert (copy.src_type, copy.src_host, copy.src_pitch) == (1, 2000, 16)
    assert (copy.dst_type, copy.dst_device, copy.dst_pitch) == (2, 1000, 16)


@pytest.mark.parametrize(("kind", "order", "stream"), [("store", 1, 11), ("load", 3, 22)])
def test_batch_call_passes_its_arguments_in_the_order_of_12_8(kind, order, stream, device):
    """Arguments: dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, hStream.

    The source of a store is read in stream order, behind the kernels that write it, and at no other time.
    """
    library = Library()
    seen = []
    library.on_batch = lambda given: (
        library.batches.append(given),
        seen.append(ctypes.c_size_t.from_address(given[5]).value),
        seen.append(bytes(cuda._CopyAttributes.from_address(given[4]))),
    )
    one = device(library)
    ranges = Ranges(*(np.array(x, dtype=np.int64) for x in ([1, 2, 3], [40, 50, 60], [7, 8, 9])))
    one.copy_batch(kind, ranges)

    ((dsts, srcs, sizes, count, attrs, first, attr_count, failed, handle),) = library.batches
    assert (count, attr_count, handle) == (3, 1, stream)
    assert failed
    assert seen == [0, order.to_bytes(4, "little") + bytes(20)]  # no location hints, no flags
    del dsts, srcs, sizes, first, attrs  # valid only during the call


def test_batch_arrays_hold_targets_then_sources(device):
    library = Library()
    seen = []

    def batch(arguments):
        dsts, srcs, sizes, count, *_ = arguments
        seen.extend((ctypes.c_int64 * count).from_address(at)[:] for at in (dsts, srcs, sizes))

    library.on_batch = batch
    one = device(library)
    ranges = Ranges(*(np.array(x, dtype=np.int64) for x in ([1, 2], [40, 50], [7, 8])))
    one.copy_batch("store", ranges)
    one.copy_batch("load", ranges)

    assert seen == [[40, 50], [1, 2], [7, 8], [1, 2], [40, 50], [7, 8]]


def test_an_older_driver_has_no_batches():
    assert Driver(Library(version=12070)).batch is None
    assert Driver(Library(codes={"cuGetProcAddress_v2": 500})).batch is None
    assert Driver(Library(version=12080)).batch is not None


def test_a_driver_of_cuda_13_is_asked_for_the_entry_of_12_8():
    """Its own has one argument less: the stream would be taken from where failIdx was."""
    library = Library(version=13010)

    assert Driver(library).batch is not None
    (asked,) = (given for name, given in library.calls if name == "cuGetProcAddress_v2")
    assert (asked[0], asked[2].value) == (b"cuMemcpyBatchAsync", 12080)


def test_registration_maps_and_says_what_to_do_when_it_fails(device):
    library = Library()
    assert device(library).register(4096, 8192) == 4096 + 5
    name, arguments = library.calls[-2]
    assert name == "cuMemHostRegister_v2"
    assert [a.value for a in arguments] == [4096, 8192, 3]

    for code in (2, 304):
        with pytest.raises(DeviceError, match="out of luck") as caught:
            device(Library(codes={"cuMemHostRegister_v2": code})).register(4096, 8192)
        assert "memlock" in caught.value.fix


def test_memory_that_cannot_be_mapped_does_not_stay_registered(device):
    library = Library(codes={"cuMemHostGetDevicePointer_v2": 1})
    with pytest.raises(DeviceError):
        device(library).register(4096, 8192)

    assert "cuMemHostUnregister" in library.names()


def test_threads_opt_out_of_other_threads_graph_captures(device):
    """Or registering memory while the engine captures CUDA graphs would spoil the capture."""
    library = Library()
    one = device(library)
    one._torch = SimpleNamespace(cuda=SimpleNamespace(set_device=lambda index: None))
    one.enter_thread()

    (context, handle), (capture, mode) = library.calls[-2:]
    assert (context, handle[0].value) == ("cuCtxSetCurrent", 77)
    assert (capture, mode[0]._obj.value) == ("cuThreadExchangeStreamCaptureMode", 2)


def test_failed_calls_are_errors(device):
    one = device(Library(codes={"cuMemcpyDtoHAsync_v2": 700, "batch": 1}))
    with pytest.raises(DeviceError, match="cuMemcpyDtoHAsync_v2: out of luck"):
        one.copy("store", 1, 2, 3)
    with pytest.raises(DeviceError, match="cuMemcpyBatchAsync"):
        one.copy_batch("store", Ranges(*[np.ones(1, dtype=np.int64)] * 3))


@pytest.mark.parametrize("code", [0, 713])
def test_any_thread_can_unregister_and_is_left_as_it_was(code, device):
    """The thread that closes an engine has no CUDA context: without one the driver refuses."""
    library = Library(codes={"cuMemHostUnregister": code})
    one = device(library)
    library.calls.clear()
    if code:
        with pytest.raises(DeviceError, match="cuMemHostUnregister"):
            one.unregister(4096)
    else:
        one.unregister(4096)

    names = [name for name in library.names() if name != "cuGetErrorString"]
    assert names == [
        "cuCtxPushCurrent_v2",
        "cuThreadExchangeStreamCaptureMode",
        "cuMemHostUnregister",
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxPopCurrent_v2",
    ]
    assert library.calls[0][1][0].value == 77


def test_a_device_has_two_streams_of_its_own_with_the_lowest_priority(device):
    """Not from torch's pool, whose streams are dealt out again; and not bound to the legacy stream."""
    library = Library()
    one = device(library, index=3)

    made = [arguments for name, arguments in library.calls if name == "cuStreamCreateWithPriority"]
    assert [(flags.value, priority.value) for _, flags, priority in made] == [(1, 2), (1, 2)]
    assert one._streams == {"store": (11, 3), "load": (22, 3)}
    assert (one.name, one.has_batch, one.max_pitch) == ("card 3", True, (1 << 31) - 1)
    assert library.names().count("cuCtxPushCurrent_v2") == library.names().count(
        "cuCtxPopCurrent_v2"
    )


def test_a_driver_without_a_function_is_an_error_that_can_be_handled():
    library = Library()
    library.missing.add("cuInit")

    with pytest.raises(DeviceError, match="too old"):
        Driver(library)


class Table:
    """Stands in for a tensor of descriptors."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def pin_memory(self):
        return self

    def to(self, where, *, non_blocking):
        assert non_blocking
        return self

    def __iter__(self):
        return iter(self.array)


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_rows_of_the_kernels_table_are_aligned(kind, count, device):
    """Triton compiles once more for pointers that are no multiple of 16, in the middle of serving."""
    one, launches = device(Library()), []

    class Kernel:
        PROGRAMS, WORDS = 16, 1024
        copy_ranges = property(
            lambda self: {(min(16, count),): lambda *a, **k: launches.append((a, k))}
        )

    one._kernel = Kernel()
    one._torch = SimpleNamespace(
        from_numpy=Table,
        cuda=SimpleNamespace(
            device=lambda index: contextlib.nullcontext(),
            stream=lambda stream: contextlib.nullcontext(),
        ),
    )
    ranges = Ranges(*(np.arange(count, dtype=np.int64) + n for n in (1000, 2000, 8)))
    kept = one.copy_kernel(kind, ranges)

    (((sources, targets, sizes, given), more),) = launches
    assert (given, more) == (count, {"WORDS": 1024})
    wanted = ranges if kind == "store" else (ranges.host, ranges.device, ranges.nbytes)
    for row, column in zip((sources, targets, sizes), wanted):
        assert np.array_equal(row[:count], column)
        assert (row.ctypes.data - sources.ctypes.data) % 16 == 0
    assert kept


def test_errors_of_torch_become_device_errors():
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access\nlong advice")

    with pytest.raises(DeviceError, match="illegal memory access") as caught:
        CudaDevice._guarded("cudaEventQuery", broken)
    assert "long advice" not in str(caught.value)


KERNEL = """
import numpy as np, torch
from lmcache_shm.transfer import kernel
source, target = (torch.arange(4096, dtype=torch.int64) * k for k in (1, 0))
sizes = [8, 8 * 3, 8 * 1024, 8 * 1500]
starts = [5, 100, 400, 2000]
offsets = [9, 0, 200, 1300]
table = torch.tensor([
    [source.data_ptr() + 8 * s for s in starts],
    [target.data_ptr() + 8 * o for o in offsets],
    sizes,
])
kernel.copy_ranges[(3,)](*table, 4, WORDS=kernel.WORDS)
expected = torch.zeros(4096, dtype=torch.int64)
for start, offset, size in zip(starts, offsets, sizes):
    expected[offset : offset + size // 8] = source[start : start + size // 8]
assert torch.equal(expected, target), "copied wrongly"
print("copied")
"""


def test_kernel_copies_ranges_of_any_length():
    """Under Triton's interpreter, in a process of its own because the switch is read at import."""
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.stdout.strip() == "copied", done.stderr[-2000:]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path, monkeypatch):
    """The interpreter is lenient with types and pointers; the compiler needs no GPU. To machine code of Hopper."""
    pytest.importorskip("triton.backends.nvidia")
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    from lmcache_shm.transfer import kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    types = dict.fromkeys(("sources", "targets", "sizes"), "*i64")
    types |= {"count": "i32", "WORDS": "constexpr"}
    words = {"WORDS": kernel.WORDS}
    source = compiler.ASTSource(kernel.copy_ranges, types, constexprs=words, attrs=aligned)

    compiled = compiler.compile(source, target=GPUTarget("cuda", 90, 32))

    assert compiled.asm["cubin"]
    assert "ld.global" in compiled.asm["ptx"]
    assert "st.global" in compiled.asm["ptx"]


def gpu() -> bool:
    torch = pytest.importorskip("torch")
    return bool(torch.cuda.is_available()) and torch.version.hip is None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "batch", "kernel", "rows", "ranges", "pageable"])
def test_gpu_round_trip(backend, caplog):
    """Store, overwrite, load on a real device; tools/gpu_check.py does this for real layouts.

    Closed by a thread that never heard of CUDA: everything must be unpinned all the same.
    """
    if not gpu():
        pytest.skip("no CUDA device")
    import torch

    from lmcache_shm.arena.layout import SlotState
    from lmcache_shm.transfer.pages import Part, SlotLayout, group_pages
    from lmcache_shm.transfer.streams import StreamEngine

    from .rig import SLOT, WAIT
    from .worlds import FakeArena, item, job

    kv = torch.randint(0, 256, (4, 32, 8192), dtype=torch.uint8, device="cuda:0")
    layouts = [SlotLayout([Part(group_pages(list(kv), 32), 8)])]
    arena = FakeArena(8 * SLOT)
    engine = StreamEngine(arena, layouts, CudaDevice(0), backend=backend)
    try:
        assert engine.pinned.join(60)
        before, blocks = kv.clone(), np.random.default_rng(1).permutation(32)[:8]
        arena.set(3, SlotState.RESERVED, 5)
        engine.submit(*job("store", [item(layouts, 0, 3, SLOT, blocks)], 1))
        assert engine.drain(WAIT)
        kv.zero_()
        arena.set(3, SlotState.COMMITTED, 5)
        engine.submit(*job("load", [item(layouts, 0, 3, SLOT, blocks)], 2))
        assert engine.drain(WAIT)
        assert [(r.ok, r.reason) for r in engine.poll()] == [(True, ""), (True, "")]
        assert torch.equal(kv[:, blocks], before[:, blocks])
        assert backend == "auto" or set(engine.used) == {backend}
    finally:
        closer = threading.Thread(target=engine.close)
        closer.start()
        closer.join(WAIT)
    assert not closer.is_alive()
    assert "could not unpin" not in caplog.text
