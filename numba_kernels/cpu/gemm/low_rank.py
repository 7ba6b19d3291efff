"""Low-rank sums that ride on a product's launch: ``out[t] += up[a] (down[a] x[t]) + bias[a]``, a the adapter of row t.

A launch of `linear_kernel` is given a block of `FIELDS`. Some of its first work items *shrink*: they fill ``between [T,
num_parts * stride]`` with ``down x``, rows sorted by adapter. The others, before they multiply some panels, *expand*:
they write the residual and the sums of these columns to ``out``, which is then the panels' residual. So rows of any
adapters cost no launch, and an adapter's numbers are read once. Many adapters are many short streams, which no hardware
prefetches: expanding fetches a few tiles of ``up`` ahead.

A map that a model has joined (queries, keys and values) has a pair for each of its parts. An adapter's numbers lie in
the order in which they are read, and only those of its own rank are:

    down    [parts, stride / GROUP, steps of K, GROUP, LANES words]    rows of ``down``, GROUP at a time
    up      [parts' blocks of LANES outputs, words of rank, LANES words]

A word holds one element; where rows of x are rounded to bfloat16 for such a weight (`are_pairs`), a pair of neighbours
in K or in rank, and ``between`` has pairs, too. Padding is zero. Every number of ``between`` and of ``out`` is one
chain of operations, in the order of K and of ranks, whatever the other rows and the number of threads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import llvmlite.ir as ir
import numpy as np
from numba import carray, from_dtype, njit, types
from numba.core import cgutils

from numba_kernels.closure_cache import CFunction, name_by_content
from numba_kernels.cpu import CODE_FOLDER
from numba_kernels.cpu.gemm.arranged_rows import are_pairs
from numba_kernels.cpu.gemm.packed_words import round_pairs
from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.emitted import KIND, emitted
from numba_kernels.cpu.intrinsics.simd import F32, I32, I64, i64
from numba_kernels.cpu.layout import PANEL_COLUMNS, ROUNDS_TO_BF16, TILE_VECTORS
from numba_kernels.cpu.running.launch import (
    Fields,
    Kernel,
    address,
    address_of,
    argument_block,
    float32_at,
    int32_at,
    int64_at,
)
from numba_kernels.cpu.target import LANES

_HAS_MANY_REGISTERS = TILE_VECTORS > 1
GROUP = 8 if _HAS_MANY_REGISTERS else 4  # ranks that are shrunk together
_SHRUNK_ROWS = 3 if _HAS_MANY_REGISTERS else 1  # rows that meet them at a time, as registers allow
_EXPANDED_ROWS = 8 if _HAS_MANY_REGISTERS else 4
_SHARED_ROWS = 24  # of a unit of shrinking: they stay in the second-level cache for all groups
_AHEAD_BYTES = 4096  # how far a pass over `down` prefetches
_TILES_AHEAD = 3  # how far ahead a tile prefetches `up`
_LINE = 64
_VOID = ir.VoidType()

FIELDS = Fields(
    "shrink expand *x *between *slots *parts *starts *active *tokens depth x_stride first_row "
    "first_column num_slots num_active num_parts rank stride num_shrinking"
)
"""``slots [S, 3 + parts]`` int64: the addresses of an adapter's down, up and bias (float32 ``[N]``, 0 = none), and its
own rank in each part. ``parts [parts, 3]`` int32: a part's first output, its outputs, and its first block. ``starts``,
``active``, ``tokens``: of `group_kernel`. ``rank`` is the most that up has room for, ``stride`` the same in whole
groups. Row 0 of the product is row ``first_row`` of x and out, its column 0 is the map's output ``first_column``."""
SHRINK, EXPAND = FIELDS.offset("shrink"), FIELDS.offset("expand")


@emitted(types.void, KIND, *[types.intp] * 8)
def _shrink_tile(builder, stored, height, x, stride, tokens, down, depth, target, target_stride):
    """Products of ``height`` rows and a group of ``down``: GROUP numbers for each row at ``target``. The rows are those
    of x whose int32 numbers are at ``tokens``; pairs' are neighbours."""
    simd.for_each_of(
        builder, height, range(1, _SHRUNK_ROWS + 1),
        lambda each: _emit_shrink(builder, each, stored, x, stride, tokens, down, depth, target, target_stride),
    )  # fmt: skip


def _places(builder: ir.IRBuilder, base: ir.Value, stride: ir.Value, tokens: ir.Value, height: int) -> list[ir.Value]:
    """The addresses of the rows whose int32 numbers are at ``tokens``."""
    numbers = (simd.load(builder, simd.offset(builder, tokens, 4 * r), I32, 4) for r in range(height))
    return [builder.add(base, builder.mul(stride, builder.sext(each, I64))) for each in numbers]


def _emit_shrink(builder, height, stored, x, stride, tokens, down, depth, target, target_stride):
    has_pairs, itemsize = _has_pairs(stored), stored.bitwidth // 8
    elements, row_bytes = (2 * LANES if has_pairs else LANES), LANES * 4
    lane_bytes = LANES * (4 if has_pairs else itemsize)  # of a rank's elements of a step
    if has_pairs:
        places = [builder.add(x, builder.mul(stride, i64(r))) for r in range(height)]
    else:
        places = _places(builder, x, stride, tokens, height)
    sums = {(r, g): cgutils.alloca_once(builder, simd.vector(F32)) for r in range(height) for g in range(GROUP)}
    for register in sums.values():
        builder.store(simd.splat_constant(F32, 0.0), register)

    def add(step, load):
        at = builder.add(down, builder.mul(step, i64(GROUP * lane_bytes)))
        values = [load(builder.add(place, builder.mul(step, i64(row_bytes)))) for place in places]
        for line in range(0, GROUP * lane_bytes, _LINE):
            simd.prefetch(builder, simd.offset(builder, at, _AHEAD_BYTES + line), is_near=True)
        for g in range(GROUP):
            weight = _load_words(builder, simd.offset(builder, at, g * lane_bytes), stored)
            for r in range(height):
                _add_product(builder, sums[r, g], values[r], weight)

    whole = builder.sdiv(builder.add(depth, i64(elements - 1 if has_pairs else 0)), i64(elements))
    kind = simd.vector(I32 if has_pairs else F32)
    with cgutils.for_range(builder, whole, intp=I64) as loop:
        add(loop.index, lambda at: simd.load(builder, at, kind, 4))
    if not has_pairs:
        rest = builder.sub(depth, builder.mul(whole, i64(elements)))
        with builder.if_then(builder.icmp_signed(">", rest, i64(0))):
            mask = simd.lanes_below(builder, 0, rest)
            add(whole, lambda at: simd.masked_load(builder, at, mask))
    for r in range(height):
        totals = _sum_each(builder, [builder.load(sums[r, g]) for g in range(GROUP)])
        at = builder.add(target, builder.mul(target_stride, i64(r)))
        if has_pairs:
            totals = dots.rounded_halves(builder, builder.bitcast(totals, simd.vector(I32, GROUP)))
        simd.store(builder, totals, at, 2 if has_pairs else 4)


def _has_pairs(stored: types.Type) -> bool:
    return ROUNDS_TO_BF16 and stored == types.uint16


def _load_words(builder: ir.IRBuilder, address: ir.Value, stored: types.Type) -> ir.Value:
    """LANES words: pairs, or elements as floats."""
    if _has_pairs(stored):
        return simd.load(builder, address, simd.vector(I32), 4)
    return simd.load_wide(builder, address, stored)


def _add_product(builder: ir.IRBuilder, register: ir.Value, value: ir.Value, weight: ir.Value) -> None:
    """Adds the products of two vectors of words: of floats, or of pairs."""
    add = dots.add_bf16_pairs if weight.type.element == I32 else None
    total = builder.load(register)
    builder.store(
        simd.fma(builder, value, weight, total) if add is None else add(builder, total, value, weight), register
    )


def _sum_each(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """The sum of each vector's lanes, side by side; neighbours are added first."""

    def halve(first: ir.Value, second: ir.Value) -> ir.Value:
        lanes, given = first.type.count, 2 * first.type.count
        halves = [
            builder.shuffle_vector(first, second, ir.Constant(simd.vector(I32, lanes), list(range(odd, given, 2))))
            for odd in (0, 1)
        ]
        return builder.fadd(*halves)

    while len(vectors) > 1:
        vectors = [halve(*pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    [total] = vectors
    while (lanes := total.type.count) > GROUP:
        evens, odds = (
            builder.shuffle_vector(total, total, ir.Constant(simd.vector(I32, lanes // 2), list(range(odd, lanes, 2))))
            for odd in (0, 1)
        )
        total = builder.fadd(evens, odds)
    return total


@emitted(types.void, KIND, *[types.intp] * 14)
def _expand_tile(
    builder, stored, height, between, stride, up, block_bytes, words, residual, residual_stride, out, out_stride,
    tokens, bias, low, high,
):  # fmt: skip
    """Writes ``height`` rows of ``out``, an address at the first block's first column, whose int32 numbers are at
    ``tokens``: the same rows of ``residual`` (0 = none) and their sums of TILE_VECTORS blocks of ``up``. Only columns
    from ``low`` to ``high`` are touched, counted from the first block's first one; ``bias`` (0 = none) begins there,
    too. ``up`` is prefetched _TILES_AHEAD tiles ahead."""
    simd.for_each_of(
        builder, height, range(1, _EXPANDED_ROWS + 1),
        lambda each: _emit_expand(
            builder, each, stored, between, stride, up, block_bytes, words, residual, residual_stride, out, out_stride,
            tokens, bias, low, high,
        ),
    )  # fmt: skip


def _emit_expand(
    builder, height, stored, between, stride, up, block_bytes, words, residual, residual_stride, out, out_stride,
    tokens, bias, low, high,
):  # fmt: skip
    has_pairs = _has_pairs(stored)
    lane_bytes = LANES * (4 if has_pairs else stored.bitwidth // 8)
    places = _places(builder, out, out_stride, tokens, height)
    added_places = _places(builder, residual, residual_stride, tokens, height)
    sums = {(r, v): cgutils.alloca_once(builder, simd.vector(F32)) for r in range(height) for v in range(TILE_VECTORS)}
    for register in sums.values():
        builder.store(simd.splat_constant(F32, 0.0), register)
    blocks = [builder.add(up, builder.mul(block_bytes, i64(v))) for v in range(TILE_VECTORS)]
    ahead = builder.mul(block_bytes, i64(_TILES_AHEAD * TILE_VECTORS))
    with cgutils.for_range(builder, words, intp=I64) as loop:
        column = builder.mul(loop.index, i64(lane_bytes))
        weights = [_load_words(builder, builder.add(block, column), stored) for block in blocks]
        for block in blocks:
            simd.prefetch(builder, builder.add(builder.add(block, column), ahead), is_near=True)
        at = builder.add(between, builder.mul(loop.index, i64(4)))
        for r in range(height):
            place = builder.add(at, builder.mul(stride, i64(r)))
            value = simd.splat(builder, simd.load(builder, place, I32 if has_pairs else F32, 2 if has_pairs else 4))
            for v in range(TILE_VECTORS):
                _add_product(builder, sums[r, v], value, weights[v])

    def finish(masks: list[ir.Value] | None) -> None:
        def load(address: ir.Value, v: int) -> ir.Value:
            if masks is None:
                return simd.load(builder, address, simd.vector(F32), 4)
            return simd.masked_load(builder, address, masks[v])

        with builder.if_then(builder.icmp_signed("!=", bias, i64(0))):
            for v in range(TILE_VECTORS):
                added = load(simd.offset(builder, bias, v * LANES * 4), v)
                for r in range(height):
                    builder.store(builder.fadd(builder.load(sums[r, v]), added), sums[r, v])
        zeros = simd.splat_constant(F32, 0.0)
        with builder.if_else(builder.icmp_signed("!=", residual, i64(0))) as (has_one, has_none):
            with has_one:
                for (r, v), register in sums.items():
                    added = load(simd.offset(builder, added_places[r], v * LANES * 4), v)
                    builder.store(builder.fadd(added, builder.load(register)), register)
            with has_none:
                for register in sums.values():
                    builder.store(builder.fadd(zeros, builder.load(register)), register)
        for (r, v), register in sums.items():
            at, total = simd.offset(builder, places[r], v * LANES * 4), builder.load(register)
            if masks is None:
                simd.store(builder, total, at)
            else:
                simd.masked_store(builder, total, at, masks[v])

    is_whole = builder.and_(builder.icmp_signed("<=", low, i64(0)), builder.icmp_signed(">=", high, i64(PANEL_COLUMNS)))
    with builder.if_else(is_whole, likely=True) as (whole, part):
        with whole:
            finish(None)
        with part:
            masks = []
            for v in range(TILE_VECTORS):
                outside = simd.lanes_below(builder, v * LANES, low)
                masks.append(builder.and_(simd.lanes_below(builder, v * LANES, high), builder.not_(outside)))
            finish(masks)


@emitted(types.void, *[types.intp] * 3)
def call_shrink(builder, function, block, work_item):
    """Calls `Functions.shrink` by its address."""
    _call(builder, function, block, work_item)


@emitted(types.intp, *[types.intp] * 10)
def call_expand(
    builder, function, block, first_column, columns, first_row, rows, residual, residual_stride, out, out_stride
):  # fmt: skip
    """Calls `Functions.expand`."""
    places = residual, residual_stride, out, out_stride
    return _call(builder, function, block, first_column, columns, first_row, rows, *places, result=I64)


def _call(
    builder: ir.IRBuilder, function: ir.Value, block: ir.Value, *values: ir.Value, result: ir.Type = _VOID
) -> ir.Value:  # fmt: skip
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(result, [pointer, *(value.type for value in values)])
    return builder.call(builder.inttoptr(function, kind.as_pointer()), [builder.inttoptr(block, pointer), *values])


@njit(nogil=True)
def _copy(residual, stride, out, out_stride, columns, rows):
    """Copies ``[rows, columns]`` to ``out``, or zeros if there is no residual; strides are in bytes."""
    for row in range(rows):
        target = float32_at(out + row * out_stride, columns)
        if residual == 0:
            target[:] = np.float32(0)
        else:
            source = float32_at(residual + row * stride, columns)
            for column in range(columns):
                target[column] = source[column]


class Functions(NamedTuple):
    """The kernel ``shrink(block, work item)``, and the address of ``expand(block, first column, columns, first row,
    rows, residual, its stride, out, its stride)``, of columns and rows of the product. It writes the residual (0 =
    none) and the sums to ``out``, or returns 0 if no row has sums; both addresses are at the first column and row."""

    shrink: Kernel
    expand: int


@functools.cache
def functions_of(stored: Any) -> Functions:
    """The functions for numbers of ``stored``, a class."""
    has_pairs = are_pairs(stored)
    a_word = 2 if has_pairs else 1
    word_bytes = np.dtype(stored).itemsize * a_word
    between_bytes = 4 // a_word

    def shrink(arguments, work_item):
        a = carray(arguments, 1)[0]
        fields, ranks = 3 + a.num_parts, a.num_parts * a.stride
        starts, active = int32_at(a.starts, a.num_slots + 1), int32_at(a.active, a.num_active)
        tokens, slots = int32_at(a.tokens, starts[a.num_slots]), int64_at(a.slots, a.num_slots * fields)
        steps = -(-a.depth // (LANES * a_word))
        group_bytes = steps * GROUP * LANES * word_bytes
        if has_pairs:
            memory = np.empty((_SHARED_ROWS, steps * LANES), np.uint32)
        row_bytes = steps * LANES * 4
        unit = 0
        for number in range(a.num_active):
            slot = active[number]
            if slot < 0:
                break
            for first in range(starts[slot], starts[slot + 1], _SHARED_ROWS):
                last = min(starts[slot + 1], first + _SHARED_ROWS)
                is_rounded, rounded = False, address(memory) if has_pairs else 0
                for part in range(a.num_parts):
                    for group in range(-(-slots[slot * fields + 3 + part] // GROUP)):
                        unit += 1
                        if unit % a.num_shrinking != work_item:
                            continue
                        if has_pairs and not is_rounded:
                            for row in range(first, last):
                                source, target = a.x + tokens[row] * a.x_stride * 4, rounded + (row - first) * row_bytes
                                for element in range(0, a.depth, 2 * LANES):
                                    count = min(2 * LANES, a.depth - element)
                                    round_pairs(source + element * 4, count, target + element * 2)
                            is_rounded = True
                        column = part * a.stride + group * GROUP
                        down = slots[slot * fields] + column // GROUP * group_bytes
                        row = first
                        while row < last:  # tiles of about one height: low ones wait for their own sums
                            height = -(-(last - row) // -(-(last - row) // _SHRUNK_ROWS))
                            x, stride = a.x, a.x_stride * 4
                            if has_pairs:
                                x, stride = rounded + (row - first) * row_bytes, row_bytes
                            at = a.between + (row * ranks + column) * between_bytes
                            _shrink_tile(
                                stored, height, x, stride, a.tokens + row * 4, down, a.depth, at,
                                ranks * between_bytes,
                            )  # fmt: skip
                            row += height

    @njit(nogil=True)
    @name_by_content
    def span_of(a, slot, first_row, rows):
        """A slot's rows among these, as the first and the end of their places in ``tokens``."""
        starts = int32_at(a.starts, a.num_slots + 1)
        tokens = int32_at(a.tokens, starts[a.num_slots])
        first, last = starts[slot], starts[slot + 1]
        while first < last and tokens[first] < first_row:
            first += 1
        while first < last and tokens[last - 1] >= first_row + rows:
            last -= 1
        return first, last

    @njit(nogil=True)
    @name_by_content
    def written(a, first_column, columns, first_row, rows):
        """Whether some row has sums for some of these columns, and whether every row has them for every column."""
        active, fields = int32_at(a.active, a.num_active), 3 + a.num_parts
        slots, parts = int64_at(a.slots, a.num_slots * fields), int32_at(a.parts, a.num_parts * 3)
        is_any, num_whole = False, 0
        for number in range(a.num_active):
            slot = active[number]
            if slot < 0:
                break
            first, last = span_of(a, slot, first_row, rows)
            if first == last:
                continue
            is_whole = True
            for part in range(a.num_parts):
                begin, end = parts[3 * part], parts[3 * part] + parts[3 * part + 1]
                if begin < first_column + columns and end > first_column:
                    has_own = slots[slot * fields + 3 + part] != 0 or slots[slot * fields + 2] != 0
                    is_any |= has_own
                    is_whole &= has_own
            if is_whole:
                num_whole += last - first
        return is_any, num_whole == rows

    def expand(arguments, first_column, columns, first_row, rows, residual, residual_stride, out, out_stride):
        a = carray(arguments, 1)[0]
        fields, ranks = 3 + a.num_parts, a.num_parts * a.stride
        active, slots = int32_at(a.active, a.num_active), int64_at(a.slots, a.num_slots * fields)
        parts = int32_at(a.parts, a.num_parts * 3)
        block_bytes = -(-a.rank // a_word) * LANES * word_bytes
        first_column += a.first_column
        first_row += a.first_row
        is_any, is_all = written(a, first_column, columns, first_row, rows)
        if not is_any:
            return 0
        if not is_all and residual != out:
            _copy(residual, residual_stride, out, out_stride, columns, rows)
        out -= first_row * out_stride + first_column * 4
        if residual != 0:
            residual -= first_row * residual_stride + first_column * 4
        for number in range(a.num_active):
            slot = active[number]
            if slot < 0:
                break
            first, last = span_of(a, slot, first_row, rows)
            if first == last:
                continue
            bias = slots[slot * fields + 2]
            for part in range(a.num_parts):
                own = slots[slot * fields + 3 + part]
                begin = max(first_column, parts[3 * part])
                end = min(first_column + columns, parts[3 * part] + parts[3 * part + 1])
                if begin >= end or (own == 0 and bias == 0):
                    continue
                words = -(-own // a_word)
                block = (begin - parts[3 * part]) // LANES
                at = slots[slot * fields + 1] + (parts[3 * part + 2] + block) * block_bytes
                column = parts[3 * part] + block * LANES
                while column < end:
                    added = bias + column * 4 if bias != 0 else 0
                    for row in range(first, last, _EXPANDED_ROWS):
                        height = min(_EXPANDED_ROWS, last - row)
                        between = a.between + (row * ranks + part * a.stride) * between_bytes
                        _expand_tile(
                            stored, height, between, ranks * between_bytes, at, block_bytes, words,
                            residual + column * 4 if residual != 0 else 0, residual_stride, out + column * 4,
                            out_stride, a.tokens + row * 4, added, begin - column, end - column,
                        )  # fmt: skip
                    at += TILE_VECTORS * block_bytes
                    column += PANEL_COLUMNS
        return 1

    record, index = types.CPointer(from_dtype(FIELDS.record)), types.intp
    expanding = CFunction(index(record, *[index] * 8), expand, CODE_FOLDER, error_model="numpy")
    return Functions(Kernel(shrink, FIELDS), expanding.address)


@functools.cache
def add_kernel() -> Kernel:
    """``out [T, N] = residual``, or zeros, plus the sums of ``low_rank``, of which all is shrunk; a work item is some
    columns."""

    def add(arguments, work_item):
        a = carray(arguments, 1)[0]
        first = work_item * a.columns_a_work_item
        columns = min(a.columns_a_work_item, a.width - first)
        expand, stride = int64_at(a.low_rank + EXPAND, 1)[0], a.width * 4
        residual = a.residual + first * 4 if a.residual != 0 else 0
        at = a.out + first * 4
        if not call_expand(expand, a.low_rank, first, columns, 0, a.num_rows, residual, stride, at, stride):
            _copy(residual, stride, at, stride, columns, a.num_rows)

    return Kernel(add, Fields("*low_rank *residual *out num_rows width columns_a_work_item"))


class Riding:
    """Low-rank sums for ``rows`` rows of x, that ride on the launches of products or are added by `add_kernel`.

    ``x``, ``between``, ``slots``, ``parts``, ``starts``, ``active``, ``tokens`` are addresses; see `FIELDS`.
    """

    def __init__(
        self, stored: Any, x: int, between: int, slots: int, parts: int, starts: int, active: int,
        tokens: int, rows: int, depth: int, num_slots: int, num_active: int, num_parts: int, rank: int,
        num_workers: int,
    ) -> None:  # fmt: skip
        self.functions, self.stride = functions_of(stored), whole_groups(rank)
        self._num_shrinking = shrinking_work_items(rows, self.stride * num_parts, depth, num_workers)
        self._addresses = x, between, slots, parts, starts, active, tokens, depth, depth
        self._sizes = num_slots, num_active, num_parts, rank, self.stride
        self._is_shrunk = False
        self._kept: list[object] = []

    def keep(self, *owners: object) -> None:
        """Keeps the owners of addresses alive as long as this."""
        self._kept += owners

    def block(self, first_column: int = 0, first_row: int = 0) -> tuple[int, int]:
        """The address of a block that lives as long as this and the thread's recording, for a product whose first
        result has this row and column of all; and the work items that it shrinks by: all in the first product."""
        functions = self.functions
        made = argument_block(
            FIELDS, functions.shrink.address, functions.expand, *self._addresses, first_row, first_column, *self._sizes,
            self._num_shrinking,
        )  # fmt: skip
        self._kept.append(made)
        shrinking = 0 if self._is_shrunk else self._num_shrinking
        self._is_shrunk = True
        return address_of(made), shrinking

    def shrink(self, num_workers: int) -> None:
        """Shrinks by a launch of its own."""
        functions = self.functions
        self._is_shrunk = True
        functions.shrink(
            self._num_shrinking, num_workers, 0, 0, *self._addresses, 0, 0, *self._sizes, self._num_shrinking
        )


def whole_groups(rank: int) -> int:
    """The ranks, rounded up to whole groups."""
    return -(-rank // GROUP) * GROUP


def shrinking_work_items(rows: int, ranks: int, depth: int, num_workers: int) -> int:
    """So many work items shrink ``rows`` rows, for an adapter with so many ranks in all parts together."""
    if num_workers == 1 or rows * ranks * depth < 1 << 16:
        return 1
    return min(2 * num_workers, -(-ranks // GROUP) * -(-rows // _SHARED_ROWS))


class SlotLayout:
    """The places of one adapter's numbers for a map: ``heights`` are the outputs of its parts, ``depth`` its inputs,
    ``rank`` the most of a part.

    Attributes:
        parts: as in `FIELDS`.
        down_shape, up_shape: of a slot's memory, in elements of ``stored``.
    """

    def __init__(self, stored: Any, heights: Sequence[int], rank: int, depth: int) -> None:
        self._a_word = a_word = 2 if are_pairs(stored) else 1
        table, first, block = [], 0, 0
        for height in heights:
            table.append((first, height, block))
            first, block = first + height, block + -(-height // LANES)
        self.parts = np.array(table, np.int32)
        self.down_shape = (
            len(heights),
            whole_groups(rank) // GROUP,
            -(-depth // (LANES * a_word)),
            GROUP,
            LANES * a_word,
        )
        self.up_shape = block + TILE_VECTORS - 1, -(-rank // a_word), LANES, a_word  # a tile reads so far

    def put(self, part: int, down: np.ndarray, up: np.ndarray, target: tuple[np.ndarray, np.ndarray]) -> None:
        """Writes a part's ``down [r, K]`` and ``up [N, r]`` to a slot's memory."""
        (rank, depth), height, (_, _, block) = down.shape, len(up), self.parts[part]
        _, _, steps, group, elements = self.down_shape
        groups, words, blocks = -(-rank // group), -(-rank // self._a_word), -(-height // LANES)
        rows = np.zeros((groups * group, steps * elements), down.dtype)
        rows[:rank, :depth] = down
        target[0][part, :groups] = rows.reshape(groups, group, steps, elements).swapaxes(1, 2)
        columns = np.zeros((blocks * LANES, words * self._a_word), up.dtype)
        columns[:height, :rank] = up
        target[1][block : block + blocks, :words] = columns.reshape(blocks, LANES, words, self._a_word).swapaxes(1, 2)
