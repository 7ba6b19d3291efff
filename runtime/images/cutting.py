"""The last steps from a picture to its patches: resized bicubically, columns first, and cut.

This is Pillow's resizing to the bit (`Resample.c`, 8 bits a channel): taps in fixed point, one sum, one shift, and
bytes between the two passes; in a fraction of its time. Lines are resized, split into channels and cut in one pass over
the picture. If Pillow's lines come before its columns (`columns_come_first`), Pillow resizes and the picture is only
cut.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cache import njit
from runtime.images.columns import BITS, resized_columns
from runtime.later import later

Array = np.ndarray[Any, Any]
Image = Any
"""Pillow's, which is imported when it is first used."""
_images = later("PIL.Image")

_HALF = 1 << (BITS - 1)

_BICUBIC = 3
"""Pillow's number of the filter."""

_SUPPORT = 2.0
"""Lines beside a bicubic's centre that it reads, where the picture is not made smaller."""


def cut(image: Image, height: int, width: int, patch_size: int, merge_size: int, out: NDArray[np.uint8]) -> None:
    """Resizes an RGB picture bicubically to so many lines and columns, and writes its patches to `out`, flat, as
    `Patches.pixels` has them. Partial patches at the right and bottom are dropped."""
    if image.width != width and not columns_come_first(image.height, image.width, height, width):
        image = image.resize((width, height), _BICUBIC)
    resized, channels, owner = _columns_resized(image, width)
    if height == image.height:
        first, taps = np.arange(height), np.full((height, 1), 1 << BITS, np.int32)
    else:
        first, taps = line_taps(image.height, height)
    rows, columns = height // patch_size, width // patch_size
    _cut(resized, width, channels, first, taps, rows, columns, patch_size, merge_size, out)
    del owner  # it kept the pixels alive until here


def prepare() -> None:
    """Compiles the kernels of `cut`, or reads them from disk, before a process loses write access to files."""
    out = np.zeros(12, np.uint8)
    _cut(out, 2, 3, np.arange(2), np.zeros((2, 1), np.int32), 1, 1, 2, 1, out)
    is_known_pillow()


def columns_come_first(old_height: int, old_width: int, height: int, width: int) -> bool:
    """Whether the installed Pillow resizes a picture's columns before its lines. From 13 on it does not if the height
    shrinks by more than twice as many pixels as the width; later versions are probed."""
    return not old_height - height > max(0, 2 * (old_width - width)) and is_known_pillow()


@cache
def is_known_pillow() -> bool:
    """Whether Pillow resizes a picture as we do, if both sides shrink alike."""
    pixels = np.random.RandomState(0).randint(0, 2, (23, 37, 3)).astype(np.uint8) * 255
    image = _images.fromarray(pixels)
    wanted = np.asarray(image.resize((16, 9), _BICUBIC))
    found = np.empty(wanted.size, np.uint8)
    resized, channels, owner = _columns_resized(image, 16)
    _cut(resized, 16, channels, *line_taps(23, 9), 9, 16, 1, 1, found)
    del owner
    return bool((found.reshape(wanted.shape) == wanted).all())


def _columns_resized(image: Image, width: int) -> tuple[NDArray[np.uint8], int, Any]:
    """The picture's pixels, resized to so many columns; see `_pixels_of`."""
    pixels, channels, owner = _pixels_of(image)
    if image.width == width:
        return pixels, channels, owner
    if channels == 3:
        packed = np.empty((image.height * image.width, 4), np.uint8)
        packed[:, :3] = pixels.reshape(-1, 3)
        pixels = packed.ravel()
    resized = resized_columns(pixels, image.height, image.width, *line_taps(image.width, width))
    del owner
    return resized, 4, None


def line_taps(size: int, new_size: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """For each of `new_size` lines: the first of its lines of `size`, `[new_size]`, and the weights of this and the
    next lines, `[new_size, most taps]`, in fixed point; 0 for absent taps."""
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
    fixed = weights * (1 << BITS)
    return first, (fixed + np.copysign(0.5, fixed)).astype(np.int32)


def _bicubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keys's kernel with a = -0.5 (https://doi.org/10.1109/TASSP.1981.1163711)."""
    x = np.abs(x)
    near = ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _pixels_of(image: Image) -> tuple[NDArray[np.uint8], int, Any]:
    """A picture's pixels, flat, bytes a pixel, and their owner. Pillow has four bytes a pixel, which are read in place
    if they are one block."""
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
def _byte(total: int) -> np.uint8:
    return np.uint8(min(max(np.int32(total >> BITS), np.int32(0)), np.int32(255)))


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
            elif size == 14:
                _spread_seven(plane.view(np.uint16), targets, offset, out.view(np.uint16))
            else:
                _spread(plane, targets, offset, size, 1, out)


@njit
def _spread(plane: Array, targets: Array, offset: int, size: int, width: int, out: Array) -> None:
    """Writes a line of a channel to the patches: to each, `size` elements of `width` bytes."""
    for column in range(targets.shape[0]):
        source, target = plane[column * size :], out[(targets[column] + offset) // width :]
        for x in range(size):
            target[x] = source[x]


@njit
def _spread_seven(plane: Array, targets: Array, offset: int, out: Array) -> None:
    """The same for patches of 14 bytes a line, two at once."""
    for column in range(targets.shape[0]):
        source, target = plane[column * 7 :], out[(targets[column] + offset) // 2 :]
        for x in range(7):
            target[x] = source[x]


@njit
def _blend(lines: Array, stride: int, taps: Array, line: Array) -> None:
    """Blends the lines from the first of `lines` on into one."""
    count = line.shape[0]
    if taps.shape[0] == 1:
        line[:] = lines[:count]
        return
    num_taps = taps.shape[0]
    while taps[num_taps - 1] == 0:  # lines of absent taps may not exist
        num_taps -= 1
    sums = np.empty(1024, np.int32)
    for begin in range(0, count, 1024):
        size = min(1024, count - begin)
        sums[:size] = np.int32(_HALF)
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
            target[i] = _byte(sums[i])


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
