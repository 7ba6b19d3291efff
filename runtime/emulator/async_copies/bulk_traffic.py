"""Counts bulk copies' traffic with device memory, where a launch counts (`execution/traffic.py`)."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at
from runtime.emulator.execution.traffic import GLOBAL_BYTES, GLOBAL_REQUESTS, GLOBAL_SECTORS, TRAFFIC_FIELDS
from runtime.emulator.execution.warp_state import LAUNCH_TRAFFIC, WARP_LAUNCH


@njit
def count_run(warp, site, address, size, requests):
    """Adds `size` neighbouring bytes from a host address on, and `requests`, to an instruction's counts."""
    launch = i64_at(warp[WARP_LAUNCH])
    if launch[LAUNCH_TRAFFIC] == 0:
        return
    fields = i64_at(launch[LAUNCH_TRAFFIC] + site * (TRAFFIC_FIELDS * 8))
    fields[GLOBAL_REQUESTS] += requests
    if size > 0:
        fields[GLOBAL_SECTORS] += ((address + size - 1) >> 5) - (address >> 5) + 1
        fields[GLOBAL_BYTES] += size
