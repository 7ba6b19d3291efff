"""All translations of instructions: importing this module registers them (and their operations)."""

from __future__ import annotations

from runtime.emulator.arithmetic import conversions, floats, integers, moves, small_floats
from runtime.emulator.async_copies import bulk_copy, cp_async, tensor_copy
from runtime.emulator.memory import atomics, load_store
from runtime.emulator.synchronisation import cluster, control, mbarrier
from runtime.emulator.tensor_cores import mma, wgmma

MODULES = (
    conversions, floats, integers, moves, small_floats, bulk_copy, cp_async, tensor_copy, atomics, load_store, cluster,
    control, mbarrier, mma, wgmma,
)  # fmt: skip
"""Add a folder's modules here."""
