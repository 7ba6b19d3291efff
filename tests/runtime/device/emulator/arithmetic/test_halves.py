"""f16 and bf16 arithmetic against exact fractions rounded once."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from runtime.device.emulator.translation.lowering import UnsupportedInstruction
from tests.runtime.device.emulator.arithmetic.evaluation import Case, evaluate
from tests.runtime.device.emulator.arithmetic.fractions_oracle import BFLOAT16, FLOAT16, FLOAT32, Binary, sum_zero

FORMS = {"f16": FLOAT16, "bf16": BFLOAT16}
NAN = 0x7FFF


def finite(form: Binary, count: int, seed: int) -> np.ndarray:
    """Random codes and the edges, no NaN and no infinity."""
    rng = np.random.default_rng(seed)
    edges = [0, 1, form.infinity - 1, 1 << form.mantissa, (1 << form.mantissa) - 1, form.bias << form.mantissa]
    edges += [(form.bias << form.mantissa) + 1, ((form.bias + 1) << form.mantissa) - 1]
    codes = np.array([*edges, *(code | form.sign for code in edges)], np.uint16)
    near = (form.bias << form.mantissa) + rng.integers(-(3 << form.mantissa), 3 << form.mantissa, count // 2)
    codes = np.concatenate([codes, near.astype(np.uint16), rng.integers(0, form.infinity, count).astype(np.uint16)])
    signs = (rng.integers(0, 2, len(codes)) * form.sign).astype(np.uint16)
    return rng.permutation(codes ^ signs)[:count]


def pairs_of(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    return lower.astype(np.uint32) | upper.astype(np.uint32) << 16


@pytest.mark.parametrize("kind", FORMS)
def test_sums_and_products(kind: str) -> None:
    form = FORMS[kind]
    x, y = finite(form, 1000, 1), finite(form, 1000, 2)
    names = ("add", "sub", "mul")
    cases = [Case(f"{name}.{kind} {{d}}, {{0}}, {{1}};", [x, y], np.uint16) for name in names]
    both = [pairs_of(x, y), pairs_of(y, x)]
    cases += [Case(f"{name}.rn.{kind}x2 {{d}}, {{0}}, {{1}};", both) for name in names]
    found = evaluate(cases)
    for name, single, double in zip(names, found[:3], found[3:]):
        for a, b, lower, whole in zip(x.tolist(), y.tolist(), single.tolist(), double.tolist()):
            p, q = form.value(a), form.value(b)
            exact = {"add": p + q, "sub": p - q, "mul": p * q}[name]
            flipped = b ^ form.sign if name == "sub" else b
            zero = (a ^ b) & form.sign if name == "mul" else sum_zero(a, flipped, "rn", form)
            assert lower == form.rounded(exact, "rn", zero), (name, hex(a), hex(b))
            assert whole & 0xFFFF == lower
            back = {"add": q + p, "sub": q - p, "mul": q * p}[name]
            zero = (a ^ b) & form.sign if name == "mul" else sum_zero(b, a ^ (name == "sub") * form.sign, "rn", form)
            assert whole >> 16 == form.rounded(back, "rn", zero), (name, hex(b), hex(a))


@pytest.mark.parametrize("kind", FORMS)
def test_fma_rounds_once(kind: str) -> None:
    form = FORMS[kind]
    x, y, z = (finite(form, 900, seed) for seed in (3, 4, 5))
    # A product in the middle between two numbers, and an addend too small for float64 to see.
    one = form.bias << form.mantissa
    step = 1 << (form.mantissa // 2 + 1)
    ties = [(one + a, one + b, c) for a in range(step) for b in range(step) for c in (1, form.sign | 1)]
    ties = [t for t in ties if (form.value(t[0]) * form.value(t[1]) * 2 ** (form.mantissa + 1)) % 2 == 1][:124]
    assert ties
    x, y, z = (np.concatenate([v, np.array(t, np.uint16)]) for v, t in zip((x, y, z), zip(*ties)))
    found, rectified, double = evaluate(
        [
            Case(f"fma.rn.{kind} {{d}}, {{0}}, {{1}}, {{2}};", [x, y, z], np.uint16),
            Case(f"fma.rn.relu.{kind} {{d}}, {{0}}, {{1}}, {{2}};", [x, y, z], np.uint16),
            Case(f"fma.rn.{kind}x2 {{d}}, {{0}}, {{1}}, {{2}};", [pairs_of(v, v[::-1]) for v in (x, y, z)]),
        ]
    )
    for a, b, c, bits, positive in zip(x.tolist(), y.tolist(), z.tolist(), found.tolist(), rectified.tolist()):
        exact = form.value(a) * form.value(b) + form.value(c)
        product_zero = (a ^ b) & form.sign if form.value(a) * form.value(b) == 0 else 1
        assert bits == form.rounded(exact, "rn", sum_zero(product_zero, c, "rn", form)), (hex(a), hex(b), hex(c))
        assert positive == (0 if bits & form.sign else bits)
    assert (double & 0xFFFF).tolist() == found.tolist()
    assert (double >> 16).tolist() == found[::-1].tolist()


def test_modifiers_and_special_values() -> None:
    x = np.array([0x0001, 0x83FF, 0x0400, 0x4000, 0xC000, 0x7E00, 0x7C00, 0x3800], np.uint16)
    y = np.array([0x0001, 0x8001, 0x3800, 0x3C00, 0x3C00, 0x3C00, 0xFC00, 0x3400], np.uint16)
    bx = np.array([0x7F80, 0x7FC0, 0x3F80, 0x8000, 0xC000], np.uint16)
    by = np.array([0xFF80, 0x3F80, 0xFFC0, 0x0000, 0x3F80], np.uint16)
    cases = {
        "add.f16": [0x0002, 0x8400, 0x3800, 0x4200, 0xBC00, NAN, NAN, 0x3A00],
        "add.ftz.f16": [0, 0x8000, 0x3800, 0x4200, 0xBC00, NAN, NAN, 0x3A00],
        "add.sat.f16": [0x0002, 0, 0x3800, 0x3C00, 0, 0, 0, 0x3A00],
        "mul.ftz.f16": [0, 0, 0, 0x4000, 0xC000, NAN, 0xFC00, 0x3000],
        "min.f16": [0x0001, 0x83FF, 0x0400, 0x3C00, 0xC000, 0x3C00, 0xFC00, 0x3400],
        "max.NaN.f16": [0x0001, 0x8001, 0x3800, 0x4000, 0x3C00, NAN, 0x7C00, 0x3800],
        "max.xorsign.abs.f16": [0x0001, 0x03FF, 0x3800, 0x4000, 0xC000, 0x3C00, 0xFC00, 0x3800],
        "min.ftz.f16": [0, 0x8000, 0x0400, 0x3C00, 0xC000, 0x3C00, 0xFC00, 0x3400],
    }
    small = {
        "add.bf16": [NAN, NAN, NAN, 0, 0xBF80],
        "min.bf16": [0xFF80, 0x3F80, 0x3F80, 0x8000, 0xC000],
        "max.NaN.bf16": [0x7F80, NAN, NAN, 0, 0x3F80],
        "min.xorsign.abs.bf16": [0xFF80, 0x3F80, 0xBF80, 0x8000, 0xBF80],
    }
    text = [Case(f"{name} {{d}}, {{0}}, {{1}};", [x, y], np.uint16) for name in cases]
    text += [Case(f"{name} {{d}}, {{0}}, {{1}};", [bx, by], np.uint16) for name in small]
    for case, found, wanted in zip(text, evaluate(text), [*cases.values(), *small.values()]):
        assert found.tolist() == wanted, case.statement
    unary = {
        "neg.f16": (x ^ 0x8000).tolist(), "abs.f16": (x & 0x7FFF).tolist(),
        "neg.ftz.f16": [0x8000, 0, *(x[2:] ^ 0x8000).tolist()], "neg.bf16": (x ^ 0x8000).tolist(),
        "abs.bf16": (x & 0x7FFF).tolist(),
    }  # fmt: skip
    text = [Case(f"{name} {{d}}, {{0}};", [x], np.uint16) for name in unary]
    for case, found, wanted in zip(text, evaluate(text), unary.values()):
        assert found.tolist() == wanted, case.statement
    word = np.array([0x80013C00], np.uint32)
    two = [Case("neg.f16x2 {d}, {0};", [word]), Case("abs.bf16x2 {d}, {0};", [word])]
    assert [found.tolist() for found in evaluate(two)] == [[0x0001BC00], [0x00013C00]]


def test_mixed_precision() -> None:
    rng = np.random.default_rng(8)
    c = (rng.standard_normal(500) * 2.0 ** rng.integers(-12, 12, 500)).astype(np.float32).view(np.uint32)
    for kind, form in FORMS.items():
        x, y = finite(form, 500, 6), finite(form, 500, 7)
        total, difference, fused = evaluate(
            [
                Case(f"add.rz.f32.{kind} {{d}}, {{0}}, {{1}};", [x, c]),
                Case(f"sub.f32.{kind} {{d}}, {{0}}, {{1}};", [x, c]),
                Case(f"fma.rp.f32.{kind} {{d}}, {{0}}, {{1}}, {{2}};", [x, y, c]),
            ]
        )
        for k in range(500):
            p, q, r = form.value(int(x[k])), form.value(int(y[k])), FLOAT32.value(int(c[k]))
            assert total[k] == FLOAT32.rounded(p + r, "rz")
            assert difference[k] == FLOAT32.rounded(p - r, "rn")
            assert fused[k] == FLOAT32.rounded(p * q + r, "rp")


def test_bf16_functions_stay_inside_their_bounds() -> None:
    codes = np.arange(0x3C00, 0x4180, 1, dtype=np.uint16)[:1000:1]
    codes = np.concatenate([codes[:500], codes[:500] | 0x8000])
    exponential, tangent, corner = evaluate(
        [
            Case("ex2.approx.ftz.bf16 {d}, {0};", [codes], np.uint16),
            Case("tanh.approx.bf16 {d}, {0};", [codes], np.uint16),
            Case("tanh.approx.bf16x2 {d}, {0};", [np.array([0xFF807F80, 0x7FC08000], np.uint32)]),
        ]
    )
    values = np.array([BFLOAT16.real(int(code)) for code in codes])
    powers = np.array([BFLOAT16.real(int(code)) for code in exponential])
    tangents = np.array([BFLOAT16.real(int(code)) for code in tangent])
    assert 2.0**-8 <= (np.abs(powers - np.exp2(values)) / np.exp2(values)).max() <= 2.0**-7
    assert 2.0**-9 <= np.abs(tangents - np.tanh(values)).max() <= 2.0**-8
    assert corner.tolist() == [0xBF803F80, 0x7FFF8000]
    assert math.isfinite(powers.max())
    assert Fraction(1) == BFLOAT16.value(0x3F80)


@pytest.mark.parametrize(
    "statement",
    ["fma.f16 {d}, {0}, {0}, {0};", "add.rz.f16 {d}, {0}, {0};", "add.ftz.bf16 {d}, {0}, {0};",
     "ex2.approx.bf16 {d}, {0};", "mul.f32.f16 {d}, {0}, {0};", "min.abs.f16 {d}, {0}, {0};"],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(statement: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=statement.split()[0]):
        evaluate([Case(statement, [np.zeros(1, np.uint16)], np.uint16)])
