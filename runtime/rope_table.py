"""The tables of rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotations for each position: ``cos`` and ``sin`` ``[max_position, rotary_dim / 2]`` float32.

    ``interleaved`` pairs dimensions (2 i, 2 i + 1), otherwise (i, i + rotary_dim / 2); with ``is_spread``
    (i, i + head_dim / 2). Other dimensions are not rotated. ``q_scales [max_position]`` float32, if present, multiply
    rotated queries.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    q_scales: Tensor | None = None
    is_spread: bool = False
