"""The norm of a recurrence's outputs, with a gate: RMSNorm over equal parts of a row.

    delta rule   y = rms_norm(x) weight f(gate), f SiLU or sigmoid; all parts have the same weights
    mamba        y = rms_norm(x silu(gate)) weight

x is float32, gate and y are f32, f16 or bf16. Parts of up to `WARP_SIZE` numbers take a warp each, wider ones a block;
the order of additions follows from their width. A long part's product with its gate is computed twice, not kept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.block import block_sum
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_storer, quad_storer
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import divide_u32, exp, reciprocal, reciprocal_sqrt
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import warp_sum
from numba_kernels.cuda.recurrent.chunk import run_loader, silu
from numba_kernels.cuda.specialisation import Launch, Specialisation

WARP_SIZE = 512
WARPS = 8  # of a block, each with parts of its own, or all with one


@functools.cache
def _gated_norm(dtype: str, width: int, gate: str, is_warp: bool) -> Specialisation:
    """Arguments: see `plan`. ``gate``: "silu" or "sigmoid" after the norm, "first" for SiLU before it."""
    item_bytes, load_gate, load_float = uint64(ITEM_BYTES[dtype]), run_loader(dtype, width), run_loader("f32", width)
    store_quad, store_one = quad_storer(dtype), element_storer(dtype)
    is_first, is_silu = gate == "first", gate != "sigmoid"
    step = 32 * width if is_warp else 32 * width * WARPS

    @device_function
    def gated(given, x):
        factor = silu(given) if is_silu else reciprocal(float32(1) + exp(-given))
        return x * factor

    @cuda.jit
    def gated_norm(x, gates, weight, out, num_rows, groups, size, stride, weight_step, reciprocal_size, eps):
        wait_for_previous_grid()
        launch_dependents()
        partials = cuda.shared.array(32, float32)
        values = cuda.local.array(width, float32)
        thread = uint32(cuda.threadIdx.x)
        part = uint32(cuda.blockIdx.x)
        if is_warp:
            part = uint32(part * uint32(WARPS) + (thread >> uint32(5)))
            thread = uint32(thread & uint32(31))
        row = divide_u32(part, groups)
        group = uint32(part - row * groups)
        if row >= num_rows:  # a whole warp
            return
        first = uint64(group) * uint64(size)
        x += (uint64(row) * uint64(groups) * uint64(size) + first) * uint64(4)
        out += (uint64(row) * uint64(groups) * uint64(size) + first) * item_bytes
        gates += (uint64(row) * uint64(stride) + first) * item_bytes
        weight += uint64(group) * uint64(weight_step) * uint64(4)
        squares = float32(0)
        index = uint32(thread * uint32(width))
        while index < size:
            loaded = load_float(x + uint64(index) * uint64(4))
            for i in range(width):
                values[i] = loaded[i]
            if is_first:
                given = load_gate(gates + uint64(index) * item_bytes)
                for i in range(width):
                    values[i] = gated(given[i], values[i])
            for i in range(width):
                squares += values[i] * values[i]
            index = uint32(index + uint32(step))
        squares = warp_sum(squares) if is_warp else block_sum(squares, partials)
        scale = reciprocal_sqrt(squares * reciprocal_size + eps)
        index = uint32(thread * uint32(width))
        while index < size:
            loaded = load_float(x + uint64(index) * uint64(4))
            weights = load_float(weight + uint64(index) * uint64(4))
            given = load_gate(gates + uint64(index) * item_bytes)
            for i in range(width):
                if is_first:
                    values[i] = gated(given[i], loaded[i]) * scale * weights[i]
                else:
                    values[i] = gated(given[i], loaded[i] * scale * weights[i])
            if width == 4:
                store_quad(out + uint64(index) * item_bytes, (values[0], values[1], values[2], values[3]))
            else:
                store_one(out + uint64(index) * item_bytes, values[0])
            index = uint32(index + uint32(step))

    name = f"gated_norm_{gate}_{dtype}_x{width}{'' if is_warp else '_block'}"
    constants = {"dtype": dtype, "width": width, "gate": gate, "is_warp": is_warp}
    argument_types = (types.uint64,) * 4 + (types.uint32,) * 5 + (types.float32,) * 2
    return Specialisation(name, gated_norm, argument_types, 32 * WARPS, constants=constants)


def plan(num_rows: int, groups: int, size: int, dtype: str, gate: str, *, multiples: tuple[int, ...] = ()) -> Launch:
    """x float32 ``[num_rows, groups * size]``. ``multiples``: the gates' alignment and stride in elements, which bound
    the width of accesses.

    Arguments: addresses of x, of the gates' first column, weights and results; num_rows, groups, size, elements of a
    row of gates, floats between two parts' weights (0 if they share them); 1 / size, eps.
    """
    width = 4 if size % 4 == 0 and all(each % 4 == 0 for each in multiples) else 1
    is_warp = size <= WARP_SIZE
    blocks = -(-num_rows * groups // WARPS) if is_warp else num_rows * groups
    return Launch(_gated_norm(dtype, width, gate, is_warp), (blocks, 1, 1), (32 * WARPS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """SiLU after the norm of a head, and before that of all heads."""
    for dtype in DTYPES:
        yield _gated_norm(dtype, 4, "silu", True)
        yield _gated_norm(dtype, 4, "first", False)
