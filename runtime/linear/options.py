"""Options of loading a model, in one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

from numba_kernels.split_k import SEGMENTS
from runtime.communicator import Communicator, Pipeline
from runtime.device import cublas
from runtime.device.device import CPU, Device
from runtime.device.gpu import Gpu
from runtime.dtype import KV_DTYPES, STORED, DType, float32
from runtime.errors import InvalidArgumentError
from runtime.linear.addends import AddendSource
from runtime.linear.format import FORMATS, ROUNDED, WeightFormat, quantized_format

Split = Literal["outputs", "inputs"]
"""The side over which a matrix is sharded: each rank has some of the outputs, or some of the inputs; then their results
are added."""

ACTIVATIONS = ("auto", "float")
GEMM_TIERS = ("auto", "naive", "tiled", "register", "tensor_core", "hopper", "cublas")


class LoadSettings(TypedDict, total=False):
    """`LoadOptions` in the user's words; the defaults are `LoadOptions.parse`'s."""

    device: Device | str
    dtype: DType | str
    quantization: str
    kv_cache_dtype: str
    kv_cache_dtype_skip_layers: str
    state_dtype: str
    gemm: str
    exact: bool
    activations: str
    communicator: Communicator | None
    pipeline: Pipeline | None
    stages: tuple[range, ...]
    addends: AddendSource | None
    pending_tokens: int
    hf_overrides: str  # of the model's config, which is no matter of `LoadOptions`; nor is
    mmproj: str  # the file of its tower


UNCHANGED = ("gemm", "exact", "activations", "communicator", "pipeline", "stages", "addends", "pending_tokens")
"""Settings that `LoadOptions` has as they are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of loading weights: device, formats and sharding.

    Attributes:
        device: of the weights.
        dtype: the float type that every weight is converted to; None keeps each as it is stored.
        format: of the matrices of linear maps, converted after that; None leaves them floats.
        rounding: one of `ROUNDED`, applied while they are read; "" leaves them floats.
        kv_dtype: the type of the KV pages, or None for that of the weights.
        kv_skip_layers: layers whose pages have the weights' type all the same: numbers, and "sliding_window".
        gemm: the kernel of matrix products on a GPU, one of `GEMM_TIERS`; the cpu has one, "auto".
        exact: whether a row of a product has the same bits alone and among others, and on 1, 2, 4 and 8 ranks. On the
            cpu the former always holds.
        activations: "auto" lets products round rows of x to bytes where the device's product for the weight does; with
            "float" none does, and weights that have no other product become floats.
        communicator: this rank's, where the model is sharded over several; else None.
        pipeline: this rank's stage of several, or None if one has all layers.
        stages: the layers of each stage; empty without stages.
        addends: makes the addends of the model's maps; None for none.
        pending_tokens: the most draft tokens of a step, which pages of recurrent states have room for.
        state_dtype: of recurrent states, float32 or bfloat16.

    Raises:
        InvalidArgumentError: for a dtype that is none of the three float types, a format, kernel or type of pages that
            the device lacks, for int8 on the cpu with float activations, for cublas in the exact mode, and in that mode
            for another number of ranks than 1, 2, 4 or 8.
    """

    device: Device = CPU
    dtype: DType | None = None
    format: WeightFormat | None = None
    rounding: str = ""
    kv_dtype: DType | None = None
    kv_skip_layers: tuple[str, ...] = ()
    gemm: str = "auto"
    exact: bool = False
    activations: str = "auto"
    communicator: Communicator | None = None
    pipeline: Pipeline | None = None
    stages: tuple[range, ...] = ()
    addends: AddendSource | None = None
    pending_tokens: int = 0
    state_dtype: DType = float32

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in STORED:
            raise InvalidArgumentError(
                f"dtype must be auto, float32, float16 or bfloat16, not {self.dtype.name!r}", param="dtype"
            )
        if self.format is not None:
            self.format.check(self.device.kind)
            if self.gemm == "cublas":
                raise InvalidArgumentError(
                    f"gemm is 'cublas', which reads no weights in {self.format.name}", param="gemm"
                )
        if self.activations not in ACTIVATIONS:
            raise InvalidArgumentError(
                f"activations is {self.activations!r}, must be one of {', '.join(ACTIVATIONS)}", param="activations"
            )
        if self.format is not None and self.rounds_x(self.format) and self.has_float_activations:
            raise InvalidArgumentError(
                f"activations is 'float', but quantization is {self.format.name!r}, whose products on the cpu round"
                " rows of x to int8: take quantization 'fp8' or 'none', or activations 'auto'",
                param="activations",
            )
        if self.rounding:
            _check_rounding(self.rounding, self.gemm)
        if self.exact and SEGMENTS % self.num_ranks:
            raise InvalidArgumentError(
                f"exact: sums are of {SEGMENTS} segments, which {self.num_ranks} ranks cannot share", param="exact"
            )
        _check_gemm(self.gemm, self.device, self.exact)

    @staticmethod
    def parse(**settings: Unpack[LoadSettings]) -> LoadOptions:
        """The options meant by a user's words; device "cpu", dtype and kv_cache_dtype "auto" and quantization "none"
        are the defaults."""
        dtype, quantization = settings.get("dtype", "auto"), settings.get("quantization", "none")
        kv_dtype = settings.get("kv_cache_dtype", "auto")
        if kv_dtype != "auto" and kv_dtype not in KV_DTYPES:
            raise InvalidArgumentError(
                f"kv_cache_dtype is {kv_dtype!r}, must be one of auto, {', '.join(KV_DTYPES)}", param="kv_cache_dtype"
            )
        unchanged: dict[str, Any] = {name: value for name, value in settings.items() if name in UNCHANGED}
        return LoadOptions(
            device=Device.parse(settings.get("device", "cpu")),
            dtype=None if dtype == "auto" else DType.parse(dtype),
            format=quantized_format(quantization),
            rounding=quantization if quantization in ROUNDED else "",
            kv_dtype=KV_DTYPES.get(kv_dtype),
            kv_skip_layers=_skip_layers(settings.get("kv_cache_dtype_skip_layers", ""), kv_dtype),
            state_dtype=DType.parse(settings.get("state_dtype", "float32")),
            **unchanged,
        )

    @property
    def has_float_activations(self) -> bool:
        """Whether no product may round x to bytes."""
        return self.activations == "float"

    def rounds_x(self, format: WeightFormat) -> bool:
        """Whether the device's product for weights of this format rounds rows of x to bytes."""
        return self.device.kind == "cpu" and format.activation is not None

    @property
    def rounds_long_steps(self) -> bool:
        """Whether a GPU's products of many rows may round x to bytes, where a checkpoint has it so."""
        return self.device.kind != "cpu" and not self.exact and not self.has_float_activations

    @property
    def rank(self) -> int:
        """This rank's number."""
        return 0 if self.communicator is None else self.communicator.rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the model is sharded over."""
        return 1 if self.communicator is None else self.communicator.num_ranks

    def whole_shape(self, shape: tuple[int, int], split: Split | None) -> tuple[int, int]:
        """(N, K) of a map of which a rank has this shape."""
        width, depth = shape
        if split == "outputs":
            return width * self.num_ranks, depth
        return width, depth * (self.num_ranks if split == "inputs" else 1)

    def num_segments(self, split: Split | None) -> int:
        """Segments in which this rank adds up K of a map that is split so; 0 if K is not cut."""
        return SEGMENTS // self.num_ranks if self.exact and split == "inputs" else 0

    @property
    def quantization(self) -> str:
        """The format's name for users, or "none"."""
        return self.rounding or ("none" if self.format is None else self.format.name)

    def format_of(self, dtype: DType) -> WeightFormat:
        """The format in which a matrix of this float type is kept."""
        return self.format or FORMATS[(self.dtype or dtype).name]


def _skip_layers(text: str, kv_dtype: str) -> tuple[str, ...]:
    name = "kv_cache_dtype_skip_layers"
    words = tuple(word.strip() for word in text.split(",")) if text else ()
    for word in words:
        if word != "sliding_window" and not (word.isascii() and word.isdigit()):
            raise InvalidArgumentError(
                f"{name} has {word!r}, must be numbers of layers and sliding_window, with commas between", param=name
            )
    if words and kv_dtype not in ("int8", "fp8"):
        raise InvalidArgumentError(f"{name} is {text!r}, which needs kv_cache_dtype int8 or fp8", param=name)
    return words


def _check_rounding(rounding: str, gemm: str) -> None:
    if gemm == "cublas":
        raise InvalidArgumentError(f"quantization is {rounding!r}, which cublas does not read", param="quantization")


def _check_gemm(gemm: str, device: Device, exact: bool) -> None:
    if gemm not in GEMM_TIERS:
        raise InvalidArgumentError(f"gemm is {gemm!r}, must be one of {', '.join(GEMM_TIERS)}", param="gemm")
    if gemm != "auto" and device.kind == "cpu":
        raise InvalidArgumentError(f"gemm is {gemm!r}: the cpu has one matrix product, 'auto'", param="gemm")
    if gemm == "cublas":
        if exact:
            raise InvalidArgumentError(
                "gemm is 'cublas', whose bits depend on the batch: exact needs ours", param="gemm"
            )
        if device.kind == "emulated":
            raise InvalidArgumentError(f"gemm is 'cublas', which needs a GPU: {device} is emulated", param="gemm")
        cublas.load()
    if gemm == "hopper" and (arch := Gpu.of(device).arch) != "sm_90a":
        raise InvalidArgumentError(f"gemm is 'hopper', which needs sm_90a: {device} is {arch}", param="gemm")
