"""Loads and tensor-core products on whole arrays of registers, unrolled where the kernel is made.

    load = load_all("shared", ((0, 0, 0), (4, 1, 0)))      # (first element, which address, bytes from there)
    load(words, addresses)      # words[0:4] from addresses[0], words[4:8] from addresses[1]
    multiply = multiply_all("bf16", ((0, (0, 1, 2, 3), (0, 1)),))
    multiply(sums, a, b)        # sums[0:4] += A, of words a[0] to a[3], times B, of words b[0], b[1]

Arrays are ``cuda.local.array`` of one dimension. Each call becomes as many instructions as its list has entries.
Written as loops in a kernel they would be the same instructions, once LLVM has unrolled them: it gives up on long ones,
which then keep their arrays in local memory, and Numba types every subscript. PTX ISA, "ld", "ldmatrix", "mma.sync",
"cp.async".
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import functools
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic

from numba_kernels.cuda.intrinsics.asm import call

_WORD, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_LOADS = {
    # For immutable weights, each byte of which is read once: past the first-level cache. A row's neighbouring sectors
    # are needed soon.
    "stream": "ld.global.nc.L1::no_allocate.L2::256B",
    "stream_early": "ld.global.L1::no_allocate.L2::256B",
    "global": "ld.global",
    "shared": "ld.shared",
}
_MATRIX_LOADS = {
    "matrix": "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
    "matrix_transposed": "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
}
_RESULTS = {1: ("b32", "$0"), 2: ("v2.b32", "{$0,$1}"), 4: ("v4.b32", "{$0,$1,$2,$3}")}
_COPY = "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.cg.shared.global [$0], [$1], 16, $2; }"


def _place(context, builder, kind, value, index):
    """A pointer to an element of a local array."""
    return builder.gep(context.make_array(kind)(context, builder, value).data, [ir.Constant(_WORD, index)])


@functools.cache
def load_all(how: str, plan: tuple[tuple[int, int, int], ...], count: int = 4) -> Any:
    """A function ``(words, addresses) -> None``: each entry of `plan` is one load of `count` words a lane.

    Args:
        how: "stream": read-only global memory, past the first-level cache; "stream_early": the same before
            `wait_for_previous_grid`, after which ptxas moves .nc loads; "global"; "shared"; "matrix" and
            "matrix_transposed": `ldmatrix`.
        plan: (first of `count` elements of `words`, element of `addresses`, bytes to add).
        count: 1, 2 or 4; of matrices 4.

    `words` are uint32; `addresses` uint64 for global memory, else uint32.
    """
    address_type, letter = (_LONG, "l") if how.startswith(("stream", "global")) else (_WORD, "r")
    kind, results = _RESULTS[count]
    text = f"{_MATRIX_LOADS.get(how) or f'{_LOADS[how]}.{kind}'} {results}, [${count}];"
    returned = _WORD if count == 1 else ir.LiteralStructType([_WORD] * count)
    constraints = f"{'=r,' * count}{letter},~{{memory}}"
    assembly = ir.InlineAsm(ir.FunctionType(returned, [address_type]), text, constraints, side_effect=True)

    def generate(context, builder, signature, arguments):
        for first, which, offset in plan:
            base = builder.load(_place(context, builder, signature.args[1], arguments[1], which))
            words = call(builder, assembly, [builder.add(base, ir.Constant(address_type, offset))])
            for index in range(count):
                place = _place(context, builder, signature.args[0], arguments[0], first + index)
                builder.store(words if count == 1 else builder.extract_value(words, index), place)
        return context.get_dummy_value()

    return intrinsic(lambda typing_context, words, addresses: (types.void(words, addresses), generate))


@functools.cache
def copy_all(count: int, target_step: int) -> Any:
    """A function ``(target, source, source_step, chosen, num_there) -> None``: `count` asynchronous copies of 16 bytes,
    from global memory (uint64) to shared memory, every `source_step` and `target_step` bytes.

    Copy i happens where bit i of `chosen` is set; from `num_there` on it brings zeros, without a read.
    """
    function_type = ir.FunctionType(ir.VoidType(), [_WORD, _LONG, _WORD, _WORD])
    assembly = ir.InlineAsm(function_type, _COPY, "r,l,r,r,~{memory}", side_effect=True)

    def generate(context, builder, signature, arguments):
        target, source, source_step, chosen, num_there = arguments
        zero, full = ir.Constant(_WORD, 0), ir.Constant(_WORD, 16)
        for index in range(count):
            size = builder.select(builder.icmp_unsigned(">", num_there, ir.Constant(_WORD, index)), full, zero)
            is_chosen = builder.and_(chosen, ir.Constant(_WORD, 1 << index))
            to = builder.add(target, ir.Constant(_WORD, index * target_step))
            call(builder, assembly, [to, source, size, is_chosen])
            source = builder.add(source, source_step)
        return context.get_dummy_value()

    uint32, uint64 = types.uint32, types.uint64
    return intrinsic(
        lambda typing_context, target, source, source_step, chosen, num_there: (
            types.void(uint32, uint64, uint64, uint32, uint32), generate
        )
    )  # fmt: skip


@functools.cache
def copy_rows_of_tiles(count: int, target_step: int) -> Any:
    """A function ``(target, sources, offset, num_bytes, num_rows, chosen) -> None``: `count` asynchronous copies of 16
    bytes, of tiles of 8 rows, from elements of `sources` (uint64), each with the offset added, to shared memory, every
    `target_step` bytes.

    Copy i happens where bit i of `chosen` is set. `num_bytes`, at most 16, are read each time, and zeros fill the rest;
    tiles from `num_rows` / 8 on are not read. There is at least one row.
    """
    function_type = ir.FunctionType(ir.VoidType(), [_WORD, _LONG, _WORD, _WORD])
    assembly = ir.InlineAsm(function_type, _COPY, "r,l,r,r,~{memory}", side_effect=True)

    def generate(context, builder, signature, arguments):
        target, sources, offset, num_bytes, num_rows, chosen = arguments
        for index in range(count):
            size = num_bytes
            if index:
                is_there = builder.icmp_unsigned(">", num_rows, ir.Constant(_WORD, 8 * index))
                size = builder.select(is_there, num_bytes, ir.Constant(_WORD, 0))
            is_chosen = builder.and_(chosen, ir.Constant(_WORD, 1 << index))
            to = builder.add(target, ir.Constant(_WORD, index * target_step))
            source = builder.load(_place(context, builder, signature.args[1], sources, index))
            call(builder, assembly, [to, builder.add(source, offset), size, is_chosen])
        return context.get_dummy_value()

    uint32, uint64 = types.uint32, types.uint64
    return intrinsic(
        lambda typing_context, target, sources, offset, num_bytes, num_rows, chosen: (
            types.void(uint32, sources, uint64, uint32, uint32, uint32), generate
        )
    )  # fmt: skip


@functools.cache
def copy_rows(count: int, target_step: int) -> Any:
    """A function ``(target, sources, num_bytes) -> None``: `count` asynchronous copies of 16 bytes, each from its own
    address, an element of `sources` (uint64), to shared memory, every `target_step` bytes.

    `num_bytes`, at most 16, are read each time, and zeros fill the rest.
    """
    function_type = ir.FunctionType(ir.VoidType(), [_WORD, _LONG, _WORD])
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    assembly = ir.InlineAsm(function_type, text, "r,l,r,~{memory}", side_effect=True)

    def generate(context, builder, signature, arguments):
        target, sources, num_bytes = arguments
        for index in range(count):
            source = builder.load(_place(context, builder, signature.args[1], sources, index))
            call(builder, assembly, [builder.add(target, ir.Constant(_WORD, index * target_step)), source, num_bytes])
        return context.get_dummy_value()

    return intrinsic(
        lambda typing_context, target, sources, num_bytes: (types.void(types.uint32, sources, types.uint32), generate)
    )


@functools.cache
def exchange_all(plan: tuple[tuple[int, int], ...]) -> Any:
    """A function ``(words, is_exchanged) -> None``: for each ``(i, j)`` of `plan`, words[i] and words[j] change places
    in lanes whose `is_exchanged` (uint32) is not 0."""

    def generate(context, builder, signature, arguments):
        is_exchanged = builder.icmp_unsigned("!=", arguments[1], ir.Constant(_WORD, 0))
        for pair in plan:
            places = [_place(context, builder, signature.args[0], arguments[0], index) for index in pair]
            first, second = map(builder.load, places)
            builder.store(builder.select(is_exchanged, second, first), places[0])
            builder.store(builder.select(is_exchanged, first, second), places[1])
        return context.get_dummy_value()

    return intrinsic(lambda typing_context, words, is_exchanged: (types.void(words, types.uint32), generate))


@functools.cache
def multiply_all(dtype: str, plan: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]) -> Any:
    """A function ``(sums, a, b) -> None``: each entry of `plan` is one `mma.sync` of 16x8x16, of tf32 16x8x8, in their
    order.

    Args:
        dtype: "bf16", "f16" or "tf32", whose words have a number each (elements t and t + 4 of K in lane t).
        plan: (first of 4 elements of `sums`, 4 elements of `a`, 2 elements of `b`), as `intrinsics.mma` lays them out.
    """
    text = (
        f"mma.sync.aligned.m16n8k{8 if dtype == 'tf32' else 16}.row.col.f32.{dtype}.{dtype}.f32 "
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
            result = call(builder, assembly, operands)
            for index in range(4):
                sums[first + index] = builder.extract_value(result, index)
        for index, value in sums.items():
            builder.store(value, place(0, index))
        return context.get_dummy_value()

    return intrinsic(lambda typing_context, sums, a, b: (types.void(sums, a, b), generate))


@functools.cache
def scale_all(plan: tuple[tuple[int, int], ...]) -> Any:
    """A function ``(sums, factors) -> None``: for each ``(i, j)`` of `plan`, sums[i] is multiplied with factors[j], and
    not contracted with what is added later."""
    assembly = ir.InlineAsm(ir.FunctionType(_FLOAT, [_FLOAT] * 2), "mul.rn.f32 $0, $1, $2;", "=f,f,f")

    def generate(context, builder, signature, arguments):
        def place(which: int, index: int) -> Any:
            return _place(context, builder, signature.args[which], arguments[which], index)

        for index, factor in plan:
            operands = [builder.load(place(0, index)), builder.load(place(1, factor))]
            builder.store(call(builder, assembly, operands), place(0, index))
        return context.get_dummy_value()

    return intrinsic(lambda typing_context, sums, factors: (types.void(sums, factors), generate))


@functools.cache
def settle_all(plan: tuple[tuple[int, int, int], ...]) -> Any:
    """A function ``(sums, parts, a, b) -> None``, all float32: for each ``(i, j, k)`` of `plan`,
    sums[i] += parts[i] * (a[j] * b[k]), and parts[i] becomes 0."""

    def generate(context, builder, signature, arguments):
        def place(which: int, index: int) -> Any:
            return _place(context, builder, signature.args[which], arguments[which], index)

        zero = ir.Constant(_FLOAT, 0.0)
        for index, first, second in plan:
            factor = builder.fmul(builder.load(place(2, first)), builder.load(place(3, second)))
            added = builder.fmul(builder.load(place(1, index)), factor)
            builder.store(builder.fadd(builder.load(place(0, index)), added), place(0, index))
            builder.store(zero, place(1, index))
        return context.get_dummy_value()

    return intrinsic(lambda typing_context, sums, parts, a, b: (types.void(sums, parts, a, b), generate))


@functools.cache
def add_scaled(plan: tuple[tuple[int, int], ...]) -> Any:
    """A function ``(sums, parts, factors) -> None``, all float32: for each ``(i, j)`` of `plan`, sums[i] += parts[i] *
    factors[j], rounded once, and parts[i] becomes 0."""
    assembly = ir.InlineAsm(ir.FunctionType(_FLOAT, [_FLOAT] * 3), "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")

    def generate(context, builder, signature, arguments):
        def place(which: int, index: int) -> Any:
            return _place(context, builder, signature.args[which], arguments[which], index)

        for index, factor in plan:
            operands = [builder.load(place(which, at)) for which, at in ((1, index), (2, factor), (0, index))]
            builder.store(call(builder, assembly, operands), place(0, index))
            builder.store(ir.Constant(_FLOAT, 0.0), place(1, index))
        return context.get_dummy_value()

    return intrinsic(lambda typing_context, sums, parts, factors: (types.void(sums, parts, factors), generate))
