"""Element types: names, sizes, and the whole table of promotions, written out by hand."""

from __future__ import annotations

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

from runtime import dtype as dtypes
from runtime.dtype import ALL_DTYPES, DType, dtype_of_array, promote, promote_scalar
from runtime.errors import InvalidArgumentError

SIZES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1,
    "int8": 1, "uint8": 1, "int32": 4, "int64": 8, "bool": 1,
}  # fmt: skip

# Rows and columns in the order of ALL_DTYPES: the type in which two tensors meet.
PROMOTIONS = """
f32 f32  f32  f32  f32  f32  f32  f32 f32 f32
f32 f16  f32  f16  f16  f16  f16  f16 f16 f16
f32 f32  bf16 bf16 bf16 bf16 bf16 bf16 bf16 bf16
f32 f16  bf16 f8e4m3 f32 f8e4m3 f8e4m3 f8e4m3 f8e4m3 f8e4m3
f32 f16  bf16 f32 f8e5m2 f8e5m2 f8e5m2 f8e5m2 f8e5m2 f8e5m2
f32 f16  bf16 f8e4m3 f8e5m2 i8  i32 i32 i64 i8
f32 f16  bf16 f8e4m3 f8e5m2 i32 u8  i32 i64 u8
f32 f16  bf16 f8e4m3 f8e5m2 i32 i32 i32 i64 i32
f32 f16  bf16 f8e4m3 f8e5m2 i64 i64 i64 i64 i64
f32 f16  bf16 f8e4m3 f8e5m2 i8  u8  i32 i64 bool
"""


def test_there_are_ten_of_the_right_size() -> None:
    assert {dtype.name: dtype.itemsize for dtype in ALL_DTYPES} == SIZES
    assert all(dtype.numpy.itemsize == dtype.itemsize for dtype in ALL_DTYPES)
    assert [dtype.name for dtype in ALL_DTYPES if dtype.is_floating] == list(SIZES)[:5]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_name_leads_back(dtype: DType) -> None:
    for name in (dtype, dtype.name, f"torch.{dtype.name}", dtype.safetensors, dtype.numpy, dtype.numpy.type):
        assert DType.parse(name) is dtype
    assert dtype_of_array(np.zeros(2, dtype.numpy)) is dtype
    assert copy.deepcopy(dtype) is dtype
    assert pickle.loads(pickle.dumps(dtype)) is dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", dtypes.bfloat16), ("fp16", dtypes.float16), ("half", dtypes.float16),
        ("f8e4m3", dtypes.float8_e4m3),
        ("torch.float8_e4m3fn", dtypes.float8_e4m3), ("torch.float8_e5m2", dtypes.float8_e5m2),
        (ml_dtypes.float8_e4m3fn, dtypes.float8_e4m3), ("u8", dtypes.uint8), (bool, dtypes.bool_),
        (np.longlong, dtypes.int64),
    ],
)  # fmt: skip
def test_short_and_foreign_names(name: object, dtype: DType) -> None:
    assert DType.parse(name) is dtype


@pytest.mark.parametrize("name", ["float64", np.float64, "torch.complex64", "", "int4", None, 3, ">f4", object, "auto"])
def test_unknown_names_are_refused(name: object) -> None:
    with pytest.raises(InvalidArgumentError, match="bfloat16") as caught:
        DType.parse(name)
    assert caught.value.param == "dtype"


@pytest.mark.parametrize("foreign", [np.float64, np.uint16, ">f4", ">i8", "U3", object, np.complex64])
def test_arrays_of_other_types_are_refused(foreign: object) -> None:
    with pytest.raises(InvalidArgumentError, match="float32"):
        dtype_of_array(np.zeros(2, foreign))  # type: ignore[call-overload]


def test_promotion_table() -> None:
    rows = [line.split() for line in PROMOTIONS.strip().splitlines()]
    for left, row in zip(ALL_DTYPES, rows, strict=True):
        for right, expected in zip(ALL_DTYPES, row, strict=True):
            assert promote(left, right) is DType.parse(expected), (left, right)


def test_promotion_of_numbers() -> None:
    for dtype in ALL_DTYPES:
        is_bool = dtype is dtypes.bool_
        assert promote_scalar(dtype, True) is dtype
        assert promote_scalar(dtype, 1) is (dtypes.int64 if is_bool else dtype)
        assert promote_scalar(dtype, 0.5) is (dtype if dtype.is_floating else dtypes.float32)


@pytest.mark.parametrize("left", [dtype for dtype in ALL_DTYPES if dtype.itemsize <= 2], ids=str)
def test_promotion_within_a_kind_holds_every_value(left: DType) -> None:
    patterns = np.arange(2 if left is dtypes.bool_ else 256**left.itemsize, dtype=f"u{left.itemsize}")
    values = patterns.view(left.numpy)
    for right in ALL_DTYPES:
        if left.is_floating == right.is_floating:
            met = promote(left, right)
            with np.errstate(invalid="ignore"):
                kept = values.astype(met.numpy).astype(np.float64)
                np.testing.assert_array_equal(kept, values.astype(np.float64), f"{left} {right}")
