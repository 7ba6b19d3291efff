"""Recurrent steps by the emulator's counts and by their machine code: states move once, and no register is spilled."""

from __future__ import annotations

from typing import Any

import pytest

from numba_kernels.cuda.recurrent.step import specialisations
from runtime.bench.kernels.recurrent import delta_rule_case
from runtime.device.kernel_cache import KernelCache
from tools.kernel_costs.machine_code import nvdisasm_if_any
from tools.kernel_costs.static import examine
from tools.kernel_report import count

pytestmark = pytest.mark.exhaustive


@pytest.mark.emulator
@pytest.mark.parametrize("queries", [1, 4])
def test_a_state_is_read_once_and_written_once(queries: int) -> None:
    """States of float32 and of bfloat16 differ in nothing else that moves."""
    sizes: Any = {"num_key_heads": 1, "num_value_heads": 2, "key_dim": 128, "value_dim": 48}
    moved = {state: count(delta_rule_case(3, queries, state=state, **sizes)).moved_bytes for state in ("f32", "bf16")}
    assert moved["f32"] - moved["bf16"] == 3 * 2 * 128 * 48 * 2 * (4 - 2)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_step_spills_nothing(arch: str) -> None:
    for kernel in specialisations():
        (facts,) = examine(kernel, (arch,), KernelCache(), nvdisasm_if_any())
        assert facts.offences() == []
        if kernel.name == "delta_step_bf16_f32_t4_k128_x4" and arch == "sm_90a":
            assert facts.num_registers <= 128  # four blocks of a multiprocessor
