"""The GPUs that an emulated device can pose as: their limits, and the speeds that a roofline needs.

Limits per compute capability are those of the CUDA Programming Guide's appendix "Compute Capabilities" (tables of
feature support and technical specifications). Counts, clocks, bandwidths and peak rates of the products:

- A100: "NVIDIA A100 Tensor Core GPU Architecture" whitepaper and the A100 80GB SXM datasheet.
- RTX 3090: "NVIDIA Ampere GA102 GPU Architecture" whitepaper, its table of GeForce RTX 3090.
- RTX 4090: "NVIDIA Ada GPU Architecture" whitepaper, appendix A.
- H100, H200: "NVIDIA H100 Tensor Core GPU Architecture" whitepaper and the H100 SXM and H200 SXM datasheets.
- B200: "NVIDIA Blackwell Architecture Technical Brief" and the HGX B200 datasheet (per GPU).
- RTX 5090: "NVIDIA RTX Blackwell GPU Architecture" whitepaper, appendix A.

Limits on resident blocks follow the "CUDA Occupancy Calculator" of the CUDA Toolkit: registers are handed out by 256 a
warp, warps by four, shared memory by 128 bytes. Tensor-core rates are dense, with float32 accumulation. An emulated
device's memory is an argument of its driver, not `memory_bytes`, which is the product's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from runtime.errors import InvalidArgumentError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

WARP_SIZE = 32
MAX_THREADS_PER_BLOCK = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
REGISTERS_PER_SM = 65536
DEFAULT_SHARED_BYTES_PER_BLOCK = 48 * KIB
"""Shared memory that a block may have without asking for more (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`)."""
RESERVED_SHARED_BYTES_PER_BLOCK = 1 * KIB
"""The system's share of a multiprocessor's shared memory for each resident block, from sm_80 on."""
MAX_PORTABLE_CLUSTER = 8

_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One product.

    Attributes:
        arch: the architecture that it is compiled for, with its features: "sm_90a".
        name: the product's.
        num_sms: streaming multiprocessors.
        num_gpcs: groups of them, as even as pairs of multiprocessors allow; a cluster lies in one.
        shared_bytes_per_sm, shared_bytes_per_block: of a multiprocessor, and of a block that asks for the most.
        threads_per_sm, blocks_per_sm: resident at once.
        l2_bytes: level-2 cache.
        memory_bytes: device memory of the product.
        clock_khz, memory_clock_khz: the boost clock, and the memory's as the driver reports it.
        memory_bus_bits: width of the memory's bus.
        memory_bytes_per_s: peak bandwidth.
        float32_flops: peak float32 rate outside the tensor cores, fma counted as two.
        bf16_flops, fp8_flops, int8_ops: peak dense tensor-core rates; 0 where the architecture has none.
    """

    arch: str
    name: str
    num_sms: int
    num_gpcs: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    l2_bytes: int
    memory_bytes: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int
    memory_bytes_per_s: float
    float32_flops: float
    bf16_flops: float
    fp8_flops: float
    int8_ops: float

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability: (9, 0)."""
        return parse_arch(self.arch)[:2]

    @property
    def has_clusters(self) -> bool:
        return self.capability >= (9, 0)

    @property
    def max_clusters(self) -> tuple[tuple[int, int], ...]:
        """(blocks a cluster, clusters at once) where a multiprocessor holds one block; empty without clusters."""
        return tuple((size, self.clusters_at_once(size, 1)) for size in (2, 4, 8)) if self.has_clusters else ()

    def clusters_at_once(self, size: int, blocks_per_sm: int) -> int:
        """How many clusters of `size` blocks run at once, of which a multiprocessor holds `blocks_per_sm`."""
        pairs = self.num_sms // 2
        groups = [2 * (pairs // self.num_gpcs + (index < pairs % self.num_gpcs)) for index in range(self.num_gpcs)]
        return sum(group * blocks_per_sm // size for group in groups)

    @property
    def device_name(self) -> str:
        """The emulated driver's name of it."""
        return f"Emulated {self.name} ({self.arch})"

    def runs(self, target: str) -> bool:
        """Whether PTX for a target can run here: an older or equal one; of one with features, only the same."""
        major, minor, suffix = parse_arch(target)
        if suffix == "a":
            return target == self.arch
        if suffix == "f":
            return major == self.capability[0] and (major, minor) <= self.capability
        return (major, minor) <= self.capability


A100 = GpuModel(
    arch="sm_80", name="A100", num_sms=108, num_gpcs=7, shared_bytes_per_sm=164 * KIB,
    shared_bytes_per_block=163 * KIB, threads_per_sm=2048, blocks_per_sm=32, l2_bytes=40 * MIB,
    memory_bytes=80 * GIB, clock_khz=1_410_000, memory_clock_khz=1_593_000, memory_bus_bits=5120,
    memory_bytes_per_s=2.039e12, float32_flops=19.5e12, bf16_flops=312e12, fp8_flops=0.0, int8_ops=624e12,
)  # fmt: skip
RTX_3090 = GpuModel(
    arch="sm_86", name="RTX 3090", num_sms=82, num_gpcs=7, shared_bytes_per_sm=100 * KIB,
    shared_bytes_per_block=99 * KIB, threads_per_sm=1536, blocks_per_sm=16, l2_bytes=6 * MIB, memory_bytes=24 * GIB,
    clock_khz=1_695_000, memory_clock_khz=9_751_000, memory_bus_bits=384, memory_bytes_per_s=936e9,
    float32_flops=35.6e12, bf16_flops=71e12, fp8_flops=0.0, int8_ops=284e12,
)  # fmt: skip
RTX_4090 = GpuModel(
    arch="sm_89", name="RTX 4090", num_sms=128, num_gpcs=11, shared_bytes_per_sm=100 * KIB,
    shared_bytes_per_block=99 * KIB, threads_per_sm=1536, blocks_per_sm=24, l2_bytes=72 * MIB,
    memory_bytes=24 * GIB, clock_khz=2_520_000, memory_clock_khz=10_501_000, memory_bus_bits=384,
    memory_bytes_per_s=1.008e12, float32_flops=82.6e12, bf16_flops=165.2e12, fp8_flops=330.3e12, int8_ops=660.6e12,
)  # fmt: skip
H100 = GpuModel(
    arch="sm_90a", name="H100", num_sms=132, num_gpcs=8, shared_bytes_per_sm=228 * KIB,
    shared_bytes_per_block=227 * KIB, threads_per_sm=2048, blocks_per_sm=32, l2_bytes=50 * MIB,
    memory_bytes=80 * GIB, clock_khz=1_980_000, memory_clock_khz=2_619_000, memory_bus_bits=5120,
    memory_bytes_per_s=3.35e12, float32_flops=67e12, bf16_flops=989.4e12, fp8_flops=1978.9e12, int8_ops=1978.9e12,
)  # fmt: skip
H200 = replace(
    H100, name="H200", memory_bytes=141 * 10**9, memory_clock_khz=3_201_000, memory_bus_bits=6144,
    memory_bytes_per_s=4.8e12,
)  # fmt: skip
B200 = GpuModel(
    arch="sm_100a", name="B200", num_sms=148, num_gpcs=8, shared_bytes_per_sm=228 * KIB,
    shared_bytes_per_block=227 * KIB, threads_per_sm=2048, blocks_per_sm=32, l2_bytes=126 * MIB,
    memory_bytes=180 * 10**9, clock_khz=1_965_000, memory_clock_khz=3_996_000, memory_bus_bits=8192,
    memory_bytes_per_s=8.0e12, float32_flops=75e12, bf16_flops=2250e12, fp8_flops=4500e12, int8_ops=4500e12,
)  # fmt: skip
RTX_5090 = GpuModel(
    arch="sm_120a", name="RTX 5090", num_sms=170, num_gpcs=11, shared_bytes_per_sm=100 * KIB,
    shared_bytes_per_block=99 * KIB, threads_per_sm=1536, blocks_per_sm=24, l2_bytes=96 * MIB,
    memory_bytes=32 * GIB, clock_khz=2_407_000, memory_clock_khz=14_001_000, memory_bus_bits=512,
    memory_bytes_per_s=1.792e12, float32_flops=104.8e12, bf16_flops=209.5e12, fp8_flops=419e12, int8_ops=838e12,
)  # fmt: skip

GPU_MODELS = {model.name: model for model in (A100, RTX_3090, RTX_4090, H100, H200, B200, RTX_5090)}
"""All of them by name."""

MODEL_OF_ARCH = {
    "sm_80": A100, "sm_86": RTX_3090, "sm_89": RTX_4090, "sm_90": H200, "sm_90a": H200, "sm_100": B200,
    "sm_100a": B200, "sm_120": RTX_5090, "sm_120a": RTX_5090,
}  # fmt: skip
"""The product that an architecture's emulated device poses as."""


def parse_arch(arch: str) -> tuple[int, int, str]:
    """``"sm_90a"`` → ``(9, 0, "a")``. Raises InvalidArgumentError for anything else."""
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise InvalidArgumentError(f"{arch!r} is no architecture such as 'sm_80' or 'sm_90a'", param="arch")
    return int(match[1]), int(match[2]), match[3]


def model_of(name: str) -> GpuModel:
    """The product for an architecture ("sm_80") or for its own name ("H100").

    Raises:
        InvalidArgumentError: if there is none; lists the names.
    """
    model = MODEL_OF_ARCH.get(name) or GPU_MODELS.get(name)
    if model is None:
        known = ", ".join((*MODEL_OF_ARCH, *GPU_MODELS))
        raise InvalidArgumentError(f"{name!r} is no GPU that can be emulated: {known}", param="arch")
    return model


_REGISTER_UNIT = 256  # registers, for a warp
_WARP_UNIT = 4
_SHARED_UNIT = 128


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def blocks_per_sm(model: GpuModel, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks of a kernel that one multiprocessor holds at once; 0 where not even one fits.

    Args:
        threads: a block.
        registers: a thread.
        shared_bytes: a block, static and dynamic.
    """
    if threads < 1 or shared_bytes > model.shared_bytes_per_block:
        return 0
    warps = -(-threads // WARP_SIZE)
    warps_by_registers = REGISTERS_PER_SM // registers_of_block(1, registers) // _WARP_UNIT * _WARP_UNIT
    return min(
        model.blocks_per_sm,
        model.threads_per_sm // WARP_SIZE // warps,
        warps_by_registers // warps,
        model.shared_bytes_per_sm // shared_of_block(shared_bytes),
    )


def registers_of_block(threads: int, registers: int) -> int:
    """Registers that a multiprocessor gives a block of so many threads with so many registers each."""
    return -(-threads // WARP_SIZE) * _up(registers * WARP_SIZE, _REGISTER_UNIT)


def shared_of_block(shared_bytes: int) -> int:
    """Shared memory that a multiprocessor gives a block with so many static and dynamic bytes."""
    return _up(shared_bytes + RESERVED_SHARED_BYTES_PER_BLOCK, _SHARED_UNIT)
