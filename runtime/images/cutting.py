"""The last step from a picture to its patches: its lines resized to a height, and cut, in one pass over its pixels.

Where the columns are right already (1920 of them are, for Qwen3-VL), this is Pillow's resizing to the bit
(`Resample.c`, 8 bits a channel): taps in fixed point, one sum, one shift; in an eighth of its time. Else Pillow has
resized the picture, and it is only cut.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cache import njit

if TYPE_CHECKING:
    from PIL.Image import Image

Array = np.ndarray[Any, Any]

_BITS = 22
"""Of a tap behind its point."""

_SUPPORT = 2.0
"""Lines beside a bicubic's centre that it reads, where the picture is not made smaller."""


def cut(image: Image, height: int, patch_size: int, merge_size: int, out: NDArray[np.uint8]) -> None:
    """Resizes an RGB picture bicubically to so many lines, and writes its patches to `out`, flat, as `Patches.pixels`
    has them. What is left of a patch at the right and below is dropped."""
    pixels, channels, owner = _pixels_of(image)
    if height == image.height:
        first, taps = np.arange(height), np.full((height, 1), 1 << _BITS, np.int32)
    else:
        first, taps = line_taps(image.height, height)
    rows, columns = height // patch_size, image.width // patch_size
    _cut(pixels, image.width, channels, first, taps, rows, columns, patch_size, merge_size, out)
    del owner  # until here it kept the pixels


def prepare() -> None:
    """Compiles, or reads from disk, what `cut` needs, before a process may write no files."""
    out = np.zeros(12, np.uint8)
    _cut(out, 2, 3, np.arange(2), np.zeros((2, 1), np.int32), 1, 1, 2, 1, out)


def line_taps(size: int, new_size: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """For each of `new_size` lines: the first line of `size` that it is made of, `[new_size]`, and how much of this and
    the next lines, `[new_size, most taps]`, in fixed point; 0 where a line has fewer taps."""
    scale = size / new_size
    stretch = max(scale, 1.0)
    support = _SUPPORT * stretch
    centres = (np.arange(new_size) + 0.5) * scale
    first = np.maximum((centres - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centres + support + 0.5).astype(np.int64), size)
    taps = np.arange(int((end - first).max()))
    weights = _bicubic((taps + first[:, None] - centres[:, None] + 0.5) * (1.0 / stretch))
    weights[taps >= (end - first)[:, None]] = 0.0
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # one by one, as Pillow sums them
    fixed = weights * (1 << _BITS)
    return first, (fixed + np.copysign(0.5, fixed)).astype(np.int32)


def _bicubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keys's kernel with a = -0.5 (https://doi.org/10.1109/TASSP.1981.1163711)."""
    x = np.abs(x)
    near = ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _pixels_of(image: Image) -> tuple[NDArray[np.uint8], int, Any]:
    """Its pixels, flat, bytes a pixel, and what keeps them. Pillow has four bytes a pixel, which are read where they
    lie, if they lie in one block."""
    try:
        _, capsule = image.__arrow_c_array__()
    except ValueError:  # in several blocks
        return np.asarray(image).ravel(), 3, None
    address = _CAPSULE_POINTER(capsule, b"arrow_array")
    array = _ArrowArray.from_address(address)
    lists = array.children[0].contents  # four bytes for each pixel
    count = 4 * image.width * image.height
    assert (4 * array.length, lists.length) == (count, count), (array.length, lists.length)
    data = (ctypes.c_uint8 * count).from_address(lists.buffers[1] + lists.offset)
    return np.ctypeslib.as_array(data), 4, capsule


class _ArrowArray(ctypes.Structure):
    """https://arrow.apache.org/docs/format/CDataInterface.html"""


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64), ("null_count", ctypes.c_int64), ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64), ("n_children", ctypes.c_int64), ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))), ("dictionary", ctypes.c_void_p),
    ("release", ctypes.c_void_p), ("private_data", ctypes.c_void_p),
]  # fmt: skip
_CAPSULE_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
_CAPSULE_POINTER.restype, _CAPSULE_POINTER.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@njit
def _cut(
    pixels: Array, width: int, channels: int, first: Array, taps: Array, rows: int, columns: int, size: int,
    merge: int, out: Array,
) -> None:  # fmt: skip
    used, square = columns * size, size * size
    stride, line = width * channels, np.empty(used * channels, np.uint8)
    red, green, blue = np.empty(used, np.uint8), np.empty(used, np.uint8), np.empty(used, np.uint8)
    targets = np.empty(columns, np.int64)
    for y in range(rows * size):
        row, inside = y // size, y % size
        if inside == 0:
            for column in range(columns):
                token = row // merge * (columns // merge) + column // merge
                targets[column] = ((token * merge + row % merge) * merge + column % merge) * 3 * square
        _blend(pixels[first[y] * stride :], stride, taps[y], line)
        if channels == 4:
            _split(line, 4, red, green, blue)
        else:
            _split(line, 3, red, green, blue)
        for channel, plane in enumerate((red, green, blue)):
            offset = channel * square + inside * size
            if size % 8 == 0:  # eight bytes at once
                _spread(plane.view(np.uint64), targets, offset, size // 8, 8, out.view(np.uint64))
            else:
                _spread(plane, targets, offset, size, 1, out)


@njit
def _spread(plane: Array, targets: Array, offset: int, size: int, width: int, out: Array) -> None:
    """A line of a channel, its part in each patch: `size` elements of `width` bytes."""
    for column in range(targets.shape[0]):
        source, target = plane[column * size :], out[(targets[column] + offset) // width :]
        for x in range(size):
            target[x] = source[x]


@njit
def _blend(lines: Array, stride: int, taps: Array, line: Array) -> None:
    """One line of those from the first of `lines` on."""
    count = line.shape[0]
    if taps.shape[0] == 1:
        line[:] = lines[:count]
        return
    num_taps = taps.shape[0]
    while taps[num_taps - 1] == 0:  # the lines of taps that are not there may not be there, either
        num_taps -= 1
    sums = np.empty(1024, np.int32)
    for begin in range(0, count, 1024):
        size = min(1024, count - begin)
        sums[:size] = np.int32(1 << (_BITS - 1))
        tap = 0
        while tap + 4 <= num_taps:
            at = lines[tap * stride + begin :]
            _add_four(sums[:size], at, at[stride:], at[2 * stride :], at[3 * stride :], taps[tap : tap + 4])
            tap += 4
        while tap < num_taps:
            weight, source = taps[tap], lines[tap * stride + begin :]
            for i in range(size):
                sums[i] += np.int32(source[i]) * weight
            tap += 1
        target = line[begin:]
        for i in range(size):
            target[i] = np.uint8(min(max(sums[i] >> _BITS, 0), 255))


@njit
def _add_four(sums: Array, a: Array, b: Array, c: Array, d: Array, taps: Array) -> None:
    one, two, three, four = taps[0], taps[1], taps[2], taps[3]
    for i in range(sums.shape[0]):
        sums[i] += np.int32(a[i]) * one + np.int32(b[i]) * two + np.int32(c[i]) * three + np.int32(d[i]) * four


@njit
def _split(line: Array, channels: int, red: Array, green: Array, blue: Array) -> None:
    for x in range(red.shape[0]):
        red[x] = line[channels * x]
        green[x] = line[channels * x + 1]
        blue[x] = line[channels * x + 2]
