"""GGUF's number formats: blocks of neighbours in a row that share scales, and their dequantisation.

The layouts are those of llama.cpp's `ggml-common.h`, the products are taken in the order of its `dequantize_row_*`, in
float32 without fused multiply-adds: each block gives the same bits as the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from runtime.dtype import DType, bfloat16, float16, float32

Array = np.ndarray[Any, Any]

_CHUNK_ELEMENTS = 1 << 16  # decoded at once, so that intermediate results stay in the cache

_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice e2m1's


@dataclass(frozen=True, slots=True)
class GgmlFormat:
    """One of ggml's tensor types.

    Attributes:
        name: as ggml calls it, such as "Q4_K".
        block: elements of a row that lie together.
        layout: of such a block's bytes.
        dtype: of decoded elements: the stored float type, or float32.
        decode: blocks `[n]` of the layout to elements `[n, block]` float32; None for plain floats.
    """

    name: str
    block: int
    layout: np.dtype[Any]
    dtype: DType = float32
    decode: Callable[[Array], Any] | None = None

    def row_bytes(self, num_elements: int) -> int:
        """Bytes of a row, whose elements fill its blocks."""
        return num_elements // self.block * self.layout.itemsize

    def dequantise(self, raw: Array) -> Array:
        """Rows of bytes `[..., row_bytes]` to their elements `[..., num_elements]`, of `dtype`."""
        blocks = raw.view(self.layout)
        if self.decode is None:
            return blocks
        flat, step = blocks.reshape(-1), max(1, _CHUNK_ELEMENTS // self.block)
        values = np.empty((flat.size, self.block), np.float32)
        for first in range(0, flat.size, step):
            values[first : first + step] = self.decode(flat[first : first + step])
        return values.reshape(*blocks.shape[:-1], -1)


def _float(blocks: Array, field: str) -> Array:
    """A float16 of each block as float32, to be broadcast over its elements."""
    values: Array = blocks[field].astype(np.float32)
    return values


def _cut(packed: Array, bits: int, run: int) -> Any:
    """Integers of 8, 4, 2 or 1 bits: every `run` bytes hold, low bits first, `8 / bits` runs of elements.

    `[n, size]` -> `[n, size * 8 / bits / run, run]`, uint8.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(packed), -1, run)


def _nibbles(blocks: Array) -> Any:
    """Sixteen bytes: the low halves, then the high ones. `[n, 32]`."""
    return _cut(blocks["q"], 4, 16).reshape(len(blocks), 32)


def _fifth_bits(blocks: Array) -> Any:
    """`[n, 32]` integers of five bits, whose highest lie together."""
    high = np.unpackbits(blocks["high"], axis=1, bitorder="little")
    return _nibbles(blocks) | high << np.uint8(4)


def _q4_0(blocks: Array) -> Any:
    return _float(blocks, "d")[:, None] * (_nibbles(blocks).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Array) -> Any:
    return _float(blocks, "d")[:, None] * _nibbles(blocks).astype(np.float32) + _float(blocks, "m")[:, None]


def _q5_0(blocks: Array) -> Any:
    return _float(blocks, "d")[:, None] * (_fifth_bits(blocks).astype(np.float32) - np.float32(16))


def _q5_1(blocks: Array) -> Any:
    return _float(blocks, "d")[:, None] * _fifth_bits(blocks).astype(np.float32) + _float(blocks, "m")[:, None]


def _q8_0(blocks: Array) -> Any:
    return _float(blocks, "d")[:, None] * blocks["q"].astype(np.float32)


def _q2_k(blocks: Array) -> Any:
    scales, minima = _cut(blocks["scales"], 4, 16).transpose(1, 0, 2).astype(np.float32)
    scales = (_float(blocks, "d")[:, None] * scales)[:, :, None]
    minima = (_float(blocks, "dmin")[:, None] * minima)[:, :, None]
    q = _cut(blocks["q"], 2, 32).reshape(-1, 16, 16).astype(np.float32)
    return (scales * q - minima).reshape(-1, 256)


def _q3_k(blocks: Array) -> Any:
    """Scales of six bits: the low four of all sixteen in eight bytes, then the high two in four bytes."""
    low = _cut(blocks["scales"][:, :8], 4, 8).reshape(-1, 16)
    high = _cut(blocks["scales"][:, 8:], 2, 4).reshape(-1, 16)
    scales = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    scales = (_float(blocks, "d")[:, None] * scales)[:, :, None]
    is_kept = _cut(blocks["high"], 1, 32).reshape(-1, 16, 16)  # elsewhere 4 is taken off
    q = _cut(blocks["q"], 2, 32).reshape(-1, 16, 16) + (is_kept << np.uint8(2))
    return (scales * (q.astype(np.float32) - np.float32(4))).reshape(-1, 256)


def k_scales(packed: Array) -> tuple[Array, Array]:
    """Eight scales and eight minima of six bits, `[n, 8]` each, out of twelve bytes `[n, 12]`.

    The first four of each kind lie in the low six bits of bytes 0 to 7; the last four have their low four bits in bytes
    8 to 11 and their high two above the first ones.
    """
    first, low = packed[:, :8].reshape(-1, 2, 4), packed[:, 8:]
    last = np.stack([low & np.uint8(15), low >> np.uint8(4)], axis=1) | first >> np.uint8(6) << np.uint8(4)
    both = np.concatenate([first & np.uint8(63), last], axis=2)  # [n, scales or minima, 8]
    return both[:, 0], both[:, 1]


def _scaled_less_minima(blocks: Array, q: Array) -> Any:
    scales, minima = (part.astype(np.float32) for part in k_scales(blocks["scales"]))
    scales = (_float(blocks, "d")[:, None] * scales)[:, :, None]
    minima = (_float(blocks, "dmin")[:, None] * minima)[:, :, None]
    return (scales * q.astype(np.float32) - minima).reshape(-1, 256)


def _q4_k(blocks: Array) -> Any:
    return _scaled_less_minima(blocks, _cut(blocks["q"], 4, 32))


def _q5_k(blocks: Array) -> Any:
    return _scaled_less_minima(blocks, _cut(blocks["q"], 4, 32) | _cut(blocks["high"], 1, 32) << np.uint8(4))


def _q6_k(blocks: Array) -> Any:
    scales = (_float(blocks, "d")[:, None] * blocks["scales"].astype(np.float32))[:, :, None]
    low, high = _cut(blocks["q"], 4, 64).reshape(-1, 8, 32), _cut(blocks["high"], 2, 32)
    q = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    return (scales * q.reshape(-1, 16, 16)).reshape(-1, 256)


def _iq4_nl(blocks: Array) -> Any:
    return _float(blocks, "d")[:, None] * _IQ4_VALUES[_nibbles(blocks)]


def _iq4_xs(blocks: Array) -> Any:
    low = np.stack([blocks["low"] & np.uint8(15), blocks["low"] >> np.uint8(4)], axis=2).reshape(-1, 8)
    high = (blocks["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)).astype(np.uint8)
    scales = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    scales = (_float(blocks, "d")[:, None] * scales)[:, :, None]
    return (scales * _IQ4_VALUES[_cut(blocks["q"], 4, 16).reshape(-1, 8, 32)]).reshape(-1, 256)


def _mxfp4(blocks: Array) -> Any:
    """The scale is half of e8m0's, since the values are twice e2m1's."""
    exponent = blocks["exponent"].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - np.uint32(1)) << np.uint32(23))
    return bits.view(np.float32)[:, None] * _FP4_VALUES[_nibbles(blocks)]


def _quantised(name: str, block: int, decode: Callable[[Array], Any], *fields: Any) -> GgmlFormat:
    return GgmlFormat(name, block, np.dtype(list(fields)), decode=decode)


_D, _M, _DMIN, _NIBBLES = ("d", "<f2"), ("m", "<f2"), ("dmin", "<f2"), ("q", "u1", 16)

FORMATS: dict[int, GgmlFormat] = {
    0: GgmlFormat("F32", 1, np.dtype("<f4")),
    1: GgmlFormat("F16", 1, np.dtype("<f2"), float16),
    30: GgmlFormat("BF16", 1, np.dtype(ml_dtypes.bfloat16), bfloat16),
    2: _quantised("Q4_0", 32, _q4_0, _D, _NIBBLES),
    3: _quantised("Q4_1", 32, _q4_1, _D, _M, _NIBBLES),
    6: _quantised("Q5_0", 32, _q5_0, _D, ("high", "u1", 4), _NIBBLES),
    7: _quantised("Q5_1", 32, _q5_1, _D, _M, ("high", "u1", 4), _NIBBLES),
    8: _quantised("Q8_0", 32, _q8_0, _D, ("q", "i1", 32)),
    10: _quantised("Q2_K", 256, _q2_k, ("scales", "u1", 16), ("q", "u1", 64), _D, _DMIN),
    11: _quantised("Q3_K", 256, _q3_k, ("high", "u1", 32), ("q", "u1", 64), ("scales", "u1", 12), _D),
    12: _quantised("Q4_K", 256, _q4_k, _D, _DMIN, ("scales", "u1", 12), ("q", "u1", 128)),
    13: _quantised("Q5_K", 256, _q5_k, _D, _DMIN, ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)),
    14: _quantised("Q6_K", 256, _q6_k, ("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _D),
    20: _quantised("IQ4_NL", 32, _iq4_nl, _D, _NIBBLES),
    23: _quantised("IQ4_XS", 256, _iq4_xs, _D, ("high", "<u2"), ("low", "u1", 4), ("q", "u1", 128)),
    39: _quantised("MXFP4", 32, _mxfp4, ("exponent", "u1"), _NIBBLES),
}  # fmt: skip
"""By the number in the file."""

OTHER_NAMES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
"""Types that are not read, for messages."""
