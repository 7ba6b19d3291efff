"""The arithmetic of views: shapes and strides in, shapes and strides out, in elements; no memory in sight.

Strides may be zero (an expanded axis) or negative (a slice with a negative step).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.errors import InvalidArgumentError

Shape = tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides. A zero-size shape gets those of the same shape with 1 for 0, as in numpy."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(shape[axis], 1)
    return tuple(strides)


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Whether the elements lie in row-major order without gaps; strides of axes of size 1 do not matter."""
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def has_overlap(shape: Shape, strides: Shape) -> bool:
    """Whether an expanded axis lets several indices meet in one element, which makes writing ambiguous."""
    return any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True))


def check_shape(op: str, shape: Sequence[Any]) -> Shape:
    """A shape given as `f(2, 3)` or `f((2, 3))`, as a tuple of non-negative ints.

    Raises:
        InvalidArgumentError: for a size that is negative or no integer.
    """
    if len(shape) == 1 and not hasattr(shape[0], "__index__"):
        shape = shape[0]
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise InvalidArgumentError(f"{op}: shape must be integers, got {shape!r}", param="shape") from None
    if any(size < 0 for size in sizes):
        raise InvalidArgumentError(f"{op}: shape {sizes} has a negative size", param="shape")
    return sizes


def check_axis(op: str, axis: Any, num_axes: int) -> int:
    """An axis counted from the front, from one that may be negative.

    Raises:
        InvalidArgumentError: outside -num_axes .. num_axes - 1.
    """
    try:
        index = operator.index(axis)
    except TypeError:
        raise InvalidArgumentError(f"{op}: axis must be an integer, got {axis!r}", param="axis") from None
    if not -num_axes <= index < num_axes:
        raise InvalidArgumentError(f"{op}: axis {index} is out of range for {num_axes} axes", param="axis")
    return index % num_axes


def check_axes(op: str, axis: Any, num_axes: int) -> Shape:
    """Axes from None (all of them), one axis or a sequence of axes; sorted, each once.

    Raises:
        InvalidArgumentError: for an axis out of range or named twice.
    """
    if axis is None:
        return tuple(range(num_axes))
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(sorted(check_axis(op, one, num_axes) for one in given))
    if len(set(axes)) != len(axes):
        raise InvalidArgumentError(f"{op}: axes {axis!r} name an axis twice", param="axis")
    return axes


def resolve_shape(op: str, new_shape: Sequence[Any], num_elements: int) -> Shape:
    """`new_shape` with its one -1, if any, filled in so that it holds `num_elements`.

    Raises:
        InvalidArgumentError: where no size, or more than one, would do.
    """
    if len(new_shape) == 1 and not hasattr(new_shape[0], "__index__"):
        new_shape = new_shape[0]
    sizes = list(new_shape)
    unknown = [axis for axis, size in enumerate(sizes) if isinstance(size, int) and size == -1]
    if len(unknown) > 1:
        raise InvalidArgumentError(f"{op}: shape {tuple(sizes)} leaves more than one size open", param="shape")
    if unknown:
        sizes[unknown[0]] = 1
        known = math.prod(check_shape(op, (tuple(sizes),)))
        if known == 0 or num_elements % known:
            raise InvalidArgumentError(
                f"{op}: shape {tuple(new_shape)} does not divide {num_elements} elements", param="shape"
            )
        sizes[unknown[0]] = num_elements // known
    shape = check_shape(op, (tuple(sizes),))
    if math.prod(shape) != num_elements:
        raise InvalidArgumentError(f"{op}: shape {shape} does not hold {num_elements} elements", param="shape")
    return shape


def reshaped_strides(shape: Shape, strides: Shape, new_shape: Shape) -> Shape | None:
    """Strides that show the same elements, in the same order, as `new_shape`; None where only a copy can.

    Old axes that follow each other in memory are merged into runs, each to be cut exactly into new axes.
    """
    if math.prod(shape) == 0:
        return contiguous_strides(new_shape)
    runs: list[tuple[int, int]] = []  # (number of elements, stride of the innermost), outermost first
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    new_strides = [1] * len(new_shape)
    left, stride = runs.pop() if runs else (1, 1)
    for axis in range(len(new_shape) - 1, -1, -1):
        size = new_shape[axis]
        if size != 1 and left == 1:
            left, stride = runs.pop()
        if left % size:
            return None
        new_strides[axis] = stride
        left //= size
        stride *= size
    return tuple(new_strides)


def broadcast_shapes(op: str, *shapes: Shape) -> Shape:
    """The shape that numpy's broadcasting gives.

    Raises:
        InvalidArgumentError: where two sizes differ and neither is 1.
    """
    result = [1] * max(map(len, shapes))
    for shape in shapes:
        for axis, size in enumerate(reversed(shape), start=1):
            if size != 1:
                if result[-axis] not in (1, size):
                    listed = " and ".join(map(str, shapes))
                    raise InvalidArgumentError(f"{op}: shapes {listed} do not broadcast together")
                result[-axis] = size
    return tuple(result)


def expanded_strides(op: str, shape: Shape, strides: Shape, new_shape: Sequence[Any]) -> tuple[Shape, Shape]:
    """(shape, strides) of the view that repeats axes of size 1 and adds axes in front; -1 keeps a size.

    Raises:
        InvalidArgumentError: where an axis of another size than 1 would have to change.
    """
    if len(new_shape) == 1 and not hasattr(new_shape[0], "__index__"):
        new_shape = new_shape[0]
    num_new = len(new_shape) - len(shape)
    kept = (None,) * max(num_new, 0) + shape
    sizes = [old if size == -1 and old is not None else size for size, old in zip(new_shape, kept)]
    target = check_shape(op, (tuple(sizes),))
    if num_new < 0 or any(old not in (None, 1, size) for size, old in zip(target, kept)):
        raise InvalidArgumentError(f"{op}: shape {shape} cannot be expanded to {tuple(new_shape)}", param="shape")
    stretched = (
        0 if old == 1 and size != 1 else stride for size, old, stride in zip(target, kept, (0,) * num_new + strides)
    )
    return target, tuple(stretched)


def index_view(shape: Shape, strides: Shape, offset: int, index: Any) -> tuple[Shape, Shape, int]:
    """(shape, strides, offset) of `tensor[index]`: integers, slices, `...` and None, as in numpy.

    Raises:
        InvalidArgumentError: for an index out of range, too many indices, or any other kind of index.
    """
    items = index if isinstance(index, tuple) else (index,)
    num_used = sum(1 for item in items if item is not None and item is not Ellipsis)
    num_ellipses = sum(1 for item in items if item is Ellipsis)
    if num_ellipses > 1 or num_used > len(shape):
        what = "more than one '...'" if num_ellipses > 1 else f"{num_used} indices"
        raise InvalidArgumentError(f"index: {what} for {len(shape)} axes", param="index")
    if not num_ellipses:
        items = (*items, Ellipsis)

    new_shape: list[int] = []
    new_strides: list[int] = []
    first = offset
    axis = 0
    for item in items:
        if item is None:
            new_shape.append(1)
            new_strides.append(0)
        elif item is Ellipsis:
            end = len(shape) - (num_used - axis)
            new_shape += shape[axis:end]
            new_strides += strides[axis:end]
            num_used += end - axis  # the skipped axes count as used from here on
            axis = end
        elif isinstance(item, slice):
            start, size, step = _slice_bounds(item, shape[axis])
            offset += start * strides[axis]
            new_shape.append(size)
            new_strides.append(strides[axis] * step)
            axis += 1
        elif hasattr(item, "__index__") and not isinstance(item, (bool, np.ndarray)):
            position = operator.index(item)
            if not -shape[axis] <= position < shape[axis]:
                raise InvalidArgumentError(
                    f"index: {position} is out of range for axis {axis} of size {shape[axis]}", param="index"
                )
            offset += position % shape[axis] * strides[axis]
            axis += 1
        else:
            raise InvalidArgumentError(
                f"index: {type(item).__name__} is not an integer, a slice, '...' or None "
                "(ops.gather_rows gathers rows)",
                param="index",
            )
    # An empty view begins where the tensor does: its own beginning may lie past the last byte.
    return tuple(new_shape), tuple(new_strides), first if 0 in new_shape else offset


def _slice_bounds(item: slice, size: int) -> tuple[int, int, int]:
    """(first, number of elements, step) of a slice of an axis."""
    try:
        start, stop, step = item.indices(size)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"index: {item}: {error}", param="index") from None
    return start, len(range(start, stop, step)), step
