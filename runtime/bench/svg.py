"""An SVG page of hand-written parts."""

from __future__ import annotations

from collections.abc import Sequence

STYLE = "text{font:11px sans-serif;fill:#222}.title{font-weight:bold;font-size:13px}"


def page(parts: Sequence[str], width: float, height: float) -> str:
    """The parts on a white page of this size; text is small, and bold in class "title"."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"><style>{STYLE}</style>'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
