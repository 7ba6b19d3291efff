"""Kernels' counts at run time, by the emulator: instructions, sectors, bank conflicts, tensor-core work."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from runtime.device.gpu import Gpu
from runtime.emulator.execution.counters import Counters
from runtime.emulator.execution.launch import Checks
from runtime.emulator.translation.ptx import Instruction, Kernel, Symbol, parse

SECTOR_BYTES = 32

_MMA_SHAPE = re.compile(r"\.m(\d+)n(\d+)k(\d+)\.")
_KINDS = {  # an opcode's first part: the column of the instruction mix
    **dict.fromkeys(("mma", "wgmma"), "tensor"),
    **dict.fromkeys(("bra", "brx", "bar", "barrier", "ret", "exit", "setp", "call", "selp"), "control"),
    **dict.fromkeys(("mov", "cvt", "cvta", "prmt", "shfl"), "move"),
}
KINDS = ("tensor", "float", "integer", "global", "shared", "move", "control")
_WORD = re.compile(r"ld\.(?:\w+\.)*global(?:\.(?!v\d)[\w:]+)*\.[bus]32")
_SCALAR_FLOPS = {"fma": 2, "add": 1, "sub": 1, "mul": 1}
_WAITS = (
    "bar.sync", "bar.cta.sync", "bar.red", "bar.cta.red", "barrier.sync", "barrier.cta.sync", "barrier.red",
    "barrier.cta.red", "barrier.cluster.wait", "mbarrier.try_wait", "mbarrier.test_wait",
)  # fmt: skip


@dataclass(slots=True)
class Counts:
    """One case's counts, over all of its launches.

    Attributes:
        mix: warp instructions by `KINDS`.
        requests, sectors: warp instructions to device memory, 32-byte sectors that they touched; a TMA copy is one
            request, for any number of multicast targets.
        global_bytes: of device memory requested by lanes.
        word_sectors: sectors of loads of one 32-bit integer a lane: tables and lengths.
        useful_sectors: the fewest sectors for their bytes; a sector that lanes share counts once.
        wavefronts, conflicts: of shared memory; conflicts of the kernel, and of its loops alone. TMA's writes and
            wgmma's reads are not modelled.
        barriers: warp instructions at which a warp waits for other warps or for TMA: barriers of the block and of the
            cluster, mbarriers. Arrivals that do not wait, and warp-level synchronisation, are left out.
        tensor_flops: done by tensor cores, padding included.
        scalar_flops: additions and multiplications of float32 done elsewhere, by 32 lanes each; a multiply-add is two.
        wasted_by, conflicts_by: instruction ("kernel:index opcode"): wasted sectors, and conflicts.
    """

    case: str
    kernels: tuple[str, ...]
    warp_instructions: int = 0
    mix: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    requests: int = 0
    sectors: int = 0
    global_bytes: int = 0
    word_sectors: int = 0
    useful_sectors: float = 0.0
    wavefronts: int = 0
    conflicts: int = 0
    loop_conflicts: int = 0
    barriers: int = 0
    tensor_flops: int = 0
    scalar_flops: int = 0
    wasted_by: dict[str, int] = field(default_factory=dict)
    conflicts_by: dict[str, int] = field(default_factory=dict)

    @property
    def moved_bytes(self) -> int:
        return self.sectors * SECTOR_BYTES

    @property
    def sectors_per_request(self) -> float:
        return self.sectors / self.requests if self.requests else 0.0

    @property
    def data_bytes(self) -> int:
        """The traffic without tables and lengths."""
        return (self.sectors - self.word_sectors) * SECTOR_BYTES

    @property
    def tensor_share(self) -> float:
        """The share of all additions and multiplications that tensor cores did."""
        flops = self.tensor_flops + self.scalar_flops
        return self.tensor_flops / flops if flops else 0.0

    @property
    def sector_efficiency(self) -> float:
        return self.useful_sectors / self.sectors if self.sectors else 1.0

    def add(self, counters: Counters, kernel: Kernel) -> None:
        """Adds the counts of one kernel's launches; `kernel` is its parsed PTX."""
        self.warp_instructions += counters.warp_instructions
        for opcode, number in counters.by_opcode.items():
            self.mix[_kind(opcode)] += number
            if opcode.startswith(_WAITS):
                self.barriers += number
            if opcode.startswith(("mma.", "wgmma.mma_async.")) and (shape := _MMA_SHAPE.search(opcode + ".")):
                flops = number * 2 * int(shape[1]) * int(shape[2]) * int(shape[3])
                self.tensor_flops += flops if opcode.startswith("mma.") else flops // 4  # one for each of four warps
            first, *rest = opcode.split(".")
            if first in _SCALAR_FLOPS and rest and rest[-1] == "f32":
                self.scalar_flops += number * 32 * _SCALAR_FLOPS[first]
        in_loop = loops(kernel.instructions, kernel.labels)
        for site, traffic in counters.traffic.items():
            self.requests += traffic.global_requests
            self.sectors += traffic.global_sectors
            self.global_bytes += traffic.global_bytes
            if _WORD.fullmatch(kernel.instructions[site].opcode):
                self.word_sectors += traffic.global_sectors
            self.useful_sectors += min(traffic.global_bytes / SECTOR_BYTES, traffic.global_sectors)
            self.wavefronts += traffic.shared_wavefronts
            self.conflicts += traffic.bank_conflicts
            self.loop_conflicts += traffic.bank_conflicts if in_loop[site] else 0
            place = f"{kernel.name}:{site} {kernel.instructions[site].opcode}"
            wasted = traffic.global_sectors - math.ceil(traffic.global_bytes / SECTOR_BYTES)
            if wasted > 0:
                self.wasted_by[place] = wasted
            if traffic.bank_conflicts:
                self.conflicts_by[place] = traffic.bank_conflicts


@contextmanager
def counting(gpu: Gpu, by_kernel: dict[str, Counts] | None = None) -> Iterator[Counts]:
    """Counts an emulated device's launches until the block ends, then fills in the yielded counts, and `by_kernel` with
    each kernel's. On a real device all stay 0."""
    found = Counts("", ())
    if not gpu.driver.is_emulated:
        yield found
        return
    emulator = gpu.driver.api
    gpu.synchronize()
    before = emulator.checks, emulator.is_counting
    emulator.counters.clear()
    emulator.checks, emulator.is_counting = emulator.checks | Checks.TRAFFIC, True
    try:
        yield found
        gpu.synchronize()
    finally:
        emulator.checks, emulator.is_counting = before
    found.kernels = tuple(emulator.counters)
    loaded = {kernel.compiled.name: kernel for kernel in gpu.loaded_kernels()}
    for name, counters in emulator.counters.items():
        (kernel,) = parse(loaded[name].compiled.image.rstrip(b"\0").decode()).kernels.values()
        found.add(counters, kernel)
        if by_kernel is not None:
            title = loaded[name].specialisation.name
            by_kernel[title] = Counts(title, (name,))
            by_kernel[title].add(counters, kernel)


def _kind(opcode: str) -> str:
    first, *rest = opcode.split(".")
    if first in _KINDS:
        return _KINDS[first]
    if first in ("ldmatrix", "stmatrix") or (first in ("ld", "st", "atom", "red") and "shared" in rest):
        return "shared"
    if first in ("ld", "st", "atom", "red", "cp", "prefetch"):
        return "move" if "param" in rest else "global"
    return "float" if rest and rest[-1] in ("f32", "f16", "f16x2", "bf16", "bf16x2") else "integer"


def loops(instructions: Sequence[Instruction], labels: dict[str, int]) -> list[bool]:
    """Whether each instruction lies between a branch backwards and its target."""
    inside = [False] * len(instructions)
    for index, instruction in enumerate(instructions):
        if instruction.parts[0] == "bra":
            target = min(labels[operand.name] for operand in instruction.operands if isinstance(operand, Symbol))
            for other in range(target, index + 1):
                inside[other] = True
    return inside
