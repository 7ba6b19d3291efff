"""The PTX parser: what it reads, what it renames, what it refuses."""

from __future__ import annotations

import pytest

from runtime.emulator.translation.ptx import (
    Address,
    Float,
    Integer,
    Negated,
    Pair,
    PtxError,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
    parse,
)  # fmt: skip


def kernel(body: str, parameters: str = "", before: str = ""):
    text = f".version 9.0\n.target sm_80\n.address_size 64\n{before}\n.visible .entry k({parameters})\n{{\n"
    registers = ".reg .pred %p<4>; .reg .b32 %r<8>; .reg .f32 %f<4>; .reg .b64 %rd<4>;\n"
    return parse(text + registers + body + "\n}\n").kernels["k"]


def operands(statement: str):
    return kernel(statement).instructions[0].operands


def test_operands_of_every_kind() -> None:
    r = [Register(f"%r{i}", "b32") for i in range(8)]
    assert operands("add.s32 %r1, %r2, -7;") == (r[1], r[2], Integer(-7))
    assert operands("mov.f32 %f1, 0fBF800000;")[1] == Float(0xBF800000, 32)
    assert operands("mov.f32 %f1, -0f3F800000;")[1] == Float(0xBF800000, 32)
    assert operands("mov.u32 %r1, %tid.x;")[1] == Special("%tid.x")
    assert operands("mov.u32 %r1, 0x10U;")[1] == Integer(16)
    assert operands("ld.shared.v2.u32 {%r1,%r2}, [%rd1+-8];") == (
        Vector((r[1], r[2])),
        Address(Register("%rd1", "b64"), -8),
    )
    assert operands("ld.param.u64 %rd1, [k_param_0];")[1] == Address(Symbol("k_param_0"))
    assert operands("shfl.sync.down.b32 %r1|%p1, %r2, 16, 31, -1;")[0] == Pair(r[1], Register("%p1", "pred"))
    assert operands("and.pred %p1, %p2, !%p3;")[2] == Negated(Register("%p3", "pred"))
    assert operands("atom.global.add.u32 _, [%rd1], 1;")[0] == Sink()


def test_guards_labels_and_lines() -> None:
    found = kernel("@!%p1 bra $L_end;\nadd.s32 %r1, %r1, 1;\n$L_end:\nret;")
    branch = found.instructions[0]
    assert (branch.guard, branch.guard_negated) == (Register("%p1", "pred"), True)
    assert branch.operands == (Symbol("$L_end"),)
    assert found.labels == {"$L_end": 2}
    assert [i.line for i in found.instructions] == [8, 9, 11]


def test_scopes_of_inline_assembly_do_not_collide() -> None:
    scope = "{ .reg .pred P; L: setp.eq.s32 P, %r1, 0; @P bra L; }"
    found = kernel(f"{scope}\n{scope}\nret;")
    first, second = found.instructions[1], found.instructions[3]
    assert first.guard is not None
    assert first.guard != second.guard
    assert found.labels[first.operands[0].name] == 0
    assert found.labels[second.operands[0].name] == 2


def test_parameters_variables_and_directives() -> None:
    parameters = ".param .u64 .ptr .global .align 16 a, .param .f32 b, .param .align 8 .b8 c[24]"
    before = ".shared .align 4 .b8 s[1024];\n.extern .shared .b8 dynamic[];\n.const .u16 t[3] = {1, 2, 258};"
    header = ".version 9.0\n.target sm_90a\n.address_size 64\n"
    text = f"{header}{before}\n.entry k({parameters})\n.maxntid 256, 1, 1\n{{ ret; }}"
    module = parse(text)
    found = module.kernels["k"]
    assert [(p.name, p.align, p.size_bytes) for p in found.parameters] == [("a", 8, 8), ("b", 4, 4), ("c", 8, 24)]
    assert found.directives["maxntid"] == (256, 1, 1)
    assert module.target == "sm_90a"
    assert module.variables["s"].size_bytes == 1024
    assert module.variables["dynamic"].size_bytes is None
    assert module.variables["t"].initial == bytes([1, 0, 2, 0, 2, 1])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s32 %r1, %r2, %q9;", "line 8: unknown register %q9"),
        ("add.s32 %r1, #3;", "line 8: cannot read"),
        ("add.s32 %r1, %r2", "expected|ends in the middle|cannot read"),
        (".banana 3;", "unknown directive '.banana'"),
    ],
)
def test_what_it_refuses(body: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        kernel(body)


def test_32_bit_addresses_are_refused() -> None:
    with pytest.raises(PtxError, match="64-bit"):
        parse(".version 9.0\n.target sm_80\n.address_size 32\n")
