"""A list of requested kernels, without compiling them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.device.compiled_kernel import CompiledKernel, argument_format, identifier
from runtime.device.kernel_cache import KernelCache

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import Specialisation


class KernelList(KernelCache):
    """Records the kernels requested and compiles none; only a DryDriver can load its images."""

    def __init__(self) -> None:
        super().__init__()
        self.specialisations: list[Specialisation] = []

    def get(self, specialisation: Specialisation, arch: str, *, is_ptx: bool) -> CompiledKernel:
        self.specialisations.append(specialisation)
        return CompiledKernel(
            name=identifier(specialisation.name),
            arch=arch,
            is_ptx=is_ptx,
            argument_format=argument_format(specialisation),
            waits_for_dependency=True,
            num_registers=0,
            spill_bytes=0,
            static_shared_bytes=0,
            image=b"\0",
        )
