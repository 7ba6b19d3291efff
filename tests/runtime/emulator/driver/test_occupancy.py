"""Estimated registers of small kernels, and blocks that fit on a multiprocessor."""

from __future__ import annotations

import pytest

from runtime.emulator.driver.architectures import A100, H200, RTX_4090, blocks_per_sm
from runtime.emulator.translation.basic_blocks import estimate_registers
from runtime.emulator.translation.ptx import Kernel, parse

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


def kernel(body: str, directives: str = "") -> Kernel:
    registers = ".reg .pred %p<4>; .reg .b32 %r<200>; .reg .b64 %d<9>;"
    return parse(f"{HEAD}.visible .entry k() {directives} {{ {registers}\n{body}\nret; }}").kernels["k"]


def chain(count: int) -> str:
    """`count` values that are alive together: all are made, then all are added up."""
    made = "".join(f"mov.u32 %r{index}, {index};\n" for index in range(count))
    return made + "".join(f"add.u32 %r0, %r0, %r{index};\n" for index in range(1, count)) + "st.global.u32 [%d0], %r0;"


@pytest.mark.parametrize("count", [20, 57, 150])
def test_values_alive_at_once_are_counted(count: int) -> None:
    assert estimate_registers(kernel(chain(count))) == count + 2  # %d0 is 64 bits wide


def test_values_that_follow_each_other_share_a_register() -> None:
    body = "".join(f"mov.u32 %r{index}, 1;\nst.global.u32 [%d0], %r{index};\n" for index in range(100))
    assert estimate_registers(kernel(body)) == 16


def test_a_loop_keeps_what_it_needs_again() -> None:
    made = "".join(f"mov.u32 %r{index}, {index};\n" for index in range(30))
    loop = "LOOP:\n" + "".join(f"add.u32 %r100, %r100, %r{index};\n" for index in range(30))
    once = estimate_registers(kernel(made + loop))
    again = estimate_registers(kernel(made + loop + "setp.ne.u32 %p0, %r100, 7;\n@%p0 bra LOOP;"))
    assert (once, again) == (31, 31)
    late = "mov.u32 %r101, 1;\n" + "".join(f"add.u32 %r{150 + index}, %r{index}, 1;\n" for index in range(30))
    late += "".join(f"add.u32 %r101, %r101, %r{150 + index};\n" for index in range(30))
    assert estimate_registers(kernel(made + "LOOP:\n" + late + "setp.ne.u32 %p0, %r101, 7;\n@%p0 bra LOOP;")) == 61


def test_what_is_written_under_a_guard_was_alive_before() -> None:
    body = "mov.u32 %r60, 1;\n" + chain(20) + "\n@%p1 mov.u32 %r60, 2;\nst.global.u32 [%d0], %r60;"
    without = body.replace("@%p1 ", "")
    assert estimate_registers(kernel(body)) == estimate_registers(kernel(without)) + 1


def test_a_directive_decides() -> None:
    assert estimate_registers(kernel(chain(50), ".maxnreg 40")) == 40


def test_blocks_of_a_multiprocessor() -> None:
    assert blocks_per_sm(A100, 1024, 32, 0) == 2  # threads
    assert blocks_per_sm(RTX_4090, 1024, 32, 0) == 1
    assert blocks_per_sm(RTX_4090, 32, 16, 0) == 24  # blocks
    assert blocks_per_sm(A100, 128, 255, 0) == 2  # registers: 65536 of 8 warps × 32 × 256
    assert blocks_per_sm(A100, 96, 255, 0) == 2  # warps are handed out by four
    assert blocks_per_sm(A100, 128, 32, 163 * 1024) == 1  # shared memory
    assert blocks_per_sm(A100, 128, 32, 81 * 1024) == 2
    assert blocks_per_sm(A100, 128, 32, 81 * 1024 + 1) == 1
    assert blocks_per_sm(A100, 128, 32, 163 * 1024 + 1) == 0
    assert blocks_per_sm(H200, 0, 32, 0) == 0
