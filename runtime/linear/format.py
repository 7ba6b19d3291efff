"""Formats of a weight matrix's elements: one `WeightFormat` for each that the kernels can read."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from numba_kernels.blocks import BLOCKS
from numba_kernels.cuda.intrinsics.element_types import BITS
from numba_kernels.cuda.packing import Packing
from numba_kernels.split_k import STEP
from runtime.dtype import DType, bfloat16, float16, float32, uint8
from runtime.dtype import int8 as int8_type
from runtime.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The elements of a matrix ``[N, K]`` (or of experts ``[E, N, K]``) in memory.

    Attributes:
        name: as users name it.
        element: the type of an element, or of the word that holds several.
        elements_per_byte: 0.25 for float32, 1 for int8, 2 for four bits.
        scale: the type of the scales, or None without scales.
        block: rows of N by elements of K that share a scale; 0 means all.
        activation: the type that a product rounds rows of x to, or None for the type of the processor's tile.
        activation_block: how many elements of K share a scale of x; 0 means none do. Results depend on where these
            blocks begin.
        split: K may be cut between ranks at multiples of so many elements.
        multiple: of elements that K must be; a last block of panels may be padded.
        has_gpu_kernels: whether products on a GPU can read it.
        packing: the one of `numba_kernels.cuda.packing` that a GPU uses, or "" for rows of elements.
    """

    name: str
    element: DType
    elements_per_byte: float
    scale: DType | None = None
    block: tuple[int, int] = (0, 0)
    activation: DType | None = None
    activation_block: int = 0
    split: int = 1
    multiple: int = 1
    has_gpu_kernels: bool = True
    packing: str = ""

    def size_bytes(self, *shape: int) -> int:
        """Bytes of the elements and scales of a matrix ``[..., N, K]``, without padding."""
        *stacked, width, depth = shape
        scales = 0
        if self.scale is not None:
            rows, elements = self.block
            scales = (-(-width // rows) if rows else 1) * (-(-depth // elements) if elements else 1)
            scales *= self.scale.itemsize
        return math.prod(stacked) * (round(width * depth / self.elements_per_byte) + scales)

    @property
    def segment_step(self) -> int:
        """The exact mode cuts K into segments at multiples of so many elements (`numba_kernels.split_k`)."""
        return math.lcm(STEP, self.split)

    @property
    def is_quantized(self) -> bool:
        """Whether it is made from floats by rounding to a grid."""
        return self.scale is not None

    @property
    def has_row_scales(self) -> bool:
        """Whether a scale depends on all of K, also on what other ranks hold of it."""
        return self.is_quantized and self.block[1] == 0

    def check(self, device_kind: str) -> None:
        """Raises InvalidArgumentError where the device has no product for it."""
        if device_kind != "cpu" and not self.has_gpu_kernels:
            raise InvalidArgumentError(
                f"quantization is {self.name!r}, which is for the cpu: a GPU has no kernels for it",
                param="quantization",
            )


FLOAT32 = WeightFormat("float32", float32, 0.25)
FLOAT16 = WeightFormat("float16", float16, 0.5)
BFLOAT16 = WeightFormat("bfloat16", bfloat16, 0.5)
INT8 = WeightFormat(
    "int8", uint8, 1.0, scale=float32, block=(1, 0), activation=int8_type, activation_block=64, split=64,
    packing="u8",
)  # fmt: skip
"""Integers times the largest magnitude of their row over 127, stored 128 above their value. On a cpu a product rounds x
so, too, 64 elements at a time, and multiplies and adds the integers of such a group exactly:
``out = (sum over groups of scale[group] * float32(sum of int8 products)) * scale[row] + bias``, in float32 and in the
order of K. NaN and infinity, in a weight or in x, give columns or rows that are not finite. On a GPU x stays as it is:
integers become 16 bits in registers, exactly, and the row's scale multiplies the finished sum.

A row has one scale for all of K: a rank that holds some of its inputs rounds them by the largest magnitude of the whole
row. In exact mode the sum over groups is cut into segments of whole groups, and a row's scale multiplies the tree."""


def _blocks(name: str, elements: int, size_bytes: int, *, rounds: bool = True) -> WeightFormat:
    return WeightFormat(
        name, uint8, elements / size_bytes, activation=int8_type if rounds else None,
        activation_block=32 if rounds else 0, split=elements, multiple=elements // BLOCKS[name].pairs,
        has_gpu_kernels=False,
    )  # fmt: skip


GGML_FORMATS = {
    name: _blocks(name, BLOCKS[name].elements, 4 * BLOCKS[name].words)
    for name in (
        "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS",
        "IQ1", "IQ2", "IQ3_XXS", "IQ3_S",
    )
}  # fmt: skip
"""Blocks of a GGUF file by their names; integers and scales stay as they are (`numba_kernels.blocks`). A
product rounds x by 32 elements of K: ``out = sum over groups of scale[x] * (scale[group] * float32(sum of integers) -
sum of x * minimum[group]) + bias``, in float32 and in the order of K."""

GROUP_FORMATS = {
    name: _blocks(name, 64, size_bytes)
    for name, size_bytes in (
        ("int4_half_zeros", 40), ("int4_bfloat", 36), ("int4_bfloat_zeros", 40), ("int4_float", 40),
        ("int4_float_zeros", 44), ("int8_half_zeros", 72), ("int8_bfloat", 68), ("int8_bfloat_zeros", 72),
        ("int8_float", 72), ("int8_float_zeros", 76), ("nvfp4", 48),
    )
} | {"fp8": _blocks("fp8", 128, 132, rounds=False)}  # fmt: skip
"""The same for matrices of other checkpoints: integers with such scales, and zeros, of each 32 elements; NVFP4, e2m1
with float32 scales of 16. int4 and int8 with float16 scales alone are Q4_0 and Q8_0. fp8 is e4m3 with float32 scales of
128: x is as for a bfloat16 weight."""


@functools.cache
def packed_format(packing: Packing) -> WeightFormat:
    """A checkpoint's quantised matrix as a GPU keeps it."""
    per_byte = 8 / BITS[packing.element]
    return WeightFormat(packing.name, uint8, per_byte, split=max(1, packing.group), packing=packing.name)


FORMATS = {each.name: each for each in (FLOAT32, FLOAT16, BFLOAT16, INT8)}
ROUNDED = ("int4", "mxfp4", "fp8")
"""The types that matrices are rounded to while they are read, before a device keeps them as if stored so."""

QUANTIZATIONS = ("none", *(each.name for each in FORMATS.values() if each.is_quantized), *ROUNDED)


def quantized_format(quantization: str) -> WeightFormat | None:
    """The matrices' format; None for "none" and `ROUNDED`. Raises InvalidArgumentError for an unknown name."""
    if quantization not in QUANTIZATIONS:
        raise InvalidArgumentError(
            f"quantization is {quantization!r}, must be one of {', '.join(QUANTIZATIONS)}", param="quantization"
        )
    return FORMATS.get(quantization)
