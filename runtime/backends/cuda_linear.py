"""Products with a weight on a GPU, with the norm before them and the gated unit after them; see `runtime.ops`.

A weight that a norm's weights are multiplied into (`RowWeight.is_normed`) takes rows as they are: its kernel scales the
sums by `Tensor.deferred_norm`. A product with a residual leaves these for the next one; otherwise one launch adds them
up. Products of up to four rows with packed weights apply their norm themselves (`gemm.quantised_gemv`); else it is a
launch before them, which rounds many rows to bytes where the product takes bytes. A packed weight that no tier reads
(float32, exact segments, a tier that the user names), or that has more rows than its tiers are fast for, is dequantised
first, every time: memory for one such matrix is needed then.

In exact mode the sums over K are cut into segments (`numba_kernels.split_k`). With ``gemm="cublas"`` cuBLAS multiplies,
as a reference for ours: bias and residual lie in the result before the product is added to them, so that they are
rounded to its type once more.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from numba_kernels.cuda import activation as _activation
from numba_kernels.cuda import dequantize, dynamic_quantisation
from numba_kernels.cuda import embedding as _embedding
from numba_kernels.cuda import gemm as _gemm
from numba_kernels.cuda import norm as _norm
from numba_kernels.cuda.gemm import split_k
from runtime.backends.cuda_plans import Planned, plan
from runtime.backends.cuda_tensor import alignment, id_flag, remembered, zeros
from runtime.device.cublas import Cublas
from runtime.device.gpu import Gpu
from runtime.dtype import DType, float32
from runtime.linear.gpu_slots import GpuSlots
from runtime.linear.low_rank_slots import LowRank
from runtime.linear.norm import RmsNorm
from runtime.linear.weight import GpuWeight, PackedWeight, RowWeight
from runtime.tensor.tensor import Tensor

_plan_glu = remembered(_activation.plan_glu)
_plan_reordered = remembered(_embedding.plan_reordered)
_plan_rms_norm = remembered(_norm.plan_rms_norm)
_plan_deferred_norm = remembered(_norm.plan_deferred_norm)


def linear(
    x: Tensor, weight: GpuWeight, residual: Tensor | None, out: Tensor | None, dtype: DType,
    norm: RmsNorm | None = None, *, low_rank: LowRank | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.linear`; `dtype` is that of the result."""
    ranks, given_norm = _ranks(low_rank), norm
    x, norm = _normalised_apart(x, weight, norm)
    x = _in_order(x, weight)
    gpu, rows, (width, depth) = Gpu.of(x.device), x.shape[0], weight.shape
    result = Tensor.new((rows, width), dtype, x.device) if out is None else out
    result.deferred_norm = None
    if weight.tier == "cublas":
        assert isinstance(weight, RowWeight)
        _multiply_by_cublas(gpu, x, weight, residual, result)
    elif weight.num_segments > 1:
        added = 0 if residual is None else residual.address
        _multiply_segments(gpu, x, weight, weight.bias_address, added, result)
    elif rows and width:
        bias, added = weight.bias_address, 0 if residual is None else residual.address
        key = (
            rows, dtype, added != 0, (x.address | weight.address) & 15, (result.address | added | bias) & 15,
            norm is not None, ranks,
        )  # fmt: skip
        planned = weight.plans.get(key)
        if planned is None:
            epilogue = _gemm.Epilogue(has_residual=key[2], is_aligned=key[4] == 0)
            product = _product(weight, rows, width, dtype, epilogue, is_aligned=key[3] == 0)
            planned = plan(gpu, weight, product, has_norm=norm is not None, ranks=ranks)
            weight.plans.keep(key, planned)
        launch = planned.launch
        assert launch is not None
        matrix, memory = _matrix_of(gpu, weight, planned)
        source, normalising, rounded = _rows(gpu, x, weight, planned, norm)
        last = (matrix, matrix) if planned.takes_weight_again else (0,)
        if planned.num_squares:
            result.deferred_norm = Tensor.new((rows, planned.num_squares), float32, x.device)
            last = (result.deferred_norm.address,)
        riding, between = _riding(gpu, low_rank, given_norm, planned)
        gpu.launch(
            launch, source, matrix, bias, added, result.address, rows, width, depth, 1, *normalising, *last, *riding
        )
        del memory, rounded, between
    return result


def linear_partial(x: Tensor, weight: GpuWeight) -> Tensor:
    """See `ops.linear_partial`."""
    result = Tensor.new((x.shape[0], weight.shape[0]), float32, x.device)
    _multiply_segments(Gpu.of(x.device), x, weight, 0, 0, result)
    return result


def add_partials(partials: Tensor, weight: GpuWeight, residual: Tensor | None, out: Tensor | None) -> Tensor:
    """See `ops.add_partials`."""
    result = Tensor.new(partials.shape[1:], weight.activations, partials.device) if out is None else out
    added = 0 if residual is None else residual.address
    _add_segments(Gpu.of(partials.device), partials, weight.bias_address, added, result)
    return result


def takes_low_rank(x: Tensor, weight: GpuWeight, norm: RmsNorm | None, activation: str | None, slots: GpuSlots) -> bool:
    """See `ops.takes_low_rank`."""
    rows, (width, _) = x.shape[0], weight.shape
    is_plain = weight.num_segments <= 1 and weight.tier != "cublas"
    if isinstance(weight, RowWeight):
        is_plain &= norm is None or weight.is_normed
    else:
        is_plain &= isinstance(weight, PackedWeight)
    if activation is None or not is_plain or not x.size or not width:
        return False
    ranks = slots.up.shape[2]
    of_norm = 0 if norm is None else norm.weight.address
    key = "low_rank", rows, activation, (x.address | weight.address | of_norm) & 15, ranks
    takes: bool | None = weight.plans.get(key)
    if takes is None:
        epilogue = _gemm.Epilogue(has_residual=False, is_aligned=True, activation=activation)
        columns = width // 2 if activation else width
        product = _product(weight, rows, columns, x.dtype, epilogue, is_aligned=key[3] == 0)
        launch = plan(Gpu.of(x.device), weight, product, ranks=ranks).launch
        takes = launch is not None and launch.num_shrinking > 0
        weight.plans.keep(key, takes)
    return takes


def _ranks(low_rank: LowRank | None) -> int:
    return 0 if low_rank is None else low_rank.slots.up.shape[2]


def _riding(
    gpu: Gpu, low_rank: LowRank | None, norm: RmsNorm | None, planned: Planned
) -> tuple[tuple[int, ...], Tensor | None]:
    """The arguments of low-rank sums (`numba_kernels.cuda.gemm.adapters.riding`), and the memory that they need."""
    if low_rank is None:
        return (), None
    launch: Any = planned.launch
    assert launch.num_shrinking, "`takes_low_rank` does not hold"
    slots, rows = low_rank.slots, low_rank.x.shape[0]
    num_slots, _, ranks = slots.up.shape
    between = Tensor.new((rows, ranks + 1), float32, low_rank.x.device)
    return (
        low_rank.x.address, low_rank.adapters.address, slots.down.table_address, slots.up.table_address,
        slots.ranges.address, 0 if norm is None else norm.weight.address, between.address, zeros(gpu, 2), ranks,
        num_slots, slots.ranges.shape[1], launch.num_shrinking, launch.team_warps,
    ), between  # fmt: skip


def linear_glu(
    x: Tensor, weight: GpuWeight, activation: str, norm: RmsNorm | None = None, *, low_rank: LowRank | None = None
) -> Tensor:
    """See `ops.linear_glu`; as `linear`."""
    ranks, given_norm = _ranks(low_rank), norm
    x, norm = _normalised_apart(x, weight, norm)
    given, x = x, _in_order(x, weight)
    gpu, rows, (both, depth) = Gpu.of(x.device), x.shape[0], weight.shape
    key = rows, activation, (x.address | weight.address) & 15, norm is not None, ranks
    planned = weight.plans.get(key)
    if planned is None:
        epilogue = _gemm.Epilogue(has_residual=False, is_aligned=True, activation=activation)
        product = _product(weight, rows, both // 2, x.dtype, epilogue, is_aligned=key[2] == 0)
        planned = plan(gpu, weight, product, has_norm=norm is not None, ranks=ranks)
        weight.plans.keep(key, planned)
    if planned.launch is None:
        return glu(linear(given, weight, None, None, x.dtype, norm), activation)
    result = Tensor.new((rows, both // 2), x.dtype, x.device)
    matrix, memory = _matrix_of(gpu, weight, planned)
    source, normalising, rounded = _rows(gpu, x, weight, planned, norm)
    last = (matrix, matrix) if planned.takes_weight_again else (0,)
    riding, between = _riding(gpu, low_rank, given_norm, planned)
    gpu.launch(
        planned.launch, source, matrix, 0, 0, result.address, rows, both // 2, depth, 0, *normalising, *last, *riding
    )
    del memory, rounded, between
    return result


def _normalised_apart(x: Tensor, weight: GpuWeight, norm: RmsNorm | None) -> tuple[Tensor, RmsNorm | None]:
    """x, and the norm that the product's launches apply. Unaligned rows, and those of exact products, are normalised
    here."""
    if norm is None or weight.is_normed or ((x.address | norm.weight.address) & 15 == 0 and not weight.exact):
        return x, norm
    return rms_norm(x, norm.weight, norm.eps, None), None


def _in_order(x: Tensor, weight: GpuWeight) -> Tensor:
    """x, its columns in the order in which the weight has its own."""
    if not isinstance(weight, PackedWeight) or weight.order is None or not x.size:
        return x
    (rows, depth), result = x.shape, Tensor.new(x.shape, x.dtype, x.device)
    addresses = x.address, weight.order.address, result.address
    launch, accesses = _plan_reordered(rows, depth, x.dtype.ptx, alignment=alignment(*addresses))
    Gpu.of(x.device).launch(launch, *addresses, rows, depth, accesses)
    return result


def _rows(
    gpu: Gpu, x: Tensor, weight: GpuWeight, planned: Planned, norm: RmsNorm | None
) -> tuple[int, tuple[int, int, float], Any]:
    """The product's address for x, its arguments for scaling the rows, and the owner of that memory."""
    if planned.rounding is not None:
        source, scales, memory = _rounded_rows(gpu, x, planned, norm)
        return source, (scales, 0, 0.0), memory
    if norm is None:
        return x.address, _gemm.NO_SQUARES[:3], x
    if weight.is_normed:
        squares = _deferred_norm(x)
        return x.address, (squares.address, squares.shape[1], norm.eps), x
    assert planned.launch is not None
    if planned.launch.specialisation.constants.get("takes_norm"):
        return x.address, (norm.weight.address, 0, norm.eps), x
    x = rms_norm(x, norm.weight, norm.eps, None)
    return x.address, (0, 0, norm.eps), x  # low-rank sums may ride, which normalise their own rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, factor: float = 1.0) -> Tensor:
    """See `ops.rms_norm`."""
    rows, width = x.shape
    result = Tensor.new(x.shape, x.dtype, x.device)
    if rows and width:
        addresses = x.address, 0 if residual is None else residual.address, weight.address, result.address
        launch = _plan_rms_norm(
            rows, width, x.dtype.ptx, has_residual=residual is not None, alignment=alignment(*addresses)
        )
        Gpu.of(x.device).launch(launch, *addresses, width, 1.0 / width, eps, factor)
    return result


def deferred_norm(x: Tensor, parts: int) -> Tensor:
    """See `ops.deferred_norm`."""
    squares = _deferred_norm(x)
    rows, count = squares.shape
    assert count <= parts, f"{count} parts of rows' squares do not fit into {parts}"
    if count == parts:
        return squares
    padded = Tensor.new((rows, parts), float32, x.device)
    Gpu.of(x.device).fill(padded.address, 0, padded.size_bytes)
    padded[:, :count] = squares
    return padded


def _deferred_norm(x: Tensor) -> Tensor:
    """The squares of x's rows: those left by an earlier launch, or new ones."""
    squares = x.deferred_norm
    if squares is None:
        rows, depth = x.shape
        squares = x.deferred_norm = Tensor.new((rows, _norm.SQUARE_PARTS), float32, x.device)
        launch = _plan_deferred_norm(rows, depth, x.dtype.ptx, alignment=alignment(x.address))
        Gpu.of(x.device).launch(launch, x.address, squares.address, depth)
    return squares


def _product(
    weight: GpuWeight, rows: int, width: int, dtype: DType, epilogue: _gemm.Epilogue, *, is_aligned: bool
) -> _gemm.Product:
    return _gemm.Product(
        rows, width, weight.shape[1], weight.activations.ptx, weight.elements, dtype.ptx, epilogue,
        is_aligned=is_aligned, exact=weight.exact, whole=weight.whole_shape,
    )  # fmt: skip


def gated(activation: str, gate: Tensor, shape: tuple[int, int], up: int, steps: tuple[int, int]) -> Tensor:
    """f(gate) up, ``[rows, size]``. `up` is an address; rows of gate and up are `steps` elements apart."""
    result = Tensor.new(shape, gate.dtype, gate.device)
    if result.size:
        addresses = gate.address, up, result.address
        launch, sizes = _plan_glu(activation, *shape, gate.dtype.ptx, steps, alignment=alignment(*addresses))
        Gpu.of(gate.device).launch(launch, *addresses, shape[0], *sizes)
    return result


def glu(gate_up: Tensor, activation: str) -> Tensor:
    """See `ops.glu`."""
    rows, both = gate_up.shape
    up = gate_up.address + both // 2 * gate_up.dtype.itemsize
    return gated(activation, gate_up, (rows, both // 2), up, (both, both))


def _rounded_rows(gpu: Gpu, x: Tensor, planned: Planned, norm: RmsNorm | None) -> tuple[int, int, Any]:
    """The addresses of the rounded rows of x and of their scales, and the owner of that memory. With `norm` the
    rounding was planned to normalise x, too."""
    assert planned.rounding is not None
    rows, depth = x.shape
    is_grouped = planned.rounding.specialisation.constants.get("group", 0) != 0
    codes, both = dynamic_quantisation.sections(rows, depth, is_grouped=is_grouped)
    memory = gpu.allocate(both)
    scales = memory.address + codes
    given = (planned.input_scale, 1.0 / planned.input_scale) if planned.input_scale else ()
    if norm is None:
        gpu.launch(planned.rounding, x.address, memory.address, scales, rows, depth, *given)
    else:
        gpu.launch(
            planned.rounding, x.address, norm.weight.address, memory.address, scales, rows, depth, 1.0 / depth,
            norm.eps, *(given or (0.0, 0.0)),
        )  # fmt: skip
    return memory.address, memory.address + codes, memory


def _matrix_of(gpu: Gpu, weight: GpuWeight, planned: Planned) -> tuple[int, Any]:
    """The weight's address for the product's launch, and the owner of that memory."""
    if planned.dequantization is None:
        return weight.address, weight
    rows = Tensor.new(weight.shape, weight.activations, weight.device)
    gpu.launch(planned.dequantization, weight.address, 0, rows.address, 0, weight.shape[0], *weight.shape, 1.0)
    return rows.address, rows


def packed_embedding(ids: Tensor, table: PackedWeight, multiplier: float) -> Tensor:
    """Rows of a packed table."""
    gpu, (num_rows, depth) = Gpu.of(ids.device), table.shape
    result = Tensor.new((ids.shape[0], depth), table.activations, ids.device)
    if result.size:
        launch = dequantize.plan(
            table.packing, ids.shape[0], depth, table.activations.ptx, is_lookup=True,
            alignment=alignment(result.address),
        )  # fmt: skip
        flag = id_flag(ids.device).address
        gpu.launch(launch, table.address, ids.address, result.address, flag, ids.shape[0], num_rows, depth, multiplier)
    return result


# Sums over segments of K


def _multiply_segments(gpu: Gpu, x: Tensor, weight: GpuWeight, bias: int, residual: int, result: Tensor) -> None:
    """``result [T, N] = x [T, K] . weight [N, K]^T + bias + residual``, the latter by their addresses, or 0. The
    residual may be the result itself."""
    (rows, depth), width, count = x.shape, weight.shape[0], weight.num_segments
    if not result.size:
        return
    most = split_k.most_rows(count, width)
    if count > 1:
        _leave_squares(bias, residual, result)
    sums = None if count == 1 else gpu.allocate(count * min(rows, most) * width * 4)
    for first in range(0, rows, most):
        num_rows = min(most, rows - first)
        start, skipped = x.address + first * depth * x.dtype.itemsize, first * width * result.dtype.itemsize
        multiply = _multiplication(gpu, weight, num_rows, is_aligned=(start | weight.address) & 15 == 0)
        target = result.address + skipped if sums is None else sums.address
        assert multiply.launch is not None
        matrix, memory = _matrix_of(gpu, weight, multiply)
        gpu.launch(multiply.launch, start, matrix, 0, 0, target, num_rows, width, depth, 0, *_gemm.NO_SQUARES)
        del memory
        if sums is not None:
            _add_rows(gpu, count, sums.address, bias, residual, result, first, num_rows)


def _add_segments(gpu: Gpu, partials: Tensor, bias: int, residual: int, result: Tensor) -> None:
    """``result [T, N]`` from ``partials [R, T, N]``, which are added in pairs; bias and residual as addresses."""
    count, rows, _ = partials.shape
    if result.size:
        _leave_squares(bias, residual, result)
        _add_rows(gpu, count, partials.address, bias, residual, result, 0, rows)


def _leave_squares(bias: int, residual: int, result: Tensor) -> None:
    """Makes room for the result's squares, where there is a residual: a norm may follow."""
    rows, width = result.shape
    is_aligned = (bias | residual | result.address) & 15 == 0 and width % (4 * split_k.SQUARE_COLUMNS) == 0
    result.deferred_norm = None
    if residual and is_aligned:
        result.deferred_norm = Tensor.new((rows, width // split_k.SQUARE_COLUMNS), float32, result.device)


def _add_rows(
    gpu: Gpu, count: int, sums: int, bias: int, residual: int, result: Tensor, first: int, num_rows: int
) -> None:
    """Adds the sums of some rows of the result, from `first` on, and leaves their squares where there is room."""
    width, squares = result.shape[1], result.deferred_norm
    skipped = first * width * result.dtype.itemsize
    launch = split_k.plan_add(count, num_rows, width, result.dtype.ptx)
    gpu.launch(
        launch, sums, bias, residual + skipped if residual else 0, result.address + skipped, num_rows, width,
        0 if squares is None else squares.address + first * squares.shape[1] * 4,
    )  # fmt: skip


def _multiplication(gpu: Gpu, weight: GpuWeight, rows: int, *, is_aligned: bool) -> Planned:
    """The launch of all segments' sums, remembered for all weights of its kind."""
    key = "segments", rows, is_aligned
    planned = weight.plans.get(key)
    if planned is None:
        epilogue = _gemm.Epilogue(has_residual=False, is_aligned=True)
        product = _product(weight, rows, weight.shape[0], float32, epilogue, is_aligned=is_aligned)
        planned = plan(gpu, weight, replace(product, num_segments=weight.num_segments))
        weight.plans.keep(key, planned)
    return planned


# cuBLAS


@functools.cache
def _cublas_of(gpu: Gpu) -> Cublas:
    return Cublas(gpu)


def _multiply_by_cublas(gpu: Gpu, x: Tensor, weight: RowWeight, residual: Tensor | None, result: Tensor) -> None:
    """``result [T, N] = x [T, K] . weight [N, K]^T + bias + residual``; the residual may be the result itself.

    Raises: as `Cublas`.
    """
    (rows, depth), width = x.shape, weight.shape[0]
    if not result.size:
        return
    start = residual if weight.bias is None else weight.bias if residual is None else residual + weight.bias
    if start is not None and start.address != result.address:
        result[:] = start
    if depth:
        _cublas_of(gpu).bind_linear(
            rows, width, depth, x.dtype.ptx, x.address, weight.weight.address, result.address,
            out_dtype=result.dtype.ptx, is_added=start is not None,
        )()  # fmt: skip
    elif start is None:
        result[:] = 0.0
