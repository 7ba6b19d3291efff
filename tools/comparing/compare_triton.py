"""Counts our kernels' and Triton's memory traffic and executed machine instructions for the same work.

    python tools/comparing/compare_triton.py [--arch ARCH] [--only TEXT] [--nvdisasm PROGRAM] [--check]
                                   [--json FILE] [--markdown FILE]

Both run on the same emulated GPU, on the same numbers, and each result is compared with numpy's before it is counted.
Both are assembled by the same ptxas (nvJitLink); nvdisasm shows their main loops. Triton's PTX lies in
tools/comparing/triton_comparison/ptx/ (tools/references/make_triton_peers.py made it): Triton itself is not needed. Our
kernel is compared with the tutorial's configuration of the nearest tile. With `--check` the exit status is 1 if ours is
worse in any count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.comparing.triton_comparison.comparer import METRICS, Row, compare  # noqa: E402
from tools.comparing.triton_comparison.ours import ARCHS  # noqa: E402
from tools.comparing.triton_comparison.theirs import peers  # noqa: E402
from tools.kernel_costs.machine_code import NoDisassemblerError, find_nvdisasm  # noqa: E402
from tools.kernel_costs.page import table  # noqa: E402

NOTES = """
Its kernels do the work of Triton's tutorials 03 (matrix multiplication) and 06 (fused attention, forward, causal), in
those of the tutorials' tuner configurations whose tiles are ours. Both sides run on the same emulated GPU on the same
numbers, each result is verified, and one ptxas assembles both. Ours stands beside the configuration with the nearest
tile; the mix of their instructions is in [triton_comparison.json](triton_comparison.json). In each cell: ours /
Triton's.

*Bytes* are those that lanes and TMA copies ask of device memory, *sectors* the 32-byte pieces that they touch. *Bank
conflicts* are turns of shared memory beyond the fewest (what TMA writes and wgmma reads there is not modelled).
*Barriers* are warp instructions that wait: barriers of the block or the cluster, mbarriers. *Machine instructions /
operation* are those of the main loop, as nvdisasm shows it, for each product of 16 x 8 x 16 of a warp's tensor-core
instructions (a wgmma of 64 x N x 16 is N / 8 of them); of several loops, and of a loop's turns, the leanest. *Sectors
of tables* are those of our block tables and lengths: our keys come from shuffled pages, Triton's from rows.

The fused mixture of experts in Triton is our own (tools/references/anchors/triton_experts.py), in the form that
engines with Triton kernels share: token-expert pairs sorted by expert and padded to whole tiles, rows gathered in
that order, results in the pairs' places. Experts have equally many rows except two, with three more and three fewer,
so that tiles are not whole: ours copies the last row again, Triton's copies nothing, and each thread of ours asks for
its tile's entry and its expert's addresses (16 bytes, and twice 8, the same for all). These are the bytes and sectors
in which ours is worse. The activation, in our epilogue, is a launch of its own beside Triton's
([kernels.md](kernels.md))."""


TITLES = {
    "matmul": "Matrix product, bf16, weight [N, K]", "experts": "Products with experts, bf16, weights [N, K]",
    "attention": "Causal attention, bf16",
}  # fmt: skip


def as_json(rows: Sequence[Row]) -> str:
    """All counts."""
    compilers = {facts["compiler"] for arch in ARCHS for facts in peers("matmul", arch).values()}
    found, configurations = [], {}
    for row in rows:
        known = asdict(row)
        configurations[f"{row.work} {row.arch} {row.shape}"] = known.pop("configurations")
        found.append(known | {"worse": row.worse})
    report = {"compilers": sorted(compilers), "rows": found, "triton_configurations": configurations}
    return json.dumps(report, indent=1) + "\n"


def as_markdown(rows: Sequence[Row]) -> str:
    """The page."""
    worse = [row for row in rows if row.worse]
    compilers = sorted({facts["compiler"] for arch in ARCHS for facts in peers("matmul", arch).values()})
    parts = [
        "# Counted beside Triton", "",
        "Written by `python tools/comparing/compare_triton.py --markdown docs/triton_comparison.md --json "
        "docs/triton_comparison.json`. No number here was measured on a GPU.", "",
        f"Triton's compiler: {', '.join(compilers)}.", NOTES, "",
    ]  # fmt: skip
    for work, title in TITLES.items():
        lines = [_cells(row) for row in rows if row.work == work]
        if lines:
            header = (
                "arch", "shape", "ours", "Triton", *METRICS.values(), "sectors of tables", "registers",
                "ours is worse in",
            )  # fmt: skip
            parts += [f"## {title}", "", table(header, lines), ""]
    parts += [f"Ours is worse in some count in {len(worse)} of {len(rows)} rows.", ""]
    parts += ["## Every configuration's main loop", ""]
    parts += [table(("kernel", "arch", "machine instructions / operation", "registers", "spilled bytes"), _loops(rows))]
    return "\n".join(parts) + "\n"


def _cells(row: Row) -> list[str]:
    ours, theirs = row.ours, row.triton
    pairs = [f"{getattr(ours, name):,} / {getattr(theirs, name):,}" for name in METRICS]
    tables = f"{ours.table_sectors:,} / {theirs.table_sectors:,}"
    registers = f"{ours.num_registers} / {theirs.num_registers}"
    worse = ", ".join(METRICS[name] for name in row.worse) or "none"
    return [row.arch, row.shape, f"{ours.name} {ours.tile}", theirs.tile, *pairs, tables, registers, worse]


def _loops(rows: Sequence[Row]) -> list[list[str]]:
    found = {}
    for row in rows:
        for each in (row.ours, *row.configurations):
            dim = f" {row.shape.split(', ')[-1]}" if row.work == "attention" else ""
            key = (f"{each.name} {row.work}{dim} {each.tile}", row.arch)
            found[key] = [*key, f"{each.machine_per_operation:.3f}", str(each.num_registers), str(each.spill_bytes)]
    return list(found.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0; 1 if `--check` finds ours worse; 2 without nvdisasm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=list(ARCHS))
    parser.add_argument("--only", default="", help='only rows that contain this: "matmul sm_80 256 x 256 x 512"')
    parser.add_argument("--nvdisasm", help="the disassembler; else from PATH or from an installed package")
    parser.add_argument("--check", action="store_true", help="exit with 1 where ours is worse in any count")
    for name in ("json", "markdown"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    asked = parser.parse_args(arguments)
    try:
        nvdisasm = find_nvdisasm(asked.nvdisasm)
    except NoDisassemblerError as error:
        print(f"compare_triton: {error}", file=sys.stderr)
        return 2
    rows = compare(asked.arch, nvdisasm, asked.only)
    if not rows:
        parser.error("no row contains that")
    print(as_markdown(rows))
    for file, write in ((asked.json, as_json), (asked.markdown, as_markdown)):
        if file is not None:
            file.write_text(write(rows), encoding="utf-8")
    return int(asked.check and any(row.worse for row in rows))


if __name__ == "__main__":
    sys.exit(main())
