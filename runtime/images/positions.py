"""Positions in three axes (M-RoPE, Qwen2-VL, arXiv 2409.12191).

A text token has the same position on all axes. A picture's tokens share one time, and have a line and a column each;
the text after it continues after the largest of them. So rotary positions lag places in the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def token_positions(num_tokens: int, images: Sequence[tuple[int, int, int]]) -> tuple[Array, int]:
    """The positions of a prompt's tokens, `[3, num_tokens]` int32 by time, line and column; and the offset of later
    tokens' positions from their places.

    `images`: the first token, the lines and the columns of tokens of each picture, in order.
    """
    positions = np.empty((3, num_tokens), np.int32)
    place = offset = 0
    for first, rows, columns in images:
        positions[:, place:first] = np.arange(place, first) + offset
        start, count = first + offset, rows * columns
        lines, across = np.divmod(np.arange(count), columns)
        positions[:, first : first + count] = start + np.stack([np.zeros(count, np.int64), lines, across])
        place, offset = first + count, offset + max(rows, columns) - count
    positions[:, place:] = np.arange(place, num_tokens) + offset
    return positions, offset
