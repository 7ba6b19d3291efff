"""Binary floating-point formats by exact fractions: the oracle for everything that rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

MODES = ("rn", "rz", "rm", "rp")


@dataclass(frozen=True)
class Binary:
    """An IEEE 754 format: stored mantissa bits and exponent bits."""

    mantissa: int
    exponent: int

    @property
    def bits(self) -> int:
        return 1 + self.mantissa + self.exponent

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def infinity(self) -> int:
        return (2**self.exponent - 1) << self.mantissa

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    def is_nan(self, code: int) -> bool:
        return code & (self.sign - 1) > self.infinity

    def value(self, code: int) -> Fraction:
        """A finite code's value."""
        magnitude = code & (self.sign - 1)
        assert magnitude < self.infinity
        exponent = max(magnitude >> self.mantissa, 1)
        units = magnitude & (2**self.mantissa - 1) | (0 if magnitude >> self.mantissa == 0 else 1 << self.mantissa)
        size = Fraction(units) * Fraction(2) ** (exponent - self.bias - self.mantissa)
        return -size if code & self.sign else size

    def real(self, code: int) -> float:
        """Any code's value as a float, exact for formats up to float64."""
        magnitude = code & (self.sign - 1)
        if magnitude > self.infinity:
            return math.nan
        if magnitude == self.infinity:
            return -math.inf if code & self.sign else math.inf
        value = float(self.value(code))
        return math.copysign(value, -1.0 if code & self.sign else 1.0)

    def rounded(self, exact: Fraction, mode: str, zero: int = 0) -> int:
        """The code that an exact value rounds to; `zero` is what an exact zero gives."""
        if exact == 0:
            return zero
        sign, magnitude = exact < 0, abs(exact)
        smallest = 1 - self.bias - self.mantissa
        exponent = max(_floor_log2(magnitude) - self.mantissa, smallest)
        units = magnitude / Fraction(2) ** exponent
        whole = int(units)
        rest = units - whole
        half = Fraction(1, 2)
        whole += {
            "rn": rest > half or (rest == half and whole % 2 == 1),
            "rna": rest >= half,
            "rz": False,
            "rm": bool(sign and rest),
            "rp": bool(not sign and rest),
        }[mode]
        if whole == 2 ** (self.mantissa + 1):
            whole, exponent = whole // 2, exponent + 1
        code = whole if whole < 2**self.mantissa else ((exponent - smallest) << self.mantissa) + whole
        if code >= self.infinity:
            away = mode in ("rn", "rna") or (mode == "rm" and sign) or (mode == "rp" and not sign)
            code = self.infinity if away else self.infinity - 1
        return code | (self.sign if sign else 0)


def _floor_log2(x: Fraction) -> int:
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if x >= Fraction(2) ** guess else guess - 1


FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = Binary(10, 5), Binary(7, 8), Binary(23, 8), Binary(52, 11)
TF32 = Binary(10, 8)


def sum_zero(x: int, y: int, mode: str, form: Binary) -> int:
    """The zero that an exactly cancelling sum of the codes x and y gives."""
    if x & (form.sign - 1) == 0 and y & (form.sign - 1) == 0 and x == y:
        return x
    return form.sign if mode == "rm" else 0
