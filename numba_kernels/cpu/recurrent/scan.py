"""The recurrence of a gated delta rule and of Mamba-2, token by token, and the gated norm of its outputs.

For each value head, with decay e, step size b, key k, query q and value v of a token, and a state S ``[keys, values]``:

    d = b (v - e S^T k)   (mamba: d = b v)      o = e S^T q + d (k . q)      S = e S + k d^T

Columns of S are independent. A work item has some columns of one head for all tokens of a sequence, BLOCK at a time, so
that they stay in the first-level cache (of a lone token WIDE); one pass over the rows adds ``k d^T`` of the token
before and sums up ``S^T k`` and ``S^T q`` of this one. Each lane adds from the first row to the last, whatever the
chunk, the processor or the number of threads. A state of bfloat16 is rounded after each token.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import carray, njit
from numba.core import cgutils, types

from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.intrinsics import atomic, simd
from numba_kernels.cpu.intrinsics.emitted import LITERAL, emitted
from numba_kernels.cpu.intrinsics.scalars import load_f32, store_f32
from numba_kernels.cpu.intrinsics.simd import F32, I32, I64
from numba_kernels.cpu.layout import TILE_VECTORS
from numba_kernels.cpu.recurrent.convolution import CHUNK_FIELDS, chunk_end, chunk_of, covered, written_page
from numba_kernels.cpu.recurrent.tiles import GATE_ONLY, NORMED, SIGMOID, SILU, gate_tile, inner_product
from numba_kernels.cpu.running.launch import Fields, Kernel, address, float32_at, new_lines
from numba_kernels.cpu.target import LANES

BLOCK = 64 if TILE_VECTORS > 1 else 32  # columns that are read together, as registers allow
WIDE = 128  # the same where a sequence has a single token
MOST_UNITS = 512 // BLOCK  # of a work item
_VECTORS, _WIDE_VECTORS = BLOCK // LANES, WIDE // LANES
_ROW = BLOCK * 4
_AHEAD = 12  # rows that are prefetched before they are read

FIELDS = Fields(
    CHUNK_FIELDS
    + "*prepared *factors *state *skip *out key_heads value_heads key_dim value_dim q_first k_first v_first "
    "tiled units_a_work_item"
)
NORM_FIELDS = Fields("*x *gate *weight *out num_rows width stride groups weight_step tokens_a_work_item sigmoid", "eps")


def _rounded(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Rounded to the nearest bfloat16; a NaN stays one."""
    kind = simd.vector(I32)
    number = functools.partial(simd.splat_constant, I32)
    bits = builder.bitcast(value, kind)
    last = builder.and_(builder.lshr(bits, number(16)), number(1))
    nearest = builder.and_(builder.add(builder.add(bits, number(0x7FFF)), last), number(-65536))
    quiet = builder.or_(bits, number(0x00400000))
    return builder.bitcast(builder.select(builder.fcmp_unordered("uno", value, value), quiet, nearest), value.type)


@emitted(types.void, *[LITERAL] * 6, *[types.intp] * 12, *[types.float32] * 4)
def scan_tile(
    builder, width, updates, reads, has_delta, rounds, bypasses, source, source_stride, target, target_stride, rows,
    fetched, last_k, delta, k, q, v, out, last_decay, decay, step, product,
):  # fmt: skip
    """A pass over ``width`` vectors of columns of ``rows`` rows of a state, all addresses; strides in bytes.

    With ``updates``, rows become ``last_decay * row + last_k * delta`` and go to ``target``, rounded to bfloat16 with
    ``rounds``, around the caches with ``bypasses``. With ``reads``, the token's own ``delta`` and ``out``, of as many
    columns, follow from them. A pass that does one of both prefetches rows at ``fetched``, as far apart as those of
    ``source``."""

    def vectors(at):
        return [simd.load(builder, simd.offset(builder, at, 64 * each), simd.vector(F32), 4) for each in range(width)]

    def scalar(at, row):
        return simd.splat(builder, simd.load(builder, builder.add(at, builder.mul(row, ir.Constant(I64, 4))), F32, 4))

    added = vectors(delta) if updates else []
    sums = [cgutils.alloca_once(builder, simd.vector(F32)) for _ in range(2 * width)]
    for each in sums if reads else []:
        builder.store(simd.splat_constant(F32, 0.0), each)
    last = simd.splat(builder, last_decay)
    with cgutils.for_range(builder, rows, intp=I64) as loop:
        row = loop.index
        state = vectors(builder.add(source, builder.mul(row, source_stride)))
        if updates:
            factor, at = scalar(last_k, row), builder.add(target, builder.mul(row, target_stride))
            state = [simd.fma(builder, factor, d, builder.fmul(last, s)) for d, s in zip(added, state)]
            if rounds:
                state = [_rounded(builder, each) for each in state]
            for number, each in enumerate(state):
                place = simd.offset(builder, at, 64 * number)
                simd.store(builder, each, place, 64 if bypasses else 4, is_read_soon=not bypasses)
        if updates != reads:
            ahead = builder.add(fetched, builder.mul(row, source_stride))
            for line in range(width):
                simd.prefetch(builder, simd.offset(builder, ahead, 64 * line))
        if reads:
            for first, given in ((0, k), (width, q)) if has_delta else ((width, q),):
                factor = scalar(given, row)
                for register, each in zip(sums[first : first + width], state):
                    builder.store(simd.fma(builder, factor, each, builder.load(register)), register)
    if reads:
        now, size, both = simd.splat(builder, decay), simd.splat(builder, step), simd.splat(builder, product)
        for number, value in enumerate(vectors(v)):
            if has_delta:
                value = builder.fsub(value, builder.fmul(now, builder.load(sums[number])))
            value = builder.fmul(size, value)
            result = simd.fma(builder, value, both, builder.fmul(now, builder.load(sums[width + number])))
            simd.store(builder, value, simd.offset(builder, delta, 64 * number))
            simd.store(builder, result, simd.offset(builder, out, 64 * number))


@njit(nogil=True)
def _load(stored, state, stride, columns, block, rows):
    """The block at an address, ``[rows, BLOCK]`` = columns of a page's state; the rest are zeros."""
    for row in range(rows):
        target = float32_at(block + row * _ROW, BLOCK)
        for i in range(columns):
            target[i] = load_f32(stored, state, row * stride + i)
        for i in range(columns, BLOCK):
            target[i] = 0.0


@njit(nogil=True)
def _store(stored, state, stride, columns, block, rows):
    for row in range(rows):
        source = float32_at(block + row * _ROW, BLOCK)
        for i in range(columns):
            store_f32(stored, state, row * stride + i, source[i])


def _step_of(has_delta: int) -> Any:
    """A function that computes a lone token: it reads WIDE columns of all rows from one page, and writes them to the
    other around the caches, while it prefetches those at ``after``. If these are all columns, memory delivers one
    stream."""

    @njit(nogil=True)
    @name_by_content
    def step_rows(read, written, row_bytes, rows, after, delta, k, q, v, out, decay, step, product):
        scan_tile(
            _WIDE_VECTORS, 0, 1, has_delta, 0, 0, read, row_bytes, 0, 0, rows, read + _AHEAD * row_bytes, 0, delta, k,
            q, v, out, decay, decay, step, product,
        )  # fmt: skip
        scan_tile(
            _WIDE_VECTORS, 1, 0, has_delta, 0, 1, read, row_bytes, written, row_bytes, rows, after, k, delta, 0, 0, 0,
            0, decay, decay, decay, decay,
        )  # fmt: skip

    return step_rows


@functools.cache
def scan_kernel(is_delta: bool, stored: type) -> Kernel:
    """``out [T, value_heads * value_dim]``, not yet normalised, and the states of the pages that are written. A work
    item is ``units_a_work_item`` blocks of columns of a sequence's heads."""
    itemsize = np.dtype(stored).itemsize
    is_plain, has_delta, rounds = stored is np.float32, int(is_delta), int(stored is not np.float32)
    has_steps = is_plain and TILE_VECTORS > 1  # and so registers for the sums of WIDE columns
    step_wide = _step_of(has_delta)

    def scan(arguments, work_item):
        a = carray(arguments, 1)[0]
        key_heads, value_heads, key_dim, value_dim = a.key_heads, a.value_heads, a.key_dim, a.value_dim
        channels, of_row = a.channels, a.key_heads + 2 * a.value_heads
        num_blocks = (value_dim + BLOCK - 1) // BLOCK
        units = value_heads * num_blocks
        shares = (units + a.units_a_work_item - 1) // a.units_a_work_item
        share, seq = work_item % shares, work_item // shares
        first_unit, end_unit = share * a.units_a_work_item, min(units, (share + 1) * a.units_a_work_item)
        start, n, p, page, length, status = chunk_of(a, seq)
        if status != 0:
            a.status = status
            return
        replayed = p - length if p > 0 else 0
        total = replayed + n
        kept = replayed + covered(n, p, a.pending) - p
        memory = new_lines(key_dim * BLOCK + 2 * WIDE)  # a block and two rows of WIDE columns
        block_at = address(memory)
        delta_at, result_at = block_at + key_dim * _ROW, block_at + key_dim * _ROW + WIDE * 4
        small = np.zeros(BLOCK, np.float32)
        result, stride = float32_at(result_at, WIDE), value_dim
        of_head = key_dim * value_dim * itemsize
        can_step = has_steps and total == 1 and p > 0 and (a.state | (stride * 4)) % 64 == 0
        next_unit = first_unit
        for unit in range(first_unit, end_unit):
            if unit < next_unit:
                continue
            head, column = unit // num_blocks, unit % num_blocks * BLOCK
            columns = min(BLOCK, value_dim - column)
            if can_step and value_dim - column >= WIDE and unit + WIDE // BLOCK <= end_unit:
                columns = WIDE
            next_unit = unit + (columns + BLOCK - 1) // BLOCK
            key_head = head % key_heads if a.tiled != 0 else head // (value_heads // key_heads)
            if n == 0:
                for token in range(start, chunk_end(a, seq)):
                    at = ((token * value_heads + head) * value_dim + column) * 4
                    float32_at(a.out + at, columns)[:] = 0.0
                continue
            read = a.state + (page * value_heads + head) * of_head + column * itemsize
            written = a.state + (written_page(a, seq) * value_heads + head) * of_head + column * itemsize
            after = next_unit // num_blocks * of_head + next_unit % num_blocks * BLOCK * itemsize
            after = a.state + page * value_heads * of_head + after if p > 0 and next_unit < end_unit else block_at
            is_direct = is_plain and columns >= BLOCK
            source, source_stride = block_at, np.int64(_ROW)
            if p == 0:
                float32_at(block_at, key_dim * BLOCK)[:] = 0.0
            elif is_direct:
                source, source_stride = read, stride * 4
            else:
                _load(stored, read, stride, columns, block_at, key_dim)
            last_k, last_decay = np.int64(0), np.float32(0.0)
            for t in range(total):
                row = a.num_tokens + seq * a.pending + t if t < replayed else start + t - replayed
                prepared = a.prepared + row * channels * 4
                factors = float32_at(a.factors + row * of_row * 4, of_row)
                k = prepared + (a.k_first + key_head * key_dim) * 4
                q = prepared + (a.q_first + key_head * key_dim) * 4
                v = prepared + (a.v_first + head * value_dim + column) * 4
                if columns < BLOCK:
                    for i in range(columns):
                        small[i] = float32_at(v, columns)[i]
                    v = address(small)
                decay, step = factors[key_heads + head], factors[key_heads + value_heads + head]
                product = factors[key_head]
                if columns == WIDE:
                    step_wide(
                        read, written, stride * 4, key_dim, after, delta_at, k, q, v, result_at, decay, step, product
                    )
                elif t == 0:
                    scan_tile(
                        _VECTORS, 0, 1, has_delta, rounds, 0, source, source_stride, 0, 0, key_dim,
                        source + _AHEAD * source_stride, 0, delta_at, k, q, v, result_at, last_decay, decay, step,
                        product,
                    )  # fmt: skip
                else:
                    scan_tile(
                        _VECTORS, 1, 1, has_delta, rounds, 0, source, source_stride, block_at, _ROW, key_dim, 0, last_k,
                        delta_at, k, q, v, result_at, last_decay, decay, step, product,
                    )  # fmt: skip
                    source, source_stride = block_at, np.int64(_ROW)
                    if t == kept:
                        _store(stored, written, stride, columns, block_at, key_dim)
                last_k, last_decay = k, decay
                if t >= replayed:
                    out = float32_at(a.out + ((row * value_heads + head) * value_dim + column) * 4, columns)
                    given = float32_at(v, columns)
                    if is_delta:
                        for i in range(columns):
                            out[i] = result[i]
                    else:
                        skip = float32_at(a.skip, value_heads)[head]
                        for i in range(columns):
                            out[i] = result[i] + skip * given[i]
            if kept < total or columns == WIDE:
                continue
            if is_direct and (written | (stride * 4)) % 64 == 0:
                scan_tile(
                    _VECTORS, 1, 0, has_delta, rounds, 1, source, source_stride, written, stride * 4, key_dim, after,
                    last_k, delta_at, 0, 0, 0, 0, last_decay, last_decay, last_decay, last_decay,
                )  # fmt: skip
                continue
            scan_tile(
                _VECTORS, 1, 0, has_delta, rounds, 0, source, source_stride, block_at, _ROW, key_dim, block_at, last_k,
                delta_at, 0, 0, 0, 0, last_decay, last_decay, last_decay, last_decay,
            )  # fmt: skip
            _store(stored, written, stride, columns, block_at, key_dim)
        memory[0] = small[0] = 0.0  # they live until here: numba frees an array after its last use by name
        atomic.fence()

    return Kernel(scan, FIELDS)


@functools.cache
def gated_norm_kernel(is_delta: bool) -> Kernel:
    """``out [R, width]`` from ``x [R, width]``, in ``groups`` equal parts, and a gate in rows of ``stride``: the norm's
    result times the gated function (delta rule), or the norm of ``x * silu(gate)`` (mamba). ``weight_step``: 0 if all
    parts have the same weights."""

    def gated_norm(arguments, work_item):
        a = carray(arguments, 1)[0]
        size = a.width // a.groups
        first = work_item * a.tokens_a_work_item
        for row in range(first, min(a.num_rows, first + a.tokens_a_work_item)):
            for group in range(a.groups):
                x = a.x + (row * a.width + group * size) * 4
                gate = a.gate + (row * a.stride + group * size) * 4
                weight = a.weight + group * a.weight_step * 4
                out = a.out + (row * a.width + group * size) * 4
                if not is_delta:
                    gate_tile(GATE_ONLY, x, gate, weight, out, size, np.float32(1.0))
                    x = out
                scale = np.float32(1.0 / math.sqrt(inner_product(x, x, size) / size + a.eps))
                if not is_delta:
                    gate_tile(NORMED, x, gate, weight, out, size, scale)
                elif a.sigmoid != 0:
                    gate_tile(SIGMOID, x, gate, weight, out, size, scale)
                else:
                    gate_tile(SILU, x, gate, weight, out, size, scale)

    return Kernel(gated_norm, NORM_FIELDS)
