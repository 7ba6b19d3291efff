"""All translations of instructions: importing this module registers them (and their operations)."""

from __future__ import annotations

from runtime.emulator.arithmetic import (
    bits,
    conversions,
    floats,
    integers,
    moves,
    small_floats,
    warp_exchange,
)
from runtime.emulator.async_copies import bulk_copy, cp_async, tensor_copy
from runtime.emulator.execution import closing
from runtime.emulator.memory import atomics, load_store
from runtime.emulator.synchronisation import cluster, control, mbarrier
from runtime.emulator.tensor_cores import ldmatrix, mma, wgmma

MODULES = (
    bits, conversions, floats, integers, moves, small_floats, warp_exchange, bulk_copy, cp_async, tensor_copy,
    closing, atomics, load_store, cluster, control, mbarrier, ldmatrix, mma, wgmma,
)  # fmt: skip
"""Add a folder's modules here."""
