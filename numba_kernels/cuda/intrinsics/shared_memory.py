"""The most shared memory that a block can have, by architecture: CUDA's programming guide, "Compute Capabilities"."""

from __future__ import annotations

SHARED_BYTES = {
    "sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90a": 232_448, "sm_100a": 232_448, "sm_120": 101_376,
    "sm_120a": 101_376,
}  # fmt: skip
"""By opt-in."""


def without_room(num_bytes: int) -> tuple[str, ...]:
    """The architectures where a block cannot have so much."""
    return tuple(arch for arch, most in SHARED_BYTES.items() if num_bytes > most)


SMALL = without_room(100 << 10)
