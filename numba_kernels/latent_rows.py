"""The layout of latent rows of fp8 (MLA, DeepSeek-V3.2's sizes give its 656 bytes), for the kernels of all devices.

    values   a byte (e4m3) each, zeros up to a multiple of 16
    scales   float32, one for each GROUP values, up to a multiple of 16 bytes
    rotated  bfloat16, zeros up to a multiple of 16 numbers

A group x of values is stored as round(x / scale), scale = max |x| / 448, ties to even. Bytes that fill up are never
written: pages are zeroed when they are allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 128
PIECE = 16


@dataclass(frozen=True, slots=True)
class LatentBytes:
    """A row of `width` numbers, of which the last `num_values` are the value."""

    width: int
    num_values: int

    @property
    def rotary(self) -> int:
        """The count of rotated numbers."""
        return self.width - self.num_values

    @property
    def value_bytes(self) -> int:
        """The values' part of a row, with what fills it up."""
        return _round_up(self.num_values)

    @property
    def groups(self) -> int:
        """The count of scales."""
        return -(-self.num_values // GROUP)

    @property
    def rotated_at(self) -> int:
        """Bytes before the rotated numbers; scales are at `value_bytes`."""
        return self.value_bytes + _round_up(4 * self.groups)

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return self.rotated_at + 2 * _round_up(self.rotary)


def _round_up(size: int) -> int:
    return -(-size // PIECE) * PIECE
