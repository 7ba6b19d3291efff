"""A weight matrix in the layout that its device's matrix product reads, made once when a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numba_kernels.cpu.launch import address_of
from numba_kernels.cpu.panels import empty_panels, pack
from numba_kernels.cpu.pool import NUM_THREADS
from numba_kernels.cpu.target import PANEL_COLUMNS
from runtime.device.device import CPU, Device
from runtime.dtype import STORED, DType
from runtime.errors import InvalidArgumentError
from runtime.tensor.tensor import Tensor

QUANTIZATIONS = ("none", "int8")

GEMM_TIERS = ("auto", "naive", "tiled", "register", "tensor_core", "hopper", "cublas")


class LinearWeight:
    """A weight matrix ``[N, K]`` and its bias; made by `prepare_linear`, read by `ops.linear` and `ops.embedding`.

    Attributes:
        shape: (N, K).
        dtype: the type that the weight had, float32, float16 or bfloat16; it is stored so unless it is quantised.
        quantization: "none", or "int8" for bytes and a scale for each of the N rows.
        device: where it lies.
        size_bytes: of matrix, scales and bias, padding included.
    """

    __slots__ = ("device", "dtype", "quantization", "shape", "size_bytes")

    def __init__(
        self, shape: tuple[int, int], dtype: DType, device: Device, size_bytes: int, quantization: str = "none"
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.size_bytes = size_bytes
        self.quantization = quantization

    def __repr__(self) -> str:
        quantized = "" if self.quantization == "none" else f", quantization={self.quantization}"
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype.name}, device={self.device}{quantized})"


class PanelWeight(LinearWeight):
    """On the cpu: panels of neighbouring columns, as the register tiles read them (`numba_kernels.cpu.panels`).

    Attributes:
        stored: the numpy class that carries an element's bits.
        panels: ``[ceil(N / PANEL_COLUMNS), ceil(K / e), PANEL_COLUMNS, e]`` of ``stored``.
        bias: float32, one for each of the panels' columns; zeros where there is none.
        scales: of int8, float32, one for each of the panels' columns; else empty.
    """

    __slots__ = ("bias", "bias_address", "panels", "panels_address", "scales", "scales_address", "stored")

    def __init__(self, shape: tuple[int, int], dtype: DType, quantization: str = "none") -> None:
        self.stored = np.uint8 if quantization == "int8" else STORED[dtype]
        self.panels = empty_panels(*shape, np.dtype(self.stored))
        columns = self.panels.shape[0] * PANEL_COLUMNS
        self.bias = np.zeros(columns, np.float32)
        self.scales = np.zeros(columns if quantization == "int8" else 0, np.float32)
        self.panels_address = address_of(self.panels)
        self.bias_address = address_of(self.bias)
        self.scales_address = address_of(self.scales)
        size_bytes = self.panels.nbytes + self.bias.nbytes + self.scales.nbytes
        super().__init__(shape, dtype, CPU, size_bytes, quantization)


class RowWeight(LinearWeight):
    """On a GPU: rows one after another, as they are stored.

    Attributes:
        weight: ``[N, K]``.
        bias: ``[N]`` float32, or None.
        tier: which kernel multiplies with it, one of `numba_kernels.cuda.gemm.TIERS`; gemv and few_rows only through
            "auto".
        exact: whether a row of the product has the same bits however many rows there are.
    """

    __slots__ = ("bias", "exact", "tier", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, tier: str = "auto", *, exact: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self.tier = tier
        self.exact = exact
        size_bytes = weight.size_bytes + (0 if bias is None else bias.size_bytes)
        super().__init__((weight.shape[0], weight.shape[1]), weight.dtype, weight.device, size_bytes)


def prepare_linear(
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    device: Device = CPU,
    gemm: str = "auto",
    exact: bool = False,
    quantization: str = "none",
) -> LinearWeight:
    """``weight [N, K]`` on the cpu with an optional ``bias [N]``, laid out for `device`; several weights are joined
    over N without a copy between.

    Sources may have any strides (a transposed view, a mapped file) and can be released afterwards.

    `gemm` names the kernel on a GPU, one of `GEMM_TIERS`; the cpu has one, "auto". With `exact` a row of a product has
    the same bits alone and among others; on the cpu it always has.

    `quantization` is one of `QUANTIZATIONS`; "int8" is for the cpu. It rounds each of the N rows to integers times its
    largest magnitude over 127; a product rounds each row of x so, too, by groups of 64 elements of K, and then
    multiplies and adds the integers of a group exactly: ``out = (sum over groups of scale[group] * float32(sum of
    int8 products)) * scale[row] + bias``, in float32 and in the order of K. NaN and infinity, in a weight or in x, give
    rows or columns that are not finite.

    Raises:
        InvalidArgumentError: for a name that is no quantization, or one that the device has not; for no weight, one
            that is not a matrix of float32, float16 or bfloat16 on the cpu, different K or types, a bias of another
            size, or biases of another number than weights.
    """
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [bias] * len(weights) if bias is None or isinstance(bias, Tensor) else list(bias)
    _check(weights, biases)
    check_gemm(gemm, device)
    check_quantization(quantization, device)
    if exact and gemm == "cublas":
        raise InvalidArgumentError("gemm is 'cublas', whose bits depend on the batch: exact needs ours", param="gemm")
    shape = (sum(part.shape[0] for part in weights), weights[0].shape[1])
    joined_bias = np.zeros(shape[0], np.float32)
    first = 0
    for part, part_bias in zip(weights, biases, strict=True):
        if part_bias is not None:
            joined_bias[first : first + part.shape[0]] = part_bias.array.astype(np.float32)
        first += part.shape[0]
    if device.kind == "cpu":
        panels = PanelWeight(shape, weights[0].dtype, quantization)
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
    return RowWeight(rows, Tensor.from_numpy(joined_bias).to(device) if has_bias else None, gemm, exact=exact)


def check_gemm(gemm: str, device: Device) -> None:
    """Raises InvalidArgumentError for a name that is no tier, any but "auto" on the cpu, or a device without it."""
    if gemm not in GEMM_TIERS:
        raise InvalidArgumentError(f"gemm is {gemm!r}, must be one of {', '.join(GEMM_TIERS)}", param="gemm")
    if gemm != "auto" and device.kind == "cpu":
        raise InvalidArgumentError(f"gemm is {gemm!r}: the cpu has one matrix product, 'auto'", param="gemm")
    if gemm == "cublas":
        if device.kind == "emulated":
            raise InvalidArgumentError(f"gemm is 'cublas', which needs a GPU: {device} is emulated", param="gemm")
        from runtime.device import cublas

        cublas.load()
    if gemm == "hopper":
        from runtime.device.gpu import Gpu  # brings the driver, which the cpu does without

        if (arch := Gpu.of(device).arch) != "sm_90a":
            raise InvalidArgumentError(f"gemm is 'hopper', which needs sm_90a: {device} is {arch}", param="gemm")


def check_quantization(quantization: str, device: Device) -> None:
    """Raises InvalidArgumentError for a name that is not one of `QUANTIZATIONS`, or one that the device has not."""
    if quantization not in QUANTIZATIONS:
        raise InvalidArgumentError(
            f"quantization is {quantization!r}, must be one of {', '.join(QUANTIZATIONS)}", param="quantization"
        )
    if quantization != "none" and device.kind != "cpu":
        raise InvalidArgumentError(
            f"quantization is {quantization!r}, which is for the cpu: {device} has kernels for 'none' alone",
            param="quantization",
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
