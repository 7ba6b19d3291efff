"""Tensor maps: what a kernel's TMA copies are told about a tensor, 128 bytes that the driver encodes."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from runtime.device.driver import Driver
from runtime.errors import InvalidArgumentError

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import TensorMapLayout

_SIZE = 128
_ALIGNMENT = 64
"""Alignment of the memory that the driver encodes into; the objects of cuda.bindings are aligned to 16 bytes only."""
_MOST_BOX = 256
_ENCODE_TILED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32), ctypes.c_int,
    ctypes.c_int, ctypes.c_int, ctypes.c_int,
)  # fmt: skip


def encode(driver: Driver, address: int, layout: TensorMapLayout) -> bytes:
    """The map of a tensor at an address, to be an argument of type `TENSOR_MAP`. Out of bounds reads as zero.

    Raises InvalidArgumentError, naming what is wrong, for a layout that no map can describe.
    """
    rank = len(layout.shape)
    if not (1 <= rank <= 5 and len(layout.strides) == rank - 1 and len(layout.box) == rank):
        raise InvalidArgumentError(
            f"tensor map: shape {layout.shape}, strides {layout.strides} and box {layout.box} must be of n, n - 1 and "
            "n numbers, n from 1 to 5"
        )
    if address % 16 or any(stride % 16 for stride in layout.strides):
        raise InvalidArgumentError(
            f"tensor map: address {address:#x} and strides {layout.strides} must be multiples of 16"
        )
    if not all(1 <= size <= _MOST_BOX for size in layout.box):
        raise InvalidArgumentError(f"tensor map: box {layout.box} must be 1 to {_MOST_BOX} a dimension")
    types = driver.types
    kinds = types.CUtensorMapDataType
    kind = {
        "bf16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "f16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "f32": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }[layout.dtype]
    swizzles = types.CUtensorMapSwizzle
    swizzle = {
        0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[layout.swizzle_bytes]
    memory = ctypes.create_string_buffer(_SIZE + _ALIGNMENT)
    start = -ctypes.addressof(memory) % _ALIGNMENT
    status = driver.c_function("cuTensorMapEncodeTiled", _ENCODE_TILED)(
        ctypes.addressof(memory) + start,
        int(kind),
        rank,
        address,
        (ctypes.c_uint64 * rank)(*layout.shape),
        (ctypes.c_uint64 * rank)(*layout.strides),
        (ctypes.c_uint32 * rank)(*layout.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        int(types.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(swizzle),
        int(types.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        int(types.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    if status:
        raise driver.error("cuTensorMapEncodeTiled", types.CUresult(status))
    return memory.raw[start : start + _SIZE]
