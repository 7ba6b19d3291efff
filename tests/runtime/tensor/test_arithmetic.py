"""Arithmetic on tensors against oracles that take another way.

Floating point goes through float64, whose double rounding is harmless for + - * / and the square root of
float32 (53 >= 2 * 24 + 2 bits); integers are Python's own, wrapped."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.dtype import ALL_DTYPES, DType, bool_, float32, int32, int64, promote, promote_scalar
from runtime.errors import InvalidArgumentError
from runtime.tensor import arithmetic
from runtime.tensor.tensor import Tensor
from tests.runtime.tensor_cases import (
    FLOATS,
    LAYOUTS,
    assert_same,
    broadcastable,
    cases,
    laid_out,
    random_array,
)

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
}
DIVISION: dict[str, Callable[[Any, Any], Any]] = {
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "equal": operator.eq, "not_equal": operator.ne, "less": operator.lt, "less_equal": operator.le,
    "greater": operator.gt, "greater_equal": operator.ge,
}  # fmt: skip


def wrapped(values: Any, dtype: DType) -> Any:
    """Python integers of any size as `dtype`, in two's complement; 0 and 1 for bool."""
    if dtype is bool_:
        return np.asarray(values, np.bool_)
    bits = 8 * dtype.itemsize
    low = -(1 << (bits - 1)) if dtype.name != "uint8" else 0
    flat = [(int(value) - low) % (1 << bits) + low for value in np.asarray(values, object).reshape(-1)]
    return np.array(flat, dtype.numpy).reshape(np.shape(values))


def rounded(values: Any, dtype: DType) -> Any:
    """float64 to float32 and on to `dtype`."""
    with np.errstate(all="ignore"):
        return np.asarray(values, np.float64).astype(np.float32).astype(dtype.numpy)


def pairs(seed: int, count: int) -> Any:
    """(generator, left, right, operands' common type): tensors of random types, or a tensor and a number."""
    for rng, left in cases(seed, count):
        dtype = ALL_DTYPES[int(rng.integers(len(ALL_DTYPES)))]
        layout = LAYOUTS[int(rng.integers(len(LAYOUTS)))]
        right: Any = laid_out(rng, random_array(rng, dtype, broadcastable(rng, left.shape), 0.1), layout)
        kind = DType.parse(left.dtype)
        if rng.random() < 0.25:
            right = rng.choice(np.array([True, False, 0, 1, 3, 100, 0.5, -1.25, 1e9, 1e300], object))
            yield rng, left, right, promote_scalar(kind, right)
        else:
            yield rng, left, right, promote(kind, dtype)


def as_tensor(operand: Any) -> Any:
    return Tensor.from_numpy(operand) if isinstance(operand, np.ndarray) else operand


def widen(operand: Any, dtype: DType) -> Any:
    """An operand as the oracle sees it, after it met the other one's type `dtype`."""
    if dtype.is_floating:
        with np.errstate(over="ignore"):
            return np.asarray(operand, np.float64).astype(np.float32).astype(np.float64)
    return np.vectorize(int, otypes=[object])(operand) if np.size(operand) else np.asarray(operand, object)


def met_as(operand_type: DType, *, is_division: bool = False) -> DType:
    """The type of an arithmetic result, from the type in which the operands met."""
    if is_division and not operand_type.is_floating:
        return float32
    return int64 if operand_type is bool_ else operand_type


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name: str) -> None:
    for rng, left, right, met in pairs(1, 200):
        dtype = met_as(met, is_division=name == "divide")
        a, b = (right, left) if rng.random() < 0.5 else (left, right)
        result = ARITHMETIC[name](as_tensor(a), as_tensor(b))
        x, y = np.broadcast_arrays(widen(a, dtype), widen(b, dtype))
        with np.errstate(all="ignore"):
            expected = ARITHMETIC[name](x, y)
        assert_same(result.array, rounded(expected, dtype) if dtype.is_floating else wrapped(expected, dtype))
        assert result.is_contiguous
        assert not result.is_read_only


@pytest.mark.parametrize("name", DIVISION)
def test_division_with_remainder(name: str) -> None:
    for _, left, right, met in pairs(2, 200):
        dtype = met_as(met)
        if not dtype.is_floating:
            if not isinstance(right, np.ndarray):
                right = right or True
            right = np.where(right == 0, right.dtype.type(1), right) if isinstance(right, np.ndarray) else right
        x, y = np.broadcast_arrays(widen(left, dtype), widen(right, dtype))
        with np.errstate(all="ignore"):
            if dtype.is_floating:  # exact in no wider type: numpy's own float32 says what is meant
                whole = getattr(np, name)(x.astype(np.float32), y.astype(np.float32))
                expected = rounded(whole, dtype)
            else:
                expected = wrapped(DIVISION[name](x, y), dtype)
        assert_same(DIVISION[name](as_tensor(left), as_tensor(right)).array, expected)


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name: str) -> None:
    for _, left, right, met in pairs(2, 150):
        x, y = np.broadcast_arrays(widen(left, met), widen(right, met))
        with np.errstate(all="ignore"):
            expected = np.asarray(COMPARISONS[name](x, y), np.bool_)
        assert_same(COMPARISONS[name](as_tensor(left), as_tensor(right)).array, expected)


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_minimum_and_maximum_hand_on_nan(name: str) -> None:
    for _, left, right, met in pairs(3, 150):
        chosen = getattr(np, name)(widen(left, met), widen(right, met))
        expected = rounded(chosen, met) if met.is_floating else wrapped(chosen, met)
        assert_same(getattr(arithmetic, name)(as_tensor(left), as_tensor(right)).array, expected)
    three = Tensor.from_numpy(np.array([1, np.nan, 3], np.float32))
    assert arithmetic.maximum(three, 2).tolist()[::2] == [2, 3]
    assert np.isnan(arithmetic.maximum(three, 2)[1].item())


def test_bits_of_bools_and_integers() -> None:
    for _, left, right, met in pairs(4, 300):
        for name, sign in (
            ("bitwise_and", operator.and_),
            ("bitwise_or", operator.or_),
            ("bitwise_xor", operator.xor),
        ):
            ours = as_tensor(left), as_tensor(right)
            if met.is_floating:
                with pytest.raises(InvalidArgumentError, match=name):
                    sign(*ours)
            elif isinstance(right, np.ndarray):
                assert_same(sign(*ours).array, getattr(np, name)(left.astype(met.numpy), right.astype(met.numpy)))
        if left.dtype.kind in "biu":
            assert_same((~as_tensor(left)).array, ~left)


def test_where() -> None:
    for rng, left, right, met in pairs(5, 200):
        condition = rng.random(np.broadcast_shapes(left.shape, np.shape(right))) < 0.5
        expected = np.where(condition, widen(left, met), widen(right, met))
        expected = rounded(expected, met) if met.is_floating else wrapped(expected, met)
        result = arithmetic.where(Tensor.from_numpy(np.asarray(condition)), as_tensor(left), as_tensor(right))
        assert_same(result.array, expected)
    with pytest.raises(InvalidArgumentError, match="condition"):
        arithmetic.where(Tensor.ones(3), 1, Tensor.ones(3))


def test_unary() -> None:
    for _, array in cases(6, 300):
        tensor = Tensor.from_numpy(array)
        dtype = DType.parse(array.dtype)
        number = int64 if dtype is bool_ else dtype
        floating = dtype if dtype.is_floating else float32
        with np.errstate(all="ignore"):
            if number.is_floating:
                assert_same((-tensor).array, -array)
                assert_same(abs(tensor).array, abs(array))
            else:
                assert_same((-tensor).array, wrapped(-widen(array, number), number))
                assert_same(abs(tensor).array, wrapped(abs(widen(array, number)), number))
            wide = array.astype(np.float32).astype(np.float64)
            assert_same(arithmetic.sqrt(tensor).array, rounded(np.sqrt(wide), floating))
            for name in ("exp", "log", "tanh"):
                result = getattr(arithmetic, name)(tensor)
                assert result.dtype is floating
                if floating is float32:
                    expected = getattr(np, name)(wide).astype(np.float32)
                    np.testing.assert_allclose(result.array, expected, rtol=1e-6, equal_nan=True)


def test_power() -> None:
    base = Tensor.from_numpy(np.array([[1.5], [-2.0], [0.0]], np.float32))
    np.testing.assert_array_equal((base ** Tensor.arange(4)).array, base.array.astype(np.float64) ** np.arange(4))
    assert (2 ** Tensor.arange(5)).tolist() == [1, 2, 4, 8, 16]
    assert (Tensor.full(1, 3, "u8") ** 6).tolist() == [729 % 256]
    assert (Tensor.full(1, 4, "bf16") ** -0.5).item() == 0.5
    with pytest.raises(InvalidArgumentError, match="power"):
        Tensor.arange(3) ** -1


@pytest.mark.parametrize("op", ["floor_divide", "remainder"])
def test_integer_division_by_zero_is_an_error_and_of_floats_is_not(op: str) -> None:
    for divisor in (0, Tensor.zeros(3, "i64"), False):
        with pytest.raises(InvalidArgumentError, match=f"{op}: division"):
            DIVISION[op](Tensor.arange(3), divisor)
    assert DIVISION[op](Tensor.zeros(0, "i32"), 0).shape == (0,)
    assert DIVISION[op](Tensor.ones(1), 0.0).shape == (1,)
    assert (Tensor.arange(-1, 2) / 0).tolist()[::2] == [-np.inf, np.inf]


def test_numbers_are_weak_and_arrays_are_not() -> None:
    half = Tensor.ones(2, "f16")
    assert (half * 2.5).dtype is half.dtype
    assert (half * np.float64(2.5)).dtype is half.dtype
    assert (half * np.float32(2.5)).dtype is float32
    assert (np.ones(2, np.float32) - half).tolist() == [0, 0]
    assert type(np.ones(2, np.float32) * half) is Tensor
    assert (Tensor.ones(2, "bool") + True).tolist() == [2, 2]
    assert (10 - Tensor.arange(3)).tolist() == [10, 9, 8]
    assert (half * 1e300).tolist() == [np.inf, np.inf]
    assert (Tensor.full(1, 1.0, "bf16") * 0.1).item() == float(np.float32(0.1).astype(half.to("bf16").dtype.numpy))
    assert (Tensor.arange(3, dtype="i8") < 1000).tolist() == [True] * 3


def test_foreign_operands() -> None:
    tensor = Tensor.ones(2)
    assert (tensor == None) is False  # noqa: E711
    assert (tensor != "x") is True
    for bad in (lambda: tensor + "x", lambda: [1] + tensor, lambda: tensor @ None, lambda: tensor < {}):
        with pytest.raises(TypeError):
            bad()
    with pytest.raises(InvalidArgumentError, match="float64"):
        tensor + np.ones(2)
    with pytest.raises(InvalidArgumentError, match="multiply: shapes"):
        tensor * Tensor.ones(3)
    with pytest.raises(InvalidArgumentError, match="add: 300 is outside uint8"):
        Tensor.ones(2, "u8") + 300
    with pytest.raises(InvalidArgumentError, match="too large"):
        tensor + 10**400


# ------------------------------------------------------------------------------------ writing


def test_assignment() -> None:
    for rng, target in cases(7, 200):
        target = target.copy()
        source = random_array(rng, ALL_DTYPES[int(rng.integers(10))], broadcastable(rng, target.shape), 0.1)
        tensor = Tensor.from_numpy(target)
        tensor[...] = Tensor.from_numpy(source)
        cast = Tensor.from_numpy(source).to(DType.parse(target.dtype)).array
        assert_same(target, np.broadcast_to(cast, target.shape))
    tensor = Tensor.arange(6)
    tensor[1:] = tensor[:-1]
    assert tensor.tolist() == [0, 0, 1, 2, 3, 4]
    tensor[::2] = -1
    assert tensor.tolist() == [-1, 0, -1, 2, -1, 4]
    for bad, message in ((Tensor.ones(7), "assign"), (1.5, "1.5"), (2**63, "outside"), ("x", "str")):
        with pytest.raises(InvalidArgumentError, match=message):
            tensor[...] = bad


# ------------------------------------------------------------------------------------ reductions


def random_axes(rng: np.random.Generator, num_axes: int) -> Any:
    axes = tuple(int(axis) for axis in rng.permutation(num_axes)[: rng.integers(0, num_axes + 1)])
    axes = tuple(axis - num_axes * int(rng.integers(0, 2)) for axis in axes)
    return None if rng.random() < 0.3 else axes[0] if len(axes) == 1 else axes


def test_reductions() -> None:
    for rng, array in cases(8, 400, special=0.02):
        tensor, dtype = Tensor.from_numpy(array), DType.parse(array.dtype)
        axis, keepdims = random_axes(rng, array.ndim), bool(rng.integers(0, 2))
        with np.errstate(all="ignore"):
            if dtype.is_floating:
                wide, total_dtype = array.astype(np.float64), dtype
                total = rounded(wide.sum(axis, keepdims=keepdims), dtype)
            else:
                wide, total_dtype = widen(array, dtype), int64
                total = wrapped(wide.sum(axis, keepdims=keepdims), int64)
            assert_same(tensor.sum(axis, keepdims).array, total)
            assert tensor.sum(axis, keepdims).dtype is total_dtype
            wide = array.astype(np.float64)
            count = array.size // max(total.size, 1) if array.size else 0
            mean = np.divide(wide.sum(axis, keepdims=keepdims), count)
            mean_dtype = dtype if dtype.is_floating else float32
            assert_same(tensor.mean(axis, keepdims).array, rounded(mean, mean_dtype)) if array.size else None
        axes = range(array.ndim) if axis is None else np.atleast_1d(np.asarray(axis, int))
        if any(array.shape[one] == 0 for one in axes):
            for name in ("max", "min"):
                with pytest.raises(InvalidArgumentError, match=f"{name}: nothing"):
                    getattr(tensor, name)(axis)
        else:
            for name in ("max", "min"):
                exact = array if dtype is int64 else wide
                expected = np.asarray(getattr(np, name)(exact, axis=axis, keepdims=keepdims))
                assert_same(getattr(tensor, name)(axis, keepdims).array, expected.astype(dtype.numpy))
            if axis is None or isinstance(axis, int):
                source = array if dtype is int64 else wide
                found = tensor.argmax(axis, keepdims)
                assert_same(found.array, np.argmax(source, axis=axis, keepdims=keepdims))


def test_reductions_of_nothing() -> None:
    empty = Tensor.zeros((0, 3))
    assert empty.sum(0).tolist() == [0, 0, 0]
    assert np.isnan(empty.mean(0).array).all()
    assert empty.max(1).shape == (0,)
    assert Tensor.zeros((0,), "i8").sum().item() == 0
    with pytest.raises(InvalidArgumentError, match="argmax"):
        empty.argmax()


def test_a_sum_does_not_lose_what_float32_cannot_hold() -> None:
    many = Tensor.ones((1 << 25,), "u8").to("f32").view(1 << 13, 1 << 12)
    assert many.sum().item() == 1 << 25
    assert many.transpose(0, 1).sum(1).sum().item() == 1 << 25
    assert Tensor.full(4096, 0.001, "bf16").sum().item() == pytest.approx(4.096, rel=0.01)
    assert Tensor.full(70000, 1, "f16").sum().item() == np.inf
    assert Tensor.full(70000, 1, "f16").mean().item() == 1
    assert Tensor.full(300, 255, "u8").sum().item() == 76500


def test_nan_wins() -> None:
    tensor = Tensor.from_numpy(np.array([[1, np.nan, 3], [7, 5, 6]], np.float32))
    for dtype in FLOATS:
        cast = tensor.to(dtype)
        for result in (cast.max(1), cast.min(1), cast.sum(1), cast.mean(1)):
            assert np.isnan(result.to("f32").array).tolist() == [True, False]
        assert cast.argmax(1).tolist() == [1, 0]


# ------------------------------------------------------------------------------------ matmul


@pytest.mark.parametrize("dtype", ALL_DTYPES[:-1], ids=str)
def test_matmul(dtype: DType) -> None:
    for index in range(40):
        rng = np.random.default_rng((9, index))
        m, n, k = (int(size) for size in rng.integers(0, 7, 3))
        batch = tuple(int(size) for size in rng.integers(1, 4, rng.integers(0, 3)))
        left = random_array(rng, dtype, (*broadcastable(rng, batch), m, k))
        right = random_array(rng, dtype, (*batch, k, n))
        if rng.random() < 0.2:
            left = random_array(rng, dtype, (k,))
        if rng.random() < 0.2:
            right = random_array(rng, dtype, (k,))
        left, right = (laid_out(rng, array, LAYOUTS[int(rng.integers(len(LAYOUTS)))]) for array in (left, right))
        result = Tensor.from_numpy(left) @ Tensor.from_numpy(right)
        if dtype.is_floating:
            expected = left.astype(np.float64) @ right.astype(np.float64)
            assert result.dtype is dtype
            assert result.shape == np.shape(expected)
            scale = np.abs(left.astype(np.float64)) @ np.abs(right.astype(np.float64))
            eps = float(np.finfo(np.float32).eps) * 8 + (
                0 if dtype is float32 else {2: 2.0**-8, 1: 2.0**-2}[dtype.itemsize]
            )
            error = np.abs(result.array.astype(np.float64) - expected)
            limit = np.float64({"float8_e4m3": 448, "float16": 65504}.get(dtype.name, np.inf))
            assert np.all((error <= eps * scale + 1e-3 * (dtype.itemsize == 1)) | (np.abs(expected) > 0.9 * limit))
        else:
            wide = int32 if dtype.itemsize == 1 else dtype
            product = np.matmul(widen(left, dtype), widen(right, dtype))
            expected = wrapped(product, wide)
            assert_same(result.array, expected)


def test_matmul_of_two_types_meets_in_the_wider() -> None:
    left, right = Tensor.ones((2, 3), "bf16"), Tensor.ones((3, 2), "f16")
    product = left @ right
    assert (product.dtype, product.tolist()) == (float32, [[3, 3], [3, 3]])
    assert (np.ones((2, 3), np.float32) @ right).tolist() == [[3, 3], [3, 3]]
    assert (Tensor.full((1, 300), 127, "i8") @ Tensor.full((300, 1), -128, "i8")).item() == -300 * 127 * 128


@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 3), (2, 3)), ((), (3,)), ((3,), ()), ((2, 2, 3), (3, 3, 2)), ((3,), (2,)), ((4, 3), (2,))],
)
def test_matmul_refuses_shapes(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="matmul"):
        Tensor.ones(left) @ Tensor.ones(right)
    with pytest.raises(InvalidArgumentError, match="bool"):
        Tensor.ones((2, 2), "bool") @ Tensor.ones((2, 2), "bool")
