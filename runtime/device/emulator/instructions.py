"""All translations of instructions: importing this module registers them (and their operations)."""

from __future__ import annotations

from runtime.device.emulator import (
    alu_bits,
    alu_float,
    alu_half,
    alu_integer,
    compare,
    control,
    convert,
    move,
    warp_exchange,
)

MODULES = (alu_bits, alu_float, alu_half, alu_integer, compare, control, convert, move, warp_exchange)
"""Add a room's modules here."""
