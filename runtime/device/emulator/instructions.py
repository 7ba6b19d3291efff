"""All translations of instructions: importing this module registers them (and their operations)."""

from __future__ import annotations

from runtime.device.emulator import (
    alu_bits,
    alu_float,
    alu_half,
    alu_integer,
    atomics,
    bulk,
    closing,
    cluster,
    compare,
    control,
    convert,
    cp_async,
    ldmatrix,
    load_store,
    mbarrier,
    mma,
    move,
    tensor_copy,
    warp_exchange,
    wgmma,
)

MODULES = (
    alu_bits, alu_float, alu_half, alu_integer, atomics, bulk, closing, cluster, compare, control, convert, cp_async,
    ldmatrix, load_store, mbarrier, mma, move, tensor_copy, warp_exchange, wgmma,
)  # fmt: skip
"""Add a room's modules here."""
