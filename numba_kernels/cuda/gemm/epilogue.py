"""The epilogue of every tier: scale a finished sum's row, add bias and residual in float32, round once, store.

A row is scaled where x is to be normalised first (RMSNorm, whose weights the matrix has taken in): the sums of x's row
as it is, times ``1 / sqrt(mean of the row's squares + eps)``. `x_squares` is the address of float32 [m, x_parts] whose
rows add up to the rows' sums of squares, or 0 for no scaling; 4 divides `x_parts`. In turn a tier whose kernels have
"square_columns" among their constants leaves such an array for its output at `squares`, unless that is 0: a sum for
each so many columns. Every sum is added up in an order that depends on the sizes alone.

Bias and residual are addresses, 0 where there is none. The residual has the output's dtype and may be the output
itself: the thread that writes an element has read it. The bias is float32 or of the weight's dtype, by the kernel's
argument `bias_is_f32`.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

from numba import cuda, float32, types

from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader, element_storer, quad_loader, quad_storer
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import exp, fma, maximum_nan, minimum_nan, reciprocal, reciprocal_sqrt
from numba_kernels.cuda.intrinsics.memory import load_4xf32, load_f32
from numba_kernels.cuda.intrinsics.warp import shuffle_xor_f32, warp_sum

DTYPE_PAIRS = (("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32"))
"""Dtypes of x and weight, and of the output."""

scale_element = instruction("mul.rn.f32 $0, $1, $2;", "f", "f f", is_pure=True)
"""``(element, its row's scale) -> product``, never fused with a later addition: the same bits in all kernels."""


Arguments = namedtuple("Arguments", "x weight bias residual out m n k bias_is_f32 x_squares x_parts eps squares")
"""The arguments of every kernel of the family, as its device functions get them."""


Output = namedtuple("Output", "bias residual out m n bias_is_f32 squares")
"""Those of them that finish sums, for kernels with other arguments."""


ARGUMENT_TYPES = (types.uint64,) * 5 + (types.uint32,) * 4 + (types.uint64, types.uint32, types.float32, types.uint64)
NO_SQUARES = (0, 0, 0.0, 0)
"""The last four where no row is scaled and no squares are left."""


def product_kernel(work: Any) -> Any:
    """The kernel of the device function ``work(given)``, of `Arguments`."""

    def product(x, weight, bias, residual, out, m, n, k, bias_is_f32, x_squares, x_parts, eps, squares):
        work(Arguments(x, weight, bias, residual, out, m, n, k, bias_is_f32, x_squares, x_parts, eps, squares))

    return cuda.jit(product)


@functools.cache
def finisher(dtype: str, out_dtype: str) -> Any:
    """A device function that finishes the element at ``[row, column]`` of ``out [m, n]``, and returns it unrounded.
    ``given`` holds the fields of `Output`, as in all functions here."""
    load_bias, load_bias_f32 = element_loader(dtype), memory.load_f32
    load_residual, store = element_loader(out_dtype), element_storer(out_dtype)
    bias_bytes, out_bytes = types.uint64(ITEM_BYTES[dtype]), types.uint64(ITEM_BYTES[out_dtype])
    uint64 = types.uint64

    @device_function
    def finish(given, row, column, value):
        if given.bias != uint64(0):
            if given.bias_is_f32 != types.uint32(0):
                value += load_bias_f32(given.bias + uint64(column) * uint64(4))
            else:
                value += load_bias(given.bias + uint64(column) * bias_bytes)
        place = (uint64(row) * uint64(given.n) + uint64(column)) * out_bytes
        if given.residual != uint64(0):
            value += load_residual(given.residual + place)
        store(given.out + place, value)
        return value

    return finish


@functools.cache
def squares_leaver(columns: int, lanes: int = 0) -> Any:
    """A device function for whole warps, of which each `lanes` (or `columns`) lanes share `columns` neighbours of a
    row, powers of two: it leaves the sum of their squares, by the lanes that are first, unless the address is 0."""
    distances, shift = (lanes or columns).bit_length() - 1, max(columns, 1).bit_length() - 1
    uint32, uint64 = types.uint32, types.uint64

    @device_function
    def add_near(value):
        for i in range(distances):
            value += shuffle_xor_f32(value, uint32(1 << i))
        return value

    add_up = warp_sum if lanes == 32 else add_near

    @device_function
    def leave_squares(given, squared, is_first, row, column):
        if given.squares != uint64(0):
            squared = add_up(squared)
            if is_first and row < given.m and column < given.n:
                part = uint64(row) * uint64(given.n >> uint32(shift)) + uint64(column >> uint32(shift))
                memory.store_f32(given.squares + part * uint64(4), squared)

    return leave_squares


@functools.cache
def quad_finisher(dtype: str, out_dtype: str) -> Any:
    """A device function that finishes 4 neighbours of a row, where `can_finish_quads` holds and 4 divides `column`. It
    returns the sum of their squares."""
    load_bias, load_bias_f32 = quad_loader(dtype), memory.load_4xf32
    load_residual, store = quad_loader(out_dtype), quad_storer(out_dtype)
    bias_bytes, out_bytes = types.uint64(ITEM_BYTES[dtype]), types.uint64(ITEM_BYTES[out_dtype])
    uint64 = types.uint64

    @device_function
    def finish_quad(given, row, column, values):
        a, b, c, d = values
        if given.bias != uint64(0):
            if given.bias_is_f32 != types.uint32(0):
                added = load_bias_f32(given.bias + uint64(column) * uint64(4))
            else:
                added = load_bias(given.bias + uint64(column) * bias_bytes)
            a += added[0]
            b += added[1]
            c += added[2]
            d += added[3]
        place = (uint64(row) * uint64(given.n) + uint64(column)) * out_bytes
        if given.residual != uint64(0):
            before = load_residual(given.residual + place)
            a += before[0]
            b += before[1]
            c += before[2]
            d += before[3]
        store(given.out + place, (a, b, c, d))
        return (a * a + b * b) + (c * c + d * d)

    return finish_quad


@device_function
def can_finish_quads(given):
    """Whether rows may be finished 4 elements at a time: 4 divides their length, and all lies on 16-byte bounds."""
    return (given.n & types.uint32(3)) | types.uint32(
        (given.bias | given.residual | given.out) & types.uint64(15)
    ) == types.uint32(0)


@device_function
def norm_scale(total, k, eps):
    """The scale of a row of k elements from the sum of their squares."""
    return reciprocal_sqrt(total * reciprocal(float32(k)) + eps)  # a division would be a call


@device_function
def scale_of_row(given, row):
    """The scale computed by one thread alone; 1 without scaling."""
    scale = float32(1.0)
    if given.x_squares != types.uint64(0):
        total = float32(0.0)
        at = given.x_squares + types.uint64(row) * types.uint64(given.x_parts) * types.uint64(4)
        part = types.uint32(0)
        while part < given.x_parts:
            a, b, c, d = memory.load_4xf32(at)
            total += (a + b) + (c + d)
            at += types.uint64(16)
            part = types.uint32(part + types.uint32(4))
        scale = norm_scale(total, given.k, given.eps)
    return scale


@functools.cache
def scales_leaver(rows_at_once: int) -> Any:
    """A device function that leaves the scales of ``rows`` rows from `first_row` on at a shared address, float32.

    `num_warps` whole warps call it, each of which loads parts of that many rows at once. A barrier must precede reads
    of the scales.
    """
    uint32, uint64 = types.uint32, types.uint64
    load, store = memory.load_4xf32, memory.shared_store_f32

    @device_function
    def leave_scales(given, target, first_row, rows, warp, num_warps, lane):
        values = cuda.local.array((rows_at_once, 4), float32)
        totals = cuda.local.array(rows_at_once, float32)
        row = uint32(warp * uint32(32) + lane)
        if given.x_squares == uint64(0):
            while row < rows:
                store(uint32(target + row * uint32(4)), float32(1.0))
                row = uint32(row + num_warps * uint32(32))
        else:
            row = warp
            while row < rows:
                for i in range(rows_at_once):
                    totals[i] = float32(0.0)
                part = uint32(lane * uint32(4))
                while part < given.x_parts:
                    for i in range(rows_at_once):
                        for e in range(4):
                            values[i, e] = float32(0.0)
                        inside = uint32(row + uint32(i) * num_warps)
                        if inside < rows and uint32(first_row + inside) < given.m:
                            place = uint64(uint32(first_row + inside)) * uint64(given.x_parts) + uint64(part)
                            loaded = load(given.x_squares + place * uint64(4))
                            for e in range(4):
                                values[i, e] = loaded[e]
                    for i in range(rows_at_once):
                        totals[i] += (values[i, 0] + values[i, 1]) + (values[i, 2] + values[i, 3])
                    part = uint32(part + uint32(128))
                for i in range(rows_at_once):
                    scale = norm_scale(warp_sum(totals[i]), given.k, given.eps)
                    inside = uint32(row + uint32(i) * num_warps)
                    if lane == uint32(0) and inside < rows:
                        store(uint32(target + inside * uint32(4)), scale)
                row = uint32(row + uint32(rows_at_once) * num_warps)

    return leave_scales


@device_function
def _silu_gated(gate, up):
    return gate * reciprocal(float32(1) + exp(-gate)) * up


@device_function
def _gelu_tanh_gated(gate, up):
    twice = float32(2 * 0.7978845608028654)
    return gate * reciprocal(float32(1) + exp(-gate * fma(gate * gate, twice * float32(0.044715), twice))) * up


GATED = {"silu": _silu_gated, "gelu_tanh": _gelu_tanh_gated}
"""Gated units: device functions ``(gate, up) -> f(gate) * up``."""


@functools.cache
def quad_gater(activation: str) -> Any:
    """A device function ``(4 gates, 4 ups, scale of both) -> 4 elements of a gated unit``."""
    gated = GATED[activation]

    @device_function
    def gate_quad(gates, ups, scale):
        return (
            gated(scale_element(gates[0], scale), scale_element(ups[0], scale)),
            gated(scale_element(gates[1], scale), scale_element(ups[1], scale)),
            gated(scale_element(gates[2], scale), scale_element(ups[2], scale)),
            gated(scale_element(gates[3], scale), scale_element(ups[3], scale)),
        )

    return gate_quad


@device_function
def scale_each(values, scales):
    """4 elements of a row, each times its own scale."""
    return (
        scale_element(values[0], scales[0]), scale_element(values[1], scales[1]),
        scale_element(values[2], scales[2]), scale_element(values[3], scales[3]),
    )  # fmt: skip


@device_function
def scale_quad(values, scale):
    """4 elements times their row's scale."""
    return (
        scale_element(values[0], scale), scale_element(values[1], scale),
        scale_element(values[2], scale), scale_element(values[3], scale),
    )  # fmt: skip


SLOPE, LIMIT = 1.702, 7.0


@device_function
def clamped_silu(gate, up):
    """gpt-oss's gate: ``g sigmoid(1.702 g) (u + 1)`` of clamped numbers."""
    gate = minimum_nan(gate, float32(LIMIT))
    up = minimum_nan(maximum_nan(up, float32(-LIMIT)), float32(LIMIT))
    return gate * reciprocal(float32(1) + exp(-float32(SLOPE) * gate)) * (up + float32(1))


GATES = {**GATED, "clamped_silu": clamped_silu}
"""Device functions ``(gate, up) -> number``."""


@functools.cache
def biased_gater(activation: str, count: int) -> Any:
    """A device function ``(gates, ups, bias, column, n) -> numbers`` for 1 or 4 neighbours: adds the float32 biases of
    gate, at `column`, and of up, `n` after it, and gates. A `bias` of 0 means none."""
    gated = GATES[activation]

    @device_function
    def gate_one(gate, up, bias, column, n):
        if bias != types.uint64(0):
            at = bias + types.uint64(column) * types.uint64(4)
            gate += load_f32(at)
            up += load_f32(at + types.uint64(n) * types.uint64(4))
        return gated(gate, up)

    @device_function
    def gate_quad(gates, ups, bias, column, n):
        a, b, c, d = gates
        e, f, g, h = ups
        if bias != types.uint64(0):
            at = bias + types.uint64(column) * types.uint64(4)
            added = load_4xf32(at)
            a += added[0]
            b += added[1]
            c += added[2]
            d += added[3]
            added = load_4xf32(at + types.uint64(n) * types.uint64(4))
            e += added[0]
            f += added[1]
            g += added[2]
            h += added[3]
        return gated(a, e), gated(b, f), gated(c, g), gated(d, h)

    return gate_one if count == 1 else gate_quad
