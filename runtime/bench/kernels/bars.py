"""Plots as SVG written by hand: `bench profile`'s shares, and `bench kernels`' roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_COLOURS = ("#3b6fb6", "#d9a441", "#4aa3a2", "#c8553d", "#8fb339", "#8d6a9f", "#8a8a8a")
_WIDTH, _LABEL, _LINE = 1000, 380, 16
_STYLE = "text{font:11px sans-serif;fill:#222}.title{font-weight:bold;font-size:13px}"


def _page(parts: Sequence[str], height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}"><style>{_STYLE}</style>'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def profile_svg(report: Mapping[str, Any]) -> str:
    """A bar for each kernel's share of a phase, and one for each part of the host's work."""
    parts: list[str] = []
    top = 10.0
    for name, phase in report["phases"].items():
        host = phase["host"]
        longest = max(host.values()) or 1.0
        for title, rows in (
            (f"{name}: shares by kernel ({report['measured_by']})", [(w["name"], w["share"]) for w in phase["work"]]),
            (f"{name}: the host (ms a step)", [(part, value / longest) for part, value in host.items()]),
        ):
            parts.append(f'<text x="10" y="{top + 14:.0f}" class="title">{escape(title)}</text>')
            top += 22
            for label, share in rows:
                width = max(0.5, (_WIDTH - _LABEL - 90) * share)
                note = f"{host[label]:,.3f}" if label in host else f"{share:.1%}"
                colour = _COLOURS[1] if label in host else _COLOURS[0]
                parts.append(
                    f'<text x="{_LABEL - 6}" y="{top + 11:.0f}" text-anchor="end">{escape(label)}</text>'
                    f'<rect x="{_LABEL}" y="{top + 1:.0f}" width="{width:.1f}" height="{_LINE - 3}" fill="{colour}"/>'
                    f'<text x="{_LABEL + width + 4:.1f}" y="{top + 11:.0f}">{note}</text>'
                )
                top += _LINE
            top += 12
    return _page(parts, top)


_LEFT, _RIGHT, _TOP, _BOTTOM = 80.0, 960.0, 40.0, 520.0


def roofline_svg(report: Mapping[str, Any], bytes_per_s: float, flops_per_s: float, source: str) -> str:
    """Operations a second over operations a byte, both logarithmic: the two roofs, and a point for each row.

    A timed row stands at its measured rate; a counted one is an open circle on its roof, at its operations per moved
    byte. `source` is the roofs' origin.
    """
    points = []
    for row in report["rows"]:
        if "flops" not in row:
            continue
        if "counted" in row:
            intensity = row["flops"] / (row["least_bytes"] * row["counted"]["moved_per_least_byte"])
            points.append((row, intensity, min(flops_per_s, intensity * bytes_per_s)))
        else:
            points.append((row, row["flops"] / row["least_bytes"], 1e12 * row["tflop_per_s"]))
    ridge = flops_per_s / bytes_per_s
    low = 10 ** math.floor(math.log10(min([ridge / 100, *(x for _, x, _ in points)])))
    high = 10 ** math.ceil(math.log10(max([ridge * 10, *(x for _, x, _ in points)])))
    most = flops_per_s * 2
    least = min([low * bytes_per_s, *(y for _, _, y in points)]) / 2

    def at(x: float, y: float) -> tuple[float, float]:
        right = math.log(x / low) / math.log(high / low)
        up = math.log(y / least) / math.log(most / least)
        return _LEFT + right * (_RIGHT - _LEFT), _BOTTOM - up * (_BOTTOM - _TOP)

    corners = " ".join(
        f"{x:.1f},{y:.1f}" for x, y in (at(low, low * bytes_per_s), at(ridge, flops_per_s), at(high, flops_per_s))
    )
    title = f"{report['device']}: {bytes_per_s / 1e12:.2f} TB/s, {flops_per_s / 1e12:,.0f} TFLOP/s ({source})"
    parts = [
        f'<text x="{_LEFT}" y="20" class="title">{escape(title)}</text>',
        f'<polyline points="{corners}" fill="none" stroke="#222"/>',
        f'<text x="{_RIGHT}" y="{_BOTTOM + 30}" text-anchor="end">operations a byte of device memory</text>',
        f'<text x="10" y="{_TOP - 6}">TFLOP/s</text>',
    ]
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        x, _ = at(10.0**power, most)
        parts.append(f'<text x="{x:.1f}" y="{_BOTTOM + 14}" text-anchor="middle">{10.0**power:g}</text>')
    goals = list(dict.fromkeys(row["goal"] for row, _, _ in points))
    for row, intensity, rate in points:
        x, y = at(intensity, rate)
        colour = _COLOURS[goals.index(row["goal"]) % len(_COLOURS)]
        fill = "none" if "counted" in row else colour
        words = escape(f"{row['case']} {row['shape']}: {rate / 1e12:.3g} TFLOP/s")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" stroke="{colour}" fill="{fill}"><title>{words}</title>')
        parts.append("</circle>")
    for place, goal in enumerate(goals):
        colour = _COLOURS[place % len(_COLOURS)]
        parts.append(f'<circle cx="{_LEFT + 10}" cy="{560 + 16 * place}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + 20}" y="{564 + 16 * place}">{escape(goal)}</text>')
    return _page(parts, 570 + 16 * len(goals))
