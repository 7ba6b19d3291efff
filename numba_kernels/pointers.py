"""Addresses as pointers, in compiled code: `p = u32_at(address)`, then `p[i]`.

A pointer here is a bare ``CPointer``: no bounds, no reference count (counting costs more than a short loop's work), no
array object. The maker of one has checked the address, and keeps the memory.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic as _intrinsic

intrinsic: Any = _intrinsic  # numba's stub takes the typing context for an argument of the call


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def at(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return at


u8_at = _pointer_to(types.uint8)
u16_at = _pointer_to(types.uint16)
u32_at = _pointer_to(types.uint32)
i32_at = _pointer_to(types.int32)
u64_at = _pointer_to(types.uint64)
i64_at = _pointer_to(types.int64)
f32_at = _pointer_to(types.float32)
f64_at = _pointer_to(types.float64)
