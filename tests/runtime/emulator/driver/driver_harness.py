"""An emulated driver with a context made current, calls that must succeed, and kernels small enough to read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from runtime.emulator.driver.emulated_driver import EmulatedDriver
from runtime.emulator.execution.launch import Checks

R = cu.CUresult
ID = cu.CUlaunchAttributeID
MEMORY_BYTES = 1 << 26
NON_BLOCKING = 1

_HEAD = ".version 8.0\n.target {target}\n.address_size 64\n"
_INDEX = """
mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.s32 %r5, %r2, %r3, %r4;
setp.ge.u32 %p1, %r5, %r1; @%p1 bra DONE; mul.wide.u32 %rd2, %r5, 4;"""
_REGISTERS = "\n.reg .pred %p<2>; .reg .b32 %r<8>; .reg .f32 %f<4>; .reg .b64 %rd<8>;"

SCALE = (
    ".visible .entry scale(.param .u64 x, .param .u32 n, .param .f32 factor)\n{" + _REGISTERS + """
ld.param.u64 %rd1, [x]; ld.param.u32 %r1, [n]; ld.param.f32 %f1, [factor];""" + _INDEX + """
add.s64 %rd3, %rd1, %rd2; ld.global.f32 %f2, [%rd3]; mul.f32 %f3, %f2, %f1;
st.global.f32 [%rd3], %f3;
DONE: ret;\n}\n"""
)  # fmt: skip
"""x[i] *= factor for i < n."""

SHIFT = (
    ".visible .entry shift(.param .u64 x, .param .u64 y, .param .u32 n, .param .f32 term)\n{" + _REGISTERS + """
ld.param.u64 %rd1, [x]; ld.param.u64 %rd4, [y]; ld.param.u32 %r1, [n]; ld.param.f32 %f1, [term];""" + _INDEX + """
add.s64 %rd3, %rd1, %rd2; ld.global.f32 %f2, [%rd3]; add.f32 %f3, %f2, %f1;
add.s64 %rd5, %rd4, %rd2; st.global.f32 [%rd5], %f3;
DONE: ret;\n}\n"""
)  # fmt: skip
"""y[i] = x[i] + term for i < n."""

PTX = _HEAD.format(target="sm_80") + SCALE + SHIFT


def config(grid: tuple[int, int, int], block: tuple[int, int, int], stream: Any = 0, **attributes: Any) -> Any:
    """A CUlaunchConfig; attributes: shared, cluster, dependent, or others by their names, without a value."""
    made = cu.CUlaunchConfig()
    made.gridDimX, made.gridDimY, made.gridDimZ = grid
    made.blockDimX, made.blockDimY, made.blockDimZ = block
    made.sharedMemBytes = attributes.pop("shared", 0)
    made.hStream = stream
    listed = []
    for name, value in attributes.items():
        attribute = cu.CUlaunchAttribute()
        if name == "cluster":
            attribute.id = ID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = value
        elif name == "dependent":
            attribute.id = ID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = value
        else:
            attribute.id = getattr(ID, "CU_LAUNCH_ATTRIBUTE_" + name)
        listed.append(attribute)
    made.attrs, made.numAttrs = listed, len(listed)
    return made


class Refusal(AssertionError):
    """A call that had to succeed did not."""


class Harness:
    """A driver, the first device's context current.

    Calls go through `harness(name, …)`, which gives what comes after the status, or through `harness.status(name, …)`.
    """

    def __init__(self, devices: Any = "sm_80", **options: Any) -> None:
        options.setdefault("memory_bytes", MEMORY_BYTES)
        self.driver = EmulatedDriver(devices, **options)
        self("cuInit", 0)
        self.context = self.use(0)

    def __call__(self, name: str, *arguments: Any) -> Any:
        result = getattr(self.driver, name)(*arguments)
        if result[0] != R.CUDA_SUCCESS:
            raise Refusal(f"{name}: {result[0]!r}: {self.driver.last_reason}") from self.driver.last_fault
        return result[1] if len(result) == 2 else (result[1:] or None)

    def status(self, name: str, *arguments: Any) -> Any:
        """The status alone; what comes after one that is not CUDA_SUCCESS must be None."""
        result = getattr(self.driver, name)(*arguments)
        assert result[0] == R.CUDA_SUCCESS or all(value is None for value in result[1:])
        return result[0]

    def use(self, ordinal: int) -> Any:
        """Makes a device's context current."""
        context = self("cuDevicePrimaryCtxRetain", self("cuDeviceGet", ordinal))
        self("cuCtxSetCurrent", context)
        return context

    def stream(self, flags: int = NON_BLOCKING) -> Any:
        return self("cuStreamCreateWithPriority", flags, 0)

    def event(self, flags: int = 2) -> Any:
        return self("cuEventCreate", flags)

    def function(self, name: str, text: str = PTX) -> Any:
        return self("cuModuleGetFunction", self("cuModuleLoadData", text.encode()), name.encode())

    def put(self, array: np.ndarray) -> int:
        """The address of a device copy, which all streams may use."""
        address = self("cuMemAlloc", max(array.nbytes, 1))
        self("cuMemcpyHtoDAsync", address, array, array.nbytes, 0)
        self("cuCtxSynchronize")
        return int(address)

    def get(self, address: int, count: int, dtype: Any = np.float32) -> np.ndarray:
        out = np.zeros(count, dtype)
        self("cuCtxSynchronize")
        self("cuMemcpyDtoHAsync", out, address, out.nbytes, 0)
        return out

    def pinned(self, count: int, dtype: Any = np.float32) -> np.ndarray:
        """A view of new pinned memory."""
        size = count * np.dtype(dtype).itemsize
        address = self("cuMemHostAlloc", size, 0)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)).view(dtype)

    def scale(self, function: Any, address: int, count: int, factor: float, stream: Any) -> None:
        self._launch(function, count, stream, (address, count, factor), "QIf")

    def shift(self, function: Any, source: int, target: int, count: int, term: float, stream: Any) -> None:
        self._launch(function, count, stream, (source, target, count, term), "QQIf")

    def _launch(self, function: Any, count: int, stream: Any, values: Sequence[Any], kinds: str) -> None:
        types = {"Q": ctypes.c_uint64, "I": ctypes.c_uint32, "f": ctypes.c_float}
        params = (tuple(values), tuple(types[kind] for kind in kinds))
        self("cuLaunchKernelEx", config((-(-count // 64), 1, 1), (64, 1, 1), stream), function, params, 0)


__all__ = [
    "MEMORY_BYTES",
    "NON_BLOCKING",
    "PTX",
    "SCALE",
    "SHIFT",
    "Checks",
    "Harness",
    "R",
    "Refusal",
    "config",
    "cu",
]
