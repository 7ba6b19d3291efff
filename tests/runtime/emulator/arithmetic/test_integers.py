"""Integer arithmetic against Python's unbounded integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.runtime.emulator.arithmetic.evaluation import Case, evaluate

KINDS = ("u16", "s16", "u32", "s32", "u64", "s64")
SMALL = [0, 1, 2, 3, 5, 7, 10, 255, 256, 0x7FFF, 0x8000, 0x8001, 0xFFFB, 0xFFFF]
LARGE = [*SMALL, 0x10000, 0x12345678, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 7, 2**32 - 1]
HUGE = [*LARGE[2:], 2**32, 0x123456789ABCDEF0, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 5, 2**64 - 1, 2**53 + 1]
VALUES = {16: SMALL, 32: LARGE, 64: HUGE}


def signed(x: int, bits: int) -> int:
    x %= 2**bits
    return x - 2**bits if x >> (bits - 1) else x


def read(x: int, kind: str) -> int:
    return signed(x, int(kind[1:])) if kind[0] == "s" else x % 2 ** int(kind[1:])


def columns(rows: list[tuple[int, ...]], *kinds: str) -> list[np.ndarray]:
    return [np.array(column, f"u{int(kind[1:]) // 8}") for column, kind in zip(zip(*rows), kinds)]


def limits(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind[0] == "s" else (0, 2**bits - 1)


def clamp(x: int, kind: str) -> int:
    low, high = limits(kind)
    return min(max(x, low), high)


def quotient(x: int, y: int) -> int:
    if y == 0:
        return -1
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul.lo": lambda x, y: x * y,
    "min": min,
    "max": max,
    "div": quotient,
    "rem": lambda x, y: x - quotient(x, y) * y if y else x,
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_operands(kind: str) -> None:
    bits = int(kind[1:])
    pairs = [(x, y) for x in VALUES[bits] for y in VALUES[bits]]
    operands = columns(pairs, kind, kind)
    names = [*BINARY, "mul.hi"]
    cases = [Case(f"{name}.{kind} {{d}}, {{0}}, {{1}};", operands, operands[0].dtype) for name in names]
    known = BINARY | {"mul.hi": lambda x, y: (x * y) >> bits}
    for name, found in zip(names, evaluate(cases)):
        expected = [known[name](read(x, kind), read(y, kind)) % 2**bits for x, y in pairs]
        assert found.tolist() == expected, name


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_products(kind: str) -> None:
    bits = int(kind[1:])
    wide = f"{kind[0]}{2 * bits}"
    rows = [(x, y, z) for x in VALUES[bits][::2] for y in VALUES[bits][1::2] for z in (1, 2 ** (bits - 1) + 5)]
    narrow = columns(rows, kind, kind, kind)
    addend = np.array([z * 2**bits + 7 for _, _, z in rows], f"u{bits // 4}")
    result = np.dtype(f"u{bits // 4}")
    found = evaluate(
        [
            Case(f"mul.wide.{kind} {{d}}, {{0}}, {{1}};", narrow[:2], result),
            Case(f"mad.wide.{kind} {{d}}, {{0}}, {{1}}, {{2}};", [*narrow[:2], addend], result),
            Case(f"mad.lo.{kind} {{d}}, {{0}}, {{1}}, {{2}};", narrow, narrow[0].dtype),
            Case(f"mad.hi.{kind} {{d}}, {{0}}, {{1}}, {{2}};", narrow, narrow[0].dtype),
        ]
    )
    products = [read(x, kind) * read(y, kind) for x, y, _ in rows]
    assert found[0].tolist() == [p % 4**bits for p in products], wide
    assert found[1].tolist() == [(p + int(z)) % 4**bits for p, z in zip(products, addend)]
    assert found[2].tolist() == [(p + z) % 2**bits for p, (_, _, z) in zip(products, rows)]
    assert found[3].tolist() == [((p >> bits) + z) % 2**bits for p, (_, _, z) in zip(products, rows)]


def test_products_of_64_bits() -> None:
    rows = [(x, y, 2**63 + 5) for x in HUGE for y in HUGE]
    longs = columns(rows, "u64", "u64", "u64")
    for kind in ("u64", "s64"):
        lower, upper = evaluate(
            [Case(f"mad.{part}.{kind} {{d}}, {{0}}, {{1}}, {{2}};", longs, np.uint64) for part in ("lo", "hi")]
        )
        products = [read(x, kind) * read(y, kind) for x, y, _ in rows]
        assert lower.tolist() == [(p + 2**63 + 5) % 2**64 for p in products]
        assert upper.tolist() == [((p >> 64) + 2**63 + 5) % 2**64 for p in products]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_carries(kind: str) -> None:
    """Numbers of two words: sums, differences, and the product of a number of two words with one of one."""
    bits = int(kind[1:])
    thirds = (1, 2 ** (bits - 1) + 5, 2**bits - 1)
    rows = [(x, y, z) for x in VALUES[bits][::2] for y in VALUES[bits][1::2] for z in thirds]
    given, whole = columns(rows, kind, kind, kind), 2**bits
    low, free = ("%w", "%x") if bits == 32 else ("%y", "%y")
    text = {
        "add": f"add.cc.{kind} {low}, {{0}}, {{1}}; addc.{kind} {{d}}, {{2}}, {{1}};",
        "sub": f"sub.cc.{kind} {low}, {{0}}, {{1}}; subc.{kind} {{d}}, {{2}}, {{1}};",
        "three": f"add.cc.{kind} {low}, {{0}}, {{1}}; addc.cc.{kind} {free}, {{2}}, {{1}}; addc.{kind} {{d}}, 0, 0;",
        "mad": f"mad.lo.cc.{kind} {low}, {{0}}, {{1}}, {{2}}; madc.hi.{kind} {{d}}, {{0}}, {{1}}, 0;",
        "guard": f"add.cc.{kind} {low}, {{0}}, {{1}}; setp.ne.{kind} %p, {{2}}, 1; @%p add.cc.{kind} {low}, 0, 0;"
        f"addc.{kind} {{d}}, 0, 0;",
        "branch": f"add.cc.{kind} {low}, {{0}}, {{1}}; setp.ne.{kind} %p, {{2}}, 1; @%p bra L{bits}; L{bits}:"
        f"addc.{kind} {{d}}, 0, 0;",
    }
    expected = {
        "add": [((x + y) + ((z + y) << bits)) >> bits for x, y, z in rows],
        "sub": [((x - y) + ((z - y) << bits)) >> bits for x, y, z in rows],
        "three": [((x + y) + ((z + y) << bits)) >> (2 * bits) for x, y, z in rows],
        "mad": [(read(x, kind) * read(y, kind) + z) >> bits for x, y, z in rows],
        "guard": [(x + y) >> bits if z == 1 else 0 for x, y, z in rows],
        "branch": [(x + y) >> bits for x, y, _ in rows],
    }
    found = evaluate([Case(statement, given, given[0].dtype) for statement in text.values()])
    for name, result in zip(text, found):
        assert result.tolist() == [value % whole for value in expected[name]], name


def test_signs() -> None:
    for kind in ("s16", "s32", "s64"):
        bits = int(kind[1:])
        given = np.array(VALUES[bits], f"u{bits // 8}")
        negative, positive = evaluate([Case(f"{n}.{kind} {{d}}, {{0}};", [given], given.dtype) for n in ("neg", "abs")])
        assert negative.tolist() == [-x % 2**bits for x in VALUES[bits]]
        assert positive.tolist() == [abs(signed(x, bits)) % 2**bits for x in VALUES[bits]]
