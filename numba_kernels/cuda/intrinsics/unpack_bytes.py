"""Integers of 4 and 8 bits as int8, in registers: the first factor of a product of bytes (`byte_mma`).

Elements lie in their words as in `unpack`; four of them become one word.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import functools
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic

from numba_kernels.cuda.intrinsics.element_types import words_of

_WORD = ir.IntType(32)

BYTE_ORDER = {
    "u4": ((0, 4, 1, 5), (2, 6, 3, 7)),
    "u8": ((0, 2, 1, 3), (4, 6, 5, 7)),
}
"""The order of 8 elements in the bytes of the two words that `bytes_all` makes of them."""
BYTES_SHIFT = {"u4": -4, "u8": 0}
"""Powers of two that these bytes lack."""
_EACH = 0x01010101


@functools.cache
def bytes_all(element: str, first: int, second: int) -> Any:
    """A function ``(targets, words) -> None``: 8 elements of each of two rows as int8, the first factor of a product of
    bytes (`byte_mma`).

    targets[0:4] become the rows' first four bytes, then their second four, minus the middle.

    Args:
        first, second: elements of `words` where the rows' elements begin.
    """

    def halves(builder: Any, words: list[Any]) -> list[Any]:
        """Two words of a row."""
        if element == "u8":
            return [builder.xor(word, ir.Constant(_WORD, 0x80 * _EACH)) for word in words]
        (word,) = words  # 16 times each number
        both = (builder.shl(word, ir.Constant(_WORD, 4)), word)
        return [
            builder.xor(builder.and_(each, ir.Constant(_WORD, 0xF0 * _EACH)), ir.Constant(_WORD, 0x80 * _EACH))
            for each in both
        ]

    def generate(context, builder, signature, arguments):
        def place(which: int, index: int) -> Any:
            data = context.make_array(signature.args[which])(context, builder, arguments[which]).data
            return builder.gep(data, [ir.Constant(_WORD, index)])

        rows = []
        for index in (first, second):
            words = [builder.load(place(1, index + number)) for number in range(words_of(element))]
            rows.append(halves(builder, words))
        for half, pair in enumerate(zip(*rows, strict=True)):
            for row, value in enumerate(pair):
                builder.store(value, place(0, 2 * half + row))
        return context.get_dummy_value()

    return intrinsic(lambda typing_context, targets, words: (types.void(targets, words), generate))
