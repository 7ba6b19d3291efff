"""What the user asks of weights while they are loaded: one value instead of an argument for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict, Unpack

from runtime.communicator import Communicator
from runtime.device.device import CPU, Device
from runtime.dtype import STORED, DType
from runtime.errors import InvalidArgumentError
from runtime.linear.format import FORMATS, WeightFormat, quantized_format

GEMM_TIERS = ("auto", "naive", "tiled", "register", "tensor_core", "hopper", "cublas")


class LoadSettings(TypedDict, total=False):
    """`LoadOptions` in the user's words; the defaults are `LoadOptions.parse`'s."""

    device: Device | str
    dtype: DType | str
    quantization: str
    gemm: str
    exact: bool
    communicator: Communicator | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Where weights go, and as what.

    Attributes:
        device: where they go.
        dtype: the float type that every weight is converted to; None keeps each as it is stored.
        format: what the matrices of linear maps are made into after that; None leaves them floats.
        gemm: the kernel of matrix products on a GPU, one of `GEMM_TIERS`; the cpu has one, "auto".
        exact: whether a row of a product has the same bits alone and among others. On the cpu it always has.
        communicator: the rank that this is, of several that the model is split over; None: there is one alone.

    Raises:
        InvalidArgumentError: for a dtype that is none of the three float types, a format or kernel that the device has
            not, and for cublas in the exact mode.
    """

    device: Device = CPU
    dtype: DType | None = None
    format: WeightFormat | None = None
    gemm: str = "auto"
    exact: bool = False
    communicator: Communicator | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in STORED:
            raise InvalidArgumentError(
                f"dtype must be auto, float32, float16 or bfloat16, not {self.dtype.name!r}", param="dtype"
            )
        if self.format is not None:
            self.format.check(self.device.kind)
        _check_gemm(self.gemm, self.device, self.exact)

    @staticmethod
    def parse(**settings: Unpack[LoadSettings]) -> LoadOptions:
        """The options meant by a user's words; device "cpu", dtype "auto" and quantization "none" are the defaults."""
        dtype = settings.get("dtype", "auto")
        return LoadOptions(
            device=Device.parse(settings.get("device", "cpu")),
            dtype=None if dtype == "auto" else DType.parse(dtype),
            format=quantized_format(settings.get("quantization", "none")),
            gemm=settings.get("gemm", "auto"),
            exact=settings.get("exact", False),
            communicator=settings.get("communicator"),
        )

    @property
    def rank(self) -> int:
        """This rank's number."""
        return 0 if self.communicator is None else self.communicator.rank

    @property
    def num_ranks(self) -> int:
        """How many ranks the model is split over."""
        return 1 if self.communicator is None else self.communicator.num_ranks

    @property
    def quantization(self) -> str:
        """The format's name, or "none"."""
        return "none" if self.format is None else self.format.name

    def format_of(self, dtype: DType) -> WeightFormat:
        """The format in which a matrix of this float type is kept."""
        return self.format or FORMATS[(self.dtype or dtype).name]


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
        from runtime.device import cublas

        cublas.load()
    if gemm == "hopper":
        from runtime.device.gpu import Gpu  # brings the driver, which the cpu does without

        if (arch := Gpu.of(device).arch) != "sm_90a":
            raise InvalidArgumentError(f"gemm is 'hopper', which needs sm_90a: {device} is {arch}", param="gemm")
