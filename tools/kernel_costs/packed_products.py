"""Modelled times of products of one row and of 16 with packed weights on an H200, compared with bf16: docs/kernels.md.

    python -m tools.kernel_costs.packed_products

A launch takes gap + first byte + its slowest resource + ends. Resources are the weight's stream from memory, which
whole waves of blocks read at the sustained bandwidth or at their bytes in flight, the second-level cache, and issued
instructions. None of the constants was measured by this project unless it says so.
"""

from __future__ import annotations

import argparse
import math
from types import ModuleType

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import quantised_gemv, skinny, skinny_shape
from numba_kernels.cuda.specialisation import Launch
from runtime.emulator.driver.architectures import GpuModel, blocks_per_sm, model_of
from tools.kernel_costs.page import table

GAP_S = 2.1e-6
"""From one kernel's end to the next one's start in a graph (Hazy Research, "Look Ma, No Bubbles", 2025: 1.9 to 2.4)."""
BANDWIDTH_SHARE = 0.90
"""Sustained by long reads, as a share of the data sheet's: an H200 copies 4.3 of 4.8 TB/s (measured here)."""
MEMORY_S, CACHE_S = 0.7e-6, 0.3e-6
"""A first byte from device memory under load, and from the second-level cache."""
CACHE_BYTES_PER_S = 6.5e12
"""Reads of the second-level cache by all multiprocessors: microbenchmarks of an H100 give 5.5 to 7 TB/s."""
CLUSTER_S = 0.4e-6
"""Blocks of a cluster meet and read sums out of each other's shared memory (arXiv 2402.13499)."""
ENDS_S = 0.5e-6
"""Last sums meet across warps and are stored, and the grid's end is seen."""
LOCKSTEP = 0.5
"""Share of a last, incomplete wave's bytes that are read alone."""
LAUNCH_S = 3.7e-6
"""Seconds that a kernel timed by itself takes beside the model: the mean surplus of the five rows of `MEASURED_US`,
which is 3.0 (bf16) to 4.9 (MXFP4)."""
ISSUES = 4  # warp instructions a clock and multiprocessor

SIZE = 8192
ROWS = (1, 16)
REGISTERS = 128  # at most, per thread, for up to 16 rows
INSTRUCTIONS = {"bf16": (124, 124)} | {
    name: (quantised_gemv.UNPACKING[name.split("_")[0]], skinny_shape.unpacking(name))
    for name in ("u8", "e4m3_g128", "u4_g128", "e2m1_g32_exponents")
}
"""Machine instructions of a warp in the main loop, for each 4 KB of the weight (nvdisasm, sm_90a), by `ROWS`: packed
weights by `quantised_gemv` and by `skinny`, bf16 by the latter."""
MEASURED_US = {
    "bf16": (37.4, 38.4), "u8": (22.3, None), "e4m3_g128": (23.6, None), "u4_g128": (15.6, 26.6),
    "e2m1_g32_exponents": (16.7, 26.8),
}  # fmt: skip
"""Times of an H200, one row and 16 (docs/measurements, 2026-11-26, rows and the evening). Those of 16 rows are of
`skinny` as it was: with x as the first factor, and K in half as many streams."""


def stream_s(model: GpuModel, num_bytes: float, blocks: int, blocks_at_once: int, bytes_in_flight: float) -> float:
    """The time of a stream that so many blocks read in equal parts, with so many bytes in flight per block."""
    sustained = BANDWIDTH_SHARE * model.memory_bytes_per_s

    def rate(blocks: int) -> float:
        return min(sustained, blocks * bytes_in_flight / MEMORY_S)

    each, (waves, rest) = num_bytes / blocks, divmod(blocks, blocks_at_once)
    last = LOCKSTEP / rate(max(rest, 1)) + (1 - LOCKSTEP) / sustained
    return waves * blocks_at_once * each / rate(blocks_at_once) + rest * each * last


def launch_s(model: GpuModel, launch: Launch, product: gemm.Product, instructions: int) -> float:
    """The time of a product of few rows, which streams its weight once and reads x for each block."""
    name, blocks, threads = launch.specialisation.name, launch.grid[0], math.prod(launch.block)
    is_gemv, cluster = name.startswith("gemm_quantised_gemv"), math.prod(launch.cluster)
    in_flight = max((256 if name.startswith("gemm_skinny") else 128) * threads, launch.shared_bytes)
    at_once = model.num_sms * max(1, blocks_per_sm(model, threads, REGISTERS, launch.shared_bytes))
    x_bytes = (4 if is_gemv else 2) * blocks / cluster * product.m * product.k  # a cluster's blocks each read a part
    stream = product.weight_bytes / (BANDWIDTH_SHARE * model.memory_bytes_per_s)
    slowest = max(
        stream,
        (product.weight_bytes + x_bytes) / CACHE_BYTES_PER_S,
        instructions * product.weight_bytes / 4096 / (ISSUES * model.num_sms * model.clock_khz * 1e3),
    )
    waiting = stream_s(model, product.weight_bytes, blocks, at_once, in_flight) - stream
    again = CACHE_S if is_gemv else 0.0  # x is read twice before it is used
    return GAP_S + MEMORY_S + slowest + waiting + (CLUSTER_S if cluster > 1 else 0.0) + ENDS_S + again


def modelled(weight: str, m: int, model: GpuModel, size: int = SIZE) -> tuple[gemm.Product, float]:
    """A product with a weight of ``[size, size]``, and its seconds, launched in a row of others."""
    product = gemm.Product(m, size, size, "bf16", weight)
    tier: ModuleType = quantised_gemv if m == 1 and weight != "bf16" else skinny
    launch = tier.plan(product, gemm.machine_of("sm_90a", model.num_sms, model.max_clusters))
    return product, launch_s(model, launch, product, INSTRUCTIONS[weight][ROWS.index(m)])


def row_of(weight: str, model: GpuModel) -> list[str]:
    """A line of the table: MB of the weight, and for each number of rows the time of a launch alone, modelled (for 16
    rows also by steps) and measured, with the share of the data sheet's bandwidth for one row."""
    cells = [weight]
    machine = gemm.machine_of("sm_90a", model.num_sms, model.max_clusters)
    for m, measured_us in zip(ROWS, MEASURED_US[weight], strict=True):
        product, seconds = modelled(weight, m, model)
        measured = "" if measured_us is None else f"{measured_us:.1f}"
        alone = f"{1e6 * (seconds + LAUNCH_S):.1f}"
        if m == 1:
            assert measured_us is not None
            share = product.weight_bytes / (1e-6 * measured_us) / model.memory_bytes_per_s
            cells += [f"{product.weight_bytes / 1e6:.1f}", alone, measured, f"{share:.2f}"]
        else:
            shape = skinny_shape.choose(product, machine)
            steps = "" if weight == "bf16" else f"{1e6 * skinny_shape.alone_s(product, machine, shape):.1f}"
            cells += [alone, steps, measured]
    return cells


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    header = [
        "weight", "MB", "1 row, modelled (µs)", "measured (µs)", "of the bandwidth", "16 rows, modelled (µs)",
        "by steps (µs)", "measured before (µs)",
    ]  # fmt: skip
    print(table(header, [row_of(weight, model_of("H200")) for weight in INSTRUCTIONS]))


if __name__ == "__main__":
    main()
