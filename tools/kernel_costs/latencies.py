"""A launch's time beyond its bytes: gaps, first bytes, waves and ends, as a band with sources.

A launch that streams bytes takes

    gap + first byte + stream + ends

`ASSUMPTIONS` has three values of each number: the fastest and the slowest plausible ones, and the expected one. A band
uses all fast, all expected or all slow ones. None was measured by this project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.emulator.driver.architectures import GpuModel
from runtime.emulator.driver.occupancy import blocks_per_sm

Edge = Literal["fast", "expected", "slow"]
EDGES: tuple[Edge, ...] = ("fast", "expected", "slow")


@dataclass(frozen=True, slots=True)
class Assumption:
    """A number of the model. `unit`: "µs", "TB/s", or "" for a share."""

    what: str
    fast: float
    expected: float
    slow: float
    unit: str
    because: str

    def at(self, edge: Edge) -> float:
        value: float = getattr(self, edge)
        return value * {"µs": 1e-6, "TB/s": 1e12, "": 1.0}[self.unit]


ASSUMPTIONS = {
    "bandwidth": Assumption(
        "bandwidth of long reads, share of the data sheet's", 0.93, 0.90, 0.87, "",
        "an H200 copies 4.3 of 4.8 TB/s (runtime/bench/kernels/goals.py); the same share on an H100",
    ),
    "tensor": Assumption(
        "tensor cores' rate in long products, share of the data sheet's", 0.84, 0.82, 0.76, "",
        "an H100 at its power limit does 808 TFLOP/s at best and cuBLAS 741 to 798 (pranjalssh/fast.cu)",
    ),
    "gap": Assumption(
        "from one kernel's end to the next one's start in a graph", 1.9, 2.1, 2.4, "µs",
        "H100, Hazy Research, \"Look Ma, No Bubbles\", 2025",
    ),
    "dependent_gap": Assumption(
        "the same where the next is launched dependently", 1.0, 1.3, 1.6, "µs",
        "the same page; the next one's blocks are there and wait",
    ),
    "memory": Assumption(
        "a first byte from device memory under load", 0.6, 0.7, 0.9, "µs",
        "about 0.5 when idle; hidden where a dependent launch loads its weight before it waits",
    ),
    "cache": Assumption(
        "a first byte from the second-level cache", 0.25, 0.3, 0.4, "µs",
        "about 270 clocks near by, more from the far half; what the kernel in front has written",
    ),
    "ends": Assumption(
        "last sums meet across warps, are stored, the grid's end is seen", 0.3, 0.5, 0.8, "µs",
        "two barriers of a block, a store and a flush of its writes",
    ),
    "lockstep": Assumption(
        "share of a last, incomplete wave's bytes that find no company", 0.0, 0.5, 1.0, "",
        "0: blocks have drifted apart and leave no gap; 1: all blocks of a wave end at once",
    ),
    "softmax": Assumption(
        "share of the exponentials of prefill that products do not hide", 0.4, 0.6, 0.9, "",
        "0.6 is FlashAttention-3's 661 TFLOP/s, and 1 its 582 without overlap (arXiv 2407.08608, table 2)",
    ),
    "cluster": Assumption(
        "blocks of a cluster meet, and read sums out of each other's shared memory", 0.2, 0.4, 0.8, "µs",
        "two barriers, and reads of some 180 clocks each (arXiv 2402.13499)",
    ),
    "cache_bandwidth": Assumption(
        "reads of the second-level cache by all multiprocessors", 7.5, 6.5, 5.5, "TB/s",
        "microbenchmarks of an H100 give 5.5 to 7; `RATES` in numba_kernels/cuda/gemm/product.py has 6.5",
    ),
    "issue": Assumption(
        "warp instructions a clock of a multiprocessor that holds few warps", 2.5, 1.5, 0.8, "",
        "4 at most; the draw's passes are chains of loads, comparisons and atomics",
    ),
}  # fmt: skip

UNDER_WAY_BYTES = {"gemm_skinny": 256}
"""By the kernel's name: bytes of a weight that a thread has on their way; of others 128, or all of shared memory."""


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch.

    Attributes:
        name: the kernel's.
        blocks, threads, shared_bytes: of the grid, of a block, of its dynamic shared memory.
        is_dependent: whether it may start before the previous kernel has ended.
        num_registers, static_shared_bytes: ptxas's, of a thread and of a block; 0 if the kernel was not compiled.
        product: m, n, k of a matrix product, n being the weight's rows; None for other kernels.
        weight_bytes: of its weight.
        cluster: blocks that share K.
    """

    name: str
    blocks: int = 1
    threads: int = 32
    shared_bytes: int = 0
    is_dependent: bool = False
    num_registers: int = 0
    static_shared_bytes: int = 0
    product: tuple[int, int, int] | None = None
    weight_bytes: int = 0
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """One edge of the band on one product."""

    model: GpuModel
    edge: Edge = "expected"

    def of(self, name: str) -> float:
        """An assumption's value, in seconds, bytes a second or as a share."""
        return ASSUMPTIONS[name].at(self.edge)

    @property
    def bytes_per_s(self) -> float:
        return self.of("bandwidth") * self.model.memory_bytes_per_s

    @property
    def tensor_flops(self) -> float:
        return self.of("tensor") * self.model.bf16_flops

    def gap_s(self, *, is_dependent: bool) -> float:
        return self.of("dependent_gap" if is_dependent else "gap")

    def stream_s(self, num_bytes: float, blocks: int, blocks_at_once: int, under_way_bytes: float) -> float:
        """The time of a stream that so many blocks read in equal parts, with so many bytes in flight per block.

        Whole waves are limited by the bandwidth, or by the bytes in flight per latency; so is the last one, by itself,
        for the part that runs in lockstep.
        """
        each, (waves, rest) = num_bytes / blocks, divmod(blocks, blocks_at_once)
        alone = self.of("lockstep")
        time = waves * blocks_at_once * each / self._rate(blocks_at_once * under_way_bytes)
        last = alone / self._rate(max(rest, 1) * under_way_bytes) + (1 - alone) / self.bytes_per_s
        return time + rest * each * last

    def _rate(self, under_way_bytes: float) -> float:
        return min(self.bytes_per_s, under_way_bytes / self.of("memory"))

    def streaming_s(self, launched: Launched, num_bytes: float) -> float:
        """The time of a launch that reads these bytes of a weight once."""
        begins_early = launched.is_dependent and launched.weight_bytes > 0
        return (
            self.gap_s(is_dependent=launched.is_dependent)
            + self.of("cache" if begins_early else "memory")
            + self.stream_s(num_bytes, launched.blocks, self.blocks_at_once(launched), under_way_bytes(launched))
            + self.of("ends")
        )

    def small_s(self, *, is_dependent: bool, num_reads: int = 2) -> float:
        """The time of a launch with almost no traffic: so many dependent reads of the cache."""
        return self.gap_s(is_dependent=is_dependent) + num_reads * self.of("cache") + self.of("ends")

    def blocks_at_once(self, launched: Launched) -> int:
        """Resident blocks of the device. Without known registers, limited by threads and shared memory only."""
        shared = launched.shared_bytes + launched.static_shared_bytes
        return self.model.num_sms * max(
            1, blocks_per_sm(self.model, launched.threads, launched.num_registers or 32, shared)
        )

    def attention_s(self, launched: Launched, kv_bytes: float) -> float:
        """The time of decode attention: lengths, block tables, keys and values; finally the count of a sequence's
        parts, and their records, which its last block combines."""
        return 4 * self.of("cache") + self.streaming_s(launched, kv_bytes)

    def draw_s(self, launched: Launched, warp_instructions: float) -> float:
        """The time of sampling a step's tokens, by the instructions of its few blocks."""
        busy = min(launched.blocks, self.model.num_sms) * self.model.clock_khz * 1e3 * self.of("issue")
        return self.small_s(is_dependent=launched.is_dependent) + warp_instructions / busy


def under_way_bytes(launched: Launched) -> float:
    """Bytes that a block has in flight."""
    by_threads = next((size for name, size in UNDER_WAY_BYTES.items() if launched.name.startswith(name)), 128)
    return max(by_threads * launched.threads, launched.shared_bytes)
