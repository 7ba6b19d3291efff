"""Branches of single lanes: divergence, reconvergence, loops, exits. The oracle runs one thread at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.execution.launch import Checks
from runtime.emulator.translation.program import load
from tests.runtime.emulator.running import HEADER, entry, kernel_text, run


def test_both_sides_of_a_branch() -> None:
    result = run(
        """
        and.b32 %r4, %r1, 1;
        setp.eq.u32 %p0, %r4, 0;
        @%p0 bra EVEN;
        mul.lo.u32 %r0, %r1, 100;
        bra JOIN;
        EVEN:
        add.u32 %r0, %r1, 7;
        JOIN:
        add.u32 %r0, %r0, 1;
        """
    )
    lanes = np.arange(32)
    assert result[0].tolist() == np.where(lanes % 2 == 0, lanes + 8, lanes * 100 + 1).tolist()


def test_loop_with_another_trip_count_in_each_lane() -> None:
    result = run(
        """
        mov.u32 %r4, 0;
        LOOP:
        setp.ge.u32 %p0, %r4, %r1;
        @%p0 bra DONE;
        add.u32 %r0, %r0, %r4;
        add.u32 %r4, %r4, 1;
        bra LOOP;
        DONE:
        """,
        threads=70,
    )
    assert result[0].tolist() == [n * (n - 1) // 2 for n in range(70)]


def test_the_join_may_stand_before_the_other_side() -> None:
    """A barrier that the text places ahead of the code that some lanes still have to run."""
    result = run(
        """
        and.b32 %r4, %r1, 1;
        setp.eq.u32 %p0, %r4, 0;
        @%p0 bra LATE;
        mov.u32 %r0, 5;
        JOIN:
        bar.sync 0;
        add.u32 %r0, %r0, 1;
        bra OUT;
        LATE:
        mov.u32 %r0, 9;
        bra JOIN;
        OUT:
        """,
        threads=64,
    )
    assert result[0].tolist() == [10, 6] * 32


def test_lanes_keep_their_registers_while_others_loop() -> None:
    """A register set inside of a loop body must keep the value of the lane's own last trip."""
    result = run(
        """
        mov.u32 %r4, 0;
        LOOP:
        mul.lo.u32 %r5, %r4, 3;
        add.u32 %r4, %r4, 1;
        setp.lt.u32 %p0, %r4, %r1;
        @%p0 bra LOOP;
        mov.u32 %r0, %r5;
        """
    )
    assert result[0].tolist() == [3 * max(n - 1, 0) for n in range(32)]


def test_guards_apply_to_single_instructions() -> None:
    result = run(
        """
        setp.gt.u32 %p0, %r1, 10;
        setp.lt.u32 %p1, %r1, 20;
        mov.u32 %r0, 1;
        @%p0 add.u32 %r0, %r0, 1;
        @!%p1 add.u32 %r0, %r0, 10;
        @%p0 setp.lt.u32 %p1, %r1, 15;
        @%p1 add.u32 %r0, %r0, 100;
        """
    )
    expected = []
    for lane in range(32):
        value, p1 = 1, lane < 20
        value += lane > 10
        value += 0 if p1 else 10
        if lane > 10:
            p1 = lane < 15
        expected.append(value + 100 * p1)
    assert result[0].tolist() == expected


def test_early_exit_leaves_the_other_lanes() -> None:
    kernel = entry(
        """
        setp.lt.u32 %p0, %r1, 40;
        @%p0 ret;
        mov.u32 %r0, %r1;
        bar.sync 0;
        """
    )
    result = run(kernel, threads=64, checks=Checks.NONE)
    assert result[0, 40:].tolist() == list(range(40, 64))
    assert not result[0, :40].any()


def test_exit_by_a_branch_before_a_barrier() -> None:
    """`if (i >= n) return;` as compilers write it: a branch to the return at the text's end."""
    text = HEADER + kernel_text("setp.ge.u32 %p0, %r1, 50;\n@%p0 bra END;\nbar.sync 0;\nmov.u32 %r0, 3;")
    kernel = load(text.replace("ret;", "END:\nret;")).kernel("k")
    result = run(kernel, threads=64, checks=Checks.NONE)
    assert result[0].tolist() == [3] * 50 + [0] * 14


def test_active_mask_in_a_branch() -> None:
    result = run(
        """
        activemask.b32 %r0;
        setp.ge.u32 %p0, %r1, 8;
        @%p0 bra OUT;
        activemask.b32 %r0;
        OUT:
        """
    )
    assert result[0].tolist() == [0xFF] * 8 + [0xFFFFFFFF] * 24


def test_partial_last_warp() -> None:
    result = run("activemask.b32 %r0;", threads=45)
    assert result[0].tolist() == [0xFFFFFFFF] * 32 + [0x1FFF] * 13


def test_branch_by_index() -> None:
    body = """
        rem.u32 %r4, %r1, 3;
        TABLE: .branchtargets A, B, C;
        brx.idx %r4, TABLE;
        A:
        mov.u32 %r0, 10;
        bra JOIN;
        B:
        mov.u32 %r0, 20;
        bra JOIN;
        C:
        mov.u32 %r0, 30;
        JOIN:
        add.u32 %r0, %r0, %r1;
        """
    assert run(body)[0].tolist() == [(10, 20, 30)[n % 3] + n for n in range(32)]
    with pytest.raises(EmulatorFault) as caught:
        run(body.replace("3;\n        TABLE", "4;\n        TABLE"))
    assert caught.value.kind == FaultKind.BRANCH_INDEX
    assert caught.value.thread == (3, 0, 0)


def test_trap_names_line_block_and_thread() -> None:
    kernel = entry("setp.ne.u32 %p1, %r2, 2;\nsetp.ne.u32 %p0, %r1, 37;\nor.pred %p0, %p0, %p1;\n@!%p0 trap;")
    with pytest.raises(EmulatorFault, match=r"kernel k, block \(2, 0, 0\), thread \(37, 0, 0\)") as caught:
        run(kernel, threads=64, blocks=4)
    fault = caught.value
    assert fault.kind == FaultKind.TRAP
    assert (fault.block, fault.thread, fault.kernel) == ((2, 0, 0), (37, 0, 0), "k")
    assert fault.text.strip() == "@!%p0 trap;"
    assert kernel.module.lines[fault.line - 1] == fault.text


def test_a_failed_assertion_says_which() -> None:
    """What nvcc makes of assert(): a call of __assertfail with its arguments in parameter space."""
    variables = """
    .extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
    .global .align 1 .b8 function[2] = {107};
    .global .align 1 .b8 text[7] = {105, 32, 33, 61, 32, 110};
    .global .align 1 .b8 file[5] = {97, 46, 99, 117};
    """
    body = """
    setp.ne.u32 %p1, %r1, 41;
    @%p1 bra SOUND;
    mov.u64 %d2, text;
    mov.u64 %d3, file;
    mov.u64 %d4, function;
    {
    .param .b64 param0;
    st.param.b64 [param0+0], %d2;
    .param .b64 param1;
    st.param.b64 [param1+0], %d3;
    .param .b32 param2;
    st.param.b32 [param2+0], 12;
    .param .b64 param3;
    st.param.b64 [param3+0], %d4;
    .param .b64 param4;
    st.param.b64 [param4+0], 1;
    call.uni __assertfail, (param0, param1, param2, param3, param4);
    }
    SOUND:
    mov.u32 %r0, 1;
    """
    kernel = entry(body, variables)
    assert run(kernel, threads=32).all()
    with pytest.raises(EmulatorFault, match=r"assertion 'i != n' failed \(a.cu:12\)") as caught:
        run(kernel, threads=64)
    assert caught.value.kind == FaultKind.ASSERT
    assert caught.value.thread == (41, 0, 0)


# --- random programs -------------------------------------------------------------------------------------------------

NUM_VARIABLES = 5


@dataclass
class Program:
    """A random structured program over NUM_VARIABLES registers, as PTX and as Python closures."""

    random: random.Random
    lines: list[str] = field(default_factory=list)
    serial: int = 0

    def label(self) -> str:
        self.serial += 1
        return f"L{self.serial}"

    def statements(self, depth: int, in_loop: tuple[str, int] | None) -> list[object]:
        return [self.statement(depth, in_loop) for _ in range(self.random.randint(1, 4))]

    def statement(self, depth: int, in_loop: tuple[str, int] | None) -> object:
        choose = self.random
        kind = choose.choice(["set", "set", "guarded", "if", "loop", "break"] if depth else ["set", "guarded", "break"])
        a, b, c = (choose.randrange(NUM_VARIABLES) for _ in range(3))
        number = choose.randint(1, 9)
        if kind == "set":
            self.lines.append(f"mad.lo.u32 %r{10 + a}, %r{10 + b}, {number}, %r{10 + c};")
            return ("set", a, b, number, c)
        bit = choose.randint(0, 4)
        self.lines.append(f"shr.u32 %r20, %r{10 + a}, {bit};\nand.b32 %r20, %r20, 1;\nsetp.ne.u32 %p0, %r20, 0;")
        if kind == "guarded":
            self.lines.append(f"@%p0 add.u32 %r{10 + b}, %r{10 + b}, {number};")
            return ("guarded", a, bit, b, number)
        if kind == "break":
            if in_loop is None:
                return ("nothing",)
            self.lines.append(f"@%p0 bra {in_loop[0]};")
            return ("break", a, bit)
        if kind == "if":
            other, end = self.label(), self.label()
            self.lines.append(f"@%p0 bra {other};")
            first = self.statements(depth - 1, in_loop)
            self.lines.append(f"bra {end};\n{other}:")
            second = self.statements(depth - 1, in_loop)
            self.lines.append(f"{end}:")
            return ("if", a, bit, first, second)
        start, end, counter = self.label(), self.label(), 21 + depth
        limit = choose.randint(1, 5)
        mask = choose.randint(1, 3)
        self.lines.append(f"and.b32 %r{counter}, %r{10 + a}, {mask};\n{start}:")
        body = self.statements(depth - 1, (end, counter))
        self.lines.append(f"add.u32 %r{counter}, %r{counter}, 1;\nsetp.lt.u32 %p1, %r{counter}, {limit};")
        self.lines.append(f"@%p1 bra {start};\n{end}:")
        return ("loop", a, mask, limit, body)


class Break(Exception):
    pass


def execute(statements: list[object], values: list[int]) -> None:
    """One thread's run."""
    for statement in statements:
        match statement:
            case ("set", a, b, number, c):
                values[a] = (values[b] * number + values[c]) % (1 << 32)
            case ("guarded", a, bit, b, number):
                if values[a] >> bit & 1:
                    values[b] = (values[b] + number) % (1 << 32)
            case ("break", a, bit):
                if values[a] >> bit & 1:
                    raise Break
            case ("if", a, bit, first, second):
                execute(second if values[a] >> bit & 1 else first, values)
            case ("loop", a, mask, limit, body):
                counter = values[a] & mask
                try:
                    while True:
                        execute(body, values)
                        counter += 1
                        if counter >= limit:
                            break
                except Break:
                    pass


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_run_as_one_thread_at_a_time(seed: int) -> None:
    program = Program(random.Random(seed))
    program.lines += [f"mad.lo.u32 %r{10 + i}, %r1, {2 * i + 1}, {i};" for i in range(NUM_VARIABLES)]
    tree = [statement for _ in range(4) for statement in program.statements(3, None)]
    program.lines += [f"mad.lo.u32 %r0, %r0, 31, %r{10 + i};" for i in range(NUM_VARIABLES)]
    result = run("\n".join(program.lines), threads=96)
    expected = []
    for thread in range(96):
        values = [(thread * (2 * i + 1) + i) % (1 << 32) for i in range(NUM_VARIABLES)]
        execute(tree, values)
        total = 0
        for value in values:
            total = (total * 31 + value) % (1 << 32)
        expected.append(total)
    assert result[0].tolist() == expected
