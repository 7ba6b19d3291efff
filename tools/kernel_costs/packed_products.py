"""Modelled times of products with packed weights on an H200, compared with bf16: tables for docs/kernels.md.

    python -m tools.kernel_costs.packed_products

The first is device time, with launches overlapped by the previous ones. The second adds `LAUNCH_S`, the cost of a
separate launch, fitted to the measured times of one row beside it; for 16 rows, whose blocks take steps of 32 of K, it
also has `skinny_shape`'s time of these steps.
"""

from __future__ import annotations

import argparse
import math
from types import ModuleType

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import quantised_gemv, skinny, skinny_shape
from runtime.emulator.driver.architectures import GpuModel, model_of
from tools.kernel_costs.latencies import EDGES, Launched, Timing
from tools.kernel_costs.page import table
from tools.kernel_costs.roofline import ISSUES, streamed

SIZE = 8192
ROWS = (1, 16)
REGISTERS = 128  # at most, per thread, for up to 16 rows
INSTRUCTIONS = {"bf16": (124, 124)} | {
    name: (quantised_gemv.UNPACKING[name.split("_")[0]], skinny_shape.unpacking(name))
    for name in ("u8", "e4m3_g128", "u4_g128", "e2m1_g32_exponents")
}
"""Machine instructions of a warp in the main loop, for each 4 KB of the weight (nvdisasm, sm_90a), by `ROWS`: packed
weights by `quantised_gemv` and by `skinny`, bf16 by the latter."""
LAUNCH_S = 3.7e-6
"""Seconds that a kernel timed by itself takes beside the model: the mean surplus of the five rows of `MEASURED_US`,
which is 3.0 (bf16) to 4.9 (MXFP4)."""
MEASURED_US = {
    "bf16": (37.4, 38.4), "u8": (22.3, None), "e4m3_g128": (23.6, None), "u4_g128": (15.6, 26.6),
    "e2m1_g32_exponents": (16.7, 26.8),
}  # fmt: skip
"""Times of an H200, one row and 16 (docs/measurements, 2026-11-26, rows and the evening). Those of 16 rows are of
`skinny` as it was: with x as the first factor, and K in half as many streams."""


def times_of(weight: str, m: int, loop: int, model: GpuModel, size: int) -> tuple[gemm.Product, list[float]]:
    """A product, and its seconds: fast, expected and slow."""
    product = gemm.Product(m, size, size, "bf16", weight)
    tier: ModuleType = quantised_gemv if m == 1 and weight != "bf16" else skinny
    launch = tier.plan(product, gemm.machine_of("sm_90a", model.num_sms, model.max_clusters))
    launched = Launched(
        launch.specialisation.name, blocks=launch.grid[0], threads=math.prod(launch.block),
        shared_bytes=launch.shared_bytes, num_registers=REGISTERS, product=(m, size, size),
        weight_bytes=product.weight_bytes, cluster=math.prod(launch.cluster),
    )  # fmt: skip
    issued = loop * product.weight_bytes / 4096
    issue_s = issued / (ISSUES * model.num_sms * model.clock_khz * 1e3)
    times = []
    for edge in EDGES:
        modelled = streamed(launched, Timing(model, edge))
        again = Timing(model, edge).of("cache") if tier is quantised_gemv else 0.0  # x is read twice before it is used
        times.append(modelled.seconds + max(0.0, issue_s - max(modelled.needs_s.values())) + again)
    return product, times


def row_of(weight: str, model: GpuModel, size: int = SIZE) -> list[str]:
    """A line of the first table: MB of the weight, instructions of its loop; for each number of rows the time, fast to
    slow, and the weight's share of the data sheet's bandwidth."""
    cells = [weight]
    for m, loop in zip(ROWS, INSTRUCTIONS[weight], strict=True):
        product, (fast, expected, slow) = times_of(weight, m, loop, model, size)
        if m == ROWS[0]:
            cells.append(f"{product.weight_bytes / 1e6:.1f}")
        share = product.weight_bytes / expected / model.memory_bytes_per_s
        cells += [str(loop), f"{1e6 * expected:.1f} ({1e6 * fast:.1f} to {1e6 * slow:.1f})", f"{share:.2f}"]
    return cells


def alone_of(weight: str, model: GpuModel) -> list[str]:
    """A line of the second table, of the same products: for each number of rows the modelled time, for 16 rows also by
    steps, and the measured one."""
    cells = [weight]
    machine = gemm.machine_of("sm_90a", model.num_sms, model.max_clusters)
    for m, loop, measured in zip(ROWS, INSTRUCTIONS[weight], MEASURED_US[weight], strict=True):
        product, (_, expected, _) = times_of(weight, m, loop, model, SIZE)
        alone = expected + LAUNCH_S
        cells += [f"{1e6 * alone:.1f}"]
        if m == 1:
            cells += [f"{product.weight_bytes / alone / model.memory_bytes_per_s:.2f}"]
        elif weight != "bf16":
            cells += [f"{1e6 * skinny_shape.alone_s(product, machine, skinny_shape.choose(product, machine)):.1f}"]
        else:
            cells += [""]
        cells += ["" if measured is None else f"{measured:.1f}"]
        if m == 1 and measured is not None:
            cells += [f"{product.weight_bytes / (1e-6 * measured) / model.memory_bytes_per_s:.2f}"]
    return cells


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    model = model_of("H200")
    columns = (
        text for m in ROWS for text in ("instructions for 4 KB", f"{m} row{'s' * (m > 1)} (µs)", "of the bandwidth")
    )
    header = ["weight", "MB", *columns]
    print(table(header, [row_of(weight, model) for weight in INSTRUCTIONS]))
    header = [
        "weight", "1 row alone, modelled (µs)", "of the bandwidth", "measured (µs)", "of the bandwidth",
        "16 rows alone, modelled (µs)", "by steps (µs)", "measured before (µs)",
    ]  # fmt: skip
    print(table(header, [alone_of(weight, model) for weight in INSTRUCTIONS]))


if __name__ == "__main__":
    main()
