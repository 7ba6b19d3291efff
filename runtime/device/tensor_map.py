"""Tensor maps: a tensor's description for a kernel's TMA copies, 128 bytes that the driver encodes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from numba_kernels.cuda.specialisation import TensorMapLayout
from runtime.device.driver import Driver
from runtime.errors import InvalidArgumentError

_SIZE = 128
_ALIGNMENT = 64
"""Alignment of the memory that the driver encodes into; cuda.bindings aligns its objects to 16 bytes only."""
_MOST_BOX = 256
MOST_ADDRESSES = 512
"""The most remembered maps of tensors of one layout: more than a model has layers."""
_ENCODE_TILED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32), ctypes.c_int,
    ctypes.c_int, ctypes.c_int, ctypes.c_int,
)  # fmt: skip


def encode(driver: Driver, address: int, layout: TensorMapLayout) -> bytes:
    """The map of a tensor at an address, to be an argument of type `TENSOR_MAP`. Out of bounds reads as zero.

    Raises InvalidArgumentError, naming the fault, for a layout that no map can describe.
    """
    return TensorMaps(driver, layout)[address]


class TensorMaps(dict[int, bytes]):
    """The maps of tensors of one layout, by their addresses; at most `MOST_ADDRESSES` are remembered.

    Raises InvalidArgumentError, naming the fault, for a layout that no map can describe, and for an address that
    none can.
    """

    __slots__ = ("_driver", "_encode", "_layout", "_settings", "_types")

    def __init__(self, driver: Driver, layout: TensorMapLayout) -> None:
        rank = len(layout.shape)
        if not (1 <= rank <= 5 and len(layout.strides) == rank - 1 and len(layout.box) == rank):
            raise InvalidArgumentError(
                f"tensor map: shape {layout.shape}, strides {layout.strides} and box {layout.box} must be of n, n - 1 "
                "and n numbers, n from 1 to 5"
            )
        if not all(1 <= size <= _MOST_BOX for size in layout.box):
            raise InvalidArgumentError(f"tensor map: box {layout.box} must be 1 to {_MOST_BOX} a dimension")
        self._driver = driver
        self._layout = layout
        self._encode = driver.c_function("cuTensorMapEncodeTiled", _ENCODE_TILED)
        kind, swizzle, *rest = _numbers(driver.types)
        self._types = kind[layout.dtype], rank
        self._settings = (
            (ctypes.c_uint64 * rank)(*layout.shape), (ctypes.c_uint64 * rank)(*layout.strides),
            (ctypes.c_uint32 * rank)(*layout.box), (ctypes.c_uint32 * rank)(*[1] * rank), rest[0],
            swizzle[layout.swizzle_bytes], *rest[1:],
        )  # fmt: skip

    def __missing__(self, address: int) -> bytes:
        layout = self._layout
        if (address + layout.offset) % 16 or any(stride % 16 for stride in layout.strides):
            raise InvalidArgumentError(
                f"tensor map: address {address + layout.offset:#x} and strides {layout.strides} must be multiples of 16"
            )
        memory = ctypes.create_string_buffer(_SIZE + _ALIGNMENT)
        start = -ctypes.addressof(memory) % _ALIGNMENT
        tensor = address + layout.offset
        status = self._encode(ctypes.addressof(memory) + start, *self._types, tensor, *self._settings)
        if status:
            raise self._driver.error("cuTensorMapEncodeTiled", self._driver.types.CUresult(status))
        if len(self) >= MOST_ADDRESSES:
            self.pop(next(iter(self)))
        found = self[address] = memory.raw[start : start + _SIZE]
        return found


@functools.cache
def _numbers(types: Any) -> tuple[Any, ...]:
    """The driver's numbers for dtypes and for swizzles, and those of interleaving, promotion and filling, as maps are
    made."""
    kinds, swizzles = types.CUtensorMapDataType, types.CUtensorMapSwizzle
    return (
        {
            "bf16": int(kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16), "f16": int(kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16),
            "f32": int(kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32),
        },
        {
            0: int(swizzles.CU_TENSOR_MAP_SWIZZLE_NONE), 32: int(swizzles.CU_TENSOR_MAP_SWIZZLE_32B),
            64: int(swizzles.CU_TENSOR_MAP_SWIZZLE_64B), 128: int(swizzles.CU_TENSOR_MAP_SWIZZLE_128B),
        },
        int(types.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(types.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        int(types.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )  # fmt: skip
