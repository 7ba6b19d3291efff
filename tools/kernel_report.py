"""Reports the costs of every GPU kernel without a GPU: from the compilers on each architecture, and counted by the
emulator.

    python -m tools.kernel_report [--arch ARCH ...] [--kernels TEXT] [--cases TEXT] [--only static|counted] [--check]
                                  [--nvdisasm PROGRAM] [--ladders FILE]

Prints a page of tables, of all kernels or of some; `--ladders` updates kernel-counts.md. With `--check` it
lists forbidden properties, and exits with 1 if there are any: spills, local memory, ptxas's remarks C75xx, float64,
early loads that ptxas has moved after the wait for the previous grid, device-wide fences in a product of clusters (but
for the counters of adapters), compare-and-swap loops, device memory accesses that should be coalesced with less than
95 % of each sector used, more than 1.05 times the minimum traffic of a product's or attention's tiling, less than 95 %
of their arithmetic on tensor cores if meant for these, and bank conflicts in a loop. `EXCEPTIONS` lists the allowed
ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from numba_kernels.cuda.registry import specialisations  # noqa: E402
from runtime.bench.kernels.case import Case, prepare, verify  # noqa: E402
from runtime.bench.kernels.counted import Counts, counting  # noqa: E402
from runtime.device.device import Device  # noqa: E402
from runtime.device.gpu import Gpu  # noqa: E402
from tools.kernel_cases.report import cases  # noqa: E402
from tools.kernel_costs import page  # noqa: E402
from tools.kernel_costs.machine_code import NoDisassemblerError, find_nvdisasm  # noqa: E402
from tools.kernel_costs.static import ARCHS, StaticFacts, examine_all  # noqa: E402

MAX_EXCEPTIONS = 5
COUNTED_ARCH = "sm_90a"
LEAST_SECTOR_EFFICIENCY = 0.95
MOST_TILED_BYTES = 1.05
"""Times the least of its tiling that a kernel may move."""
LEAST_TENSOR_SHARE = 0.95
"""The share of the additions and multiplications of a kernel for tensor cores that they do."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """An allowed offence: any whose text begins with `offence`, because of `reason`."""

    offence: str
    reason: str


_HISTOGRAM = "a histogram in shared memory: its additions go where the logits say, and meet in a bank"
_FLOAT32_WEIGHTS = (
    "a lane holds 8 elements of a row, and their float32 weights are two loads of 16 bytes: each takes half of every "
    "sector, the second from the first-level cache; all rows share these weights. Accesses of 4 elements would fill "
    "them, and halve the bytes of x that a thread has on their way from device memory"
)
EXCEPTIONS = (
    Allowed("sampling top_", _HISTOGRAM),
    Allowed("logprobs top 5: banks", _HISTOGRAM),
    Allowed("rms_norm bf16: sectors", _FLOAT32_WEIGHTS),
    Allowed("rms_norm + residual bf16: sectors", _FLOAT32_WEIGHTS),
    Allowed("layer_norm bf16: sectors", _FLOAT32_WEIGHTS),
)


def offences_of(case: Case, counts: Counts) -> list[str]:
    """A case's offences, in words."""
    found = []
    efficiency = counts.sector_efficiency
    if not case.scattered_because and not efficiency >= LEAST_SECTOR_EFFICIENCY:
        found.append(f"{case.name}: sectors: {100 * efficiency:.1f} % of their bytes are used")
    if case.tiled_bytes and not counts.data_bytes <= MOST_TILED_BYTES * case.tiled_bytes:
        found.append(f"{case.name}: bytes: {counts.data_bytes / case.tiled_bytes:.3f} times the least of its tiling")
    if case.is_on_tensor_cores and not counts.tensor_share >= LEAST_TENSOR_SHARE:
        found.append(f"{case.name}: tensor cores: {100 * counts.tensor_share:.1f} % of the arithmetic")
    if counts.loop_conflicts:
        found.append(
            f"{case.name}: banks: {counts.loop_conflicts} conflicts in a loop ({counts.wavefronts} wavefronts)"
        )
    return found


def offenders(facts: Sequence[StaticFacts], measured: Sequence[tuple[Case, Counts]]) -> list[str]:
    """All offences that `EXCEPTIONS` does not allow. Raises ValueError for too many exceptions."""
    if len(EXCEPTIONS) > MAX_EXCEPTIONS:
        raise ValueError(f"{len(EXCEPTIONS)} exceptions, at most {MAX_EXCEPTIONS}")
    found = [offence for each in facts for offence in each.offences()]
    found += [offence for case, counts in measured for offence in offences_of(case, counts)]
    return [offence for offence in found if not any(offence.startswith(each.offence) for each in EXCEPTIONS)]


def count(case: Case, arch: str = COUNTED_ARCH) -> Counts:
    """The counts of a case's launches on an emulated device: the case's own, else this architecture's. Raises
    AssertionError if its result is wrong."""
    gpu = Gpu.of(Device.parse(f"emulated:{case.arch or arch}"))
    _inputs, ready = prepare(gpu, case, 0)
    with counting(gpu) as found:
        if ready.expected.size:
            verify(gpu, case, ready)
        else:
            ready.run()
    found.case = case.name
    return found


def as_markdown(facts: Sequence[StaticFacts], measured: Sequence[tuple[Case, Counts]]) -> str:
    """The whole report as a page."""
    parts = ["# Kernel report", "", "Made by `tools/kernel_report.py`. No number here was measured on a GPU.", ""]
    if measured:
        rows = [page.count_row(case, counts) for case, counts in measured]
        parts += [f"## Counted on an emulated {COUNTED_ARCH}", "", page.table(page.COUNT_COLUMNS, rows), ""]
        parts += ["Where sectors cannot be filled:", ""]
        parts += [f"- {case.name}: {case.scattered_because}" for case, _ in measured if case.scattered_because]
        parts += ["", "What `--check` lets pass:", ""]
        parts += [f"- {each.offence}: {each.reason}" for each in EXCEPTIONS]
        found = offenders(facts, measured)
        parts += ["", "What it does not:" if found else "Nothing else offends.", "", *(f"- {each}" for each in found)]
        parts += ["", "## Instruction mix", "", page.mix_table(measured), ""]
        parts += ["## Roofline: no kernel can be faster", "", page.roofline_table(measured), ""]
    if facts:
        seen, known = len({each.kernel for each in facts}), sum(1 for _ in specialisations())
        parts += ["## Registers a thread and occupancy, by architecture", ""]
        parts += [f"{seen} of the {known} registered kernels were examined.", "", page.static_table(facts), ""]
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0; 1 if `--check` finds an offender; 2 if the machine code cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=list(ARCHS))
    parser.add_argument("--kernels", default="", help="only kernels whose name contains this")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--only", choices=("static", "counted"), help="one half of the report")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a kernel has what it may not have")
    parser.add_argument("--nvdisasm", help="the disassembler; else from PATH or from an installed package")
    parser.add_argument("--ladders", type=Path, metavar="FILE", help="a page whose tables are made anew")
    asked = parser.parse_args(arguments)
    names = [each.name for each in specialisations() if asked.kernels in each.name]
    facts = []
    if asked.only != "counted" and names:
        try:
            facts = examine_all(find_nvdisasm(asked.nvdisasm), asked.arch, names)
        except NoDisassemblerError as error:
            parser.error(str(error))
    measured = [(case, count(case)) for case in cases() if asked.cases in case.name] if asked.only != "static" else []
    if not facts and not measured:
        parser.error("no kernel and no case has such a name")
    print(as_markdown(facts, measured))
    if asked.ladders is not None:
        asked.ladders.write_text(page.fill(asked.ladders.read_text(encoding="utf-8"), measured), encoding="utf-8")
    if not asked.check:
        return 0
    found = offenders(facts, measured)
    print("\n".join(found) or "No kernel has what it may not have.", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
