"""Launching: arguments, special registers, variables, counters, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.emulator.execution.counters import Counters
from runtime.emulator.execution.launch import Checks, launch, load
from runtime.emulator.memory.device_memory import Machine
from runtime.emulator.translation.lowering import UnsupportedInstruction
from runtime.errors import InvalidArgumentError
from tests.runtime.emulator.running import HEADER, entry, kernel_text, run, run_counted


def test_parameters_at_their_alignment() -> None:
    text = (
        HEADER
        + """
        .visible .entry k(.param .u8 a, .param .u64 out, .param .u16 b, .param .f32 c, .param .align 8 .b8 d[12])
        {
        .reg .b32 %r<9>; .reg .b64 %d<3>; .reg .b16 %h<3>; .reg .f32 %f<2>;
        ld.param.u8 %h1, [a];
        ld.param.u16 %h2, [b];
        ld.param.f32 %f1, [c];
        ld.param.u32 %r4, [d+8];
        ld.param.u64 %d1, [out];
        cvt.u32.u16 %r1, %h1;
        cvt.u32.u16 %r2, %h2;
        st.global.u32 [%d1], %r1;
        st.global.u32 [%d1+4], %r2;
        st.global.f32 [%d1+8], %f1;
        st.global.u32 [%d1+12], %r4;
        ret;
        }
        """
    )
    layout = np.dtype(
        {
            "names": ["a", "out", "b", "c", "d"],
            "formats": ["u1", "u8", "u2", "f4", "(3,)u4"],
            "offsets": [0, 8, 16, 20, 24],
        }
    )
    machine = Machine(1 << 20)
    target = machine.allocate(16)
    values = np.zeros((), layout)
    values["a"], values["out"], values["b"], values["c"], values["d"] = 200, target, 60000, 1.5, (1, 2, 3)
    kernel = load(text).kernel()
    assert kernel.parameter_bytes == 36
    launch(kernel, machine, (1, 1, 1), (1, 1, 1), 0, values.tobytes(), checks=Checks.ALL)
    found = machine.read(target, 16)
    assert np.frombuffer(found, np.uint32)[[0, 1, 3]].tolist() == [200, 60000, 3]
    assert np.frombuffer(found, np.float32)[2] == 1.5
    machine.close()


def test_thread_indices_of_a_three_dimensional_block() -> None:
    text = (
        HEADER
        + """
        .visible .entry k(.param .u64 out)
        {
        .reg .b32 %r<20>; .reg .b64 %d<3>;
        mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
        mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y; mov.u32 %r6, %ctaid.z;
        mov.u32 %r7, %ntid.x; mov.u32 %r8, %ntid.y; mov.u32 %r9, %ntid.z;
        mov.u32 %r10, %nctaid.x; mov.u32 %r11, %nctaid.y;
        mad.lo.u32 %r12, %r6, %r11, %r5;
        mad.lo.u32 %r12, %r12, %r10, %r4;
        mad.lo.u32 %r12, %r12, %r9, %r3;
        mad.lo.u32 %r12, %r12, %r8, %r2;
        mad.lo.u32 %r12, %r12, %r7, %r1;
        ld.param.u64 %d1, [out];
        mul.wide.u32 %d2, %r12, 4;
        add.u64 %d1, %d1, %d2;
        mov.u32 %r13, %warpid;
        mad.lo.u32 %r13, %r13, 1000, %r12;
        st.global.u32 [%d1], %r13;
        ret;
        }
        """
    )
    machine = Machine(1 << 20)
    grid, block = (3, 2, 2), (5, 3, 4)
    count = 12 * 60
    target = machine.allocate(4 * count)
    kernel = load(text).kernel()
    launch(kernel, machine, grid, block, 0, np.uint64(target).tobytes(), checks=Checks.ALL)
    found = np.frombuffer(machine.read(target, 4 * count), np.uint32)
    index = np.arange(count)
    assert found.tolist() == (index + index % 60 // 32 * 1000).tolist()
    machine.close()


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("mov.u32 %r0, %lanemask_eq;", [1 << n for n in range(32)]),
        ("mov.u32 %r0, %lanemask_lt;", [(1 << n) - 1 for n in range(32)]),
        ("mov.u32 %r0, %lanemask_le;", [(2 << n) - 1 for n in range(32)]),
        ("mov.u32 %r0, %lanemask_gt;", [2**32 - (2 << n) for n in range(32)]),
        ("mov.u32 %r0, %lanemask_ge;", [2**32 - (1 << n) for n in range(32)]),
        ("mov.u32 %r0, %nwarpid;", [1] * 32),
        ("mov.u32 %r0, %dynamic_smem_size;", [64] * 32),
    ],
)
def test_special_registers(statement: str, expected: list[int]) -> None:
    assert run(statement, shared_bytes=64)[0].tolist() == expected


def test_the_clock_rises() -> None:
    clocks = "mov.u64 %d2, %clock64;\nbar.sync 0;\nmov.u64 %d3, %clock64;\n"
    body = clocks + "setp.gt.u64 %p0, %d3, %d2;\nselp.u32 %r0, 1, 0, %p0;"
    assert run(body).all()


def test_module_variables() -> None:
    variables = (
        ".global .align 4 .u32 table[4] = {3, 5, 7, 9};\n.const .align 4 .u32 scale = 100;\n.global .u32 unused;"
    )
    body = """
        mov.u64 %d2, table;
        and.b32 %r4, %r1, 3;
        mul.wide.u32 %d3, %r4, 4;
        add.u64 %d2, %d2, %d3;
        ld.global.u32 %r5, [%d2];
        ld.const.u32 %r6, [scale];
        mul.lo.u32 %r0, %r5, %r6;
    """
    kernel = entry(body, variables)
    assert run(kernel)[0].tolist() == [300, 500, 700, 900] * 8
    with pytest.raises(InvalidArgumentError, match="no address for variable table"):
        launch(kernel, Machine(1 << 20), (1, 1, 1), (32, 1, 1), 0, bytes(16), checks=Checks.ALL)


def test_counters_count_what_ran() -> None:
    body = """
        setp.ge.u32 %p0, %r1, 40;
        @%p0 bra OUT;
        mul.lo.u32 %r0, %r1, 3;
        mul.lo.u32 %r0, %r0, 5;
        OUT:
        add.u32 %r0, %r0, 1;
    """
    _, counters = run_counted(body, 64, 2)
    assert counters.by_opcode["mul.lo.u32"] == 2 * 2 * 2
    assert counters.lanes_by_opcode["mul.lo.u32"] == 2 * 2 * 40
    assert counters.by_opcode["add.u32"] == 4
    assert counters.lanes_by_opcode["st.global.u32"] == 128
    # Warp 1 diverges: its 24 lanes skip two instructions, and it executes what follows once, together again.
    assert counters.warp_instructions == sum(counters.by_opcode.values())
    assert counters.lane_instructions == sum(counters.lanes_by_opcode.values())
    twice = counters + counters
    assert twice.by_opcode["mul.lo.u32"] == 16
    assert twice.lane_instructions == 2 * counters.lane_instructions
    assert counters + Counters() == counters


def test_a_barrier_that_is_waited_for_counts_once() -> None:
    _, counters = run_counted("bar.sync 0;\nadd.u32 %r0, %r0, 1;\nbar.sync 0;", 256, 2)
    assert counters.by_opcode["bar.sync"] == 2 * 8 * 2
    assert counters.by_opcode["add.u32"] == 2 * 8


def test_an_unknown_instruction_is_refused_by_name() -> None:
    for statement in ("frobnicate.u32 %r0, %r1;", "bar.sync.sideways 0;", "add.sideways.u32 %r0, %r1, %r1;"):
        with pytest.raises(UnsupportedInstruction, match=statement.split()[0]):
            run(statement)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": (1025, 1, 1)}, "1025 threads"),
        ({"block": (0, 1, 1)}, "block"),
        ({"grid": (1, 0, 1)}, "grid"),
        ({"cluster": (2, 1, 1), "grid": (3, 1, 1)}, "no multiple of cluster"),
        ({"shared_bytes": -1}, "shared_bytes is -1"),
        ({"parameters": bytes(15)}, "16 parameter bytes, not 15"),
    ],
)
def test_bad_arguments(changes: dict[str, object], message: str) -> None:
    options: dict[str, object] = {
        "grid": (1, 1, 1), "block": (32, 1, 1), "shared_bytes": 0, "parameters": bytes(16), "cluster": (1, 1, 1),
    }  # fmt: skip
    options |= changes
    machine = Machine(1 << 20)
    with pytest.raises(InvalidArgumentError, match=message):
        launch(entry(""), machine, checks=Checks.ALL, **options)  # type: ignore[arg-type]
    machine.close()


def test_a_program_names_its_kernels() -> None:
    program = load(HEADER + kernel_text("", name="first") + kernel_text("", name="second"))
    assert program.kernel("second").name == "second"
    assert program.kernel("first") is program.kernel("first")
    for name in ("third", None):
        with pytest.raises(InvalidArgumentError, match="first, second"):
            program.kernel(name)
