"""The arithmetic of views against numpy's own, on random shapes and strides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidArgumentError
from runtime.tensor import views

sizes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@settings(deadline=None)
@given(sizes)
def test_contiguous_strides_are_numpy_s(shape: tuple[int, ...]) -> None:
    array = np.empty(shape, np.int8)
    if array.size:
        assert views.contiguous_strides(shape) == array.strides
    assert views.is_contiguous(shape, views.contiguous_strides(shape))


@settings(deadline=None)
@given(sizes, st.lists(st.integers(-8, 8), min_size=4, max_size=4))
def test_is_contiguous_is_numpy_s(shape: tuple[int, ...], strides: list[int]) -> None:
    array = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), shape, tuple(strides[: len(shape)]))
    assert views.is_contiguous(shape, array.strides) == array.flags.c_contiguous


@settings(deadline=None)
@given(st.lists(sizes, min_size=1, max_size=3))
def test_broadcasting_is_numpy_s(shapes: list[tuple[int, ...]]) -> None:
    try:
        expected = np.broadcast_shapes(*shapes)
    except ValueError:
        with pytest.raises(InvalidArgumentError, match="op: shapes"):
            views.broadcast_shapes("op", *shapes)
    else:
        assert views.broadcast_shapes("op", *shapes) == expected


def _factorisations(number: int) -> list[tuple[int, ...]]:
    if number == 1:
        return [()]
    return [
        (factor, *rest)
        for factor in range(2, number + 1)
        if number % factor == 0
        for rest in _factorisations(number // factor)
    ]


@settings(deadline=None)
@given(st.data())
def test_a_reshaped_view_exists_just_where_numpy_finds_one(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(_factorisations(24)))
    base = np.arange(24 * 2 ** len(shape)).reshape(tuple(2 * size for size in shape))
    sliced = base[tuple(data.draw(st.sampled_from([np.s_[:size], np.s_[::2], np.s_[size:]])) for size in shape)]
    order = data.draw(st.permutations(range(len(shape))))
    array = sliced.transpose(order)
    new_shape = data.draw(st.sampled_from(_factorisations(24)))
    position = data.draw(st.integers(0, len(new_shape)))
    new_shape = (*new_shape[:position], 1, *new_shape[position:])
    strides = tuple(stride // array.itemsize for stride in array.strides)
    ours = views.reshaped_strides(array.shape, strides, new_shape)
    try:
        expected = array.reshape(new_shape, copy=False)
    except ValueError:
        assert ours is None
    else:
        assert ours is not None
        bytes_ = tuple(stride * array.itemsize for stride in ours)
        view = np.lib.stride_tricks.as_strided(array, new_shape, bytes_)
        np.testing.assert_array_equal(view, expected)


@pytest.mark.parametrize("shape", [(2, -1), (2.5,), ("3",), (None,), ((2, "x"),)])
def test_bad_shapes(shape: tuple[object, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="op: shape") as caught:
        views.check_shape("op", shape)
    assert caught.value.param == "shape"


@pytest.mark.parametrize(("axis", "num_axes"), [(2, 2), (-3, 2), (0, 0), ("x", 2), (1.0, 2), (None, 2)])
def test_bad_axis(axis: object, num_axes: int) -> None:
    with pytest.raises(InvalidArgumentError, match="op: axis"):
        views.check_axis("op", axis, num_axes)


def test_axes() -> None:
    assert views.check_axes("op", None, 3) == (0, 1, 2)
    assert views.check_axes("op", -1, 3) == (2,)
    assert views.check_axes("op", (2, -3), 3) == (0, 2)
    assert views.check_axes("op", (), 3) == ()
    with pytest.raises(InvalidArgumentError, match="twice"):
        views.check_axes("op", (0, -3), 3)
