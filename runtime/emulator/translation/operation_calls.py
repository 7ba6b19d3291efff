"""Operations that other compiled code calls: by symbol, to be compiled once and not into each of their callers, or by
an address found in memory, to be compiled only for kernels that need them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from runtime.emulator.translation.operations import PREFIX, signature_of


def by_symbol(name: str, kinds: str) -> Any:
    """A function for compiled code: ``f(warp, mask, site, *arguments) -> int32``."""
    return types.ExternalFunction(PREFIX + name, signature_of(kinds))


@intrinsic
def by_address(typing_context, function, warp, mask, site, argument):
    """Calls an operation of one int64 by its address."""

    def generate(context, builder, signature, arguments):
        word, long = ir.IntType(32), ir.IntType(64)
        type_ = ir.FunctionType(word, [long.as_pointer(), word, word, long])
        return builder.call(builder.inttoptr(arguments[0], type_.as_pointer()), arguments[1:])

    return types.int32(types.int64, types.CPointer(types.int64), types.uint32, types.int32, types.int64), generate
