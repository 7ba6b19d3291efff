"""RMSNorm and rounding in one launch, against the two launches, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import dynamic_quantisation, norm, rounded_norm
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import empty, get, numpy_dtype, put

EPS = 1e-5
KINDS = [("e4m3", "groups"), ("s8", "rows"), ("e4m3", "static")]
SHAPES = [(9, 8), (3, 328), (8, 1032), (2, 16_904)]
MORE = [(1, 64), (17, 200), (5, 4096), (1, 16_384), (1, 33_000)]


def rows(shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Rows of several magnitudes; zeros, a NaN and an infinity, where there are enough rows."""
    rng = np.random.default_rng(shape)
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-2, 2, (shape[0], 1))
    x[:, shape[1] // 2 :] *= 1e-3
    if shape[0] > 4:
        x[1], x[2, 5], x[3, 7], x[4] = 0, np.nan, np.inf, 1e-30
    return x.astype(numpy_dtype(dtype))


def codes_and_scales(gpu: Gpu, shape: tuple[int, int], memory, is_grouped: bool) -> tuple[np.ndarray, np.ndarray]:
    first, size = dynamic_quantisation.sections(*shape, is_grouped=is_grouped)
    held = get(gpu, memory, (size,), "u8")
    return held[:first], held[first:].view(np.float32)


@pytest.mark.parametrize(
    ("element", "kind", "dtype", "shapes"),
    [
        *((*each, "bf16", SHAPES) for each in KINDS),
        *(pytest.param(*each, dtype, SHAPES + MORE, marks=pytest.mark.exhaustive)
          for dtype in ("bf16", "f16") for each in (*KINDS, ("e4m3", "rows"), ("s8", "static"))),
    ],
)  # fmt: skip
@pytest.mark.exhaustive_cases("e4m3-static")
def test_the_same_bits_as_two_launches(gpu: Gpu, element: str, kind: str, dtype: str, shapes: list) -> None:
    is_grouped, is_static = kind == "groups", kind == "static"
    given = (np.float32(0.02), np.float32(1) / np.float32(0.02)) if is_static else ()
    for m, size in shapes:
        x, weight = rows((m, size), dtype), np.random.default_rng(size).standard_normal(size).astype(np.float32)
        blocks, between = [put(gpu, array) for array in (x, weight)], empty(gpu, (m, size), dtype)
        codes, both = dynamic_quantisation.sections(m, size, is_grouped=is_grouped)
        apart, at_once = empty(gpu, (both,), "u8"), empty(gpu, (both,), "u8")
        x_at, weight_at = (block.address for block in blocks)
        launch = norm.plan_rms_norm(m, size, dtype)
        gpu.launch(launch, x_at, 0, weight_at, between.address, size, 1.0 / size, EPS, 1.0)
        launch = dynamic_quantisation.plan(m, size, dtype, element, is_grouped=is_grouped, is_static=is_static)
        gpu.launch(launch, between.address, apart.address, apart.address + codes, m, size, *given)
        launch = rounded_norm.plan(m, size, dtype, element, is_grouped=is_grouped, is_static=is_static)
        gpu.launch(
            launch, x_at, weight_at, at_once.address, at_once.address + codes, m, size, 1.0 / size, EPS,
            *(given or (0.0, 0.0)),
        )  # fmt: skip
        expected, scales = codes_and_scales(gpu, (m, size), apart, is_grouped)
        got, got_scales = codes_and_scales(gpu, (m, size), at_once, is_grouped)
        np.testing.assert_array_equal(got_scales, scales, err_msg=f"{m} x {size}")
        # Bytes of rows with a NaN mean nothing but that: theirs is in the scale, or in e4m3 itself.
        np.testing.assert_array_equal(got, expected, err_msg=f"{m} x {size}")
        assert (expected != 0).any()
