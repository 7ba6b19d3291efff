"""All translations of instructions: importing this module registers them (and their operations)."""

from __future__ import annotations

from runtime.device.emulator.arithmetic import (
    bits,
    comparisons,
    conversions,
    floats,
    integers,
    moves,
    pairs,
    warp_exchange,
)
from runtime.device.emulator.async_copies import bulk_copy, cp_async, tensor_copy
from runtime.device.emulator.execution import closing
from runtime.device.emulator.memory import atomics, load_store
from runtime.device.emulator.synchronisation import cluster, control, mbarrier
from runtime.device.emulator.tensor_cores import ldmatrix, mma, wgmma

MODULES = (
    bits, comparisons, conversions, floats, integers, moves, pairs, warp_exchange, bulk_copy, cp_async, tensor_copy,
    closing, atomics, load_store, cluster, control, mbarrier, ldmatrix, mma, wgmma,
)  # fmt: skip
"""Add a room's modules here."""
