"""Seeded random arrays for the tensor tests: every element type, sizes 0 and 1 among them, every layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from runtime.dtype import ALL_DTYPES, DType

FLOATS = tuple(dtype for dtype in ALL_DTYPES if dtype.is_floating)
INTEGERS = tuple(dtype for dtype in ALL_DTYPES if not dtype.is_floating and dtype.name != "bool")
LAYOUTS = ("contiguous", "transposed", "sliced", "backwards", "expanded", "misaligned")


def random_array(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], special: float = 0.0) -> Any:
    """Values of many magnitudes; a share `special` of the floating-point ones is NaN, infinite or zero."""
    if dtype.name == "bool":
        return np.asarray(rng.integers(0, 2, shape), np.bool_)
    if not dtype.is_floating:
        limits = np.iinfo(dtype.numpy)
        wide = rng.integers(limits.min, limits.max, shape, dtype=dtype.numpy, endpoint=True)
        small = rng.integers(max(limits.min, -9), 10, shape, dtype=dtype.numpy)
        return np.where(rng.random(shape) < 0.3, wide, small)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, shape))
    oddities = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], shape)
    with np.errstate(all="ignore"):
        mixed = np.where(rng.random(shape) < special, oddities, values)
        return np.asarray(mixed.astype(np.float32).astype(dtype.numpy))


def laid_out(rng: np.random.Generator, array: Any, layout: str) -> Any:
    """An equal array (but "expanded", which repeats its first row) in another layout."""
    if layout == "transposed":
        order = rng.permutation(array.ndim)
        back = np.argsort(order)
        return np.array(array.transpose(order), order="C").transpose(back)
    if layout == "sliced":
        big = np.zeros(tuple(2 * size + 3 for size in array.shape), array.dtype)
        view = big[(*(slice(1, 1 + 2 * size, 2) for size in array.shape), ...)]
        view[...] = array
        return view
    if layout == "backwards":
        turn = (*(slice(None, None, int(rng.choice([-1, 1]))) for _ in array.shape), ...)
        return np.array(array[turn], order="C")[turn]
    if layout == "expanded":
        return np.broadcast_to(array[:1], array.shape) if array.ndim and array.shape[0] else array
    if layout == "misaligned":
        buffer = np.zeros(array.nbytes + 1, np.uint8)
        view = buffer[1:].view(array.dtype).reshape(array.shape)
        view[...] = array
        return view
    return np.array(array, order="C")


def random_shape(rng: np.random.Generator, max_axes: int = 4) -> tuple[int, ...]:
    return tuple(int(size) for size in rng.choice([0, 1, 2, 3, 4, 5], rng.integers(0, max_axes + 1),
                                                  p=[0.04, 0.16, 0.2, 0.2, 0.2, 0.2]))  # fmt: skip


def broadcastable(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts with `shape`."""
    kept = [1 if rng.random() < 0.3 else size for size in shape]
    return tuple(kept[rng.integers(0, len(kept) + 1) :])


def cases(seed: int, count: int, dtypes: tuple[DType, ...] = ALL_DTYPES, special: float = 0.1) -> Iterator[Any]:
    """`count` pairs (generator, array) with random types, shapes and layouts."""
    for index in range(count):
        rng = np.random.default_rng((seed, index))
        dtype = dtypes[index % len(dtypes)]
        array = random_array(rng, dtype, random_shape(rng), special)
        yield rng, laid_out(rng, array, LAYOUTS[int(rng.integers(len(LAYOUTS)))])


def wide(array: Any) -> Any:
    """A floating-point array in float64, exactly, without numpy's warning of signalling NaNs."""
    with np.errstate(invalid="ignore"):
        return np.asarray(array).astype(np.float64)


def assert_same(actual: Any, expected: Any) -> None:
    """Same shape, same type, same values, NaN where NaN is and nowhere else."""
    expected = np.asarray(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    if expected.dtype.kind not in "biu":
        actual, expected = wide(actual), wide(expected)
    np.testing.assert_array_equal(actual, expected, strict=True)
