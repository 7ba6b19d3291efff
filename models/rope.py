"""Rotary position tables: the cosine and sine of each position and frequency.

Pair `i` of a head of size D turns by `position * theta^(-2i/D)` (Su et al. 2021, arXiv 2104.09864).
Frequencies and angles are rounded to float32 where transformers rounds them, since that is the arithmetic
that the models were trained in and are compared with: at position 131,071 one unit in the last place of a
frequency near 1 turns a head by 0.008 radians. The cosine and sine of such an angle are exact to float32.

Positions may also lie on three axes (`runtime.images.positions`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from models.configuration.rope_config import RopeConfig
from models.errors import ModelLoadError
from runtime import ops
from runtime.device.device import CPU, Device
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor

Float32Array = np.ndarray[Any, np.dtype[np.float32]]

_MOST_TABLE_BYTES = 4 << 30


def make_rope_table(rope: RopeConfig, num_positions: int, device: Device = CPU) -> RopeTable:
    """cos and sin `[num_rows, rotary_dim / 2]` on a device: a row for each position. With a `rope.switch`,
    longer sequences have rows of their own: their position p is row `switch + p`.

    Raises `ModelLoadError` for a table of more than 4 GiB.
    """
    num_rows = num_table_rows(rope, num_positions)
    size_bytes = 2 * num_rows * (rope.rotary_dim // 2) * 4
    if size_bytes > _MOST_TABLE_BYTES:
        raise ModelLoadError(
            f"the rotary table of {num_positions:,} positions takes {size_bytes:,} bytes, more than the limit of"
            f" {_MOST_TABLE_BYTES:,}: serve fewer tokens a sequence with max_model_len"
        )
    positions = np.arange(num_rows, dtype=np.float32)
    if num_rows == num_positions:
        angles = positions[:, None] * inverse_frequencies(rope)  # [num_rows, rotary_dim / 2]
    else:
        num_short = num_rows - num_positions
        positions[num_short:] -= np.float32(num_short)
        angles = np.empty((num_rows, rope.rotary_dim // 2), np.float32)
        np.multiply(positions[:num_short, None], inverse_frequencies(rope), out=angles[:num_short])
        np.multiply(positions[num_short:, None], inverse_frequencies(rope, is_long=True), out=angles[num_short:])
    # Computed in float64 piece by piece, and rounded into place; the sine takes the place of the angles.
    cos = np.cos(angles, out=np.empty_like(angles), dtype=np.float64, casting="same_kind")
    sin = np.sin(angles, out=angles, dtype=np.float64, casting="same_kind")
    if rope.attention_factor != 1.0:
        cos *= np.float32(rope.attention_factor)
        sin *= np.float32(rope.attention_factor)
    if rope.long_attention_factor is not None and num_rows > num_positions:
        relative = np.float32(rope.long_attention_factor / rope.attention_factor)
        cos[num_rows - num_positions :] *= relative
        sin[num_rows - num_positions :] *= relative
    q_scales = None
    if rope.q_scaling_beta:
        contexts = positions // np.float32(rope.original_max_position_embeddings)
        scales = np.float32(1.0) + np.float32(rope.q_scaling_beta) * np.log1p(contexts)
        q_scales = Tensor.from_numpy(scales).to(device)
    return RopeTable(
        cos=Tensor.from_numpy(cos).to(device),
        sin=Tensor.from_numpy(sin).to(device),
        interleaved=rope.interleaved,
        q_scales=q_scales,
        is_spread=rope.kind == "proportional",
    )


def num_table_rows(rope: RopeConfig, num_positions: int) -> int:
    """Rows of the table of a model whose sequences may have so many tokens."""
    return num_positions + (rope.switch(num_positions) or 0)


def inverse_frequencies(rope: RopeConfig, *, is_long: bool = False) -> Float32Array:
    """Radians per token of each pair `[rotary_dim / 2]`, float32; of a longrope by its long factors, if `is_long`."""
    whole = rope.head_dim if rope.kind == "proportional" else rope.rotary_dim
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(whole)
    powers = np.power(rope.theta, exponents, dtype=np.float64).astype(np.float32)  # rounded once
    if rope.kind == "longrope":
        factors = np.array(rope.long_factors if is_long else rope.short_factors, np.float32)
        powers = factors * powers
    frequencies: Float32Array = np.float32(1.0) / powers
    if rope.kind in ("linear", "proportional"):
        return frequencies / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, powers)
    assert rope.kind in ("default", "longrope")
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Float32Array) -> Float32Array:
    """Wavelengths longer than the trained context over `low_freq_factor` are stretched by `factor`, those
    shorter than it over `high_freq_factor` stay, and those between are interpolated (Llama 3.1)."""
    context = rope.original_max_position_embeddings
    wavelengths = np.float32(2 * math.pi) / frequencies
    stretched = frequencies / np.float32(rope.factor)
    blend = (np.float32(context) / wavelengths - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (np.float32(1.0) - blend) * stretched + blend * frequencies
    is_low = wavelengths > np.float32(context / rope.low_freq_factor)
    is_high = wavelengths < np.float32(context / rope.high_freq_factor)
    return np.where(is_low, stretched, np.where(is_high, frequencies, blended))


def _yarn(rope: RopeConfig, frequencies: Float32Array, powers: Float32Array) -> Float32Array:
    """Pairs below the one that turns `beta_fast` times over the trained context stay, those above the one
    that turns `beta_slow` times are stretched by `factor`, with a ramp between (Peng et al. 2023, arXiv
    2309.00071)."""

    def pair_that_turns(times: float) -> float:
        turns = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    pairs = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    stretched = np.float32(1.0) / (np.float32(rope.factor) * powers)
    kept = np.float32(1.0) - ramp
    blended: Float32Array = stretched * (np.float32(1.0) - kept) + frequencies * kept
    return blended


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
