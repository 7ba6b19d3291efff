"""Integer arithmetic against Python's unbounded integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from runtime.device.emulator.translation.lowering import UnsupportedInstruction
from tests.runtime.device.emulator.arithmetic.evaluation import Case, evaluate

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
    names = [*BINARY, "mul.hi", "sad"]
    zero = np.full(len(pairs), 3, operands[0].dtype)
    cases = [Case(f"{name}.{kind} {{d}}, {{0}}, {{1}};", operands, operands[0].dtype) for name in names[:-1]]
    cases.append(Case(f"sad.{kind} {{d}}, {{0}}, {{1}}, {{2}};", [*operands, zero], operands[0].dtype))
    known = BINARY | {"mul.hi": lambda x, y: (x * y) >> bits, "sad": lambda x, y: abs(x - y) + 3}
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


def test_products_of_24_bits_and_of_64() -> None:
    rows = [(x, y, z) for x in LARGE for y in LARGE for z in (9,)]
    words = columns(rows, "u32", "u32", "u32")
    cases, expected = [], []
    for kind in ("u32", "s32"):
        low24 = (lambda x: signed(x, 24)) if kind == "s32" else (lambda x: x % 2**24)
        for part, shift in (("lo", 0), ("hi", 16)):
            products = [(low24(x) * low24(y)) >> shift for x, y, _ in rows]
            cases.append(Case(f"mul24.{part}.{kind} {{d}}, {{0}}, {{1}};", words[:2]))
            expected.append([p % 2**32 for p in products])
            cases.append(Case(f"mad24.{part}.{kind} {{d}}, {{0}}, {{1}}, {{2}};", words))
            expected.append([(p + 9) % 2**32 for p in products])
    for found, wanted, case in zip(evaluate(cases), expected, cases):
        assert found.tolist() == wanted, case.statement
    rows = [(x, y, 2**63 + 5) for x in HUGE for y in HUGE]
    longs = columns(rows, "u64", "u64", "u64")
    for kind in ("u64", "s64"):
        lower, upper = evaluate(
            [Case(f"mad.{part}.{kind} {{d}}, {{0}}, {{1}}, {{2}};", longs, np.uint64) for part in ("lo", "hi")]
        )
        products = [read(x, kind) * read(y, kind) for x, y, _ in rows]
        assert lower.tolist() == [(p + 2**63 + 5) % 2**64 for p in products]
        assert upper.tolist() == [((p >> 64) + 2**63 + 5) % 2**64 for p in products]


def test_saturation_and_relu() -> None:
    rows = [(x, y) for x in LARGE for y in LARGE]
    words = columns(rows, "u32", "u32")
    third = [*words, np.full(len(rows), 2**31 - 3, np.uint32)]
    cases = [
        Case("add.sat.s32 {d}, {0}, {1};", words),
        Case("sub.sat.s32 {d}, {0}, {1};", words),
        Case("mad.hi.sat.s32 {d}, {0}, {1}, {2};", third),
        Case("mad24.hi.sat.s32 {d}, {0}, {1}, {2};", third),
        Case("min.relu.s32 {d}, {0}, {1};", words),
        Case("max.relu.s32 {d}, {0}, {1};", words),
    ]
    pairs = [(signed(x, 32), signed(y, 32)) for x, y in rows]
    low24 = [(signed(x, 24) * signed(y, 24)) >> 16 for x, y in rows]
    expected = [
        [clamp(x + y, "s32") for x, y in pairs],
        [clamp(x - y, "s32") for x, y in pairs],
        [clamp((x * y >> 32) + 2**31 - 3, "s32") for x, y in pairs],
        [clamp(signed(p, 32) + 2**31 - 3, "s32") for p in low24],
        [max(min(x, y), 0) for x, y in pairs],
        [max(x, y, 0) for x, y in pairs],
    ]
    for case, found, wanted in zip(cases, evaluate(cases), expected):
        assert found.view(np.int32).tolist() == wanted, case.statement


def test_pairs_of_16_bits() -> None:
    halves = [(x, y) for x in SMALL for y in SMALL]
    words = [(x | y << 16, y | x << 16) for x, y in halves]
    operands = columns(words, "u32", "u32")
    known = {"add": lambda x, y: x + y, "min": min, "max": max}
    named = [(name, kind) for name in known for kind in ("u16", "s16")]
    cases = [Case(f"{name}.{kind}x2 {{d}}, {{0}}, {{1}};", operands) for name, kind in named]
    cases += [Case(f"{name}.relu.s16x2 {{d}}, {{0}}, {{1}};", operands) for name in ("min", "max")]
    found = evaluate(cases)
    for (name, kind), result in zip(named, found):
        each = [(known[name](read(x, kind), read(y, kind)) % 2**16) for x, y in halves]
        assert result.tolist() == [value | value << 16 for value in each], (name, kind)
    for name, result in zip(("min", "max"), found[-2:]):
        each = [max(known[name](read(x, "s16"), read(y, "s16")), 0) for x, y in halves]
        assert result.tolist() == [value | value << 16 for value in each], name


def test_carries_make_wide_numbers() -> None:
    """128-bit sums and differences of 32-bit words, and a 64-bit product the way the manual shows it."""
    words = [0, 1, 2**32 - 1, 2**31, 0x89ABCDEF]
    rng = np.random.default_rng(3)
    given = rng.choice(words, (300, 8)).astype(np.uint32)
    operands = [np.ascontiguousarray(given[:, k]) for k in range(8)]
    cases, whole = [], []
    left = [sum(int(row[k]) << (32 * k) for k in range(4)) for row in given]
    right = [sum(int(row[4 + k]) << (32 * k) for k in range(4)) for row in given]
    for first, rest, total in (
        ("add", "addc", [x + y for x, y in zip(left, right)]),
        ("sub", "subc", [x - y for x, y in zip(left, right)]),
    ):
        chain = [f"{first}.cc.u32 {{d}}, {{0}}, {{4}};"]
        cases.append(Case(chain[0], operands))
        for k in range(1, 4):
            chain.append(f"{rest}.cc.u32 {{d}}, {{{k}}}, {{{4 + k}}};")
            cases.append(Case(" ".join(chain), operands))
        cases.append(Case(" ".join([*chain, f"{rest}.u32 {{d}}, 0, 0;"]), operands))
        whole.append(total)
    found = evaluate(cases)
    for part, total in zip((found[:5], found[5:]), whole):
        for k in range(5):
            assert part[k].tolist() == [(value >> (32 * k)) % 2**32 for value in total], k
    product = (
        "mul.lo.u32 %w, {0}, {2}; mul.hi.u32 {d}, {0}, {2};"
        "mad.lo.cc.u32 {d}, {1}, {2}, {d}; madc.hi.u32 %x, {1}, {2}, 0;"
        "mad.lo.cc.u32 {d}, {0}, {3}, {d}; madc.hi.cc.u32 %x, {0}, {3}, %x; addc.u32 %w, 0, 0;"
        "mad.lo.cc.u32 %x, {1}, {3}, %x; madc.hi.u32 %w, {1}, {3}, %w;"
    )
    quads = operands[:4]
    second, third, fourth = evaluate(
        [Case(product, quads), Case(product + " mov.u32 {d}, %x;", quads), Case(product + " mov.u32 {d}, %w;", quads)]
    )
    products = [(int(r[0]) | int(r[1]) << 32) * (int(r[2]) | int(r[3]) << 32) for r in given]
    for k, part in ((1, second), (2, third), (3, fourth)):
        assert part.tolist() == [(p >> (32 * k)) % 2**32 for p in products], k


def test_a_carry_reaches_over_a_branch_and_only_guarded_lanes_set_it() -> None:
    x = np.array([2**64 - 1, 5, 2**64 - 1, 5], np.uint64)
    y = np.array([1, 1, 1, 1], np.uint64)
    even = np.array([1, 1, 0, 0], np.uint32)
    statement = (
        "setp.ne.u32 %p, {2}, 0; add.cc.u64 %y, {1}, {1}; @%p add.cc.u64 %y, {0}, {1}; @%p bra over; bra over;"
        "over: addc.u64 {d}, 0, 0;"
    )
    assert evaluate([Case(statement, [x, y, even], np.uint64)])[0].tolist() == [1, 0, 0, 0]


def test_dot_products_and_signs() -> None:
    rows = [
        (x, y, z) for x in (*LARGE, 0x80FF7F01) for y in (0x807FFF01, 0x01020304, 2**32 - 1) for z in (0, 2**32 - 9)
    ]
    words = columns(rows, "u32", "u32", "u32")

    def split(x: int, bits: int, kind: str) -> list[int]:
        return [read(x >> k, f"{kind[0]}{bits}") for k in range(0, 32, bits)]

    cases, expected = [], []
    for of in ("u32", "s32"):
        for by in ("u32", "s32"):
            cases.append(Case(f"dp4a.{of}.{by} {{d}}, {{0}}, {{1}}, {{2}};", words))
            expected.append([sum(p * q for p, q in zip(split(x, 8, of), split(y, 8, by))) + z for x, y, z in rows])
            for part, first in (("lo", 0), ("hi", 2)):
                cases.append(Case(f"dp2a.{part}.{of}.{by} {{d}}, {{0}}, {{1}}, {{2}};", words))
                expected.append(
                    [sum(p * q for p, q in zip(split(x, 16, of), split(y, 8, by)[first:])) + z for x, y, z in rows]
                )
    for case, found, wanted in zip(cases, evaluate(cases), expected):
        assert found.tolist() == [value % 2**32 for value in wanted], case.statement
    for kind in ("s16", "s32", "s64"):
        bits = int(kind[1:])
        given = np.array(VALUES[bits], f"u{bits // 8}")
        negative, positive = evaluate([Case(f"{n}.{kind} {{d}}, {{0}};", [given], given.dtype) for n in ("neg", "abs")])
        assert negative.tolist() == [-x % 2**bits for x in VALUES[bits]]
        assert positive.tolist() == [abs(signed(x, bits)) % 2**bits for x in VALUES[bits]]


@pytest.mark.parametrize(
    "statement",
    ["add.sat.u32 {d}, {0}, {0};", "add.what.s32 {d}, {0}, {0};", "mul.s32 {d}, {0}, {0};", "abs.u32 {d}, {0};",
     "min.relu.u32 {d}, {0}, {0};", "frobnicate.b32 {d}, {0};", "mad.wide.cc.u32 {d}, {0}, {0}, {0};"],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(statement: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=statement.split()[0]):
        evaluate([Case(statement, [np.zeros(1, np.uint32)])])
