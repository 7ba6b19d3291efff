"""cuBLAS by ctypes: what it is called with, on an emulated device with a library of our own."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from runtime import ops
from runtime.backends import cuda_linear
from runtime.device import cublas
from runtime.device.cublas import Cublas, CublasError, NoCublasError
from runtime.device.gpu import Gpu
from runtime.errors import InvalidArgumentError
from runtime.linear.options import LoadOptions
from runtime.linear.weight import RowWeight
from runtime.tensor.tensor import Tensor

pytestmark = pytest.mark.emulator


class Library:
    """Has cuBLAS's functions, and multiplies as its documentation says, column-major, by numpy."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.calls: list[str] = []
        self.status = 0

    def cublasCreate_v2(self, handle: Any) -> int:
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = 77
        return self.status

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:
        self.calls.append("stream")
        assert stream.value == int(self.gpu.stream.handle)
        return self.status

    def cublasSetWorkspace_v2(self, handle: Any, place: Any, size: Any) -> int:
        self.calls.append("workspace")
        assert place.value % 256 == 0
        return self.status

    def cublasGemmEx(
        self, handle: Any, op_a: int, op_b: int, m: int, n: int, k: int, alpha: Any, a: Any, a_type: int, lda: int,
        b: Any, b_type: int, ldb: int, beta: Any, c: Any, c_type: int, ldc: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        self.calls.append("gemm")
        assert (handle.value, op_a, op_b, compute, algorithm) == (77, 1, 0, 68, -1)
        assert (a_type, b_type) == (2, 2)
        assert (ldc, alpha._obj.value) == (m, 1)
        left, right = self._columns(a, lda, k, m), self._columns(b, ldb, k, n)
        product = (left.T.astype(np.float32) @ right.astype(np.float32)).T
        found = np.empty((n, m), {2: np.float16, 0: np.float32}[c_type])
        if beta._obj.value:
            self.gpu.read(c.value, found)
            product += beta._obj.value * found.astype(np.float32)
        self.gpu.write(c.value, product.astype(found.dtype))
        return self.status

    def cublasDestroy_v2(self, handle: Any) -> int:
        self.calls.append("destroy")
        return self.status

    def _columns(self, address: Any, leading: int, rows: int, columns: int) -> np.ndarray:
        found = np.empty((columns, leading), np.float16)
        self.gpu.read(address.value, found)
        return found[:, :rows].T


@pytest.fixture
def gpu() -> Gpu:
    return Gpu.of("emulated:sm_90a")


def test_a_product_is_what_it_says(gpu: Gpu) -> None:
    library = Library(gpu)
    handle = Cublas(gpu, library)
    m, n, k = 5, 24, 16
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(-3, 4, (rows, k)).astype(np.float16) for rows in (m, n))
    blocks = [gpu.allocate(size) for size in (x.nbytes, weight.nbytes, 2 * m * n)]
    for block, array in zip(blocks, (x, weight)):
        gpu.write(block.address, array)
    handle.bind_linear(m, n, k, "f16", *(block.address for block in blocks))()
    found = np.empty((m, n), np.float16)
    gpu.read(blocks[2].address, found)
    assert np.array_equal(found, x @ weight.T)
    handle.close()
    handle.close()
    assert library.calls == ["stream", "workspace", "gemm", "destroy"]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("added", ["", "residual", "in place"])
def test_a_linear_layer_by_cublas(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, has_bias: bool, added: str) -> None:
    handle = Cublas(gpu, Library(gpu))
    monkeypatch.setattr(cuda_linear, "_cublas_of", lambda gpu: handle)
    rng = np.random.default_rng(1)
    x, weight, extra = (rng.integers(-3, 4, shape).astype(np.float16) for shape in ((5, 16), (24, 16), (5, 24)))
    bias = rng.integers(-3, 4, 24).astype(np.float32)
    place, expected = [Tensor.from_numpy(array).to(gpu.device) for array in (x, weight, extra, bias)], x @ weight.T
    layer = RowWeight(place[1], place[3] if has_bias else None, "cublas")
    expected = expected + (bias if has_bias else 0) + (extra if added else 0)
    residual = place[2] if added else None
    found = ops.linear(place[0], layer, residual=residual, out=residual if added == "in place" else None)
    assert np.array_equal(found.to("cpu").numpy(), expected.astype(np.float16))
    if not added:
        logits = ops.logits_linear(place[0], layer)
        assert logits.dtype.name == "float32"
        assert np.array_equal(logits.to("cpu").numpy(), expected)
    handle.close()


def test_where_a_model_may_ask_for_it(gpu: Gpu) -> None:
    with pytest.raises(InvalidArgumentError, match="needs a GPU: emulated:sm_90a is emulated"):
        LoadOptions(device=gpu.device, gemm="cublas")
    with pytest.raises(InvalidArgumentError, match="the cpu has one"):
        LoadOptions(gemm="cublas")
    with pytest.raises(InvalidArgumentError, match="bits depend on the batch"):
        LoadOptions(device=gpu.device, gemm="cublas", exact=True)


def test_what_it_refuses_and_what_fails(gpu: Gpu) -> None:
    with pytest.raises(InvalidArgumentError, match="emulated"):
        Cublas(gpu)
    library = Library(gpu)
    handle = Cublas(gpu, library)
    with pytest.raises(InvalidArgumentError, match="dtype is 'f64'"):
        handle.bind_linear(1, 1, 1, "f64", 0, 0, 0)
    with pytest.raises(InvalidArgumentError, match="n is 0"):
        handle.bind_linear(1, 0, 1, "f16", 0, 0, 0)
    library.status = 13
    block = gpu.allocate(512)
    with pytest.raises(CublasError, match=r"cublasSetStream_v2: CUBLAS_STATUS_EXECUTION_FAILED"):
        handle.bind_linear(1, 8, 8, "f16", block.address, block.address, block.address)()
    library.status = 0
    handle.close()


def test_without_a_library_it_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(cublas.ctypes, "CDLL", missing)
    with pytest.raises(NoCublasError, match=r"tried libcublas\.so\.13, libcublas\.so\.12.*pip install nvidia-cublas"):
        cublas.load()
