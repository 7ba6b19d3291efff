"""Conversions, every bit pattern of the narrow types, and the values at every edge."""

from __future__ import annotations

import math

import numpy as np
import pytest

from runtime.dtype import ALL_DTYPES, DType, bool_
from runtime.tensor.cast import cast_array
from runtime.tensor.tensor import Tensor
from tests.runtime.tensor_cases import FLOATS, INTEGERS, assert_same, cases, wide


def all_patterns(dtype: DType) -> np.ndarray:  # type: ignore[type-arg]
    return np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype.numpy)


@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtype.itemsize <= 2], ids=str)
def test_narrow_floats_survive_the_way_through_float32(dtype: DType) -> None:
    patterns = all_patterns(dtype)
    single = Tensor.from_numpy(patterns).to("f32")
    assert_same(single.to(dtype).array, patterns)
    assert_same(wide(single.array), wide(patterns))


@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtype.itemsize <= 2], ids=str)
def test_rounding_is_to_the_nearest_and_to_even(dtype: DType) -> None:
    """Around every finite pair of neighbours: their middle, and a hair to either side of it."""
    values = wide(all_patterns(dtype))
    values = np.unique(values[np.isfinite(values)])
    low, high = values[:-1], values[1:]
    middle = ((low + high) / 2).astype(np.float32)
    bits = all_patterns(dtype)
    is_even = dict(zip(wide(bits).tolist(), (np.arange(bits.size) % 2 == 0).tolist()))
    expected = [a if is_even[a] else b for a, b in zip(low.tolist(), high.tolist())]
    np.testing.assert_array_equal(cast_array(middle, dtype).astype(np.float64), expected)
    for towards, chosen in ((-np.inf, low), (np.inf, high)):
        np.testing.assert_array_equal(
            cast_array(np.nextafter(middle, np.float32(towards)), dtype).astype(np.float64), chosen
        )


def test_what_is_too_large_shows() -> None:
    large = Tensor.from_numpy(np.array([1e30, -1e30, np.inf, -np.inf, np.nan], np.float32))
    for name in ("f16", "f8e5m2"):
        assert large.to(name).tolist()[:4] == [np.inf, -np.inf, np.inf, -np.inf]
        assert math.isnan(large.to(name)[4].item())
    assert np.isnan(large.to("f8e4m3").to("f32").array).all()
    edge = (
        Tensor.from_numpy(np.array([448, 464, np.nextafter(np.float32(464), 500), -449], np.float32))
        .to("f8e4m3")
        .tolist()
    )
    assert edge[:2] == [448, 448]
    assert math.isnan(edge[2])
    assert edge[3] == -448


@pytest.mark.parametrize("target", INTEGERS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_float_to_integer_truncates_and_saturates(source: DType, target: DType) -> None:
    limits = np.iinfo(target.numpy)
    edges = [0.0, -0.0, 0.99, -0.99, 1.5, -1.5, np.nan, np.inf, -np.inf, 3e38, -3e38]
    for limit in (limits.min, limits.max):
        near = np.float32(limit)
        edges += [
            near,
            np.nextafter(near, np.float32(np.inf)),
            np.nextafter(near, np.float32(-np.inf)),
            near / 2,
        ]
    array = cast_array(np.array(edges, np.float32), source)
    if source.itemsize <= 2:
        array = np.concatenate([array, all_patterns(source)])
    expected = [
        0 if math.isnan(value)
        else limits.max if value >= limits.max
        else limits.min if value <= limits.min
        else int(value)
        for value in wide(array).tolist()
    ]  # fmt: skip
    assert_same(cast_array(array, target), np.array(expected, target.numpy))


def test_integers_wrap_and_become_floats_by_way_of_float32() -> None:
    for _, array in cases(1, 200, (*INTEGERS, bool_)):
        for target in ALL_DTYPES:
            ours = Tensor.from_numpy(array).to(target)
            if target is bool_:
                expected = np.vectorize(bool, otypes=[bool])(array)
            elif target.is_floating:
                with np.errstate(over="ignore"):
                    expected = array.astype(np.float32).astype(target.numpy)
            else:
                bits = 8 * target.itemsize
                low = 0 if target.name == "uint8" else -(1 << (bits - 1))
                flat = [(int(value) - low) % (1 << bits) + low for value in array.reshape(-1)]
                expected = np.array(flat, target.numpy).reshape(array.shape)
            assert_same(ours.array, expected)
            assert ours.is_contiguous or ours.dtype.numpy == array.dtype


def test_to_bool_is_whether_it_differs_from_zero() -> None:
    for dtype in FLOATS:
        tensor = Tensor.from_numpy(np.array([0.0, -0.0, 1.0, -0.5, np.nan], np.float32)).to(dtype)
        assert tensor.to("bool").tolist() == [False, False, True, True, True]
        assert Tensor.from_numpy(np.array([True, False])).to(dtype).tolist() == [1.0, 0.0]


def test_the_same_type_is_the_same_array() -> None:
    for dtype in ALL_DTYPES:
        array = np.zeros((2, 3), dtype.numpy).T
        assert cast_array(array, dtype) is array
