"""Arithmetic on f16 and bf16, alone and in pairs, against exact fractions; NaN and infinity by hand."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.runtime.emulator.arithmetic.evaluation import Case, evaluate

DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
LARGEST, UNIT = {"f16": 65504, "bf16": float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)}, {"f16": -24, "bf16": -133}
MANTISSA = {"f16": 10, "bf16": 7}


def rounded(exact: Fraction, of: str) -> float:
    """To nearest even, with subnormals and overflow."""
    if exact == 0:
        return 0.0
    size, exponent = abs(exact), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    last = Fraction(2) ** max(exponent - MANTISSA[of], UNIT[of])
    value = float(round(exact / last) * last)  # Python rounds ties of fractions to even
    return value if abs(value) <= LARGEST[of] else float("inf") * (1 if exact > 0 else -1)


@pytest.mark.parametrize("of", DTYPES)
def test_each_half_is_rounded_once(of: str) -> None:
    rng = np.random.default_rng(17)
    codes = rng.integers(0, 1 << 16, (3, 2, 1000)).astype(np.uint16)
    near = rng.integers(0, 64, (3, 2, 1000)).astype(np.uint16) + np.uint16(0x3F00 if of == "f16" else 0x3F80)
    codes[..., ::2] = near[..., ::2]  # of like size: sums that cancel, products that tie
    with np.errstate(invalid="ignore"):
        values = codes.view(DTYPES[of]).astype(np.float64)
    finite = np.isfinite(values).all(axis=(0, 1))
    codes, values = codes[..., finite], values[..., finite]
    words = [code[0].astype(np.uint32) | code[1].astype(np.uint32) << 16 for code in codes]
    texts = {"add": "{0}, {1}", "sub": "{0}, {1}", "mul": "{0}, {1}", "fma": "{0}, {1}, {2}"}
    alone = [code[1] for code in codes]
    results = evaluate(
        [Case(f"{name}.rn.{of}x2 {{d}}, {text};", words[: text.count("{")]) for name, text in texts.items()]
        + [Case(f"{name}.rn.{of} {{d}}, {text};", alone[: text.count("{")], np.uint16) for name, text in texts.items()]
    )
    for result, single in zip(results, results[len(texts) :]):
        assert ((result >> 16).astype(np.uint16) == single).all()
    for name, result in zip(texts, results):
        for half in range(2):
            got = (result >> (16 * half)).astype(np.uint16).view(DTYPES[of]).astype(np.float64)
            for index, (x, y, z) in enumerate(values[:, half].T):
                a, b, c = Fraction(x), Fraction(y), Fraction(z)
                exact = {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + c}[name]
                assert got[index] == rounded(exact, of), (name, x, y, z)


def test_saturated_and_without_negatives() -> None:
    x = np.array([0x3F80, 0xBF80, 0x7FC1, 0x4000], np.uint16)  # 1, -1, NaN, 2
    one = np.full(4, 0x3F80, np.uint16)
    zero = np.zeros(4, np.uint16)
    clamped, positive = evaluate(
        [
            Case("mul.sat.bf16 {d}, {0}, {1};", [x, one], np.uint16),
            Case("fma.rn.relu.bf16 {d}, {0}, {1}, {2};", [x, one, zero], np.uint16),
        ]
    )
    assert clamped.tolist() == [0x3F80, 0, 0, 0x3F80]
    assert positive.tolist() == [0x3F80, 0, 0x7FFF, 0x4000]


def test_nan_infinity_and_the_sign_of_zero() -> None:
    one, infinity, minus_zero, nan = 0x3F80, 0x7F80, 0x8000, 0x7FC1
    pairs = np.array([nan << 16 | one, infinity << 16 | infinity, minus_zero << 16 | minus_zero], np.uint32)
    others = np.array([one << 16 | one, (infinity | 0x8000) << 16 | one, one << 16 | one], np.uint32)
    minus_zeros = np.full(3, 0x80008000, np.uint32)
    total, product = evaluate(
        [
            Case("add.bf16x2 {d}, {0}, {1};", [pairs, others]),
            Case("fma.rn.bf16x2 {d}, {0}, {1}, {2};", [pairs, others, minus_zeros]),
        ]
    )
    assert total.tolist() == [0x7FFF << 16 | 0x4000, 0x7FFF << 16 | infinity, one << 16 | one]
    assert product.tolist() == [0x7FFF << 16 | one, (infinity | 0x8000) << 16 | infinity, 0x80008000]
