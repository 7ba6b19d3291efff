"""SVG written by hand: a page, its texts and its bars."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

COLOURS = ("#3b6fb6", "#d9a441", "#4aa3a2", "#c8553d", "#8fb339", "#8d6a9f", "#8a8a8a")


def page(parts: Sequence[str], width: float, height: float, font_size: float = 11) -> str:
    """The parts on a white page of this size; text is small, and bold in class "title"."""
    style = f"text{{font:{font_size:g}px sans-serif;fill:#222}}.title{{font-weight:bold;font-size:13px}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"><style>{style}</style>'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", style: str = "") -> str:
    """Words at a place, which is their beginning, their "middle" or their "end"; `style` is a class."""
    attributes = f' text-anchor="{anchor}"' * (anchor != "start") + f' class="{style}"' * bool(style)
    return f'<text x="{x:g}" y="{y:g}"{attributes}>{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, colour: str, tip: str = "") -> str:
    """A filled rectangle; `tip` is shown beside the pointer."""
    shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{colour}"'
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def panels(
    groups: Sequence[tuple[str, Sequence[tuple[str, Sequence[tuple[float, str]]]]]], width: float, label_width: float,
    line: float,
) -> str:  # fmt: skip
    """A page of titled panels. A panel has labels, each with bars: their share of the panel's width, and a note."""
    parts: list[str] = []
    top = 10.0
    for title, rows in groups:
        parts.append(text(10, top + 14, title, style="title"))
        top += 22
        for label, bars in rows:
            parts.append(text(label_width - 6, top + line * len(bars) / 2 + 4, label, anchor="end"))
            for (share, note), colour in zip(bars, COLOURS):
                parts.append(bar(label_width, top, (width - label_width - 90) * share, line, colour, note))
                top += line
            top += 5 * (len(bars) > 1)
        top += 12
    return page(parts, width, top)


def bar(left: float, top: float, width: float, height: float, colour: str, note: str) -> str:
    """A horizontal bar in a line of this height, and a note at its end."""
    width = max(0.5, width)
    return rectangle(left, top + 1, width, height - 2, colour) + text(left + width + 4, top + height - 3, note)
