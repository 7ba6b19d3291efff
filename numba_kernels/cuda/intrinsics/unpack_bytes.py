"""Elements of 4 and 8 bits as int8, in registers: the first factor of a product of bytes (`byte_mma`).

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
    "e2m1": ((0, 2, 4, 6), (1, 3, 5, 7)),
}
"""The order of 8 elements in the bytes of the two words that `bytes_all` makes of them."""
BYTES_SHIFT = {"u4": -4, "u8": 0, "e2m1": -1}
"""Powers of two that these bytes lack."""
_EACH = 0x01010101
_POSITIVE = (0x04030200, 0x0D090705)  # of e2m1, twice as large: 0, 1, 2, 3 and 4, 6, 8, 12; but for 0 one too much
_NEGATIVE = (0xFDFEFF00, 0xF4F8FAFC)  # the same, less than 0


@functools.cache
def bytes_all(element: str, first: int, second: int) -> Any:
    """A function ``(targets, words) -> None``: 8 elements of each of two rows as int8, the first factor of a product of
    bytes (`byte_mma`).

    Integers: targets[0:4] become the rows' first four bytes, then their second four, minus the middle. e2m1:
    targets[0:4] plus targets[4:8] are its numbers, twice as large: the former hold positive numbers and one too much,
    the latter negative ones. Elsewhere `prmt` repeats the sign of a table's byte: 0, and the -1 that takes it off.

    Args:
        first, second: elements of `words` where the rows' elements begin.
    """
    choose = ir.InlineAsm(ir.FunctionType(_WORD, [_WORD] * 3), "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")

    def halves(builder: Any, words: list[Any]) -> list[Any]:
        """Two words of a row, and two more of e2m1."""
        if element == "u8":
            return [builder.xor(word, ir.Constant(_WORD, 0x80 * _EACH)) for word in words]
        (word,) = words
        if element == "u4":  # 16 times each number
            both = (builder.shl(word, ir.Constant(_WORD, 4)), word)
            return [
                builder.xor(builder.and_(each, ir.Constant(_WORD, 0xF0 * _EACH)), ir.Constant(_WORD, 0x80 * _EACH))
                for each in both
            ]
        chosen = []
        for table, flips in ((_POSITIVE, 0), (_NEGATIVE, 0x88 * _EACH)):
            selectors = builder.xor(word, ir.Constant(_WORD, flips))
            for selector in (selectors, builder.lshr(selectors, ir.Constant(_WORD, 16))):
                chosen.append(builder.call(choose, [*(ir.Constant(_WORD, each) for each in table), selector]))
        return chosen

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
