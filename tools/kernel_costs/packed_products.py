"""How long products with packed weights take by the model of an H200, beside bf16: a table for docs/kernels.md.

    python -m tools.kernel_costs.packed_products
"""

from __future__ import annotations

import math
from types import ModuleType

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import few_rows, packed_row
from runtime.device.emulator.driver.architectures import GpuModel, model_of
from tools.kernel_costs.latencies import EDGES, Timing
from tools.kernel_costs.launch_lists import Launched
from tools.kernel_costs.page import table
from tools.kernel_costs.roofline import ISSUES, streamed

SIZE = 8192
ROWS = (1, 16)
REGISTERS = 128  # a thread's at most, of up to 16 rows
INSTRUCTIONS = {
    "bf16": (165, 165), "u8": (packed_row.UNPACKING["u8"], 615), "e4m3_g128": (packed_row.UNPACKING["e4m3"], 602),
    "u4_g128": (packed_row.UNPACKING["u4"], 1101),
}  # fmt: skip
"""Machine instructions of a warp in the main loop, for each 4 KB of the weight (nvdisasm, sm_90a), by `ROWS`: packed
weights by `packed_row` and by `few_rows`, bf16 by the latter."""


def row_of(weight: str, model: GpuModel, size: int = SIZE) -> list[str]:
    """A line of the table: MB of the weight, instructions of its loop; for each number of rows the time, fast to slow,
    and the share of the data sheet's bandwidth that the weight's bytes take."""
    cells = [weight]
    for m, loop in zip(ROWS, INSTRUCTIONS[weight], strict=True):
        product = gemm.Product(m, size, size, "bf16", weight)
        tier: ModuleType = packed_row if m == 1 and weight != "bf16" else few_rows
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
            again = Timing(model, edge).of("cache") if tier is packed_row else 0.0  # x is read twice before it is used
            times.append(modelled.seconds + max(0.0, issue_s - max(modelled.needs_s.values())) + again)
        fast, expected, slow = times
        if m == ROWS[0]:
            cells.append(f"{product.weight_bytes / 1e6:.1f}")
        share = product.weight_bytes / expected / model.memory_bytes_per_s
        cells += [str(loop), f"{1e6 * expected:.1f} ({1e6 * fast:.1f} to {1e6 * slow:.1f})", f"{share:.2f}"]
    return cells


def main() -> None:
    model = model_of("H200")
    columns = (
        text for m in ROWS for text in ("instructions for 4 KB", f"{m} row{'s' * (m > 1)} (µs)", "of the bandwidth")
    )
    header = ["weight", "MB", *columns]
    print(table(header, [row_of(weight, model) for weight in INSTRUCTIONS]))


if __name__ == "__main__":
    main()
