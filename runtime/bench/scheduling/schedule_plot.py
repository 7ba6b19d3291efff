"""`bench schedule --plot`: the styles side by side, as one SVG written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_PANELS = (
    ("Time to first token, median and 99th percentile (ms)", ("p50_ttft_ms", "p99_ttft_ms")),
    ("Time per output token, median and 99th percentile (ms)", ("p50_tpot_ms", "p99_tpot_ms")),
    ("Gap between two tokens, 99th percentile and worst stall (ms)", ("p99_gap_ms", "worst_stall_ms")),
    ("Output tokens a second", ("output_throughput",)),
)
_COLOURS = ("#3b6fb6", "#d9a441")
_WIDTH, _LABEL, _LINE = 900, 120, 13


def svg(report: Mapping[str, Any]) -> str:
    """Four panels, in each a group of bars for every style; the longest bar of a panel fills its width."""
    results: Sequence[Mapping[str, Any]] = report["results"]
    parts: list[str] = []
    top = 10
    for title, names in _PANELS:
        parts.append(f'<text x="10" y="{top + 14}" class="title">{escape(title)}</text>')
        top += 22
        most = max(result[name] for result in results for name in names) or 1.0
        for result in results:
            middle = top + _LINE * len(names) / 2 + 4
            parts.append(f'<text x="{_LABEL - 6}" y="{middle:.1f}" text-anchor="end">{escape(result["style"])}</text>')
            for name, colour in zip(names, _COLOURS):
                width = max(0.5, (_WIDTH - _LABEL - 90) * result[name] / most)
                parts.append(
                    f'<rect x="{_LABEL}" y="{top + 1}" width="{width:.1f}" height="{_LINE - 2}" fill="{colour}"/>'
                    f'<text x="{_LABEL + width + 4:.1f}" y="{top + _LINE - 3}">{result[name]:,.2f}</text>'
                )
                top += _LINE
            top += 5
        top += 12
    style = "text{font:11px sans-serif;fill:#222}.title{font-weight:bold;font-size:13px}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}"><style>{style}</style>'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
