"""Plots as SVG written by hand: `bench profile`'s shares, and `bench kernels`' roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from runtime.bench.svg import page, panels, text

_COLOURS = ("#3b6fb6", "#d9a441", "#4aa3a2", "#c8553d", "#8fb339", "#8d6a9f", "#8a8a8a")


def profile_svg(report: Mapping[str, Any]) -> str:
    """A bar for each kernel's share of a phase, and one for each part of the host's work."""
    groups = []
    for name, phase in report["phases"].items():
        longest = max(phase["host"].values()) or 1.0
        work = [(each["name"], [(each["share"], f"{each['share']:.1%}")]) for each in phase["work"]]
        host = [(part, [(value / longest, f"{value:,.3f}")]) for part, value in phase["host"].items()]
        groups += [
            (f"{name}: shares by kernel ({report['measured_by']})", work), (f"{name}: the host (ms a step)", host),
        ]  # fmt: skip
    return panels(groups, 1000, 380, 16, _COLOURS)


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
        text(_LEFT, 20, title, style="title"),
        f'<polyline points="{corners}" fill="none" stroke="#222"/>',
        text(_RIGHT, _BOTTOM + 30, "operations a byte of device memory", anchor="end"),
        text(10, _TOP - 6, "TFLOP/s"),
    ]
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        x, _ = at(10.0**power, most)
        parts.append(text(x, _BOTTOM + 14, f"{10.0**power:g}", anchor="middle"))
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
        parts.append(text(_LEFT + 20, 564 + 16 * place, goal))
    return page(parts, 1000, 570 + 16 * len(goals))
