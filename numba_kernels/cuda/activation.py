"""Activations, elementwise over x, the product of a gated linear unit, multipliers (as in Granite) and soft caps.

    gelu erf      x Phi(x) = x erfc(-x / sqrt 2) / 2         Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415
    gelu tanh     x (1 + tanh u) / 2 = x sigmoid(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)
    gelu sigmoid  x sigmoid(1.702 x)
    silu          x sigmoid(x)
    clamp         max(-c, min(x, c))
    xielu         x > 0: p x^2 + b x,  else: n (e^min(x, eps) - 1 - x) + b x        https://arxiv.org/abs/2411.13010
    squared_relu  max(x, 0)^2                                https://arxiv.org/abs/2109.08668
    glu           f(gate) up, of any columns of rows         Shazeer, https://arxiv.org/abs/2002.05202
    add_scaled    x + scale y, rounded once
    sigmoid_gate  x sigmoid(gate)                            https://arxiv.org/abs/2505.06708
    scale_logits  scale x, or cap tanh(scale x / cap), float32, in place            https://arxiv.org/abs/2408.00118
    forbid        minus infinity at some columns of logits, in place
    keep_groups   the same at the columns of all but the best groups of each row

x and out are f32, f16 or bf16; arithmetic is float32; NaN in gives NaN out. Each element is read and written once, and
bandwidth bounds the time. `out` may be x. Where sizes and addresses allow it, accesses are 16 bytes wide.

erfc is (1 + 2 a) e^(a^2) erfc(a), a polynomial in (a - 3.75) / (a + 3.75) fitted by least squares on Chebyshev nodes
(relative error 5e-9 for 0 <= a <= 9.8), times the missing factor: far out the result keeps its relative accuracy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.gemm.epilogue import clamped_silu
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import elements_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import absolute, divide, exp, fma, sigmoid
from numba_kernels.cuda.intrinsics.memory import load_b32, load_f32, store_b32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index, warp_sum
from numba_kernels.cuda.specialisation import THREADS, Launch, Specialisation, access_width, flat_grid, row_grid

ACTIVATIONS = ("gelu_erf", "gelu_tanh", "gelu_sigmoid", "silu", "squared_relu")
GLU_ACTIVATIONS = ("silu", "gelu_tanh")  # of a gate, also in a product's epilogue: SwiGLU and GeGLU
GATES = (*GLU_ACTIVATIONS, "gelu_erf", "gelu_sigmoid", "clamped_silu")

_ERFCX = (
    1.2375125885009766, -0.14024055004119873, 0.0035847111139446497, 0.08227401226758957, -0.10879048705101013,
    0.0923512876033783, -0.058756597340106964, 0.028049921616911888, -0.009843672625720501, 0.0023983472492545843,
    0.0011264273198321462,
)  # fmt: skip


@device_function
def _silu(x):
    return divide(x, float32(1) + exp(-x))


@device_function
def _gelu_sigmoid(x):
    return divide(x, float32(1) + exp(x * float32(-1.702)))


@device_function
def _gelu_tanh(x):
    twice = float32(2 * 0.7978845608028654)
    return x * sigmoid(x * fma(x * x, twice * float32(0.044715), twice))


@device_function
def _gelu_erf(x):
    size = absolute(x)
    if size > float32(13.8):  # from here on the tail is 0
        size = float32(13.8)
    a = size * float32(0.7071067811865476)
    t = divide(a - float32(3.75), a + float32(3.75))
    scaled = float32(_ERFCX[10])
    scaled = fma(scaled, t, float32(_ERFCX[9]))
    scaled = fma(scaled, t, float32(_ERFCX[8]))
    scaled = fma(scaled, t, float32(_ERFCX[7]))
    scaled = fma(scaled, t, float32(_ERFCX[6]))
    scaled = fma(scaled, t, float32(_ERFCX[5]))
    scaled = fma(scaled, t, float32(_ERFCX[4]))
    scaled = fma(scaled, t, float32(_ERFCX[3]))
    scaled = fma(scaled, t, float32(_ERFCX[2]))
    scaled = fma(scaled, t, float32(_ERFCX[1]))
    scaled = fma(scaled, t, float32(_ERFCX[0]))
    erfcx = divide(scaled, fma(a, float32(2), float32(1)))
    # e^(-x^2 / 2) with the square's rounding error handed back
    square = size * size
    error = fma(size, size, -square)
    gauss = exp(square * float32(-0.5))
    gauss = fma(gauss, error * float32(-0.5), gauss)
    tail = size * float32(0.5) * (erfcx * gauss)
    result = x - tail
    if x < float32(0):
        result = -tail
    return result


@device_function
def _squared_relu(x):
    if x < float32(0):
        x = float32(0)
    return x * x


@device_function
def _clamp(x, _, numbers):
    limit = numbers[0]
    if x > limit:
        x = limit
    if x < -limit:
        x = -limit
    return x


@device_function
def _xielu(x, _, numbers):
    positive, negative, beta, eps = numbers
    low = eps
    if x < eps:
        low = x
    # (e^low - 1 - low) / low^2 by 1 / n! near 0, where the difference would cancel
    near = fma(float32(1 / 40320), low, float32(1 / 5040))
    near = fma(near, low, float32(1 / 720))
    near = fma(near, low, float32(1 / 120))
    near = fma(near, low, float32(1 / 24))
    near = fma(near, low, float32(1 / 6))
    near = fma(near, low, float32(0.5))
    curve = near * (low * low)
    if low < float32(-0.5):
        curve = exp(low) - float32(1) - low
    bent = (curve + (low - x)) * negative
    if x > float32(0):
        bent = positive * (x * x)
    return fma(beta, x, bent)


@device_function
def _scale_and_cap(x, _, numbers):
    scale, cap, exponent, _ = numbers  # the exponent is -2 / cap
    value = x * scale
    e = exp(absolute(value) * exponent)
    capped = cap * divide(float32(1) - e, float32(1) + e)
    if value < float32(0):
        capped = -capped
    return capped


FUNCTIONS = {
    "gelu_erf": _gelu_erf, "gelu_tanh": _gelu_tanh, "gelu_sigmoid": _gelu_sigmoid, "silu": _silu,
    "squared_relu": _squared_relu,
}  # fmt: skip


def _of_one(function: Any) -> Any:
    return device_function(lambda x, _, numbers: function(x))


ELEMENTWISE = {
    **{name: _of_one(function) for name, function in FUNCTIONS.items()},
    "clamp": _clamp,
    "xielu": _xielu,
    "add_scaled": device_function(lambda x, y, numbers: x + numbers[0] * y),
    "sigmoid_gate": device_function(lambda x, gate, _: x * sigmoid(gate)),
    "scale_logits": device_function(lambda x, _, numbers: x * numbers[0]),
    "scale_logits_capped": _scale_and_cap,
}
"""By name a device function ``(element of x, element of y, four numbers)``."""
_OF_TWO = ("add_scaled", "sigmoid_gate")  # others read no y


@functools.cache
def _elementwise(name: str, dtype: str, width: int) -> Specialisation:
    """Arguments: x, y, out addresses; number of accesses of `width` elements; four numbers."""
    of_lane, has_two, access_bytes = ELEMENTWISE[name], name in _OF_TWO, uint64(ITEM_BYTES[dtype] * width)
    load, store = elements_loader(dtype, width), elements_storer(dtype, width)

    @cuda.jit
    def elementwise(x, y, out, num_accesses, first, second, third, fourth):
        wait_for_previous_grid()
        launch_dependents()
        values = cuda.local.array(width, float32)
        index = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        step = uint32(cuda.gridDim.x) * uint32(cuda.blockDim.x)
        while index < num_accesses:
            at = uint64(index) * access_bytes
            loaded = load(x + at)
            other = load(y + at) if has_two else loaded
            for lane in range(width):
                values[lane] = of_lane(loaded[lane], other[lane], (first, second, third, fourth))
            store(out + at, values)
            index += step

    arguments = (types.uint64,) * 3 + (types.uint32,) + (types.float32,) * 4
    constants = {"dtype": dtype, "width": width}
    return Specialisation(f"{name}_{dtype}_x{width}", elementwise, arguments, THREADS, constants=constants)


@functools.cache
def _glu(name: str, dtype: str, width: int) -> Specialisation:
    """Arguments: gate, up, out addresses; rows; accesses a row of out, and from one row to the next of gate and up."""
    access_bytes = uint64(ITEM_BYTES[dtype] * width)
    load, store, function = elements_loader(dtype, width), elements_storer(dtype, width), FUNCTIONS.get(name)
    gated = clamped_silu if function is None else device_function(lambda gate, up: function(gate) * up)

    @cuda.jit
    def glu(gates, ups, out, num_rows, accesses_a_row, gate_step, up_step):
        wait_for_previous_grid()
        launch_dependents()
        values = cuda.local.array(width, float32)
        column = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        row = uint32(cuda.blockIdx.y)
        if column < accesses_a_row:
            while row < num_rows:
                gate = load(gates + (uint64(row) * uint64(gate_step) + uint64(column)) * access_bytes)
                up = load(ups + (uint64(row) * uint64(up_step) + uint64(column)) * access_bytes)
                for lane in range(width):
                    values[lane] = gated(gate[lane], up[lane])
                store(out + (uint64(row) * uint64(accesses_a_row) + uint64(column)) * access_bytes, values)
                row += uint32(cuda.gridDim.y)

    constants = {"dtype": dtype, "width": width}
    arguments = (types.uint64,) * 3 + (types.uint32,) * 4
    return Specialisation(f"glu_{name}_{dtype}_x{width}", glu, arguments, THREADS, constants=constants)


def plan_elementwise(name: str, num_rows: int, size: int, dtype: str, *, alignment: int = 16) -> tuple[Launch, int]:
    """(launch, number of accesses) of one of `ELEMENTWISE` over [num_rows, size]; logits are f32.

    The number of rows does not choose the kernel: versions of different widths may differ in a last bit.

    Arguments: x, y, out, number of accesses, four numbers. Out may be x or y; functions of one operand read no y.
    """
    width = access_width(dtype, size, alignment)
    accesses = num_rows * size // width
    return Launch(_elementwise(name, dtype, width), flat_grid(accesses), (THREADS, 1, 1)), accesses


def plan_glu(
    name: str, num_rows: int, size: int, dtype: str, steps: tuple[int, int], *, alignment: int = 16
) -> tuple[Launch, tuple[int, int, int]]:
    """(launch, accesses a row, and from one row to the next of gate and up) by one of `GATES`.

    Gate, up and out are [num_rows, size]; rows of gate and up are `steps` elements apart.

    Arguments: gate, up, out, num_rows, the three numbers.
    """
    width = access_width(dtype, math.gcd(size, *steps), alignment)
    accesses = size // width
    launch = Launch(_glu(name, dtype, width), *row_grid(num_rows, accesses))
    return launch, (accesses, steps[0] // width, steps[1] // width)


@functools.cache
def _forbid() -> Specialisation:
    """Arguments: addresses of the logits and the ids; rows' width; number of ids; of elements to write."""

    @cuda.jit
    def forbid(logits, ids, width, num_ids, count):
        wait_for_previous_grid()
        launch_dependents()
        index = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if index < count:
            row = uint32(index // num_ids)
            column = load_b32(ids + uint64(uint32(index - row * num_ids)) * uint64(4))
            store_b32(logits + (uint64(row) * uint64(width) + uint64(column)) * uint64(4), uint32(0xFF800000))

    return Specialisation("forbid", forbid, (types.uint64,) * 2 + (types.uint32,) * 3, THREADS)


@functools.cache
def _keep_groups() -> Specialisation:
    """Arguments: addresses of the logits, the groups' scores and columns; rows' width; number of groups; columns of
    each; groups to keep; rows x groups. A warp has a group of a row."""

    @cuda.jit
    def keep_groups(logits, scores, columns, width, num_groups, size, num_best, count):
        wait_for_previous_grid()
        launch_dependents()
        warp = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS // 32) + (uint32(cuda.threadIdx.x) >> uint32(5)))
        if warp < count:
            row, lane = uint32(warp // num_groups), lane_index()
            of_row, own = scores + uint64(uint32(row * num_groups)) * uint64(4), uint32(warp - row * num_groups)
            score, better, other = load_f32(of_row + uint64(own) * uint64(4)), float32(0), lane
            while other < num_groups:
                found = load_f32(of_row + uint64(other) * uint64(4))
                if found > score or (found == score and other < own):
                    better = better + float32(1)
                other = uint32(other + uint32(32))
            if warp_sum(better) >= float32(num_best):
                place = lane
                while place < size:
                    column = load_b32(columns + (uint64(own) * uint64(size) + uint64(place)) * uint64(4))
                    store_b32(logits + (uint64(row) * uint64(width) + uint64(column)) * uint64(4), uint32(0xFF800000))
                    place = uint32(place + uint32(32))

    return Specialisation("keep_groups", keep_groups, (types.uint64,) * 3 + (types.uint32,) * 5, THREADS)


def plan_keep_groups(num_rows: int, num_groups: int) -> Launch:
    """Arguments: logits float32 [rows, width], scores float32 [rows, groups], columns int32 [groups, size], width,
    groups, size, groups to keep, rows x groups."""
    return Launch(_keep_groups(), flat_grid(32 * num_rows * num_groups), (THREADS, 1, 1))


def plan_forbid(num_rows: int, num_ids: int) -> Launch:
    """Arguments: logits float32 [rows, width], ids int32 [n], width, n, rows x n."""
    return Launch(_forbid(), flat_grid(num_rows * num_ids), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every kernel of this family, but that clamp and xielu are the vectors' alone."""
    for dtype in DTYPES:
        for width in (1, VECTOR_WIDTH[dtype]):
            for name in GATES:
                yield _glu(name, dtype, width)
            for name in ELEMENTWISE:
                is_of_vectors, is_of_logits = name in ("clamp", "xielu"), name.startswith("scale_logits")
                if (width > 1 or not is_of_vectors) and (dtype == "f32" or not is_of_logits):
                    yield _elementwise(name, dtype, width)
    yield _forbid()
    yield _keep_groups()
