"""A weight matrix in the layout that its device's matrix product reads, made once when a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numba_kernels.cpu.launch import address_of
from numba_kernels.cpu.panels import empty_panels, pack, panel_bytes
from numba_kernels.cpu.pool import NUM_THREADS
from numba_kernels.cpu.target import PANEL_COLUMNS
from runtime.device.device import CPU, Device
from runtime.dtype import STORED, DType, float32
from runtime.errors import InvalidArgumentError
from runtime.linear.format import FORMATS, WeightFormat
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor

DEFAULT_OPTIONS = LoadOptions()
MOST_PLANS = 512  # that a weight remembers: mostly one for each number of rows

class LinearWeight:
    """A weight matrix ``[N, K]`` and its bias; made by `prepare_linear`, read by `ops.linear` and `ops.embedding`.

    This class alone describes a matrix that is not there yet; `PanelWeight` and `RowWeight` hold one.

    Attributes:
        shape: (N, K).
        format: how its elements are kept.
        device: where it lies.
        size_bytes: of matrix, scales and bias, padding included.
        activations: the type of the rows that it multiplies.
    """

    activations: DType
    __slots__ = ("device", "format", "shape", "size_bytes")

    def __init__(self, shape: tuple[int, int], format: WeightFormat, device: Device, size_bytes: int) -> None:
        self.shape = shape
        self.format = format
        self.device = device
        self.size_bytes = size_bytes

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, format={self.format.name}, device={self.device})"


class PanelWeight(LinearWeight):
    """On the cpu: panels of neighbouring columns, as the register tiles read them (`numba_kernels.cpu.panels`).

    Attributes:
        stored: the numpy class that carries an element's bits.
        panels: ``[ceil(N / PANEL_COLUMNS), ceil(K / e), PANEL_COLUMNS, e]`` of ``stored``.
        bias: float32, one for each of the panels' columns; zeros where there is none.
        scales: of int8, float32, one for each of the panels' columns; else empty.
    """

    activations = float32
    __slots__ = ("bias", "bias_address", "panels", "panels_address", "scales", "scales_address", "stored")

    def __init__(self, shape: tuple[int, int], format: WeightFormat) -> None:
        self.stored = stored_class(format)
        self.panels = empty_panels(*shape, np.dtype(self.stored))
        columns = self.panels.shape[0] * PANEL_COLUMNS
        self.bias = np.zeros(columns, np.float32)
        self.scales = np.zeros(columns if format.is_quantized else 0, np.float32)
        self.panels_address = address_of(self.panels)
        self.bias_address = address_of(self.bias)
        self.scales_address = address_of(self.scales)
        size_bytes = self.panels.nbytes + self.bias.nbytes + self.scales.nbytes
        super().__init__(shape, format, CPU, size_bytes)


class RowWeight(LinearWeight):
    """On a GPU: rows one after another, as they are stored.

    Attributes:
        weight: ``[N, K]``.
        bias: ``[N]`` float32, or None.
        tier: which kernel multiplies with it, one of `numba_kernels.cuda.gemm.TIERS`; gemv and few_rows only through
            "auto".
        exact: whether a row of the product has the same bits however many rows there are.
        plans: launches of products with it, by what they depend on.
    """

    __slots__ = ("activations", "address", "bias", "bias_address", "exact", "plans", "tier", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, tier: str = "auto", *, exact: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self.activations = weight.dtype
        self.address = weight.address
        self.bias_address = 0 if bias is None else bias.address
        self.tier = tier
        self.exact = exact
        self.plans: dict[Any, Any] = {}
        size_bytes = weight.size_bytes + (0 if bias is None else bias.size_bytes)
        super().__init__((weight.shape[0], weight.shape[1]), FORMATS[weight.dtype.name], weight.device, size_bytes)

    def keep_plan(self, key: Any, launch: Any) -> None:
        """Remembers a launch, so that a product of the same kind is not planned again."""
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
        self.plans[key] = launch


def stored_class(format: WeightFormat) -> Any:
    """The numpy class that carries an element's bits on the cpu."""
    return STORED.get(format.element, format.element.numpy.type)


def packed_bytes(shape: tuple[int, int], format: WeightFormat, device: Device, *, has_bias: bool) -> int:
    """`size_bytes` of the weight that `prepare_linear` will make, padding included."""
    width, depth = shape
    if device.kind != "cpu":
        return round(width * depth / format.elements_per_byte) + 4 * width * has_bias
    return panel_bytes(width, depth, np.dtype(stored_class(format)), has_scales=format.is_quantized)


def prepare_linear(
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    options: LoadOptions = DEFAULT_OPTIONS,
) -> LinearWeight:
    """``weight [N, K]`` on the cpu with an optional ``bias [N]``, laid out for the options' device and in their format;
    several weights are joined over N without a copy between.

    Sources may have any strides (a transposed view, a mapped file) and can be released afterwards.

    Raises:
        InvalidArgumentError: for no weight, one that is not a matrix of float32, float16 or bfloat16 on the cpu,
            different K or types, a bias of another size, or biases of another number than weights.
    """
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [bias] * len(weights) if bias is None or isinstance(bias, Tensor) else list(bias)
    if options.dtype is not None:
        weights = [part.to(options.dtype) for part in weights]
    _check(weights, biases)
    shape = (sum(part.shape[0] for part in weights), weights[0].shape[1])
    joined_bias = np.zeros(shape[0], np.float32)
    first = 0
    for part, part_bias in zip(weights, biases, strict=True):
        if part_bias is not None:
            joined_bias[first : first + part.shape[0]] = part_bias.array.astype(np.float32)
        first += part.shape[0]
    device = options.device
    if device.kind == "cpu":
        panels = PanelWeight(shape, options.format_of(weights[0].dtype))
        panels.bias[: shape[0]] = joined_bias
        first = 0
        for part in weights:
            pack(panels.panels, panels.scales, part.array.view(STORED[part.dtype]), first, NUM_THREADS)
            first += part.shape[0]
        return panels
    rows = Tensor.empty(shape, weights[0].dtype, device)
    first = 0
    for part in weights:
        rows[first : first + part.shape[0]] = part
        first += part.shape[0]
    rows.storage.freeze()
    has_bias = any(part is not None for part in biases)
    return RowWeight(
        rows, Tensor.from_numpy(joined_bias).to(device) if has_bias else None, options.gemm, exact=options.exact
    )


def _check(weights: list[Tensor], biases: list[Tensor | None]) -> None:
    if not weights:
        raise InvalidArgumentError("prepare_linear: weight is an empty sequence", param="weight")
    if len(biases) != len(weights) or (len(weights) > 1 and any(b is biases[0] and b is not None for b in biases[1:])):
        raise InvalidArgumentError(
            f"prepare_linear: bias must hold one entry for each of {len(weights)} weights", param="bias"
        )
    for number, (part, bias) in enumerate(zip(weights, biases, strict=True)):
        if part.ndim != 2 or part.dtype not in STORED:
            raise InvalidArgumentError(
                f"prepare_linear: weight {number} is {part.dtype.name} {part.shape}, "
                "must be [N, K] of float32, float16 or bfloat16",
                param="weight",
            )
        for name, ours, first in (
            ("K", part.shape[1], weights[0].shape[1]),
            ("dtype", part.dtype, weights[0].dtype),
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
