"""cuBLAS by ctypes, where its library is installed: the reference for our matrix products. Optional.

The functions, their arguments and the enumerations' numbers are those of the cuBLAS library's documentation:
https://docs.nvidia.com/cuda/cublas/
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime.device.gpu import Gpu
from runtime.errors import DeviceError, InvalidArgumentError

VERSIONS = ("13", "12")
WORKSPACE_BYTES = 64 << 20
_OP_N, _OP_T = 0, 1
_TYPES = {"f32": 0, "f16": 2, "bf16": 14}  # cudaDataType
_COMPUTE_32F = 68
_GEMM_DEFAULT = -1
_STATUS = {
    1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR",
}  # fmt: skip
_WHERE = "pip install nvidia-cublas, or name its folder in LD_LIBRARY_PATH or CUDA_HOME"


class NoCublasError(DeviceError):
    """cuBLAS is not installed, or not for this machine; the message names the paths tried."""


class CublasError(DeviceError):
    """A call of cuBLAS failed; the message has its status."""


def candidates() -> Iterator[str]:
    """Names and paths under which the library may lie, those that need no search first."""
    names = [f"libcublas.so.{version}" for version in VERSIONS]
    yield from names
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [Path(home) / "lib64", Path(home) / "lib"] if home else []
    nvidia = find_spec("nvidia")
    for place in nvidia.submodule_search_locations or () if nvidia else ():
        folders += [Path(place) / part / "lib" for part in ("cu13", "cublas")]
    for folder in folders:
        yield from (str(folder / name) for name in names if (folder / name).is_file())
    if found := ctypes.util.find_library("cublas"):
        yield found


def load() -> ctypes.CDLL:
    """The library. Raises NoCublasError naming every place that was tried."""
    tried = list(dict.fromkeys(candidates()))
    for name in tried:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NoCublasError(f"cuBLAS was not found: tried {', '.join(tried)}. {_WHERE}")


class Cublas:
    """A handle on one device. Its work goes to the device's current stream, with a workspace of its own."""

    def __init__(self, gpu: Gpu, library: Any | None = None) -> None:
        """`library` replaces the installed one in tests.

        Raises:
            InvalidArgumentError: for an emulated device, whose memory a real library cannot reach.
            NoCublasError: where there is none.
            CublasError: where it does not start.
        """
        if gpu.driver.is_emulated and library is None:
            raise InvalidArgumentError(f"{gpu.device}: cuBLAS needs a GPU, and this one is emulated", param="device")
        self.gpu = gpu
        self._library = load() if library is None else library
        gpu.context.make_current()
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._workspace = gpu.allocator.allocate(WORKSPACE_BYTES, gpu.stream, is_redirected=False)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def bind_linear(
        self, m: int, n: int, k: int, dtype: str, x: int, weight: int, y: int, *, out_dtype: str | None = None,
        is_added: bool = False,
    ) -> Callable[[], None]:  # fmt: skip
        """A function that queues ``y [m, n] = x [m, k] . weight [n, k]^T``, all row-major at these addresses, sums in
        float32.

        `out_dtype` is y's, `dtype` or "f32". With `is_added` the product is added to y.

        Raises InvalidArgumentError for another dtype than f32, f16, bf16, or sizes below 1.
        """
        out_dtype = out_dtype or dtype
        for name, value in (("dtype", dtype), ("out_dtype", out_dtype)):
            if value not in _TYPES:
                known = ", ".join(_TYPES)
                raise InvalidArgumentError(f"cublas: {name} is {value!r}, must be one of {known}", param=name)
        for name, size in (("m", m), ("n", n), ("k", k)):
            if size < 1:
                raise InvalidArgumentError(f"cublas: {name} is {size}, must be at least 1", param=name)
        kind, out_kind, beta = _TYPES[dtype], _TYPES[out_dtype], self._one if is_added else self._zero
        # Its matrices are column-major: y^T [n, m] = weight [n, k] . x^T, where both lie as [k, ...] columns.
        arguments = (
            self._handle, _OP_T, _OP_N, n, m, k, ctypes.byref(self._one), ctypes.c_void_p(weight), kind, k,
            ctypes.c_void_p(x), kind, k, ctypes.byref(beta), ctypes.c_void_p(y), out_kind, n, _COMPUTE_32F,
            _GEMM_DEFAULT,
        )  # fmt: skip

        def run() -> None:
            self.gpu.context.make_current()
            self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(int(self.gpu.stream.handle)))
            place = ctypes.c_void_p(self._workspace.address)
            self._call("cublasSetWorkspace_v2", self._handle, place, ctypes.c_size_t(WORKSPACE_BYTES))
            self._call("cublasGemmEx", *arguments)

        return run

    def close(self) -> None:
        """Waits for the device and gives the handle back; may be called twice."""
        if self._handle.value:
            self.gpu.synchronize()
            self._call("cublasDestroy_v2", self._handle)
            self._handle = ctypes.c_void_p()

    def _call(self, name: str, *arguments: Any) -> None:
        status = int(getattr(self._library, name)(*arguments))
        if status:
            raise CublasError(f"{name}: CUBLAS_STATUS_{_STATUS.get(status, status)}")
