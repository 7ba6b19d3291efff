"""Resizes a picture's columns: Pillow's horizontal pass to the bit (`Resample.c`, 8 bits a channel).

A pixel is four bytes, and two neighbours are one vector of eight sums. So four lines share each load of taps, nothing
is transposed, and each new pixel is written once.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from numba_kernels.cache import njit

Array = np.ndarray[Any, Any]

BITS = 22
"""Fraction bits of a tap."""

_LINES = 4
"""That share a load of taps."""


def resized_columns(
    pixels: NDArray[np.uint8], height: int, width: int, first: NDArray[np.int64], taps: NDArray[np.int32]
) -> NDArray[np.uint8]:
    """Pixels of four bytes, flat, line by line. Column x becomes the sum of columns from `first[x]` on, each times
    `taps[x]`, which are 0 beyond the picture."""
    num_taps = taps.shape[1] + taps.shape[1] % 2
    if width < num_taps:  # the last line's taps would be read past its end
        pixels = np.concatenate([pixels, np.zeros(4 * num_taps, np.uint8)])
    begin = np.minimum(first, max(width - num_taps, 0))
    columns, places = np.nonzero(taps)
    moved = np.zeros((len(first), num_taps), np.int32)
    moved[columns, places + (first - begin)[columns]] = taps[columns, places]
    out = np.empty(4 * height * len(first), np.uint8)
    _resize(pixels, height, 4 * width, 4 * begin, np.repeat(moved, 4, axis=1).ravel(), num_taps // 2, out)
    return out


@njit
def _resize(pixels: Array, height: int, pitch: int, begin: Array, taps: Array, num_pairs: int, out: Array) -> None:
    """`pitch`: bytes of a line; `begin`: of each new column; `taps`: of each, repeated for each byte of a pixel."""
    new_pitch = 4 * begin.shape[0]
    whole = height - height % _LINES
    for top in range(0, whole, _LINES):
        for x in range(begin.shape[0]):
            target = top * new_pitch + 4 * x
            _sum_four(pixels, top * pitch + begin[x], pitch, taps, 8 * num_pairs * x, num_pairs, out, target, new_pitch)
    for line in range(whole, height):  # one line, four times
        for x in range(begin.shape[0]):
            target = line * new_pitch + 4 * x
            _sum_four(pixels, line * pitch + begin[x], 0, taps, 8 * num_pairs * x, num_pairs, out, target, 0)


@intrinsic
def _sum_four(typingctx, pixels, at, pitch, taps, tap, num_pairs, out, target, new_pitch):
    """Sums `2 * num_pairs` pixels from byte `at` on, in each of four lines, by taps from `tap` on, into byte `target`
    and the same places of the next lines."""
    byte, word, size = ir.IntType(8), ir.IntType(32), ir.IntType(64)
    eight, all_sums, four = ir.VectorType(word, 8), ir.VectorType(word, 16), ir.VectorType(word, 4)

    def every(value: int) -> ir.Constant:
        return ir.Constant(all_sums, [value] * 16)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def address(array: int, place: Any) -> Any:
            data = context.make_array(signature.args[array])(context, builder, args[array]).data
            return builder.gep(data, [place])

        def lanes(a: Any, b: Any, places: Any) -> Any:
            return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(word, len(places)), list(places)))

        lines = [address(0, builder.add(args[1], builder.mul(args[2], size(line)))) for line in range(_LINES)]
        weights = address(3, args[4])
        sums = [cgutils.alloca_once_value(builder, ir.Constant(eight, [0] * 8)) for _ in lines]
        with cgutils.for_range(builder, args[5], intp=size) as loop:
            place = builder.mul(loop.index, size(8))
            weight = builder.load(builder.bitcast(builder.gep(weights, [place]), eight.as_pointer()), align=4)
            for line, total in zip(lines, sums):
                pair = builder.bitcast(builder.gep(line, [place]), ir.VectorType(byte, 8).as_pointer())
                product = builder.mul(builder.zext(builder.load(pair, align=1), eight), weight)
                builder.store(builder.add(builder.load(total), product), total)
        a, b, c, d = (builder.load(total) for total in sums)
        halves = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)  # even taps' sums of two lines, odd ones'
        above, below = (builder.add(*(lanes(x, y, half) for half in halves)) for x, y in ((a, b), (c, d)))
        whole = builder.add(lanes(above, below, range(16)), every(1 << (BITS - 1)))
        whole = builder.ashr(whole, every(BITS))
        for sign, limit in ((">", 0), ("<", 255)):
            whole = builder.select(builder.icmp_signed(sign, whole, every(limit)), whole, every(limit))
        made = builder.bitcast(builder.trunc(whole, ir.VectorType(byte, 16)), four)
        for line in range(_LINES):
            to = address(6, builder.add(args[7], builder.mul(args[8], size(line))))
            pixel = builder.extract_element(made, word(line))
            builder.store(pixel, builder.bitcast(to, word.as_pointer()), align=1)
        return context.get_dummy_value()

    one, arrays = types.int64, (pixels, taps, out)
    return types.void(arrays[0], one, one, arrays[1], one, one, arrays[2], one, one), codegen
