"""The driver's function that encodes tensor maps, in the emulator's own encoding."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from cuda.bindings import driver as cu

from runtime.emulator.async_copies.tensor_map import encode
from runtime.emulator.driver.state import DriverState, R, Refused, entry
from runtime.errors import InvalidArgumentError

_ALIGNMENT = 64


class TensorMapFunctions(DriverState):
    """cuTensorMapEncodeTiled, called as C calls it (`Driver.c_function`)"""

    def cuTensorMapEncodeTiled(
        self, tensorMap: int, tensorDataType: int, tensorRank: int, globalAddress: int | None, globalDim: Sequence[int],
        globalStrides: Sequence[int], boxDim: Sequence[int], elementStrides: Sequence[int], interleave: int,
        swizzle: int, l2Promotion: int, oobFill: int,
    ) -> int:  # fmt: skip
        """The status. Addresses, and pointers to the numbers of each dimension; promotion into L2 is a hint, which
        must be one of the enumeration's."""

        def numbers(pointer: Sequence[int], count: int) -> list[int]:
            return [pointer[index] for index in range(count)]

        @entry()
        def write(self: TensorMapFunctions) -> None:
            self.context()
            if not tensorMap or tensorMap % _ALIGNMENT:
                raise Refused(
                    R.CUDA_ERROR_INVALID_VALUE, f"tensorMap is {tensorMap or 0:#x}, no multiple of {_ALIGNMENT}"
                )
            if not 1 <= tensorRank <= 5:
                raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"tensorRank is {tensorRank}, must be 1 to 5")
            try:
                cu.CUtensorMapL2promotion(l2Promotion)
                data = encode(
                    tensorDataType,
                    globalAddress or 0,
                    numbers(globalDim, tensorRank),
                    numbers(globalStrides, tensorRank - 1),
                    numbers(boxDim, tensorRank),
                    numbers(elementStrides, tensorRank),
                    swizzle=swizzle,
                    interleave=interleave,
                    fill=oobFill,
                )
            except (InvalidArgumentError, ValueError) as error:
                raise Refused(R.CUDA_ERROR_INVALID_VALUE, str(error)) from None
            ctypes.memmove(tensorMap, data, len(data))

        return int(write(self)[0])
