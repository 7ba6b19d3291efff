"""The part of a multiprocessor that a launch takes while it runs, and whether its successor fits beside it.

A dependent launch asks for its weights early only if its blocks become resident while its predecessor still runs. The
predecessor leaves them what its own resident blocks do not take: registers, shared memory, threads. A launch of more
blocks than fit at once leaves nothing, since its next blocks take what the first ones give back.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba_kernels.cuda.specialisation import Launch
from runtime.device.assemble import assemble
from runtime.device.kernel_cache import KernelCache
from runtime.emulator.driver.architectures import (
    REGISTERS_PER_SM,
    GpuModel,
    blocks_per_sm,
    registers_of_block,
    shared_of_block,
)  # fmt: skip
from runtime.emulator.translation.program import load

HALF = 2  # each kernel of a decode step may take one part of so many


@dataclass(frozen=True, slots=True)
class Residency:
    """A launch's share of each multiprocessor.

    Attributes:
        kernel: its name.
        blocks: resident at once on a multiprocessor.
        waves: how often its blocks fill the GPU, rounded up.
        registers, shared_bytes, threads: of those blocks together.
        block_registers, block_shared_bytes, block_threads: of one block.
    """

    kernel: str
    blocks: int
    waves: int
    registers: int
    shared_bytes: int
    threads: int
    block_registers: int
    block_shared_bytes: int
    block_threads: int

    def takes_half(self, model: GpuModel) -> bool:
        """Whether it leaves half of each multiprocessor."""
        return (
            HALF * self.registers <= REGISTERS_PER_SM
            and HALF * self.shared_bytes <= model.shared_bytes_per_sm
            and HALF * self.threads <= model.threads_per_sm
        )

    def leaves_room_for(self, successor: Residency, model: GpuModel) -> bool:
        """Whether a block of the successor fits beside this launch's blocks."""
        return (
            self.registers + successor.block_registers <= REGISTERS_PER_SM
            and self.shared_bytes + successor.block_shared_bytes <= model.shared_bytes_per_sm
            and self.threads + successor.block_threads <= model.threads_per_sm
        )


def residency(launch: Launch, model: GpuModel, cache: KernelCache) -> Residency:
    """A launch's residency by its machine code, of the product's architecture. Static shared memory is what the PTX
    declares: for sm_90a the linker's log has the system's kilobyte in it, which `shared_of_block` adds."""
    text = cache.get(launch.specialisation, model.arch, is_ptx=True).image.rstrip(b"\0").decode()
    code = assemble(text, model.arch)
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    registers = registers_of_block(threads, code.num_registers)
    shared_bytes = load(text).static_shared_bytes(launch.specialisation.name) + launch.shared_bytes
    shared = shared_of_block(shared_bytes)
    at_once = blocks_per_sm(model, threads, code.num_registers, shared_bytes)
    grid = launch.grid[0] * launch.grid[1] * launch.grid[2]
    blocks = min(at_once, -(-grid // model.num_sms))
    return Residency(
        launch.specialisation.name, blocks, -(-grid // (at_once * model.num_sms)), blocks * registers, blocks * shared,
        blocks * threads, registers, shared, threads,
    )  # fmt: skip
