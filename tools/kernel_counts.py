"""What a kernel does when it runs, counted by the emulator: instructions, sectors, bank conflicts, tensor-core work."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from numba_kernels.cuda.specialisation import Launch
from runtime.device.allocator import DeviceBlock
from runtime.device.device import Device
from runtime.device.driver import Driver
from runtime.device.emulator.architectures import A100, H100, H200, RTX_4090, RTX_5090, GpuModel
from runtime.device.emulator.counters import Counters
from runtime.device.emulator.driver import EmulatedDriver
from runtime.device.emulator.launch import Checks
from runtime.device.emulator.ptx import Instruction, Kernel, Symbol, parse
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import identifier

PRODUCTS = (A100, RTX_4090, RTX_5090, H100, H200)
LEAST_SECTOR_EFFICIENCY = 0.9
SECTOR_BYTES = 32

NUMPY = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}

_MMA_SHAPE = re.compile(r"\.m(\d+)n(\d+)k(\d+)\.")
_KINDS = {  # an opcode's first part: the column of the instruction mix
    **dict.fromkeys(("mma", "wgmma"), "tensor"),
    **dict.fromkeys(("bra", "brx", "bar", "barrier", "ret", "exit", "setp", "call", "selp"), "control"),
    **dict.fromkeys(("mov", "cvt", "cvta", "prmt", "shfl"), "move"),
}
KINDS = ("tensor", "float", "integer", "global", "shared", "move", "control")


@dataclass(frozen=True, slots=True)
class Work:
    """What a case has to do at the very least.

    Attributes:
        read_bytes, written_bytes: of device memory, each byte once.
        flops: multiply and add counted as two.
        is_tensor_core: whether tensor cores could do them (products of 16-bit factors).
    """

    read_bytes: int
    written_bytes: int
    flops: int
    is_tensor_core: bool = False

    @property
    def least_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    def roofline_us(self, model: GpuModel) -> float:
        """Microseconds below which no kernel can do it: its bytes at full bandwidth, or its arithmetic at full rate."""
        rate = model.bf16_flops if self.is_tensor_core else model.float32_flops
        return 1e6 * max(self.least_bytes / model.memory_bytes_per_s, self.flops / rate)


@dataclass(slots=True)
class Counts:
    """One case's counts, over all of its launches.

    Attributes:
        mix: warp instructions by `KINDS`.
        requests, sectors: warp instructions to device memory, 32-byte sectors that they touched.
        useful_sectors: the sectors that their bytes fill at best; a sector that lanes share counts once.
        wavefronts, conflicts: of shared memory; conflicts of the kernel, and of its loops alone.
        tensor_flops: done by tensor cores, padding included.
        wasted_by, conflicts_by: instruction ("kernel:index opcode"): sectors that need not have been, and conflicts.
    """

    case: str
    kernels: tuple[str, ...]
    warp_instructions: int = 0
    mix: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    requests: int = 0
    sectors: int = 0
    useful_sectors: float = 0.0
    wavefronts: int = 0
    conflicts: int = 0
    loop_conflicts: int = 0
    tensor_flops: int = 0
    wasted_by: dict[str, int] = field(default_factory=dict)
    conflicts_by: dict[str, int] = field(default_factory=dict)

    @property
    def moved_bytes(self) -> int:
        return self.sectors * SECTOR_BYTES

    @property
    def sectors_per_request(self) -> float:
        return self.sectors / self.requests if self.requests else 0.0

    @property
    def sector_efficiency(self) -> float:
        return self.useful_sectors / self.sectors if self.sectors else 1.0


class Bench:
    """An emulated GPU that counts, and what a case needs to upload and launch."""

    def __init__(self, arch: str) -> None:
        from cuda.bindings import driver as bindings

        self.emulator = EmulatedDriver(arch, num_devices=1, checks=Checks.TRAFFIC, is_order_checked=False)
        driver = Driver(self.emulator, bindings, arch=arch)
        driver.call("cuInit", 0)
        self.gpu = Gpu(Device(f"emulated:{arch}:0"), driver)
        self.rng = np.random.default_rng(0)
        self._held: list[DeviceBlock] = []
        self._kernels: dict[str, Kernel] = {}

    def put(self, array: np.ndarray[Any, Any]) -> int:
        """The address of an array's copy, which stays until the case ends."""
        address = self.empty(array.nbytes)
        self.gpu.write(address, array)
        return address

    def normal(self, shape: tuple[int, ...] | int, dtype: str) -> int:
        """The address of normally distributed numbers."""
        return self.put(self.rng.standard_normal(shape, dtype=np.float32).astype(NUMPY[dtype]))

    def empty(self, size_bytes: int) -> int:
        self._held.append(self.gpu.allocate(size_bytes))
        return self._held[-1].address

    def launch(self, launch: Launch | None, *arguments: float) -> None:
        """One launch. Raises ValueError for the plan of an empty result, which counts nothing."""
        if launch is None:
            raise ValueError("a case that launches nothing")
        self.gpu.launch(launch, *arguments)
        specialisation = launch.specialisation
        name = identifier(specialisation.name)
        if name not in self._kernels:
            image = self.gpu.kernel_cache.get(specialisation, self.gpu.arch, is_ptx=True).image
            (self._kernels[name],) = parse(image.rstrip(b"\0").decode()).kernels.values()

    def count(self, case: str, run: Any) -> Counts:
        """Runs a case, ``run(bench)``, and counts what it launched."""
        self.emulator.counters.clear()
        self.emulator.is_counting = True
        try:
            run(self)
            self.gpu.synchronize()
        finally:
            self.emulator.is_counting = False
            self._held.clear()
        found = Counts(case, tuple(self.emulator.counters))
        for name, counters in self.emulator.counters.items():
            _add(found, counters, self._kernels[name])
        return found


def _add(total: Counts, counters: Counters, kernel: Kernel) -> None:
    total.warp_instructions += counters.warp_instructions
    for opcode, number in counters.by_opcode.items():
        total.mix[_kind(opcode)] += number
        if opcode.startswith("mma.") and (shape := _MMA_SHAPE.search(opcode + ".")):
            total.tensor_flops += number * 2 * int(shape[1]) * int(shape[2]) * int(shape[3])
    in_loop = loops(kernel.instructions, kernel.labels)
    for site, traffic in counters.traffic.items():
        total.requests += traffic.global_requests
        total.sectors += traffic.global_sectors
        total.useful_sectors += min(traffic.global_bytes / SECTOR_BYTES, traffic.global_sectors)
        total.wavefronts += traffic.shared_wavefronts
        total.conflicts += traffic.bank_conflicts
        total.loop_conflicts += traffic.bank_conflicts if in_loop[site] else 0
        place = f"{kernel.name}:{site} {kernel.instructions[site].opcode}"
        wasted = traffic.global_sectors - math.ceil(traffic.global_bytes / SECTOR_BYTES)
        if wasted > 0:
            total.wasted_by[place] = wasted
        if traffic.bank_conflicts:
            total.conflicts_by[place] = traffic.bank_conflicts


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
    """Of each instruction, whether it lies between a branch backwards and its target."""
    inside = [False] * len(instructions)
    for index, instruction in enumerate(instructions):
        if instruction.parts[0] == "bra":
            target = min(labels[operand.name] for operand in instruction.operands if isinstance(operand, Symbol))
            for other in range(target, index + 1):
                inside[other] = True
    return inside
