"""The element types of a Tensor, with their names in numpy, PTX and safetensors, and how two of them combine.

Both fp8 types are those of the OCP 8-bit specification (https://arxiv.org/abs/2209.05433): `float8_e4m3` is
the one without infinities that ml_dtypes and PyTorch call e4m3fn. There is no float64: neither weights nor
activations use it.

It does not know tensors or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from runtime.errors import InvalidArgumentError

NDArray = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type. There is exactly one object of each, so `is` and `==` agree.

    Attributes:
        name: our name, e.g. "bfloat16".
        itemsize: bytes of one element.
        numpy: the numpy dtype of the same bits (from ml_dtypes for bfloat16 and fp8).
        ptx: the PTX name of the type; bool is stored as a byte of 0 or 1, hence "u8".
        safetensors: the name in a safetensors header.
        is_floating: whether it is a floating-point type.
    """

    name: str
    itemsize: int
    numpy: np.dtype[Any]
    ptx: str
    safetensors: str
    is_floating: bool

    @staticmethod
    def parse(value: Any) -> DType:
        """The DType of a DType, a numpy dtype or scalar type, or a name.

        Names are ours ("bfloat16"), short ("bf16"), PyTorch's ("torch.bfloat16") or safetensors' ("BF16").

        Raises:
            InvalidArgumentError: for anything else; the message lists the names that are understood.
        """
        if isinstance(value, DType):
            return value
        if isinstance(value, str):
            found = _BY_NAME.get(value.removeprefix("torch.").lower())
        else:
            try:
                found = _BY_NUMPY.get(np.dtype(value)) if value is not None else None
            except TypeError:
                found = None
        if found is None:
            names = ", ".join(dtype.name for dtype in ALL_DTYPES)
            raise InvalidArgumentError(f"dtype {value!r} is not one of {names}", param="dtype")
        return found

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return DType.parse, (self.name,)


float32 = DType("float32", 4, np.dtype(np.float32), "f32", "F32", True)
float16 = DType("float16", 2, np.dtype(np.float16), "f16", "F16", True)
bfloat16 = DType("bfloat16", 2, np.dtype(ml_dtypes.bfloat16), "bf16", "BF16", True)
float8_e4m3 = DType("float8_e4m3", 1, np.dtype(ml_dtypes.float8_e4m3fn), "e4m3", "F8_E4M3", True)
float8_e5m2 = DType("float8_e5m2", 1, np.dtype(ml_dtypes.float8_e5m2), "e5m2", "F8_E5M2", True)
int8 = DType("int8", 1, np.dtype(np.int8), "s8", "I8", False)
uint8 = DType("uint8", 1, np.dtype(np.uint8), "u8", "U8", False)
int32 = DType("int32", 4, np.dtype(np.int32), "s32", "I32", False)
int64 = DType("int64", 8, np.dtype(np.int64), "s64", "I64", False)
bool_ = DType("bool", 1, np.dtype(np.bool_), "u8", "BOOL", False)

ALL_DTYPES = (float32, float16, bfloat16, float8_e4m3, float8_e5m2, int8, uint8, int32, int64, bool_)

STORED: dict[DType, Any] = {float32: np.float32, bfloat16: np.uint16, float16: np.int16}
"""The types of weights and pages, and the types that carry their bits in numba's CPU code, which has no 16-bit
floating-point number."""

PAGES: dict[DType, Any] = {**STORED, int8: np.int8, float8_e4m3: np.uint8}
"""The types of KV pages, and those that carry their bits on the CPU. One-byte types have a scale a token and head."""

KV_DTYPES: dict[str, DType] = {
    "float32": float32, "float16": float16, "bfloat16": bfloat16, "int8": int8, "fp8": float8_e4m3
}  # fmt: skip
"""The names of the types of KV pages, as users write them."""

_ALIASES = {
    "float": float32, "f32": float32, "fp32": float32,
    "half": float16, "f16": float16, "fp16": float16,
    "bf16": bfloat16,
    "f8e4m3": float8_e4m3, "fp8_e4m3": float8_e4m3, "float8_e4m3fn": float8_e4m3,
    "f8e5m2": float8_e5m2, "fp8_e5m2": float8_e5m2,
    "i8": int8, "u8": uint8, "i32": int32, "int": int32, "i64": int64, "long": int64,
    "bool_": bool_,
}  # fmt: skip
_BY_NAME = {
    **{dtype.name: dtype for dtype in ALL_DTYPES},
    **{dtype.safetensors.lower(): dtype for dtype in ALL_DTYPES},
    **_ALIASES,
}
_BY_NUMPY = {dtype.numpy: dtype for dtype in ALL_DTYPES}


def dtype_of_array(array: np.ndarray[Any, Any]) -> DType:
    """The DType of a numpy array's elements.

    Raises:
        InvalidArgumentError: if no Tensor can hold them (float64, foreign byte order, objects ...).
    """
    found = _BY_NUMPY.get(array.dtype)
    if found is None:
        names = ", ".join(dtype.name for dtype in ALL_DTYPES)
        raise InvalidArgumentError(f"array's dtype {array.dtype!r} is not one of {names}", param="dtype")
    return found


def promote(left: DType, right: DType) -> DType:
    """The element type in which two tensors are combined.

    - A bool gives way to every other type, an integer to every floating-point type.
    - Two integers give the wider; int8 with uint8 gives int32, the narrowest here that holds both.
    - Two floating-point types give the wider. float16 with bfloat16 gives float32, since neither holds the
      other; so do the two fp8 types; fp8 with any other gives the other.

    Example: `promote(int64, bfloat16)` is bfloat16.
    """
    if left is right:
        return left
    if left.is_floating != right.is_floating:
        return left if left.is_floating else right
    if left is bool_ or right is bool_:
        return right if left is bool_ else left
    if left.itemsize == right.itemsize:  # float16 and bfloat16; the fp8 pair; int8 and uint8
        return float32 if left.is_floating else int32
    return left if left.itemsize > right.itemsize else right


def promote_scalar(tensor: DType, scalar: bool | int | float) -> DType:
    """The element type in which a tensor is combined with a Python number, which is weak: it never widens
    the tensor within its own kind. An int turns bool into int64; a float turns the others into float32.
    """
    if isinstance(scalar, bool) or tensor.is_floating:
        return tensor
    if isinstance(scalar, int):
        return int64 if tensor is bool_ else tensor
    return float32
