"""The kernel report as a page: a Markdown document's tables, and plots as one SVG written by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape

from runtime.bench.kernels.counted import KINDS, Counts
from tools.kernel_costs.case import Case
from tools.kernel_costs.counts import PRODUCTS
from tools.kernel_costs.static import StaticFacts

Measured = Sequence[tuple[Case, Counts]]

_COLOURS = ("#3b6fb6", "#4aa3a2", "#8fb339", "#d9a441", "#c8553d", "#8d6a9f", "#8a8a8a")
_WIDTH, _LABEL, _LINE = 1000, 250, 18


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|--:" * (len(header) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


COUNT_COLUMNS = (
    "case", "shape", "warp instructions", "moved / least bytes", "of its tiling", "sectors a request",
    "sector efficiency", "bank conflicts", "in loops", "tensor-core MFLOP", "of all",
)  # fmt: skip


def count_row(case: Case, counts: Counts) -> list[str]:
    """A case's counts, in the order of `COUNT_COLUMNS`."""
    return [
        case.name, case.shape, f"{counts.warp_instructions:,}", f"{counts.moved_bytes / case.work.least_bytes:.2f}",
        f"{counts.data_bytes / case.tiled_bytes:.3f}" if case.tiled_bytes else "",
        f"{counts.sectors_per_request:.2f}", f"{100 * counts.sector_efficiency:.1f} %", f"{counts.conflicts:,}",
        f"{counts.loop_conflicts:,}", f"{counts.tensor_flops / 1e6:.1f}",
        f"{100 * counts.tensor_share:.1f} %" if case.is_on_tensor_cores else "",
    ]  # fmt: skip


def fill(text: str, measured: Measured) -> str:
    """A page with the tables between ``<!-- table: FAMILY -->`` and ``<!-- end -->`` made anew.

    Raises ValueError for a family that was not counted.
    """

    def made(match: re.Match[str]) -> str:
        rows = [count_row(case, counts) for case, counts in measured if case.family == match[2]]
        if not rows:
            raise ValueError(f"no case of family {match[2]!r} was counted")
        return f"{match[1]}{table(COUNT_COLUMNS, rows)}\n{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", made, text, flags=re.DOTALL)


def roofline_table(measured: Measured) -> str:
    """Microseconds below which no kernel can do a case's work, on each product."""
    rows = [
        [case.name, f"{case.work.least_bytes:,}", f"{case.work.flops:,}"]
        + [f"{case.work.roofline_us(model):.3f}" for model in PRODUCTS]
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


def svg(measured: Measured) -> str:
    """Four plots, one below the other, a bar for each case."""
    parts: list[str] = []
    top = 10
    for title, draw in (
        ("Instruction mix (share of warp instructions)", _mix_bars),
        ("Bytes moved over the least possible (logarithmic, one ruler for all)", _traffic_bars),
        ("Sector efficiency (the line is at 90 %)", _efficiency_bars),
        ("Conflicts of shared memory's banks, share of wavefronts", _conflict_bars),
    ):
        parts.append(f'<text x="10" y="{top + 14}" class="title">{escape(title)}</text>')
        top += 24
        for case, counts in measured:
            parts.append(f'<text x="{_LABEL - 6}" y="{top + 12}" text-anchor="end">{escape(case.name)}</text>')
            parts += draw(case, counts, top)
            top += _LINE
        top += 16
    legend = [
        f'<rect x="{_LABEL + 100 * place}" y="{top}" width="12" height="12" fill="{colour}"/>'
        f'<text x="{_LABEL + 100 * place + 16}" y="{top + 11}">{kind}</text>'
        for place, (kind, colour) in enumerate(zip(KINDS, _COLOURS))
    ]
    style = "text{font:11px sans-serif;fill:#222}.title{font-weight:bold;font-size:13px}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top + 24}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts + legend)
        + "\n</svg>\n"
    )


def _bar(left: float, top: int, width: float, colour: str) -> str:
    return f'<rect x="{left:.1f}" y="{top + 2}" width="{max(width, 0.5):.1f}" height="{_LINE - 5}" fill="{colour}"/>'


def _note(left: float, top: int, words: str) -> str:
    return f'<text x="{left + 4:.1f}" y="{top + 12}">{escape(words)}</text>'


_ROOM = _WIDTH - _LABEL - 80


def _mix_bars(case: Case, counts: Counts, top: int) -> list[str]:
    found, left = [], float(_LABEL)
    for kind, colour in zip(KINDS, _COLOURS):
        width = _ROOM * counts.mix[kind] / counts.warp_instructions
        if width:
            found.append(_bar(left, top, width, colour))
        left += width
    return found


def _traffic_bars(case: Case, counts: Counts, top: int) -> list[str]:
    ratio = counts.moved_bytes / case.work.least_bytes
    width = _ROOM * min(1.0, math.log2(max(ratio, 1.0)) / 10)  # 1024 times as much fills the line
    return [_bar(_LABEL, top, width, _COLOURS[0]), _note(_LABEL + width, top, f"{ratio:.2f}")]


def _efficiency_bars(case: Case, counts: Counts, top: int) -> list[str]:
    colour = _COLOURS[6] if case.scattered_because else _COLOURS[1]
    width, line = _ROOM * counts.sector_efficiency, _LABEL + 0.9 * _ROOM
    mark = f'<rect x="{line:.1f}" y="{top}" width="1" height="{_LINE}" fill="#c8553d"/>'
    return [
        _bar(_LABEL, top, width, colour),
        mark,
        _note(_LABEL + width, top, f"{100 * counts.sector_efficiency:.0f} %"),
    ]


def _conflict_bars(case: Case, counts: Counts, top: int) -> list[str]:
    share = counts.conflicts / counts.wavefronts if counts.wavefronts else 0.0
    return [_bar(_LABEL, top, _ROOM * share, _COLOURS[4]), _note(_LABEL + _ROOM * share, top, f"{100 * share:.1f} %")]
