"""Loads and stores by address: wide ones for global memory, 32-bit addresses for shared memory, cp.async.

Global addresses are uint64, shared ones uint32 (`shared_address` of a `cuda.shared.array`). A 128-bit access needs an
address that is a multiple of 16. PTX ISA, "ld", "st", "cp.async".
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic

from numba_kernels.cuda.intrinsics.asm import instruction

load_u8 = instruction("{ .reg .b16 t; ld.global.u8 t, [$1]; cvt.u32.u16 $0, t; }", "r", "l")
load_b16 = instruction("ld.global.b16 $0, [$1];", "h", "l")
load_b32 = instruction("ld.global.b32 $0, [$1];", "r", "l")
load_written_b32 = instruction("ld.relaxed.gpu.global.b32 $0, [$1];", "r", "l")
"""Past the first-level cache: a number that an earlier kernel wrote, before `wait_for_previous_grid`."""
load_b64 = instruction("ld.global.b64 $0, [$1];", "l", "l")
load_f32 = instruction("ld.global.f32 $0, [$1];", "f", "l")
load_2xb32 = instruction("ld.global.v2.b32 {$0,$1}, [$2];", "rr", "l")
load_4xb32 = instruction("ld.global.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "l")
load_2xf32 = instruction("ld.global.v2.f32 {$0,$1}, [$2];", "ff", "l")
load_4xf32 = instruction("ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", "ffff", "l")

# For immutable weights, each byte of which is read once: past the first-level cache.
stream_4xb32 = instruction("ld.global.nc.L1::no_allocate.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "l")
stream_4xf32 = instruction("ld.global.nc.L1::no_allocate.v4.f32 {$0,$1,$2,$3}, [$4];", "ffff", "l")
# The same before `wait_for_previous_grid`, after which ptxas moves .nc loads.
stream_early_4xb32 = instruction("ld.global.L1::no_allocate.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "l")
stream_early_4xf32 = instruction("ld.global.L1::no_allocate.v4.f32 {$0,$1,$2,$3}, [$4];", "ffff", "l")

prefetch = instruction("prefetch.global.L2 [$0];", "", "l")  # into the second-level cache

store_b8 = instruction("{ .reg .b16 t; cvt.u16.u32 t, $1; st.global.b8 [$0], t; }", "", "l r")
store_b16 = instruction("st.global.b16 [$0], $1;", "", "l h")
store_b32 = instruction("st.global.b32 [$0], $1;", "", "l r")
store_b64 = instruction("st.global.b64 [$0], $1;", "", "l l")
store_f32 = instruction("st.global.f32 [$0], $1;", "", "l f")
store_2xb32 = instruction("st.global.v2.b32 [$0], {$1,$2};", "", "l rr")
store_2xf32 = instruction("st.global.v2.f32 [$0], {$1,$2};", "", "l ff")
store_4xb32 = instruction("st.global.v4.b32 [$0], {$1,$2,$3,$4};", "", "l rrrr")
store_4xf32 = instruction("st.global.v4.f32 [$0], {$1,$2,$3,$4};", "", "l ffff")

shared_load_b32 = instruction("ld.shared.b32 $0, [$1];", "r", "r")
shared_load_2xb32 = instruction("ld.shared.v2.b32 {$0,$1}, [$2];", "rr", "r")
shared_load_f32 = instruction("ld.shared.f32 $0, [$1];", "f", "r")
shared_load_2xf32 = instruction("ld.shared.v2.f32 {$0,$1}, [$2];", "ff", "r")
shared_load_4xb32 = instruction("ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "r")
shared_load_4xf32 = instruction("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "ffff", "r")
shared_store_b16 = instruction("st.shared.b16 [$0], $1;", "", "r h")
shared_store_b32 = instruction("st.shared.b32 [$0], $1;", "", "r r")
shared_store_f32 = instruction("st.shared.f32 [$0], $1;", "", "r f")
shared_store_2xb32 = instruction("st.shared.v2.b32 [$0], {$1,$2};", "", "r rr")
shared_store_2xf32 = instruction("st.shared.v2.f32 [$0], {$1,$2};", "", "r ff")
shared_store_4xb32 = instruction("st.shared.v4.b32 [$0], {$1,$2,$3,$4};", "", "r rrrr")
shared_store_4xf32 = instruction("st.shared.v4.f32 [$0], {$1,$2,$3,$4};", "", "r ffff")

# Asynchronous copies of 16 bytes, global to shared; the third argument is how many bytes are read, the rest is zero.
copy_async_16 = instruction("cp.async.cg.shared.global [$0], [$1], 16, $2;", "", "r l r")
copy_async_whole_16 = instruction("cp.async.cg.shared.global [$0], [$1], 16;", "", "r l")
copy_async_4 = instruction("cp.async.ca.shared.global [$0], [$1], 4, $2;", "", "r l r")
copy_async_whole_4 = instruction("cp.async.ca.shared.global [$0], [$1], 4;", "", "r l")
copy_async_whole_8 = instruction("cp.async.ca.shared.global [$0], [$1], 8;", "", "r l")
copy_async_commit = instruction("cp.async.commit_group;")


def copy_async_wait(num_pending: int) -> Any:
    """A function that waits until at most `num_pending` committed groups are still under way."""
    return instruction(f"cp.async.wait_group {num_pending};")


generic_address = instruction(
    "{ .reg .b64 wide; cvt.u64.u32 wide, $1; cvta.shared.u64 $0, wide; }", "l", "r", is_pure=True
)
"""The uint64 address, for loads and stores without a space, of a shared address."""


@intrinsic
def shared_address(typingctx: Any, array: Any) -> Any:
    """The 32-bit shared-memory address of a ``cuda.shared.array``'s first element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        generic = builder.ptrtoint(view.data, ir.IntType(64))
        convert = ir.InlineAsm(ir.FunctionType(ir.IntType(64), [ir.IntType(64)]), "cvta.to.shared.u64 $0, $1;", "=l,l")
        return builder.trunc(builder.call(convert, [generic]), ir.IntType(32))

    return types.uint32(array), generate


@intrinsic
def address_of(typingctx: Any, pointer: Any) -> Any:
    """The uint64 address in a ``CPointer`` argument."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.uint64(pointer), generate
