"""What the tests of matrix products share: seeded cases, and running them on a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_kernels.cuda import gemm
from numba_kernels.cuda.specialisation import Launch
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import assert_equal, empty, get, numpy_dtype, put
from tests.oracles import dense as oracle


def plan(
    tier: str, m: int, n: int, k: int, dtype: str, out_dtype: str = "", *, arch: str = "sm_80",
    num_multiprocessors: int = 132, tile: str = "", has_residual: bool = True, is_out_aligned: bool = False,
    activation: str = "", **options: int,
) -> Launch | None:  # fmt: skip
    """`gemm.plan` of a product by its numbers; `options` are `gemm.Product`'s."""
    epilogue = gemm.Epilogue(has_residual=has_residual, is_aligned=is_out_aligned, activation=activation)
    product = gemm.Product(m, n, k, dtype, out=out_dtype, epilogue=epilogue, **options)
    return gemm.plan(product, gemm.machine_of(arch, num_multiprocessors), tier, tile)


@dataclass
class Case:
    """Arrays of one product; bias and residual may be None."""

    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray | None
    residual: np.ndarray | None
    dtype: str
    out_dtype: str
    is_weight_layout: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, n and k."""
        return self.x.shape[0], self.weight.shape[0 if self.is_weight_layout else 1], self.x.shape[1]

    def run(self, gpu: Gpu, tier: str, *, rows: slice = slice(None), **options) -> np.ndarray:
        """The product by a tier, of all rows or of some."""
        _, n, k = self.sizes
        m = self.x[rows].shape[0]
        launch = plan(tier, m, n, k, self.dtype, self.out_dtype, is_weight_layout=self.is_weight_layout, **options)
        return self.run_launch(gpu, launch, rows)

    def run_launch(self, gpu: Gpu, launch: Launch | None, rows: slice = slice(None)) -> np.ndarray:
        """The product by a launch that was planned for these rows."""
        x = np.ascontiguousarray(self.x[rows])
        _, n, k = self.sizes
        m = x.shape[0]
        out_dtype = numpy_dtype(self.out_dtype)
        out = empty(gpu, (m, n), out_dtype)
        if launch is None:
            return get(gpu, out, (m, n), out_dtype)
        held = [put(gpu, x), put(gpu, self.weight)]
        gpu.declare_immutable(held[1])
        addresses = [block.address for block in held]
        for term in (self.bias, None if self.residual is None else self.residual[rows]):
            if term is not None:
                held.append(put(gpu, term))
            addresses.append(0 if term is None else held[-1].address)
        is_f32 = self.bias is not None and self.bias.dtype == np.float32
        gpu.launch(launch, *addresses, out.address, m, n, k, int(is_f32), *gemm.NO_SQUARES)
        return get(gpu, out, (m, n), out_dtype)

    def check(self, actual: np.ndarray) -> None:
        """Within the error bound of float64; exactly, where the case is made of integers."""
        arrays = (self.x, self.weight, self.bias, self.residual)
        exact = oracle.linear(*arrays, is_weight_layout=self.is_weight_layout)
        if all(array is None or (np.asarray(array, np.float64) % 1 == 0).all() for array in arrays):
            assert_equal(actual, exact.astype(actual.dtype))
            return
        bound = oracle.error_bound(*arrays, actual.dtype, is_weight_layout=self.is_weight_layout)
        assert actual.shape == exact.shape
        is_close = np.abs(actual.astype(np.float64) - exact) <= bound
        assert is_close.all(), f"{(~is_close).sum()} elements off, first at {np.argwhere(~is_close)[0]}"


def case(
    sizes: tuple[int, int, int], dtype: str, out_dtype: str | None = None, *, is_weight_layout: bool = True,
    integers: bool = False, bias: str | None = "f32", residual: bool = True, seed: int = 0,
) -> Case:  # fmt: skip
    """A case of normal numbers, or of integers from -4 to 4; `bias` is its dtype or None."""
    m, n, k = sizes
    out_dtype = out_dtype or dtype
    rng = np.random.default_rng([seed, m, n, k])

    def array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        values = rng.integers(-4, 5, shape) if integers else rng.standard_normal(shape, dtype=np.float32)
        return values.astype(numpy_dtype(dtype))

    return Case(
        array((m, k), dtype), array((n, k) if is_weight_layout else (k, n), dtype),
        array((n,), bias) if bias else None, array((m, n), out_dtype) if residual else None,
        dtype, out_dtype, is_weight_layout,
    )  # fmt: skip
