"""A weight matrix in the layout that its device's matrix product reads, made once when a model is loaded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np

from numba_kernels.blocks import BLOCKS
from numba_kernels.cpu.gemm.arranged_rows import rounds_x
from numba_kernels.cpu.gemm.block_panels import pack_blocks
from numba_kernels.cpu.gemm.panels import empty_panels, largest_of_rows, pack, panel_bytes
from numba_kernels.cpu.layout import PANEL_COLUMNS
from numba_kernels.cpu.running.launch import address_of
from numba_kernels.cpu.running.pool import NUM_THREADS
from numba_kernels.cuda.packing import Packing, arrange, packing_of
from runtime.device.device import CPU, Device
from runtime.device.gpu import Gpu
from runtime.dtype import STORED, DType, NDArray, float32
from runtime.errors import InvalidArgumentError
from runtime.linear.format import FORMATS, WeightFormat
from runtime.linear.kept import block_bytes, kept_format, row_scales
from runtime.linear.norm import RmsNorm
from runtime.linear.options import LoadOptions, Split
from runtime.linear.quantise import int8_rows
from runtime.linear.quantized import QuantizedMatrix
from runtime.tensor.tensor import Tensor

DEFAULT_OPTIONS = LoadOptions()
_ROWS_AT_ONCE = 1024  # of a matrix that a norm's weights are multiplied into
MOST_PLANS = 512  # of products with weights of one kind: mostly one for each number of rows


DynamicQuantisation = Literal["", "rows", "groups", "static"]


class GpuSettings(TypedDict, total=False):
    """Settings of a `GpuWeight`."""

    exact: bool
    whole_shape: tuple[int, int] | None
    num_segments: int
    is_normed: bool
    rounds_rows: DynamicQuantisation
    input_scale: float


@dataclass(frozen=True, slots=True)
class BlockRows:
    """A matrix ``[N, K]`` in ggml's blocks: the bytes of its rows, ``[N, row bytes]``, as the file has them."""

    raw: NDArray
    format: WeightFormat
    depth: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.raw.shape[0], self.depth

    def cut_columns(self, first: int, end: int) -> BlockRows:
        """Columns ``first`` up to ``end``, both between blocks."""
        size = self.format.multiple
        bytes_a_block = self.raw.shape[1] // (self.depth // size)
        places = slice(first // size * bytes_a_block, end // size * bytes_a_block)
        return BlockRows(self.raw[:, places], self.format, end - first)


class KeptRows(NamedTuple):
    """Rows of a matrix on the cpu, and their format."""

    width: int
    format: WeightFormat
    has_order: bool = False


MatrixSource = Tensor | BlockRows | QuantizedMatrix
"""A matrix ``[N, K]`` on the cpu that a weight is made of."""


class LinearWeight:
    """A weight matrix ``[N, K]`` and its bias; made by `prepare_linear`, read by `ops.linear` and `ops.embedding`.

    This class alone describes a matrix that is not there yet; `PanelWeight`, `RowWeight` and `PackedWeight` hold one.

    Attributes:
        shape: (N, K).
        format: how its elements are kept.
        device: where it lies.
        size_bytes: of matrix, scales and bias, padding included.
        activations: the type of the rows that it multiplies.
        num_segments: in how many segments K is added up (`numba_kernels.split_k`); 0 if it is not cut.
        is_normed: whether the weights of the norm before it are multiplied into its columns: products then scale
            rows alone.
        rounds_rows: how the checkpoint rounds x to the weight's own kind of byte: "rows" by their own largest
            magnitude, "groups" of 128 of K by theirs, or all by a "static" scale; products of many rows on a GPU may
            then. Else "".
        rounds_x: whether every product rounds x, to bfloat16 or int8.
        takes_norm: whether products may be given the norm of x's rows, to apply it in their own launches.
    """

    activations: DType
    is_normed = False
    rounds_x = False
    takes_norm = False
    rounds_rows: DynamicQuantisation = ""
    __slots__ = ("device", "format", "num_segments", "shape", "size_bytes")

    def __init__(
        self, shape: tuple[int, int], format: WeightFormat, device: Device, size_bytes: int, num_segments: int = 0
    ) -> None:
        self.shape = shape
        self.num_segments = num_segments
        self.format = format
        self.device = device
        self.size_bytes = size_bytes

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, format={self.format.name}, device={self.device})"

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """The formats of its parts."""
        return (self.format,)


class PanelWeight(LinearWeight):
    """On the cpu: panels of neighbouring columns, as the register tiles read them (`numba_kernels.cpu.gemm.panels`).

    Attributes:
        stored: the numpy class that carries an element's bits, or a block's name.
        panels: ``[ceil(N / PANEL_COLUMNS), ceil(K / e), PANEL_COLUMNS, e]`` of ``stored``.
        bias: float32, one for each of the panels' columns; zeros where there is none.
        scales: of int8, float32, one for each of the panels' columns; else empty.
        order: int32 ``[K]``, if the matrix's columns are stored in another order: its column j is multiplied with x's
            column ``order[j]``; else None. Parts of one map that have the same order share the array.
        segment_step: the format's.
    """

    activations = float32
    __slots__ = (
        "bias", "bias_address", "order", "panels", "panels_address", "rounds_x", "scales", "scales_address",
        "segment_step", "stored",
    )  # fmt: skip

    def __init__(
        self, shape: tuple[int, int], format: WeightFormat, num_segments: int = 0, order: NDArray | None = None
    ) -> None:
        self.stored = stored_class(format)
        self.rounds_x = rounds_x(self.stored)
        self.order = order
        self.panels = empty_panels(*_panel_layout(*shape, format))
        columns = self.panels.shape[0] * PANEL_COLUMNS
        self.bias = np.zeros(columns, np.float32)
        self.scales = np.zeros(columns if format.is_quantized else 0, np.float32)
        self.panels_address = address_of(self.panels)
        self.bias_address = address_of(self.bias)
        self.scales_address = address_of(self.scales)
        self.segment_step = format.segment_step
        size_bytes = self.panels.nbytes + self.bias.nbytes + self.scales.nbytes
        size_bytes += 0 if order is None else order.nbytes
        super().__init__(shape, format, CPU, size_bytes, num_segments)

    def part(self, first: int, end: int) -> PanelWeight:
        """Outputs ``first`` (a panel's first) up to ``end``, in the same memory."""
        assert first % PANEL_COLUMNS == 0, "a panel is whole"
        panels = slice(first // PANEL_COLUMNS, -(-end // PANEL_COLUMNS))
        columns = slice(first, panels.stop * PANEL_COLUMNS)
        part = copy.copy(self)
        part.shape, part.size_bytes = (end - first, self.shape[1]), 0
        part.panels, part.bias, part.scales = self.panels[panels], self.bias[columns], self.scales[columns]
        part.panels_address = address_of(part.panels)
        part.bias_address = address_of(part.bias)
        part.scales_address = address_of(part.scales)
        return part


class JoinedWeight(LinearWeight):
    """On the cpu: parts in formats of their own, their outputs one after another.

    Attributes:
        parts: the parts. `format` is that of the first.
    """

    activations = float32
    __slots__ = ("parts", "rounds_x")

    def __init__(self, parts: Sequence[PanelWeight]) -> None:
        self.parts = tuple(parts)
        self.rounds_x = all(part.rounds_x for part in parts)
        shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        size_bytes = sum(part.size_bytes for part in parts)
        super().__init__(shape, parts[0].format, CPU, size_bytes, parts[0].num_segments)

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        return tuple(part.format for part in self.parts)


class Plans(dict[Any, Any]):
    """Plans of the products with weights of one kind, keyed by their other arguments; a model's layers share them.
    They live as long as one of these weights."""

    __slots__ = ("__weakref__",)

    def keep(self, key: Any, plan: Any) -> None:
        """Remembers a plan, so that a product like it is not planned again."""
        if len(self) >= MOST_PLANS:
            self.clear()
        self[key] = plan


class GpuWeight(LinearWeight):
    """On a GPU: one block of memory, in rows or packed.

    Attributes:
        elements: the type that the kernels read: a dtype, or the name of a packing (`numba_kernels.cuda.packing`).
        address: of the block.
        bias: ``[N]`` float32, or None.
        tier: the kernel of its products, one of `numba_kernels.cuda.gemm.TIERS`; gemv and skinny only through
            "auto".
        exact: whether a row of the product has the same bits however many rows there are.
        whole_shape: (N, K) of the unsharded map, by which exact products choose their kernel.
        input_scale: the static scale, whose multiples rows are rounded to; else 0.
        plans: of products with weights of its kind.
    """

    __slots__ = (
        "activations", "address", "bias", "bias_address", "elements", "exact", "input_scale", "is_normed", "memory",
        "plans", "rounds_rows", "takes_norm", "tier", "whole_shape",
    )  # fmt: skip

    def __init__(
        self,
        shape: tuple[int, int],
        format: WeightFormat,
        memory: Tensor,
        activations: DType,
        bias: Tensor | None,
        tier: str = "auto",
        *,
        exact: bool = False,
        whole_shape: tuple[int, int] | None = None,
        num_segments: int = 0,
        is_normed: bool = False,
        rounds_rows: DynamicQuantisation = "",
        input_scale: float = 0.0,
    ) -> None:
        self.is_normed = self.takes_norm = is_normed
        self.rounds_rows = rounds_rows
        self.input_scale = input_scale
        self.memory = memory
        self.elements = format.packing or activations.ptx
        self.bias = bias
        self.activations = activations
        self.address = memory.address
        self.bias_address = 0 if bias is None else bias.address
        self.tier = tier
        self.exact = exact
        size_bytes = memory.size_bytes + (0 if bias is None else bias.size_bytes)
        super().__init__(shape, format, memory.device, size_bytes, num_segments)
        self.whole_shape = whole_shape or shape
        kind = (
            shape, format, activations, bias is None, tier, exact, self.whole_shape, num_segments, is_normed,
            rounds_rows, input_scale,
        )  # fmt: skip
        self.plans: Plans = Gpu.of(memory.device).plans.setdefault(kind, Plans())


class RowWeight(GpuWeight):
    """Rows one after another, as they are stored.

    Attributes:
        weight: ``[N, K]``.
    """

    __slots__ = ("weight",)

    def __init__(
        self, weight: Tensor, bias: Tensor | None, tier: str = "auto", **settings: Unpack[GpuSettings]
    ) -> None:
        self.weight = weight
        shape = weight.shape[0], weight.shape[1]
        super().__init__(shape, FORMATS[weight.dtype.name], weight, weight.dtype, bias, tier, **settings)

    def part(self, first: int, end: int) -> RowWeight:
        """Outputs ``first`` up to ``end``, in the same memory; exact products take the kernel of the whole."""
        bias = None if self.bias is None else self.bias[first:end]
        part = RowWeight(
            self.weight[first:end], bias, self.tier, exact=self.exact, whole_shape=self.whole_shape,
            num_segments=self.num_segments, is_normed=self.is_normed,
        )  # fmt: skip
        part.size_bytes = 0
        return part


class PackedWeight(GpuWeight):
    """Elements of few bits and their scales, arranged as kernels read them.

    Attributes:
        packing: how.
        order: int32 ``[K]``, if the matrix's columns are stored in another order: its column j is multiplied with x's
            column ``order[j]``; else None.
    """

    __slots__ = ("order", "packing")

    def __init__(
        self, shape: tuple[int, int], format: WeightFormat, block: Tensor, activations: DType, bias: Tensor | None,
        tier: str = "auto", *, order: Tensor | None = None, **settings: Unpack[GpuSettings],
    ) -> None:  # fmt: skip
        found = packing_of(format.packing)
        assert found is not None
        self.packing: Packing = found
        self.order = order
        super().__init__(shape, format, block, activations, bias, tier, **settings)
        self.takes_norm = self.rounds_rows != "" or (order is None and tier == "auto" and not self.exact)
        self.size_bytes += 0 if order is None else order.size_bytes


def logits_share(width: int, num_ranks: int) -> int:
    """Logits of each rank but the last, of so many: whole panels and aligned rows. 0 if a rank would have none."""
    panels = -(-width // PANEL_COLUMNS)
    share = -(-panels // num_ranks) * PANEL_COLUMNS
    return share if (num_ranks - 1) * share < width else 0


def stored_class(format: WeightFormat) -> Any:
    """The kernels' key of a format on the cpu: the numpy class that carries an element's bits, or a block's name."""
    return format.name if format.name in BLOCKS else STORED.get(format.element, format.element.numpy.type)


def _panel_layout(width: int, depth: int, format: WeightFormat) -> tuple[int, int, np.dtype[Any]]:
    """Columns, depth and type of the panels: of blocks, words that float32 carries."""
    stored = stored_class(format)
    return (width, BLOCKS[stored].words_of(depth), np.dtype(np.float32)) if stored in BLOCKS else (
        width, depth, np.dtype(stored)
    )  # fmt: skip


def runs_of(parts: Sequence[KeptRows]) -> list[KeptRows]:
    """The parts, neighbours of one format joined; those with an order of their columns stay alone."""
    runs: list[KeptRows] = []
    for width, kept, has_order in parts:
        if runs and runs[-1].format is kept and not (has_order or runs[-1].has_order):
            width += runs.pop().width
        runs.append(KeptRows(width, kept, has_order))
    return runs


def packed_bytes(
    parts: Sequence[KeptRows], depth: int, device: Device, *, has_bias: bool,
    activations: DType = float32,
) -> int:  # fmt: skip
    """`size_bytes` of the weight that `prepare_linear` will make of these parts, padding included; `activations` are
    those of a GPU."""
    if device.kind != "cpu":
        width, kept = sum(part.width for part in parts), parts[0].format
        packing = packing_of(kept.packing)
        size_bytes = (
            kept.size_bytes(width, depth) if packing is None else packing.size_bytes(width, depth, activations.ptx)
        )
        return size_bytes + 4 * width * has_bias + 4 * depth * parts[0].has_order
    return sum(
        panel_bytes(*_panel_layout(width, depth, kept), has_scales=kept.is_quantized) + 4 * depth * has_order
        for width, kept, has_order in runs_of(parts)
    )


def prepare_linear(
    weight: Tensor | Sequence[MatrixSource],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    options: LoadOptions = DEFAULT_OPTIONS,
    *,
    split: Split | None = None,
    whole_rows: Sequence[Tensor] | None = None,
    norm: RmsNorm | None = None,
    whole_shape: tuple[int, int] | None = None,
) -> LinearWeight:
    """``weight [N, K]`` on the cpu with an optional ``bias [N]``, laid out for the options' device and in their format.
    Several weights are joined over N without a copy between. On the cpu, weights of several types keep them; there and
    whole, with the options' default type, a weight may be in ggml's blocks, or quantised as in `kept_format`.

    ``split`` is the side over which the map is sharded between the options' ranks. Where that is over
    inputs of several ranks, a format with a scale for a whole row of K needs ``whole_rows``, the weights with all
    ranks' inputs.

    ``whole_shape`` is (N, K) of all ranks' map; None means that each has as much of it.

    ``norm`` is applied to the products' rows. On a GPU its weights are multiplied into the matrix's columns,
    unless another library multiplies with it, or they would lose bits there.

    Sources may have any strides (a transposed view, a mapped file) and can be released afterwards.

    Raises:
        InvalidArgumentError: for no weight, one that is not a matrix of float32, float16 or bfloat16 on the cpu,
            different K, different types on a GPU, a bias of another size, biases of another number than weights, or
            whole rows that are missing, or not as many or as long as they must be.
    """
    weights: list[MatrixSource] = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [bias] * len(weights) if bias is None or isinstance(bias, Tensor) else list(bias)
    if options.dtype is not None:
        weights = [part.to(options.dtype) if isinstance(part, Tensor) else part for part in weights]
        whole_rows = None if whole_rows is None else [part.to(options.dtype) for part in whole_rows]
    _check(weights, biases, options)
    shape = (sum(part.shape[0] for part in weights), weights[0].shape[1])
    whole_shape = whole_shape or options.whole_shape(shape, split)
    joined_bias = np.zeros(shape[0], np.float32)
    first = 0
    for part, part_bias in zip(weights, biases, strict=True):
        if part_bias is not None:
            joined_bias[first : first + part.shape[0]] = part_bias.array.astype(np.float32)
        first += part.shape[0]
    if options.device.kind == "cpu":
        needs_whole = split == "inputs" and options.num_ranks > 1
        whole = _whole_rows(weights, whole_rows, options, whole_shape[1]) if needs_whole else None
        return _in_panels(weights, whole, joined_bias, options, options.num_segments(split))
    has_bias = any(part is not None for part in biases)
    device_bias = Tensor.from_numpy(joined_bias).to(options.device) if has_bias else None
    floats = [part for part in weights if isinstance(part, Tensor)]
    settings = GpuSettings(exact=options.exact, whole_shape=whole_shape, num_segments=options.num_segments(split))
    if options.format is not None:
        whole = None
        if split == "inputs" and options.num_ranks > 1:
            whole = _whole_rows(weights, whole_rows, options, whole_shape[1])
        return _packed(floats, whole, device_bias, options, settings)
    joins = norm is not None and options.gemm != "cublas" and norm.can_join(floats[0].dtype)
    return _in_rows(floats, device_bias, options, settings, norm if joins else None)


def _in_rows(
    weights: list[Tensor], bias: Tensor | None, options: LoadOptions, settings: GpuSettings, norm: RmsNorm | None
) -> RowWeight:
    """The weight on a GPU; the norm's weights are multiplied into the columns."""
    shape = (sum(part.shape[0] for part in weights), weights[0].shape[1])
    rows = Tensor.empty(shape, weights[0].dtype, options.device)
    first = 0
    for part in weights:
        rows[first : first + part.shape[0]] = part
        first += part.shape[0]
    if norm is not None:
        for first in range(0, shape[0], _ROWS_AT_ONCE):
            some = slice(first, first + _ROWS_AT_ONCE)
            rows[some] = rows[some] * norm.weight
    rows.storage.freeze()
    settings["is_normed"] = norm is not None
    return RowWeight(rows, bias, options.gemm, **settings)


def _packed(
    weights: list[Tensor], whole_rows: list[Tensor] | None, bias: Tensor | None, options: LoadOptions,
    settings: GpuSettings,
) -> PackedWeight:  # fmt: skip
    """The weight on a GPU, in the options' format. The norm before it stays a launch of its own."""
    format, activations = options.format, weights[0].dtype
    assert format is not None
    packing = packing_of(format.packing)
    assert packing is not None
    shape = (sum(part.shape[0] for part in weights), weights[0].shape[1])
    codes, scales, first = np.empty(shape, np.uint8), np.empty(shape[0], np.float32), 0
    for part, whole in zip(weights, whole_rows or weights, strict=True):
        some = slice(first, first + part.shape[0])
        codes[some], scales[some] = int8_rows(part.array, whole.array)
        first += part.shape[0]
    block = Tensor.from_numpy(arrange(packing, activations.ptx, codes, None, None, scales)).to(options.device)
    block.storage.freeze()
    return PackedWeight(shape, format, block, activations, bias, options.gemm, **settings)


def _in_panels(
    weights: list[MatrixSource],
    whole_rows: list[Tensor] | None,
    bias: NDArray,
    options: LoadOptions,
    num_segments: int,
) -> LinearWeight:
    joined: list[PanelWeight] = []
    first, parts = 0, zip(weights, whole_rows or weights, strict=True)
    orders = iter(_orders(weights))
    runs = runs_of(
        [KeptRows(part.shape[0], _format_of(part, options), _order_of(part) is not None) for part in weights]
    )
    for width, kept, has_order in runs:
        panels = PanelWeight((width, weights[0].shape[1]), kept, num_segments, next(orders) if has_order else None)
        panels.bias[:width] = bias[first : first + width]
        packed = 0
        while packed < width:
            part, whole = next(parts)
            if isinstance(part, QuantizedMatrix):
                if panels.stored is np.uint8:
                    _pack_integers(panels, part, packed)
                    packed += part.shape[0]
                    continue
                part = BlockRows(block_bytes(part, kept), kept, part.shape[1])
            if isinstance(part, BlockRows):
                pack_blocks(panels.stored, panels.panels, part.raw, packed, NUM_THREADS)
                packed += part.shape[0]
                continue
            largest = None
            if isinstance(whole, Tensor) and whole is not part and kept.has_row_scales:
                largest = largest_of_rows(whole.array.view(STORED[whole.dtype]))
            pack(panels.panels, panels.scales, part.array.view(STORED[part.dtype]), packed, NUM_THREADS, largest)
            packed += part.shape[0]
        joined.append(panels)
        first += width
    return joined[0] if len(joined) == 1 else JoinedWeight(joined)


def _order_of(part: MatrixSource) -> NDArray | None:
    return part.order if isinstance(part, QuantizedMatrix) else None


def _orders(parts: Sequence[MatrixSource]) -> list[NDArray]:
    """The orders of those that have one; each that is equal to the one before is the same array."""
    orders: list[NDArray] = []
    for part in parts:
        if (order := _order_of(part)) is not None:
            orders.append(orders[-1] if orders and np.array_equal(orders[-1], order) else order)
    return orders


def _pack_integers(panels: PanelWeight, matrix: QuantizedMatrix, first_column: int) -> None:
    """Integers of 8 bits into panels, four in a word that float32 carries."""
    words = np.ascontiguousarray(matrix.codes).view(np.float32)
    pack(panels.panels.view(np.float32), panels.scales, words, first_column, NUM_THREADS)
    panels.scales[first_column : first_column + matrix.shape[0]] = row_scales(matrix)


def _format_of(part: MatrixSource, options: LoadOptions) -> WeightFormat:
    if isinstance(part, QuantizedMatrix):
        kept = kept_format(part.layout, options)
        assert kept is not None, part.layout
        return kept
    return part.format if isinstance(part, BlockRows) else options.format_of(part.dtype)


def _whole_rows(
    weights: list[MatrixSource], given: Sequence[Tensor] | None, options: LoadOptions, depth: int
) -> list[Tensor] | None:
    """The whole rows, of ``depth`` inputs, where a format needs them."""
    if not any(isinstance(part, Tensor) and _format_of(part, options).has_row_scales for part in weights):
        return None
    wanted = [(part.shape[0], depth) for part in weights]
    if [part.shape for part in given or ()] != wanted:
        raise InvalidArgumentError(f"prepare_linear: whole_rows must have the shapes {wanted}", param="whole_rows")
    return list(given or ())


def _check(weights: list[MatrixSource], biases: list[Tensor | None], options: LoadOptions) -> None:
    device = options.device
    first_type = next((part.dtype for part in weights if isinstance(part, Tensor)), None)
    if not weights:
        raise InvalidArgumentError("prepare_linear: weight is an empty sequence", param="weight")
    if len(biases) != len(weights) or (len(weights) > 1 and any(b is biases[0] and b is not None for b in biases[1:])):
        raise InvalidArgumentError(
            f"prepare_linear: bias must hold one entry for each of {len(weights)} weights", param="bias"
        )
    for number, (part, bias) in enumerate(zip(weights, biases, strict=True)):
        if not isinstance(part, Tensor):
            if isinstance(part, QuantizedMatrix):
                name, is_kept = part.layout.name, kept_format(part.layout, options) is not None
            else:
                name = part.format.name
                is_kept = not (options.dtype or options.format or part.shape[1] % part.format.multiple)
            if device.kind != "cpu" or not is_kept or part.shape[1] != weights[0].shape[1]:
                raise InvalidArgumentError(
                    f"prepare_linear: weight {number} is {name} {part.shape}, which {device} cannot keep so, whole, or "
                    "beside the first",
                    param="weight",
                )
            continue
        if part.ndim != 2 or part.dtype not in STORED:
            raise InvalidArgumentError(
                f"prepare_linear: weight {number} is {part.dtype.name} {part.shape}, "
                "must be [N, K] of float32, float16 or bfloat16",
                param="weight",
            )
        for name, ours, first in (
            ("K", part.shape[1], weights[0].shape[1]),
            ("dtype", part.dtype, part.dtype if device.kind == "cpu" else first_type),
            ("device", part.device, CPU),
        ):
            if ours != first:
                raise InvalidArgumentError(
                    f"prepare_linear: weight {number} has {name} {ours}, must have {first}", param="weight"
                )
        if bias is not None and (bias.shape != (part.shape[0],) or bias.dtype not in STORED):
            raise InvalidArgumentError(
                f"prepare_linear: bias {number} is {bias.dtype.name} {bias.shape}, must be [{part.shape[0]}] of "
                "float32, float16 or bfloat16",
                param="bias",
            )
