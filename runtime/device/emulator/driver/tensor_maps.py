"""The driver's function that encodes tensor maps, in the emulator's own encoding."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cu

from runtime.device.emulator.async_copies.tensor_map import encode
from runtime.device.emulator.driver.state import DriverState, R, Refused, entry, handle_of
from runtime.errors import InvalidArgumentError


def _numbers(values: Sequence[Any] | None, count: int, what: str) -> list[int]:
    numbers = [int(value) for value in values or ()]
    if len(numbers) < count:
        raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{what}: {len(numbers)} numbers of {count}")
    return numbers[:count]


class TensorMapFunctions(DriverState):
    """cuTensorMapEncodeTiled"""

    @entry(1)
    def cuTensorMapEncodeTiled(
        self, tensorDataType: Any, tensorRank: Any, globalAddress: Any, globalDim: Any, globalStrides: Any, boxDim: Any,
        elementStrides: Any, interleave: Any, swizzle: Any, l2Promotion: Any, oobFill: Any,
    ) -> Any:  # fmt: skip
        """Promotion into L2 is a hint, which must be one of the enumeration's."""
        self.context()
        rank = int(tensorRank)
        try:
            cu.CUtensorMapL2promotion(int(l2Promotion))
            data = encode(
                int(tensorDataType),
                handle_of(globalAddress),
                _numbers(globalDim, rank, "globalDim"),
                _numbers(globalStrides, max(rank - 1, 0), "globalStrides"),
                _numbers(boxDim, rank, "boxDim"),
                _numbers(elementStrides, rank, "elementStrides"),
                swizzle=int(swizzle),
                interleave=int(interleave),
                fill=int(oobFill),
            )
        except (InvalidArgumentError, ValueError) as error:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, str(error)) from None
        found = cu.CUtensorMap()
        ctypes.memmove(found.getPtr(), data, len(data))
        return found
