"""Blocks of ggml whose rows are read as files store them (`cpu.ggml_rows`). Numba is not needed to know them."""

from __future__ import annotations

ROW_BLOCKS = {
    "Q4_0": (32, 18), "Q5_0": (32, 22), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)
}  # fmt: skip
"""By ggml's name: elements and bytes of a block."""
