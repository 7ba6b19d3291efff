"""Hopper's tensor cores: `wgmma`, which multiplies tiles that lie in shared memory for a group of four warps.

    multiply = group_multiply("bf16", num_columns=256, num_steps=4, a_step=32, b_step=32)
    multiply(sums, a, b, uint32(0))         # sums[64, 256] = A[64, 64] . B[64, 256]; a last 1: added to the sums
    group_wait(0, 128)(sums)                # only now may sums be read, and A's and B's memory be written

`sums` is a ``cuda.local.array(num_columns // 2, float32)``, of which lane 4 g + t of warp w holds, in quads,
D[16 w + g, 8 i + 2 t], its right neighbour, and both 8 rows below. One call is one committed group: fence, `num_steps`
products over 16 of K, commit. A and B are described by 64-bit descriptors (`descriptor`), which advance by `a_step` and
`b_step` bytes a product. With `a_in_registers`, `a` is instead a ``cuda.local.array(4 * num_steps, uint32)`` of pairs
laid out as for `mma.sync`, 16 rows a warp.

LLVM may not move accesses to `sums` across these calls: they read and write the whole array. Every lane of the four
warps calls them together. PTX ISA, "wgmma.mma_async", "wgmma.fence", "Matrix descriptor".
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import functools
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic

from numba_kernels.cuda.intrinsics.asm import call
from numba_kernels.cuda.intrinsics.device import device_function

_WORD, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_SWIZZLE_BITS = {0: 0, 128: 1, 64: 2, 32: 3}
uint32, uint64 = types.uint32, types.uint64


@functools.cache
def descriptor(swizzle_bytes: int, stride_bytes: int, leading_bytes: int = 16) -> Any:
    """A device function ``shared address -> descriptor`` of a tile whose rows are `swizzle_bytes` long, swizzled.

    `stride_bytes`: from 8 rows to the next 8. `leading_bytes`: from one row's length to the next along the row, for
    transposed tiles; no meaning for others. Tiles begin at multiples of 8 rows.
    """
    high = (leading_bytes >> 4) << 16 | (stride_bytes >> 4) << 32 | _SWIZZLE_BITS[swizzle_bytes] << 62

    @device_function
    def describe(address):
        return uint64((address & uint32(0x3FFFF)) >> uint32(4)) | uint64(high)

    return describe


@device_function
def advance(descriptor, count):
    """The descriptor of a tile like it, `count` times 16 bytes further in shared memory."""
    return (descriptor & uint64(0xFFFFFFFF00000000)) | uint64(uint32(uint32(descriptor) + count))


@functools.cache
def group_multiply(
    dtype: str,
    num_columns: int,
    num_steps: int,
    a_step: int | tuple[int, ...],
    b_step: int | tuple[int, ...],
    *,
    a_in_registers: bool = False,
    b_is_transposed: bool = False,
    is_fresh: bool = False,
) -> Any:
    """A function ``(sums, a, b, is_added) -> None``, see the module's docstring.

    Args:
        dtype: "bf16", "f16" or "e4m3".
        num_columns: of B, 8 to 256, a multiple of 8.
        num_steps: products in the group, of depth 16, of bytes 32.
        a_step, b_step: bytes in shared memory from one product's part to the next; where they differ, num_steps - 1.
        b_is_transposed: whether rows of B's tile run along its columns (values [keys, head dim]), not along K.
        is_fresh: the function is ``(sums, a, b) -> None``: the old contents of `sums` are ignored.
    """
    count = num_columns // 2
    a_count = 4 * num_steps if a_in_registers else 1
    a_steps, b_steps = ((step,) * num_steps if isinstance(step, int) else (*step, 0) for step in (a_step, b_step))
    sums = ",".join(f"${i}" for i in range(count))
    first_a, b, flag = count, count + a_count, count + a_count + 1
    depth, transposed = 16, ("" if a_in_registers else ", 0") + (", 1" if b_is_transposed else ", 0")
    if dtype == "e4m3":
        depth, transposed = 32, ""  # bytes are not transposed
    lines = [f"setp.ne.b32 added, {0 if is_fresh else f'${flag}'}, 0;", f"mov.b64 {{low_b, high_b}}, ${b};"]
    lines.append(f"mov.b64 b, ${b};")
    if not a_in_registers:
        lines += [f"mov.b64 {{low_a, high_a}}, ${first_a};", f"mov.b64 a, ${first_a};"]
    lines.append("wgmma.fence.sync.aligned;")
    for step in range(num_steps):
        at = first_a + 4 * step
        source = f"{{${at},${at + 1},${at + 2},${at + 3}}}" if a_in_registers else "a"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{num_columns}k{depth}.f32.{dtype}.{dtype} {{{sums}}}, {source}, b, "
            f"{'added' if step == 0 else '1'}, 1, 1{transposed};"
        )
        if step < num_steps - 1:
            lines += [f"add.s32 low_b, low_b, {b_steps[step] >> 4};", "mov.b64 b, {low_b, high_b};"]
            if not a_in_registers:
                lines += [f"add.s32 low_a, low_a, {a_steps[step] >> 4};", "mov.b64 a, {low_a, high_a};"]
    lines.append("wgmma.commit_group.sync.aligned;")
    text = "{ .reg .pred added; .reg .b64 a, b; .reg .b32 low_a, high_a, low_b, high_b; " + " ".join(lines) + " }"
    a_letter, a_type = ("r", _WORD) if a_in_registers else ("l", _LONG)
    constraints, operand_types = ["=f"] * count + [a_letter] * a_count + ["l"], [a_type] * a_count + [_LONG]
    if not is_fresh:
        constraints += ["r", *(str(i) for i in range(count))]
        operand_types += [_WORD, *[_FLOAT] * count]
    function_type = ir.FunctionType(ir.LiteralStructType([_FLOAT] * count), operand_types)
    assembly = ir.InlineAsm(function_type, text, ",".join([*constraints, "~{memory}"]), side_effect=True)

    def generate(context, builder, signature, arguments):
        places = _elements(context, builder, signature.args[0], arguments[0], count)
        operands = [arguments[1]]
        if a_in_registers:
            words = _elements(context, builder, signature.args[1], arguments[1], a_count)
            operands = [builder.load(word) for word in words]
        operands.append(arguments[2])
        if not is_fresh:
            operands += [arguments[3], *(builder.load(place) for place in places)]
        result = call(builder, assembly, operands)
        for index, place in enumerate(places):
            builder.store(builder.extract_value(result, index), place)
        return context.get_dummy_value()

    def typed(sums, a, *flag):
        return types.void(sums, a if a_in_registers else uint64, uint64, *flag), generate

    if is_fresh:
        return intrinsic(lambda typing_context, sums, a, b: typed(sums, a))
    return intrinsic(lambda typing_context, sums, a, b, is_added: typed(sums, a, uint32))


@functools.cache
def group_wait(num_pending: int, *counts: int) -> Any:
    """A function of arrays of sums, one for each of `counts` (their lengths; one or two): waits until at most
    `num_pending` groups are still under way.

    Pass every array that a group may have been writing: reads of them then stay after the wait.
    """
    total = sum(counts)
    constraints = ["=f"] * total + [str(i) for i in range(total)] + ["~{memory}"]
    function_type = ir.FunctionType(ir.LiteralStructType([_FLOAT] * total), [_FLOAT] * total)
    text = f"wgmma.wait_group.sync.aligned {num_pending};"
    assembly = ir.InlineAsm(function_type, text, ",".join(constraints), side_effect=True)

    def generate(context, builder, signature, arguments):
        places = []
        for kind, value, count in zip(signature.args, arguments, counts):
            places += _elements(context, builder, kind, value, count)
        result = call(builder, assembly, [builder.load(place) for place in places])
        for index, place in enumerate(places):
            builder.store(builder.extract_value(result, index), place)
        return context.get_dummy_value()

    if len(counts) == 1:
        return intrinsic(lambda typing_context, sums: (types.void(sums), generate))
    return intrinsic(lambda typing_context, sums, others: (types.void(sums, others), generate))


def _elements(context, builder, kind, value, count):
    """Pointers to the first `count` elements of an array."""
    data = context.make_array(kind)(context, builder, value).data
    return [builder.gep(data, [ir.Constant(_WORD, index)]) for index in range(count)]
