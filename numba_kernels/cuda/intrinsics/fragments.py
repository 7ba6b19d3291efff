"""Loads and tensor-core products on whole arrays of registers, unrolled where the kernel is made.

    load = load_all("global.nc", ((0, 0, 0), (4, 1, 0)))       # (first element, which address, bytes from there)
    load(words, addresses)      # words[0:4] from addresses[0], words[4:8] from addresses[1]
    multiply = multiply_all("bf16", (((0, (0, 1, 2, 3), (0, 1)),))
    multiply(sums, a, b)        # sums[0:4] += A, of words a[0] to a[3], times B, of words b[0], b[1]

Arrays are ``cuda.local.array`` of one dimension. Each call becomes as many instructions as its list has entries. Written
as loops in a kernel they would be the same instructions, once LLVM has unrolled them: it gives up on long ones, which
then keep their arrays in local memory, and Numba types every subscript. PTX ISA, "ld", "ldmatrix", "mma.sync".
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import functools
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic

_WORD, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FOUR_WORDS = "{$0,$1,$2,$3}, [$4];"
_LOADS = {
    "global": ("ld.global.v4.b32 " + _FOUR_WORDS, "l"),
    # For immutable weights, each byte of which is read once; a row's neighbouring sectors will be wanted soon.
    "stream": ("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 " + _FOUR_WORDS, "l"),
    "shared": ("ld.shared.v4.b32 " + _FOUR_WORDS, "r"),
    "matrix": ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 " + _FOUR_WORDS, "r"),
    "matrix_transposed": ("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 " + _FOUR_WORDS, "r"),
}


def _place(context, builder, kind, value, index):
    """A pointer to an element of a local array."""
    return builder.gep(context.make_array(kind)(context, builder, value).data, [ir.Constant(_WORD, index)])


@functools.cache
def load_all(how: str, plan: tuple[tuple[int, int, int], ...]) -> Any:
    """A function ``(words, addresses) -> None``: each entry of `plan` is one load of 16 bytes a lane.

    Args:
        how: "global"; "stream": global memory that nobody writes, past the first-level cache; "shared"; "matrix" and
            "matrix_transposed": `ldmatrix`.
        plan: (first of 4 elements of `words`, element of `addresses`, bytes to add).

    `words` are uint32; `addresses` uint64 for global memory, else uint32.
    """
    text, letter = _LOADS[how]
    address_type, numba_type = (_LONG, types.uint64) if letter == "l" else (_WORD, types.uint32)
    function_type = ir.FunctionType(ir.LiteralStructType([_WORD] * 4), [address_type])
    assembly = ir.InlineAsm(function_type, text, f"=r,=r,=r,=r,{letter},~{{memory}}", side_effect=True)

    def generate(context, builder, signature, arguments):
        for first, which, offset in plan:
            base = builder.load(_place(context, builder, signature.args[1], arguments[1], which))
            words = builder.call(assembly, [builder.add(base, ir.Constant(address_type, offset))])
            for index in range(4):
                place = _place(context, builder, signature.args[0], arguments[0], first + index)
                builder.store(builder.extract_value(words, index), place)
        return context.get_dummy_value()

    def typed(typing_context: Any, words: Any, addresses: Any) -> Any:
        if addresses.dtype != numba_type or words.dtype != types.uint32:
            raise TypeError(f"load_all({how!r}): words are {words.dtype}, addresses {addresses.dtype}")
        return types.void(words, addresses), generate

    return intrinsic(typed)


@functools.cache
def multiply_all(dtype: str, plan: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]) -> Any:
    """A function ``(sums, a, b) -> None``: each entry of `plan` is one `mma.sync` of 16x8x16, in their order.

    Args:
        dtype: "bf16" or "f16".
        plan: (first of 4 elements of `sums`, 4 elements of `a`, 2 elements of `b`), as `intrinsics.mma` lays them out.
    """
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$0,$1,$2,$3};"
    )
    function_type = ir.FunctionType(ir.LiteralStructType([_FLOAT] * 4), [_WORD] * 6 + [_FLOAT] * 4)
    assembly = ir.InlineAsm(function_type, text, "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3", side_effect=False)

    def generate(context, builder, signature, arguments):
        def place(which: int, index: int) -> Any:
            return _place(context, builder, signature.args[which], arguments[which], index)

        sums: dict[int, Any] = {}
        words: dict[tuple[int, int], Any] = {}
        for first, a, b in plan:
            operands = []
            for key in [*((1, index) for index in a), *((2, index) for index in b)]:
                if key not in words:
                    words[key] = builder.load(place(*key))
                operands.append(words[key])
            for index in range(first, first + 4):
                if index not in sums:
                    sums[index] = builder.load(place(0, index))
                operands.append(sums[index])
            result = builder.call(assembly, operands)
            for index in range(4):
                sums[first + index] = builder.extract_value(result, index)
        for index, value in sums.items():
            builder.store(value, place(0, index))
        return context.get_dummy_value()

    return intrinsic(lambda typing_context, sums, a, b: (types.void(sums, a, b), generate))
