"""Statements that the emulator does not understand are refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.emulator.translation.lowering import UnsupportedInstruction
from tests.runtime.emulator.arithmetic.evaluation import Case, evaluate


@pytest.mark.parametrize(
    "statement",
    [
        "shl.u32 {d}, {0}, 1;", "shf.l.b32 {d}, {0}, {0}, 1;", "lop3.b32 {d}, {0}, {0}, {0}, 25;", "popc.u32 {d}, {0};",
        "prmt.b32.f4e {d}, {0}, {0}, 0;", "bfi.u32 {d}, {0}, {0}, 0, 1;", "mov.b32.x {d}, {0};",
        "setp.lt.b32 %p, {0}, {0};", "setp.lo.s32 %p, {0}, {0};", "setp.ltu.u32 %p, {0}, {0};",
        "selp.pred %p, %p, %q, %p;", "setp.lt.nand.s32 %p, {0}, {0}, %q;", "set.lt.u32.u32 {d}, {0}, {0};",
        "slct.s32.s32 {d}, {0}, {0}, {0};", "cvt.s32.f32 {d}, {0};", "cvt.f32.s32 {d}, {0};",
        "cvt.rn.e4m3x2.f32 {d}, {0}, {0};", "cvt.f16.f32 {d}, {0};", "cvt.rs.f16x2.f32 {d}, {0}, {0}, {0};",
        "cvt.rm.tf32.f32 {d}, {0};", "cvt.rn.f32.f32 {d}, {0};", "cvt.rn.satfinite.s2f6x2.f32 {d}, {0}, {0};",
        "fma.f32 {d}, {0}, {0}, {0};", "div.f32 {d}, {0}, {0};", "add.relu.f32 {d}, {0}, {0};", "sin.f32 {d}, {0};",
        "sqrt.rni.f32 {d}, {0};", "max.abs.f32 {d}, {0}, {0};", "tanh.approx.f32 {d}, {0};",
        "add.cc.u16 %h0, %h0, %h0;", "add.what.s32 {d}, {0}, {0};", "mul.s32 {d}, {0}, {0};", "abs.u32 {d}, {0};",
        "min.relu.u32 {d}, {0}, {0};", "frobnicate.b32 {d}, {0};", "mad.wide.cc.u32 {d}, {0}, {0}, {0};",
        "shfl.bfly.b32 {d}, {0}, 1, 0x1f, -1;", "vote.ballot.b32 {d}, %p, -1;", "redux.sync.add.b32 {d}, {0}, -1;",
        "shfl.sync.rot.b32 {d}, {0}, 1, 0x1f, -1;", "redux.sync.min.f32 {d}, {0}, -1;",
    ],
)  # fmt: skip
def test_a_statement_is_refused(statement: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=statement.split()[0]):
        evaluate([Case(statement, [np.zeros(1, np.uint32)])])
