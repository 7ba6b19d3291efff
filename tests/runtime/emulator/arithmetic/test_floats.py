"""float32 and float64 arithmetic in every rounding mode against exact fractions; NaN, zeros, .ftz, .sat."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from tests.runtime.emulator.arithmetic.evaluation import Case, check, evaluate
from tests.runtime.emulator.arithmetic.fractions_oracle import FLOAT32, FLOAT64, MODES, Binary, sum_zero

NAN, INF, ONE = 0x7FFFFFFF, 0x7F800000, 0x3F800000
NAN64 = 0x7FF8000000000000
BITS32 = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x3F800001,
    0x3FFFFFFF, 0x40490FDB, 0xC0490FDB, 0x4B800000, 0x33800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x34000001, 0x20000003,
    0x5F000001, 0xBEAAAAAB, 0x1F7FFFFF,
]  # fmt: skip
BITS64 = [
    0, 1 << 63, 1, (1 << 63) + 1, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x3FF0000000000000, 0xBFF0000000000001,
    0x400921FB54442D18, 0x4340000000000001, 0x3CA0000000000000, 0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF,
    0x3FD5555555555555, 0xB970000000000003, 0x1FF0000000000001,
]  # fmt: skip
FORMS = {"f32": (FLOAT32, BITS32, np.uint32, NAN), "f64": (FLOAT64, BITS64, np.uint64, NAN64)}


def root(exact: Fraction, mode: str, form: Binary) -> int:
    """The square root of a positive fraction, rounded: cut far below the last place, and a sticky bit."""
    shift = 1200
    scaled = exact.numerator * 2 ** (2 * shift) // exact.denominator
    whole = math.isqrt(scaled)
    is_exact = whole * whole == scaled and exact.numerator * 2 ** (2 * shift) % exact.denominator == 0
    return form.rounded(Fraction(2 * whole + (not is_exact), 2 ** (shift + 1)), mode)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_every_rounding_mode(mode: str, kind: str) -> None:
    form, values, dtype, nan = FORMS[kind]
    pairs = list(itertools.product(values, values))
    operands = [np.array(column, dtype) for column in zip(*pairs)]
    single = [np.array(values, dtype)]
    names = ("add", "sub", "mul", "div")
    cases = [Case(f"{name}.{mode}.{kind} {{d}}, {{0}}, {{1}};", operands, dtype) for name in names]
    cases += [Case(f"{name}.{mode}.{kind} {{d}}, {{0}};", single, dtype) for name in ("rcp", "sqrt")]
    total, difference, product, quotient, reciprocal, square_root = (found.tolist() for found in evaluate(cases))
    for k, (x, y) in enumerate(pairs):
        a, b, sign = form.value(x), form.value(y), (x ^ y) & form.sign
        where = (hex(x), hex(y))
        assert total[k] == form.rounded(a + b, mode, sum_zero(x, y, mode, form)), where
        assert difference[k] == form.rounded(a - b, mode, sum_zero(x, y ^ form.sign, mode, form)), where
        assert product[k] == form.rounded(a * b, mode, sign), where
        if b:
            assert quotient[k] == form.rounded(a / b, mode, sign), where
        else:
            assert quotient[k] == (nan if a == 0 else sign | form.infinity), where
    for k, x in enumerate(values):
        a, sign = form.value(x), x & form.sign
        assert reciprocal[k] == (form.rounded(1 / a, mode, sign) if a else sign | form.infinity), hex(x)
        assert square_root[k] == (root(a, mode, form) if a > 0 else x if a == 0 else nan), hex(x)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_fma_rounds_once(mode: str, kind: str) -> None:
    form, values, dtype, _ = FORMS[kind]
    rng = np.random.default_rng(1)
    triples = [tuple(int(v) for v in rng.choice(np.array(values, dtype), 3)) for _ in range(700)]
    for _ in range(300):  # near cancellation, where a second rounding shows
        x, y = (int(v) for v in rng.choice(np.array(values[6:11], dtype), 2))
        z = form.rounded(form.value(x) * form.value(y), "rn") ^ form.sign
        triples.append((x, y, max(z + int(rng.integers(-1, 2)), 0)))
    operands = [np.array(column, dtype) for column in zip(*triples)]
    found, same = evaluate(
        [Case(f"{name}.{mode}.{kind} {{d}}, {{0}}, {{1}}, {{2}};", operands, dtype) for name in ("fma", "mad")]
    )
    assert same.tolist() == found.tolist()
    for (x, y, z), bits in zip(triples, found.tolist()):
        a, b, c = (form.value(v) for v in (x, y, z))
        zero = sum_zero((x ^ y) & form.sign if a * b == 0 else 1, z, mode, form)
        assert bits == form.rounded(a * b + c, mode, zero), (hex(x), hex(y), hex(z))


def test_not_a_number_and_infinity() -> None:
    x = np.array([INF, INF, 0x7FC00001, 0, 0xFF800000, 0], np.uint32)
    y = np.array([0xFF800000, ONE, ONE, INF, 0xFF800000, 0x80000000], np.uint32)
    check(
        [Case(f"{n}.f32 {{d}}, {{0}}, {{1}};", [x, y]) for n in ("add", "sub", "mul", "div.rn")],
        [
            [NAN, INF, NAN, INF, 0xFF800000, 0],
            [INF, INF, NAN, 0xFF800000, NAN, 0],
            [0xFF800000, INF, NAN, NAN, INF, 0x80000000],
            [NAN, INF, NAN, 0, NAN, NAN],
        ],
    )
    wide = np.array([0x7FF0 << 48, 0xFFF0 << 48, 0x7FF4 << 48], np.uint64)
    check(
        [Case("add.f64 {d}, {0}, {1};", [wide, wide[::-1].copy()], np.uint64)],
        [[NAN64, 0xFFF0 << 48, NAN64][:1] + [0xFFF0 << 48, NAN64]],
    )
    check([Case("sqrt.rn.f32 {d}, {0};", [np.array([0xBF800000, INF, 0xFF800000, 0x80000000], np.uint32)])],
          [[NAN, INF, NAN, 0x80000000]])  # fmt: skip


def test_minimum_and_maximum() -> None:
    a = [0x7FC00000, ONE, 0x80000000, 0x00000000, 0x7FC00000, 0xC0000000, INF]
    b = [ONE, 0x7FC00000, 0x00000000, 0x80000000, 0x7FC00001, ONE, 0xFF800000]
    x, y = np.array(a, np.uint32), np.array(b, np.uint32)
    low = [ONE, ONE, 0x80000000, 0x80000000, NAN, 0xC0000000, 0xFF800000]
    high = [ONE, ONE, 0, 0, NAN, ONE, INF]
    strict = [NAN, NAN, None, None, NAN, None, None]
    cases = [Case(f"{n}.f32 {{d}}, {{0}}, {{1}};", [x, y]) for n in ("min", "max", "min.NaN", "max.NaN")]
    check(cases, [low, high, [s or v for s, v in zip(strict, low)], [s or v for s, v in zip(strict, high)]])
    wide = [np.array([v << 32 for v in (0x7FF80000, 0x3FF00000, 0x80000000)], np.uint64),
            np.array([v << 32 for v in (0x3FF00000, 0x40000000, 0)], np.uint64)]  # fmt: skip
    check(
        [Case(f"{n}.f64 {{d}}, {{0}}, {{1}};", wide, np.uint64) for n in ("min", "max")],
        [[0x3FF0 << 48, 0x3FF0 << 48, 1 << 63], [0x3FF0 << 48, 0x4000 << 48, 0]],
    )


def test_ftz_and_sat() -> None:
    x = np.array([0x00000001, 0x807FFFFF, 0x00800000, 0x40000000, 0xC0000000, 0x7FC00000, 0x3F000000], np.uint32)
    y = np.array([0x00000001, 0x80000001, 0x3F000000, 0x3F800000, 0x3F800000, 0x3F800000, 0x3E800000], np.uint32)
    check(
        [
            Case("add.ftz.f32 {d}, {0}, {1};", [x, y]),
            Case("mul.ftz.f32 {d}, {0}, {1};", [x, y]),
            Case("mul.f32 {d}, {0}, {1};", [x, y]),
            Case("add.sat.f32 {d}, {0}, {1};", [x, y]),
            Case("fma.rn.ftz.sat.f32 {d}, {0}, {1}, {0};", [x, y]),
            Case("mul.rz.ftz.f32 {d}, {0}, {1};", [x, y]),
            Case("neg.ftz.f32 {d}, {0};", [x]),
            Case("abs.ftz.f32 {d}, {0};", [x]),
            Case("max.ftz.f32 {d}, {0}, {1};", [x, y]),
        ],
        [
            [0, 0x80000000, 0x3F000000, 0x40400000, 0xBF800000, NAN, 0x3F400000],
            [0, 0, 0, 0x40000000, 0xC0000000, NAN, 0x3E000000],
            [0, 0, 0x00400000, 0x40000000, 0xC0000000, NAN, 0x3E000000],
            [2, 0, 0x3F000000, ONE, 0, 0, 0x3F400000],
            [0, 0, 0x00C00000, ONE, 0, 0, 0x3F200000],
            [0, 0, 0, 0x40000000, 0xC0000000, NAN, 0x3E000000],
            [0x80000000, 0, 0x80800000, 0xC0000000, 0x40000000, 0xFFC00000, 0xBF000000],
            [0, 0, 0x00800000, 0x40000000, 0x40000000, 0x7FC00000, 0x3F000000],
            [0, 0x80000000, 0x3F000000, 0x40000000, ONE, ONE, 0x3F000000],
        ],
    )


def test_signs() -> None:
    x = np.array([ONE, 0x80000000, 0x7FC00001, 1, 0xFF800000, 0x807FFFFF, 0x00800000], np.uint32)
    y = np.array([0xC0490FDB, 0x00000005, 0xBF800000, 0x80000000, 0x3F800000, 0x3F800000, 0xBF800000], np.uint32)
    signs = (x & 0x80000000).tolist()
    magnitudes = (y & 0x7FFFFFFF).tolist()
    check([Case("copysign.f32 {d}, {0}, {1};", [x, y])], [[s | m for s, m in zip(signs, magnitudes)]])
    wide = np.array(
        [v << 32 for v in (0x3FF00000, 0x80000000, 0x7FF80000, 0x00010000, 0xFFF00000, 0x800FFFFF, 0x00100000)],
        np.uint64,
    )
    check(
        [Case(f"{n}.f64 {{d}}, {{0}};", [wide], np.uint64) for n in ("neg", "abs")]
        + [Case("copysign.f64 {d}, {0}, {1};", [wide, wide[::-1].copy()], np.uint64)],
        [
            [int(v) ^ 1 << 63 for v in wide],
            [int(v) & ~(1 << 63) for v in wide],
            [int(v) & 1 << 63 | int(w) & ~(1 << 63) for v, w in zip(wide, wide[::-1])],
        ],
    )
