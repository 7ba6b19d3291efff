"""Comparisons and selections: every relation of every type, NaN, combination with a predicate."""

from __future__ import annotations

import itertools
import math
import operator

import numpy as np
import pytest

from tests.runtime.emulator.arithmetic.evaluation import Case, check
from tests.runtime.emulator.arithmetic.fractions_oracle import FLOAT32, FLOAT64
from tests.runtime.emulator.arithmetic.test_integers import KINDS, VALUES, columns, read

RELATIONS = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
             "ge": operator.ge}  # fmt: skip
UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
SELECT = " selp.u32 {d}, 1, 0, %p;"
FORMS = {
    "f32": (FLOAT32, np.uint32),
    "f64": (FLOAT64, np.uint64),
}
Pairs = list[tuple[int, int]]


def float_pairs(kind: str) -> tuple[Pairs, list[tuple[float, float]], list[np.ndarray]]:
    """Pairs of codes, their values, and the columns."""
    form, dtype = FORMS[kind]
    one = form.bias << form.mantissa
    codes = [0, form.sign, 1, one, one + 1, one | form.sign, form.infinity, form.infinity | form.sign]
    codes += [form.infinity + 1, form.sign | form.infinity | 1 << (form.mantissa - 1)]
    pairs = list(itertools.product(codes, codes))
    return pairs, [(form.real(x), form.real(y)) for x, y in pairs], [np.array(c, dtype) for c in zip(*pairs)]


def float_truth(name: str, x: float, y: float) -> int:
    unordered = math.isnan(x) or math.isnan(y)
    if name in ("num", "nan"):
        return int(unordered == (name == "nan"))
    if name in RELATIONS:
        return int(not unordered and RELATIONS[name](x, y))
    return int(unordered or RELATIONS[name[:-1]](x, y))


FLOAT_NAMES = (*RELATIONS, *(f"{name}u" for name in RELATIONS), "num", "nan")


@pytest.mark.parametrize("kind", [*KINDS, "b16", "b32", "b64"])
def test_integers(kind: str) -> None:
    bits = int(kind[1:])
    pairs = [(x, y) for x in VALUES[bits][::2] for y in VALUES[bits][::2]]
    names = RELATIONS | (UNSIGNED if kind[0] == "u" else {})
    if kind[0] == "b":
        names = {name: RELATIONS[name] for name in ("eq", "ne")}
    operands = columns(pairs, kind, kind)
    cases = [Case(f"setp.{name}.{kind} %p, {{0}}, {{1}};" + SELECT, operands) for name in names]
    check(cases, [[int(holds(read(x, kind), read(y, kind))) for x, y in pairs] for holds in names.values()])


@pytest.mark.parametrize("kind", FORMS)
def test_floats(kind: str) -> None:
    _, values, operands = float_pairs(kind)
    cases = [Case(f"setp.{name}.{kind} %p, {{0}}, {{1}};" + SELECT, operands) for name in FLOAT_NAMES]
    check(cases, [[float_truth(name, x, y) for x, y in values] for name in FLOAT_NAMES])


def test_ftz() -> None:
    x, y = np.array([1, 0x80000001, 0x00800000], np.uint32), np.array([0, 0, 0], np.uint32)
    check([Case("setp.eq.ftz.f32 %p, {0}, {1};" + SELECT, [x, y])], [[1, 1, 0]])


def test_combination_with_a_predicate() -> None:
    x, y = np.array([1, 1, 2, 2], np.uint32), np.array([0, 1, 0, 1], np.uint32)
    start = "setp.ne.u32 %q, {1}, 0; "
    makes = {"and": lambda t, c: t and c, "or": lambda t, c: t or c, "xor": lambda t, c: t != c}
    cases, expected = [], []
    for name, make in makes.items():
        for sign in ("", "!"):
            given = [c != (sign == "!") for c in (False, True, False, True)]
            holds = [True, True, False, False]
            both = f"setp.lt.{name}.s32 %p|%q, {{0}}, 2, {sign}%q;"
            cases += [Case(start + both + SELECT, [x, y]), Case(start + both + SELECT.replace("%p", "%q"), [x, y])]
            expected += [
                [int(make(t, c)) for t, c in zip(holds, given)],
                [int(make(not t, c)) for t, c in zip(holds, given)],
            ]
    cases.append(Case("setp.lt.s32 %p|%q, {0}, 2;" + SELECT.replace("%p", "%q"), [x, y]))
    expected.append([0, 0, 1, 1])
    cases.append(Case(start + "setp.lt.and.s32 _|%q, {0}, 2, %q;" + SELECT.replace("%p", "%q"), [x, y]))
    expected.append([0, 0, 0, 1])
    check(cases, expected)


def test_selections() -> None:
    c = np.array([0, 1, 0x80000000, 0x7FC00000, 0xBF800000], np.uint32)
    h, w, q = np.full(5, 0x1234, np.uint16), np.full(5, 0x89ABCDEF, np.uint32), np.full(5, 2**63 + 5, np.uint64)
    start = "setp.eq.u32 %p, {0}, 1; "
    chosen = [0, 1, 0, 0, 0]
    check(
        [
            Case(start + "selp.b16 {d}, {1}, 7, %p;", [c, h], np.uint16),
            Case(start + "selp.f32 {d}, {1}, 0f3F800000, %p;", [c, w]),
            Case(start + "selp.s64 {d}, {1}, -1, !%p;", [c, q], np.uint64),
        ],
        [
            [0x1234 if t else 7 for t in chosen],
            [0x89ABCDEF if t else 0x3F800000 for t in chosen],
            [2**64 - 1 if t else 2**63 + 5 for t in chosen],
        ],
    )
