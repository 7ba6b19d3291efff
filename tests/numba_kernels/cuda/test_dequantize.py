"""Packed matrices as rows of numbers: each element rounded once, whole matrices and looked-up rows."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import dequantize
from numba_kernels.cuda.packing import PACKINGS, Packing, arrange, packing_of
from tests.numba_kernels.cuda.harness import assert_close, empty, get, numpy_dtype, put
from tests.numba_kernels.cuda.packed_cases import packed_matrix

pytestmark = pytest.mark.exhaustive_cases(r"\bf16\b", "u4_g128-bf16", "u4_g32")

UNITS = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
OTHERS = ("u8_g32_zeros", "u8_g128", "u4_g64", "u4_g32_zeros")
CASES = [
    *((name, "bf16", (19, 264)) for name in PACKINGS),
    ("u8", "f32", (3, 70)), ("u4_g32", "f32", (17, 96)), ("e2m1_g16_e4m3", "f16", (5, 40)),
]  # fmt: skip
MORE = [(name, dtype, (33, 328)) for name in (*PACKINGS, *OTHERS) for dtype in ("f32", "f16", "bf16")]


@pytest.mark.parametrize(
    ("name", "dtype", "shape"), [*CASES, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE)]
)
def test_elements_are_rounded_once(gpu, name, dtype, shape):
    matrix = packed_matrix(name, *shape, dtype)
    packed, out = put(gpu, matrix.block), empty(gpu, shape, dtype)
    gpu.declare_immutable(packed)
    launch = dequantize.plan(matrix.packing, *shape, dtype)
    gpu.launch(launch, packed.address, 0, out.address, 0, shape[0], *shape, 1.0)
    # Products of float32 round before the one rounding that counts.
    assert_close(get(gpu, out, shape, dtype), matrix.values, rtol=UNITS[dtype] + 2.0**-22, atol=2.0**-24)


@pytest.mark.parametrize("name", ["u8", "u4_g128"])
def test_rows_by_their_ids(gpu, name):
    (rows, depth), ids = (40, 72), np.array([3, 39, 0, 17, 3], np.int32)
    matrix = packed_matrix(name, rows, depth, "bf16")
    packed, wanted, flag = put(gpu, matrix.block), put(gpu, ids), put(gpu, np.zeros(1, np.int32))
    out = empty(gpu, (5, depth), "bf16")
    launch = dequantize.plan(matrix.packing, 5, depth, "bf16", is_lookup=True)
    gpu.launch(launch, packed.address, wanted.address, out.address, flag.address, 5, rows, depth, 2.5)
    expected = 2.5 * matrix.values[ids]
    assert_close(get(gpu, out, (5, depth), "bf16"), expected, rtol=2.0**-8 + 2.0**-22, atol=1e-9)
    assert get(gpu, flag, 1, np.int32) == 0
    bad = put(gpu, np.array([40, -1, 1, 2, 3], np.int32))
    gpu.launch(launch, packed.address, bad.address, out.address, flag.address, 5, rows, depth, 1.0)
    assert get(gpu, flag, 1, np.int32) == 1
    assert_close(get(gpu, out, (5, depth), "bf16")[:2], matrix.values[[0, 0]], rtol=2.0**-8 + 2.0**-22, atol=1e-9)


def test_names_say_what_a_packing_is():
    for name in (*PACKINGS, *OTHERS):
        packing = packing_of(name)
        assert packing is not None
        assert packing.name == name
    assert packing_of("bf16") is None
    for wrong in (("u4", 32, "", False), ("e4m3", 128, "value", True), ("u4", 16, "value", False), ("u8", 7, "value")):
        with pytest.raises(ValueError, match="there is none of"):
            Packing(*wrong)


def test_a_scale_that_is_no_number_is_refused():
    codes, scales = np.zeros((2, 64), np.uint8), np.ones((2, 2), np.float32)
    for kind, element, wrong in (
        ("value", "u4", np.nan), ("value", "u4", np.inf), ("exponent", "e2m1", -1.0), ("exponent", "e2m1", np.nan)
    ):  # fmt: skip
        scales[1, 0] = wrong
        with pytest.raises(ValueError, match="scales: must be finite"):
            arrange(Packing(element, 32, kind), "bf16", codes, scales, None, None)
    with pytest.raises(ValueError, match="shape"):
        arrange(Packing("u4", 32, "value"), "bf16", codes, np.ones((2, 3), np.float32), None, None)


def test_sizes_are_little_more_than_the_elements():
    sizes = {"u8": 1.0, "u4_g128": 0.516, "u4_g32": 0.563, "e2m1_g32_exponents": 0.532, "e2m1_g16_e4m3": 0.563}
    for name, most in sizes.items():
        packing = packing_of(name)
        assert packing is not None
        assert packing.size_bytes(4096, 4096, "bf16") <= (most + 0.001) * 4096**2
    assert numpy_dtype("bf16").itemsize == 2
