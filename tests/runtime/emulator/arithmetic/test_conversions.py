"""cvt against exact fractions, ml_dtypes and Python's integers: every pair of types, rounding, saturation, NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.runtime.emulator.arithmetic.evaluation import Case, evaluate
from tests.runtime.emulator.arithmetic.fractions_oracle import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    MODES,
    TF32,
    Binary,
)
from tests.runtime.emulator.arithmetic.test_integers import VALUES, clamp, limits, read

WHOLE = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FORMS = {"f16": FLOAT16, "bf16": BFLOAT16, "f32": FLOAT32, "f64": FLOAT64}
DTYPES = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}
NANS = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8 << 48}


@pytest.mark.parametrize("of", WHOLE)
def test_integers_to_integers(of: str) -> None:
    """The source register may be wider than its type, the target's too: then it is extended by the type's sign."""
    bits = max(int(of[1:]), 16)
    given = np.array(VALUES[bits], f"u{bits // 8}")
    cases, expected = [], []
    for to in WHOLE:
        result = np.dtype(np.uint64) if to.endswith("64") else np.dtype(np.uint32)
        values = [read(x, of) for x in VALUES[bits]]
        cases.append(Case(f"cvt.{to}.{of} {{d}}, {{0}};", [given], result))
        expected.append([read(x, to) % 2 ** (8 * result.itemsize) for x in values])
        (low, high), (least, most) = limits(to), limits(of)
        if low > least or high < most:
            cases.append(Case(f"cvt.sat.{to}.{of} {{d}}, {{0}};", [given], result))
            expected.append([clamp(x, to) % 2 ** (8 * result.itemsize) for x in values])
    for case, found, wanted in zip(cases, evaluate(cases), expected):
        assert found.tolist() == wanted, case.statement


def reals(form: Binary) -> list[int]:
    """Codes around what rounds, clamps or overflows."""
    values = [0.0, 0.5, 1.5, 2.5, 3.5, 0.49, 127.5, 128.0, 255.5, 256.0, 32767.5, 65535.0, 65504.0, 2.0**31, 2.0**32,
              2.0**31 - 1, 2.0**53 + 2, 2.0**63, 2.0**64, 1e10, 1e-20, 1e30]  # fmt: skip
    codes = [form.rounded(Fraction(v), "rn") for v in values]
    return [
        *codes,
        *(code | form.sign for code in codes),
        form.infinity,
        form.infinity | form.sign,
        form.infinity | 1,
        1,
    ]


ROUND = {
    "rni": lambda x: round(x), "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil,
}  # fmt: skip


@pytest.mark.parametrize("of", FORMS)
def test_floats_to_integers(of: str) -> None:
    form = FORMS[of]
    codes = reals(form)
    given = [np.array(codes, DTYPES[of])]
    cases, expected = [], []
    for to in WHOLE if of != "bf16" else WHOLE[2:]:
        result = np.dtype(np.uint64) if to.endswith("64") else np.dtype(np.uint32)
        if of == "bf16" and to.endswith("16"):
            result = np.dtype(np.uint16)  # a wider register is not allowed here
        for mode, whole in ROUND.items():
            cases.append(Case(f"cvt.{mode}.{to}.{of} {{d}}, {{0}};", given, result))

            def convert(code: int, to: str = to, whole: Callable[[Fraction], int] = whole) -> int:
                if form.is_nan(code):
                    if not to.endswith("64") and of != "f64":
                        return 0
                    return read(1 << (int(to[1:]) - 1), to)
                if code & (form.sign - 1) == form.infinity:
                    return limits(to)[0 if code & form.sign else 1]
                return clamp(whole(form.value(code)), to)

            expected.append([convert(code) % 2 ** (8 * result.itemsize) for code in codes])
    for case, found, wanted in zip(cases, evaluate(cases), expected):
        assert found.tolist() == wanted, case.statement


@pytest.mark.parametrize("to", FORMS)
def test_integers_to_floats(to: str) -> None:
    form = FORMS[to]
    more = [2**24 + 1, 2**24 + 3, 2**62 + 2**38 + 1, 2**40 + 2**16, 2**11 + 1, 2**12 + 3 * 2, 65519, 65520, 65521]
    cases, expected = [], []
    for of in WHOLE if to != "bf16" else WHOLE[2:]:
        bits = max(int(of[1:]), 16)
        values = [x % 2**bits for x in (*VALUES[bits], *more)]
        given = [np.array(values, f"u{bits // 8}")]
        for mode in MODES:
            cases.append(Case(f"cvt.{mode}.{to}.{of} {{d}}, {{0}};", given, DTYPES[to]))
            expected.append([form.rounded(Fraction(read(x, of)), mode) for x in values])
    for case, found, wanted in zip(cases, evaluate(cases), expected):
        assert found.tolist() == wanted, case.statement


def edges(form: Binary, target: Binary) -> list[int]:
    """Codes of `form` near numbers of `target`, near the middles between those, and near its ends."""
    rng = np.random.default_rng(11)
    found = [0, 1, 2, form.infinity - 1, 1 << form.mantissa]
    exponents = range(1 - target.bias - target.mantissa - 2, target.bias + 3)
    for exponent in rng.choice(np.array(exponents), 60):
        for units in rng.integers(2**target.mantissa, 2 ** (target.mantissa + 1), 2):
            for half in (0, 1):
                exact = (int(units) + Fraction(half, 2)) * Fraction(2) ** (int(exponent) - target.mantissa)
                code = form.rounded(exact, "rn")
                found += [code, max(code - 1, 0), min(code + 1, form.infinity - 1)]
    return [code | (form.sign if k % 2 else 0) for k, code in enumerate(found) if code < form.infinity][:1000]


@pytest.mark.parametrize("to", FORMS)
@pytest.mark.parametrize("of", FORMS)
def test_floats_to_floats(of: str, to: str) -> None:
    form, target = FORMS[of], FORMS[to]
    codes = edges(form, target)
    specials = [form.infinity, form.infinity | form.sign, form.infinity + 1]
    widens = form.mantissa <= target.mantissa and form.exponent <= target.exponent
    cases, expected = [], []
    if of == to:
        codes = reals(form)[:-2]
        for mode, whole in ROUND.items():
            cases.append(Case(f"cvt.{mode}.{to}.{of} {{d}}, {{0}};", [np.array(codes, DTYPES[of])], DTYPES[to]))

            def integral(code: int, whole: Callable[[Fraction], int] = whole) -> int:
                if code & (form.sign - 1) == form.infinity:
                    return code
                return form.rounded(Fraction(whole(form.value(code))), "rn", 0)

            expected.append([integral(code) | code & form.sign for code in codes])
    else:
        given = [np.array([*codes, *specials], DTYPES[of])]
        for mode in ("",) if widens else MODES:
            name = f"cvt.{mode}.{to}.{of}" if mode else f"cvt.{to}.{of}"
            cases.append(Case(f"{name} {{d}}, {{0}};", given, DTYPES[to]))
            wanted = [target.rounded(form.value(code), mode or "rn", _zero(code, form, target)) for code in codes]
            expected.append([*wanted, target.infinity, target.infinity | target.sign, NANS[to]])
    for case, found, wanted in zip(cases, evaluate(cases), expected):
        assert found.tolist() == wanted, case.statement


def _zero(code: int, form: Binary, target: Binary) -> int:
    return target.sign if code & form.sign else 0


def test_modifiers_of_floats() -> None:
    x = np.array(
        [0x00000001, 0x807FFFFF, 0xBF800000, 0x40000000, 0x7FC00000, 0x7F800000, 0x477FF000, 0xC77FE000], np.uint32
    )
    wide = np.array([0x3FE00000, 0xBFE00000, 0x40000000, 0x7FF80000], np.uint64) << np.uint64(32)
    cases = [
        (Case("cvt.ftz.f32.f32 {d}, {0};", [x]), [0, 0x80000000, 0xBF800000, 0x40000000, 0x7FFFFFFF, *x[5:]]),
        (Case("cvt.sat.f32.f32 {d}, {0};", [x]), [1, 0, 0, 0x3F800000, 0, 0x3F800000, 0x3F800000, 0]),
        (Case("cvt.rpi.ftz.f32.f32 {d}, {0};", [x[:3]]), [0, 0x80000000, 0xBF800000]),
        (Case("cvt.rpi.f32.f32 {d}, {0};", [x[:3]]), [0x3F800000, 0x80000000, 0xBF800000]),
        (Case("cvt.rpi.ftz.s32.f32 {d}, {0};", [x[:1]]), [0]),
        (Case("cvt.rpi.s32.f32 {d}, {0};", [x[:1]]), [1]),
        (Case("cvt.rn.sat.f32.f64 {d}, {0};", [wide]), [0x3F000000, 0, 0x3F800000, 0]),
        (Case("cvt.rn.relu.f16.f32 {d}, {0};", [x], np.uint16), [0, 0, 0, 0x4000, 0x7FFF, 0x7C00, 0x7C00, 0]),
        (Case("cvt.rz.relu.bf16.f32 {d}, {0};", [x], np.uint16), [0, 0, 0, 0x4000, 0x7FFF, 0x7F80, 0x477F, 0]),
        (Case("cvt.rn.satfinite.f16.f32 {d}, {0};", [x], np.uint16),
         [0, 0x8000, 0xBC00, 0x4000, 0x7FFF, 0x7BFF, 0x7BFF, 0xFBFF]),
        (Case("cvt.rn.sat.f16.f32 {d}, {0};", [x], np.uint16), [0, 0, 0, 0x3C00, 0, 0x3C00, 0x3C00, 0]),
        (Case("cvt.rn.f16x2.f32 {d}, {0}, {1};", [x, x[::-1].copy()]), None),
        (Case("cvt.rz.bf16x2.f32 {d}, {0}, {1};", [x, x[::-1].copy()]), None),
        (Case("cvt.rn.relu.satfinite.bf16x2.f32 {d}, {0}, {1};", [x, x]),
         [0, 0, 0, 0x40004000, 0x7FFF7FFF, 0x7F7F7F7F, 0x47804780, 0]),
    ]  # fmt: skip
    found = evaluate([case for case, _ in cases])
    for (case, wanted), result in zip(cases, found):
        if wanted is not None:
            assert result.tolist() == wanted, case.statement
    half, brain = (
        [target.rounded(FLOAT32.value(int(v)), mode, _zero(int(v), FLOAT32, target)) if v & 0x7F800000 != 0x7F800000
         else NANS["f16"] if v & 0x7FFFFF else target.infinity for v in x]
        for target, mode in ((FLOAT16, "rn"), (BFLOAT16, "rz"))
    )  # fmt: skip
    assert found[-3].tolist() == [upper << 16 | lower for upper, lower in zip(half, half[::-1])]
    assert found[-2].tolist() == [upper << 16 | lower for upper, lower in zip(brain, brain[::-1])]


def test_tf32() -> None:
    codes = [*edges(FLOAT32, TF32)[:600], 0x3F801000, 0x3F803000, 0x7F7FFFFF]
    given = [np.array([*codes, 0x7F800000, 0xFF800000, 0x7FC00001], np.uint32)]
    cases = [Case(f"cvt.{mode}.tf32.f32 {{d}}, {{0}};", given) for mode in ("rna", "rn", "rz")]
    for mode, found in zip(("rna", "rn", "rz"), evaluate(cases)):
        wanted = [TF32.rounded(FLOAT32.value(c), mode, _zero(c, FLOAT32, TF32)) << 13 for c in codes]
        assert found.tolist() == [*wanted, 0x7F800000, 0xFF800000, 0x7FFFFFFF], mode
    saturated, rectified = evaluate(
        [
            Case("cvt.rna.satfinite.tf32.f32 {d}, {0};", [np.array([0x7F800000, 0xFF7FFFFF, 0x7FC00000], np.uint32)]),
            Case("cvt.rn.relu.tf32.f32 {d}, {0};", [np.array([0xBF800000, 0x3F800000, 0x7FC00000], np.uint32)]),
        ]
    )
    assert saturated.tolist() == [0x7F7FE000, 0xFF7FE000, 0x7FFFFFFF]
    assert rectified.tolist() == [0, 0x3F800000, 0x7FFFFFFF]


SMALL = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 8, 448.0, 0x7F), "e5m2": (ml_dtypes.float8_e5m2, 8, 57344.0, 0x7F),
}  # fmt: skip


def narrowed(x: np.ndarray, name: str) -> list[int]:
    """ml_dtypes' codes of values that have been clamped; NaN is the instruction's own."""
    dtype, bits, largest, nan = SMALL[name]
    clean = np.where(np.isnan(x), np.float32(0), x)
    codes = np.clip(clean, -largest, largest).astype(np.float32).astype(dtype).view(np.uint8) & (2**bits - 1)
    return np.where(np.isnan(x), nan, codes).tolist()


@pytest.mark.parametrize("name", SMALL)
def test_small_formats(name: str) -> None:
    dtype, bits, largest, _ = SMALL[name]
    rng = np.random.default_rng(2)
    every = np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float32)
    numbers = np.sort(every[np.isfinite(every)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = (rng.standard_normal(400) * 2.0 ** rng.integers(-20, 20, 400)).astype(np.float32)
    x = np.concatenate([[np.inf, -np.inf, np.nan, 1e30, -0.0, largest], middles, np.nextafter(middles, 9), x])
    x = x.astype(np.float32)[:1000]
    y = rng.permutation(x)
    stride, code_type = 8, np.uint16
    half = np.clip(x, -60000, 60000).astype(np.float16)
    packed = half.view(np.uint16).astype(np.uint32) | half[::-1].view(np.uint16).astype(np.uint32) << 16
    brain = x.astype(ml_dtypes.bfloat16)
    packed_brain = brain.view(np.uint16).astype(np.uint32) | brain[::-1].view(np.uint16).astype(np.uint32) << 16
    cases = [
        Case(f"cvt.rn.satfinite.{name}x2.f32 {{d}}, {{0}}, {{1}};", [x, y], code_type),
        Case(f"cvt.rn.satfinite.relu.{name}x2.f32 {{d}}, {{0}}, {{1}};", [x, y], code_type),
    ]
    for kind, source in (("f16x2", packed), ("bf16x2", packed_brain)):
        statement = f"cvt.rn.satfinite.{name}x2.{kind} {{d}}, {{0}};"
        cases.append(Case(statement, [source], code_type))
    found = evaluate(cases)
    upper, lower = narrowed(x, name), narrowed(y, name)
    assert found[0].tolist() == [u << stride | v for u, v in zip(upper, lower)]
    sign = 1 << (bits - 1)
    positive = [
        [0 if code & sign and not math.isnan(v) else code for code, v in zip(c, z)] for c, z in ((upper, x), (lower, y))
    ]
    assert found[1].tolist() == [u << stride | v for u, v in zip(*positive)]
    for values, result_codes in ((half, found[2]), (brain, found[3])):
        codes = narrowed(values.astype(np.float32), name)
        assert result_codes.tolist() == [u << stride | v for u, v in zip(codes[::-1], codes)]
    codes = np.arange(2**bits, dtype=np.uint16)
    pairs = codes | codes[::-1] << stride
    wide, rectified, brains = evaluate(
        [Case(f"cvt.rn.{to}.{name}x2 {{d}}, {{0}};", [pairs]) for to in ("f16x2", "relu.f16x2", "bf16x2")]
    )
    exact = codes.astype(np.uint8).view(dtype).astype(np.float16).view(np.uint16)
    exact = np.where(np.isnan(exact.view(np.float16)), 0x7FFF, exact).astype(np.uint32)
    assert wide.tolist() == (exact | exact[::-1] << 16).tolist()
    brain = codes.astype(np.uint8).view(dtype).astype(ml_dtypes.bfloat16).view(np.uint16)
    brain = np.where(brain & 0x7FFF > 0x7F80, 0x7FFF, brain).astype(np.uint32)
    assert brains.tolist() == (brain | brain[::-1] << 16).tolist()
    positive_half = np.where((exact & 0x8000) != 0, 0, exact)
    assert rectified.tolist() == (positive_half | positive_half[::-1] << 16).tolist()
