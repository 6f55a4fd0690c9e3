"""Stands in for libcuda: as strict about arguments as a C compiler with cuda.h would be.

Python passes a driver whatever it is given, so a wrong count or width of an argument is first seen on a
machine with a GPU, as a crash. Here it fails.
"""

import ctypes
from typing import Any

from lmcache_shm.transfer import cuda

Int, UInt, U64, Size = ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_size_t
Pointer, Text = ctypes.c_void_p, ctypes.c_char_p
"""A context, a stream, and an address of host memory are all passed as a pointer."""


class To:
    """A pointer to something that the callee reads or writes."""

    def __init__(self, pointee: type) -> None:
        self.pointee = pointee


# Compared with the headers of CUDA 12.8 and 13.0; enums are 4 bytes, CUdeviceptr is 8.
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (UInt,),
    "cuDriverGetVersion": (To(Int),),
    "cuGetErrorString": (Int, To(Text)),
    "cuGetProcAddress_v2": (bytes, To(Pointer), Int, U64, To(Int)),
    "cuDeviceGet": (To(Int), Int),
    "cuDeviceGetAttribute": (To(Int), Int, Int),
    "cuDevicePrimaryCtxRetain": (To(Pointer), Int),
    "cuCtxPushCurrent_v2": (Pointer,),
    "cuCtxPopCurrent_v2": (To(Pointer),),
    "cuCtxSetCurrent": (Pointer,),
    "cuCtxGetStreamPriorityRange": (To(Int), To(Int)),
    "cuStreamCreateWithPriority": (To(Pointer), UInt, Int),
    "cuThreadExchangeStreamCaptureMode": (To(Int),),
    "cuMemHostRegister_v2": (Pointer, Size, UInt),
    "cuMemHostGetDevicePointer_v2": (To(U64), Pointer, UInt),
    "cuMemHostUnregister": (Pointer,),
    "cuMemcpyDtoHAsync_v2": (Pointer, U64, Size, Pointer),
    "cuMemcpyHtoDAsync_v2": (U64, Pointer, Size, Pointer),
    "cuMemcpy2DAsync_v2": (To(cuda._Memcpy2D), Pointer),
}

BATCH_12_8 = ctypes.CFUNCTYPE(Int, *[Size] * 9)
"""dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, hStream; 13.0 has no failIdx any more."""


def check(name: str, given: tuple[Any, ...]) -> None:
    """AssertionError unless these arguments fit the prototype."""
    expected = PROTOTYPES[name]
    assert len(given) == len(expected), f"{name} has {len(expected)} arguments, not {len(given)}"
    for number, (argument, kind) in enumerate(zip(given, expected, strict=True)):
        if isinstance(kind, To):
            found = type(getattr(argument, "_obj", None))
            assert found is kind.pointee, f"{name}: argument {number} points to a {found.__name__}"
        else:
            assert type(argument) is kind, f"{name}: argument {number} is a {type(argument)}"


class Library:
    """Records calls, answers what it is told."""

    def __init__(self, version: int = 13000, codes: dict[str, int] | None = None) -> None:
        self.version = version
        self.codes = codes or {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.missing: set[str] = set()
        self.batches: list[tuple[Any, ...]] = []
        self.on_batch: Any = self.batches.append
        self._streams = iter((11, 22))

        def batch(*arguments: int) -> int:
            self.on_batch(arguments)
            return self.codes.get("batch", 0)

        self.entry = BATCH_12_8(batch)

    def __getattr__(self, name: str) -> Any:
        if name in self.missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            check(name, arguments)
            self.calls.append((name, arguments))
            if name in self.codes:
                return self.codes[name]
            self._answer(name, arguments)
            return 0

        return call

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        match name:
            case "cuDriverGetVersion":
                arguments[0]._obj.value = self.version
            case "cuGetErrorString":
                arguments[1]._obj.value = b"out of luck"
            case "cuGetProcAddress_v2" if arguments[2].value < 13000:  # from there on another form
                arguments[1]._obj.value = ctypes.cast(self.entry, Pointer).value
            case "cuDevicePrimaryCtxRetain":
                arguments[0]._obj.value = 77
            case "cuDeviceGetAttribute":
                arguments[0]._obj.value = {11: (1 << 31) - 1}[arguments[1].value]
            case "cuCtxGetStreamPriorityRange":
                arguments[0]._obj.value, arguments[1]._obj.value = 2, -5
            case "cuStreamCreateWithPriority":
                arguments[0]._obj.value = next(self._streams)
            case "cuMemHostGetDevicePointer_v2":
                arguments[0]._obj.value = arguments[1].value + 5

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]
