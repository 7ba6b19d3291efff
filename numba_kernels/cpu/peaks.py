"""The processor's peak rates: loops that only read memory, or only multiply in registers.

Their rates are the limits beside which `bench peers` puts the engine's. Each loop is one thread's; the caller runs as
many as there are cores. The multiplying ones keep enough independent sums under way to hide the latency of an
instruction; the reading one touches each byte once, four streams at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import llvmlite.binding as llvm
import llvmlite.ir as ir
from numba.core import cgutils, types

from numba_kernels.cache import njit
from numba_kernels.cpu.intrinsics.amx import TILE_ROWS, Tiles
from numba_kernels.cpu.intrinsics.emitted import emitted
from numba_kernels.cpu.intrinsics.simd import (
    F32,
    I32,
    I64,
    fma,
    load,
    offset,
    prefetch,
    reduce_sum,
    splat_constant,
    vector,
)
from numba_kernels.cpu.target import LANES, available_tiles, compiled_for

CHAINS = 24 if compiled_for("avx512f") else 6  # independent sums
READ_STREAMS = 4
READ_BYTES = 256  # of each stream in one iteration
_PREFETCH_BYTES = 1024  # ahead of what is read

FLOPS_PER_FMA_ITERATION = 2 * LANES * CHAINS
OPS_PER_DOT_ITERATION = {"avx512vnni": 2 * 4 * LANES * CHAINS, "avx512bf16": 2 * 2 * LANES * CHAINS}
_DOT_INSTRUCTION = {"avx512vnni": "vpdpbusd $2, $1, $0", "avx512bf16": "vdpbf16ps $2, $1, $0"}


OPS_PER_TILE_ITERATION = {"amx-bf16": 2 * 6 * 16 * 16 * 32, "amx-int8": 2 * 6 * 16 * 16 * 64}
"""Six products of whole AMX tiles, of pairs of bfloat16 and of bytes."""


def _chains(builder, iterations, start, step):
    """`step` applied `iterations` times to each of CHAINS values that begin as `start`; returns the values."""
    slots = [cgutils.alloca_once_value(builder, start) for _ in range(CHAINS)]
    with cgutils.for_range(builder, iterations):
        for slot in slots:
            builder.store(step(builder.load(slot)), slot)
    return [builder.load(slot) for slot in slots]


@emitted(types.float32, types.intp)
def _fma_chains(builder, iterations):
    factor, addend = splat_constant(F32, 0.5), splat_constant(F32, 1.0)
    values = _chains(builder, iterations, addend, lambda value: fma(builder, value, factor, addend))
    total = values[0]
    for value in values[1:]:
        total = builder.fadd(total, value)
    return reduce_sum(builder, total)


def _dot_chains(feature):
    @emitted(types.int32, types.intp)
    def chains(builder, iterations):
        llvm.initialize_native_asmparser()
        kind = vector(I32)
        function_type = ir.FunctionType(kind, [kind, kind, kind])
        instruction = ir.InlineAsm(function_type, _DOT_INSTRUCTION[feature], "=v,v,v,0")
        factor = splat_constant(I32, 0)
        values = _chains(builder, iterations, factor, lambda sums: builder.call(instruction, [factor, factor, sums]))
        total = values[0]
        for value in values[1:]:
            total = builder.or_(total, value)
        return builder.extract_element(total, I32(0))

    return chains


@emitted(types.int32, types.intp, types.intp)
def _read(builder, start, size):
    kind = vector(I32)
    stream_bytes = builder.sdiv(size, ir.Constant(I64, READ_STREAMS))
    iterations = builder.sdiv(stream_bytes, ir.Constant(I64, READ_BYTES))
    slots = [cgutils.alloca_once_value(builder, splat_constant(I32, 0)) for _ in range(READ_STREAMS)]
    with cgutils.for_range(builder, iterations) as loop:
        moved = builder.mul(loop.index, ir.Constant(I64, READ_BYTES))
        for number, slot in enumerate(slots):
            first = builder.add(builder.mul(stream_bytes, ir.Constant(I64, number)), moved)
            place = builder.add(start, first)
            seen = builder.load(slot)
            for step in range(0, READ_BYTES, 64):
                prefetch(builder, offset(builder, place, _PREFETCH_BYTES + step))
                seen = builder.or_(seen, load(builder, offset(builder, place, step), kind, 4))
            builder.store(seen, slot)
    total = builder.load(slots[0])
    for slot in slots[1:]:
        total = builder.or_(total, builder.load(slot))
    return builder.extract_element(total, I32(0))


@njit
def fma_loop(iterations):
    """`iterations` times FLOPS_PER_FMA_ITERATION float32 operations, each multiply-add counted as two."""
    return _fma_chains(iterations)


@njit
def read_loop(address, size_bytes):
    """Reads `size_bytes` at `address`, rounded down to a multiple of READ_STREAMS * READ_BYTES."""
    return _read(address, size_bytes)


def dot_loop(feature: str) -> Callable[[int], int] | None:
    """The loop of dot-product instructions for `feature`: "avx512vnni" (int8) or "avx512bf16". None without it.

    An iteration is OPS_PER_DOT_ITERATION[feature] operations.
    """
    if not compiled_for(feature):
        return None
    chains = _dot_chains(feature)

    @njit
    def loop(iterations):
        return chains(iterations)

    return loop


def tile_loop(feature: str) -> Callable[[int], int] | None:
    """The loop of AMX's products for `feature`: "amx-bf16" or "amx-int8". None without AMX, or without Linux's leave.

    An iteration is OPS_PER_TILE_ITERATION[feature] operations.
    """
    if "amx" not in available_tiles():
        return None

    @emitted(types.intp, types.intp)
    def products(builder, iterations):
        tiles = Tiles(builder, is_emulated=False)
        sums, left, right = range(6), 6, 7
        tiles.configure(ir.Constant(I64, TILE_ROWS), sums, [left], [right], TILE_ROWS)
        with cgutils.for_range(builder, iterations):
            for tile in sums:
                (tiles.add_pairs if feature == "amx-bf16" else tiles.add_bytes)(tile, left, right)
        tiles.release()
        return iterations

    @njit
    def loop(iterations):
        return products(iterations)

    return loop
