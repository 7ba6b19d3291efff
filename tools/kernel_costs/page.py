"""The kernel report's tables, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runtime.bench.kernels.case import Case
from runtime.bench.kernels.counted import KINDS, Counts
from runtime.emulator.driver.architectures import A100, H100, H200, RTX_4090, RTX_5090, GpuModel
from tools.kernel_costs.static import StaticFacts

PRODUCTS = (A100, RTX_4090, RTX_5090, H100, H200)
Measured = Sequence[tuple[Case, Counts]]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|--:" * (len(header) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


COUNT_COLUMNS = (
    "case", "shape", "warp instructions", "moved / least bytes", "of its tiling", "sectors a request",
    "sector efficiency", "bank conflicts", "in loops", "tensor-core MFLOP", "of all",
)  # fmt: skip
LADDER_COLUMNS = (0, 1, 2, 3, 6)  # `--check` bounds the others


def count_row(case: Case, counts: Counts) -> list[str]:
    """A case's counts, in the order of `COUNT_COLUMNS`."""
    return [
        case.name, case.shape.replace(" x ", "×"), f"{counts.warp_instructions:,}",
        f"{counts.moved_bytes / case.least_bytes:.2f}",
        f"{counts.data_bytes / case.tiled_bytes:.3f}" if case.tiled_bytes else "",
        f"{counts.sectors_per_request:.2f}", f"{100 * counts.sector_efficiency:.1f}%", f"{counts.conflicts:,}",
        f"{counts.loop_conflicts:,}", f"{counts.tensor_flops / 1e6:.1f}",
        f"{100 * counts.tensor_share:.1f}%" if case.is_on_tensor_cores else "",
    ]  # fmt: skip


def fill(text: str, measured: Measured) -> str:
    """A page with its tables, from ``<!-- table: FAMILY -->`` to ``<!-- end -->``, made anew.
    Raises ValueError for a family that was not counted."""

    def made(match: re.Match[str]) -> str:
        rows = [count_row(case, counts) for case, counts in measured if case.family == match[2]]
        if not rows:
            raise ValueError(f"no case of family {match[2]!r} was counted")
        header, *body = ([row[column] for column in LADDER_COLUMNS] for row in (COUNT_COLUMNS, *rows))
        return f"{match[1]}{table(header, body)}\n{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", made, text, flags=re.DOTALL)


def roofline_us(case: Case, model: GpuModel) -> float:
    """The lower bound in microseconds: its bytes at full bandwidth, or its arithmetic at full rate."""
    rate = model.bf16_flops if case.has_16_bits else model.float32_flops
    return 1e6 * max(case.least_bytes / model.memory_bytes_per_s, case.flops / rate)


def roofline_table(measured: Measured) -> str:
    """Lower bounds of a case's microseconds, on each product."""
    rows = [
        [case.name, f"{case.least_bytes:,}", f"{case.flops:,.0f}"]
        + [f"{roofline_us(case, model):.3f}" for model in PRODUCTS]
        for case, _ in measured
    ]
    return table(("case", "least bytes", "operations", *(f"{model.name} (us)" for model in PRODUCTS)), rows)


def mix_table(measured: Measured) -> str:
    """Shares of the warp instructions by kind."""
    rows = [
        [case.name, *(f"{100 * counts.mix[kind] / counts.warp_instructions:.1f} %" for kind in KINDS)]
        for case, counts in measured
    ]
    return table(("case", *KINDS), rows)


def static_table(facts: Sequence[StaticFacts]) -> str:
    """A kernel a line, with registers and occupancy on each architecture, and the most shared memory of them."""
    archs = list(dict.fromkeys(each.arch for each in facts))
    by_kernel: dict[str, dict[str, StaticFacts]] = {}
    for each in facts:
        by_kernel.setdefault(each.kernel, {})[each.arch] = each
    rows = []
    for kernel, found in by_kernel.items():
        cells = [
            f"{found[arch].num_registers} / {100 * found[arch].occupancy:.0f} %" if arch in found else ""
            for arch in archs
        ]
        first = next(iter(found.values()))
        rows.append([kernel, str(first.num_threads), str(max(each.shared_bytes for each in found.values())), *cells])
    return table(("kernel", "threads", "shared bytes", *archs), rows)
