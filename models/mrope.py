"""Rotations by positions in three axes (`runtime.images.positions`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.configuration.rope_config import RopeConfig
from models.rope import inverse_frequencies
from runtime import ops
from runtime.device.device import Device
from runtime.ops import RopeTable

Array = np.ndarray[Any, Any]


def parted_axes(sections: Sequence[int]) -> Array:
    """The axis that turns each pair: a section for each, as in Qwen2.5-VL."""
    return np.repeat(np.arange(len(sections)) % 3, sections)


def interleaved_axes(sections: Sequence[int], num_pairs: int) -> Array:
    """The same as in Qwen3-VL: the axes take turns for as long as their sections last, then it is time."""
    axes = np.zeros(num_pairs, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def rotations(rope: RopeConfig, axes: Array, positions: Array, device: Device) -> RopeTable:
    """A row of rotations for each token of `positions [3, num_tokens]`: equal to the model's table, to the bit, where a
    token's axes agree."""
    turned = np.ascontiguousarray(positions.astype(np.float32)[axes].T)  # [num_tokens, num_pairs]
    angles = turned * inverse_frequencies(rope)
    cos = np.cos(angles, dtype=np.float64, casting="same_kind").astype(np.float32)
    sin = np.sin(angles, dtype=np.float64, casting="same_kind").astype(np.float32)
    if rope.attention_factor != 1.0:
        cos *= np.float32(rope.attention_factor)
        sin *= np.float32(rope.attention_factor)
    cos_on, sin_on = ops.place([cos, sin], device)
    return RopeTable(cos=cos_on, sin=sin_on, interleaved=rope.interleaved)
