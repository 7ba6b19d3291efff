"""Logic, shifts, bit fields and bytes against loops over bits as the manual spells them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.emulator.arithmetic.evaluation import Case, check, evaluate
from tests.runtime.emulator.arithmetic.test_integers import LARGE, VALUES, columns, signed

ALL = 2**32 - 1


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic(bits: int) -> None:
    pairs = [(x, y) for x in VALUES[bits] for y in VALUES[bits]]
    operands = columns(pairs, f"b{bits}", f"b{bits}")
    dtype = operands[0].dtype
    binary = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}
    cases = [Case(f"{name}.b{bits} {{d}}, {{0}}, {{1}};", operands, dtype) for name in binary]
    cases += [Case(f"{name}.b{bits} {{d}}, {{0}};", operands[:1], dtype) for name in ("not",)]
    expected = [[make(x, y) for x, y in pairs] for make in binary.values()]
    expected += [[~x % 2**bits for x, _ in pairs]]
    check(cases, expected)


def test_predicates() -> None:
    x, y = np.array([0, 0, 1, 1], np.uint32), np.array([0, 1, 0, 1], np.uint32)
    start = "setp.ne.u32 %p, {0}, 0; setp.ne.u32 %q, {1}, 0; "
    end = " selp.u32 {d}, 1, 0, %p;"
    cases = [
        Case(start + "and.pred %p, %p, %q;" + end, [x, y]),
        Case(start + "or.pred %p, %p, !%q;" + end, [x, y]),
        Case(start + "xor.pred %p, %p, %q;" + end, [x, y]),
        Case(start + "not.pred %p, %q;" + end, [x, y]),
        Case(start + "mov.pred %p, %q;" + end, [x, y]),
    ]
    check(cases, [[0, 0, 0, 1], [1, 0, 1, 1], [0, 1, 1, 0], [1, 0, 1, 0], [0, 1, 0, 1]])


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_clamp_at_the_width(bits: int) -> None:
    pairs = [(x, n) for x in VALUES[bits] for n in (0, 1, bits - 1, bits, bits + 1, 200, 2**31, ALL)]
    operands = columns(pairs, f"b{bits}", "b32")
    dtype = operands[0].dtype
    cases = [
        Case(f"{name}{bits} {{d}}, {{0}}, {{1}};", operands, dtype) for name in ("shl.b", "shr.b", "shr.u", "shr.s")
    ]
    right = [x >> min(n, bits) for x, n in pairs]
    left = [(x << min(n, bits)) % 2**bits for x, n in pairs]
    check(cases, [left, right, right, [(signed(x, bits) >> min(n, bits)) % 2**bits for x, n in pairs]])
    x = operands[0][:3]
    literal = [Case(f"shl.b{bits} {{d}}, {{0}}, {n};", [x], dtype) for n in (0, 3, bits, bits + 9)]
    check(literal, [[(int(v) << min(n, bits)) % 2**bits for v in x] for n in (0, 3, bits, bits + 9)])


def test_funnel_shifts() -> None:
    rows = [(x, y, n) for x in LARGE[::3] for y in LARGE[1::3] for n in (0, 1, 5, 31, 32, 33, 37, 64, ALL)]
    operands = columns(rows, "b32", "b32", "b32")
    cases, expected = [], []
    for way in ("l", "r"):
        for mode, amount in (("clamp", lambda n: min(n, 32)), ("wrap", lambda n: n & 31)):
            cases.append(Case(f"shf.{way}.{mode}.b32 {{d}}, {{0}}, {{1}}, {{2}};", operands))
            whole = [(y << 32 | x, amount(n)) for x, y, n in rows]
            expected.append([(w << n >> 32) % 2**32 if way == "l" else (w >> n) % 2**32 for w, n in whole])
    check(cases, expected)


@pytest.mark.parametrize("bits", [32, 64])
def test_counts_and_searches(bits: int) -> None:
    values = VALUES[bits]
    given = [np.array(values, f"u{bits // 8}")]
    cases = [Case(f"{name}.b{bits} {{d}}, {{0}};", given) for name in ("popc", "clz")]
    expected = [[x.bit_count() for x in values], [bits - x.bit_length() for x in values]]
    cases.append(Case(f"brev.b{bits} {{d}}, {{0}};", given, given[0].dtype))
    expected.append([int(f"{x:0{bits}b}"[::-1], 2) for x in values])
    check(cases, expected)


def field(x: int, start: int, length: int, bits: int, is_signed: bool) -> int:
    start, length = start & 255, length & 255
    sign = 0 if not is_signed or length == 0 else (x >> min(start + length - 1, bits - 1)) & 1
    return sum(((x >> (start + i)) & 1 if i < length and start + i < bits else sign) << i for i in range(bits))


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits: int) -> None:
    values = VALUES[bits][::3]
    rows = [
        (x, s, n) for x in values for s in (0, 3, 31, 32, 63, 64, 255, 256) for n in (0, 1, 8, 32, 33, 64, 255, 259)
    ]
    operands = columns(rows, f"b{bits}", "b32", "b32")
    dtype = operands[0].dtype
    cases = [Case(f"bfe.{kind}{bits} {{d}}, {{0}}, {{1}}, {{2}};", operands, dtype) for kind in ("u", "s")]
    expected = [[field(x, s, n, bits, kind == "s") for x, s, n in rows] for kind in ("u", "s")]
    target = 0x0F0F0F0F0F0F0F0F % 2**bits
    cases.append(Case(f"bfi.b{bits} {{d}}, {{0}}, {target}, {{1}}, {{2}};", operands, dtype))

    def insert(x: int, start: int, length: int) -> int:
        result = target
        for i in range(length & 255):
            at = (start & 255) + i
            if at < bits:
                result = result & ~(1 << at) | ((x >> i) & 1 if i < bits else 0) << at
        return result

    expected.append([insert(*row) for row in rows])
    check(cases, expected)


def permuted(x: int, y: int, selector: int) -> int:
    both = (y << 32 | x).to_bytes(8, "little")
    result = 0
    for i in range(4):
        nibble = (selector >> (4 * i)) & 15
        byte = both[nibble & 7]
        result |= ((0xFF if byte & 0x80 else 0) if nibble & 8 else byte) << (8 * i)
    return result


def test_permutation_of_bytes() -> None:
    x, y = np.array([0x03020100, 0x80FF7F01], np.uint32), np.array([0x87060504, 0x12345678], np.uint32)
    cases, expected = [], []
    selectors = [0x5410, 0x7632, 0xF7A0, 0x0123, 0x8888, 0xFFFF_4567, 0x9ABC]
    for selector in selectors:
        wanted = [permuted(int(a), int(b), selector) for a, b in zip(x, y)]
        cases += [
            Case(f"prmt.b32 {{d}}, {{0}}, {{1}}, {selector};", [x, y]),
            Case("prmt.b32 {d}, {0}, {1}, {2};", [x, y, np.full(2, selector, np.uint32)]),
        ]
        expected += [wanted, wanted]
    check(cases, expected)


def test_moves_pack_and_unpack() -> None:
    h = np.array([0x1234, 0xFFFF], np.uint16)
    g = np.array([0xABCD, 0x0001], np.uint16)
    w = np.array([0x12345678, 0xFFFFFFFF], np.uint32)
    v = np.array([0x9ABCDEF0, 1], np.uint32)
    q = np.array([0x1122334455667788, 2**64 - 2], np.uint64)
    r = np.array([0x99AABBCCDDEEFF00, 5], np.uint64)
    cases = [
        Case("mov.b32 {d}, {{0}, {1}};", [h, g]),
        Case("mov.b64 {d}, {{0}, {1}};", [w, v], np.uint64),
        Case("mov.b64 {d}, {{0}, {1}, {1}, {0}};", [h, g], np.uint64),
        Case("mov.b64 {_, {d}}, {0};", [q]),
        Case("mov.b32 {{d}, %h1}, {0};", [w], np.uint16),
        Case("mov.b64 {%h0, %h1, {d}, %h3}, {0};", [q], np.uint16),
        Case(".reg .b128 %z; mov.b128 %z, {{0}, {1}}; mov.b128 {%y, {d}}, %z;", [q, r], np.uint64),
        Case(".reg .b128 %z; mov.b128 %z, {{0}, {1}}; mov.b128 {{d}, %y}, %z;", [q, r], np.uint64),
        Case("mov.f32 {d}, 0fBF800000;", [w]),
        Case("mov.s32 {d}, -2;", [w]),
        Case("mov.u32 {d}, %laneid;", [w]),
        Case("mov.f64 {d}, 0dBFF0000000000000;", [w], np.uint64),
    ]
    expected = [
        [0xABCD1234, 0x0001FFFF],
        [0x9ABCDEF012345678, 0x1FFFFFFFF],
        [0x1234ABCDABCD1234, 0xFFFF00010001FFFF],
        [0x11223344, 0xFFFFFFFF],
        [0x5678, 0xFFFF],
        [0x3344, 0xFFFF],
        r.tolist(), q.tolist(), [0xBF800000] * 2, [2**32 - 2] * 2, [0, 1], [0xBFF0 << 48] * 2,
    ]  # fmt: skip
    check(cases, expected)


def test_128_bits_outlive_waiting_and_branches() -> None:
    q = np.arange(64, dtype=np.uint64) * np.uint64(7) + np.uint64(2**40)
    r, odd = q[::-1].copy(), (np.arange(64) % 2).astype(np.uint32)
    members = np.full(64, 2**32 - 1, np.uint32)
    start = ".reg .b128 %z; mov.b128 %z, {{0}, {1}}; "
    parted = (
        "setp.ne.u32 %p, {2}, 0; @%p bra over; mov.b128 %z, {{1}, {0}}; over: bar.warp.sync -1; mov.b128 {%y, {d}}, %z;"
    )
    waited = "shfl.sync.idx.b32 %w, {2}, 0, 31, {3}; bar.warp.sync -1; mov.b128 {%y, {d}}, %z;"
    check(
        [Case(start + parted, [q, r, odd], np.uint64), Case(start + waited, [q, r, odd, members], np.uint64)],
        [np.where(odd, r, q).tolist(), r.tolist()],
    )


def test_guards_leave_other_lanes_alone() -> None:
    x = np.arange(1, 65, dtype=np.uint32)
    odd = "and.b32 %w, {0}, 1; setp.ne.u32 %p, %w, 0; mov.u32 {d}, 7; "
    cases = [
        Case(odd + "@%p add.u32 {d}, {0}, 100;", [x]),
        Case(odd + "@!%p mov.b32 {d}, 9;", [x]),
        Case(odd + "setp.eq.u32 %q, 0, 0; @%p setp.gt.u32 %q, {0}, 31; selp.u32 {d}, 1, 0, %q;", [x]),
        Case(odd + "@%p popc.b32 {d}, {0};", [x]),
    ]
    check(
        cases,
        [
            [v + 100 if v & 1 else 7 for v in range(1, 65)],
            [7 if v & 1 else 9 for v in range(1, 65)],
            [int(not v & 1 or v > 31) for v in range(1, 65)],
            [v.bit_count() if v & 1 else 7 for v in range(1, 65)],
        ],
    )


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_the_leading_bit(kind: str) -> None:
    bits = int(kind[1:])
    given = [np.array(VALUES[bits], f"u{bits // 8}")]
    found = evaluate([Case(f"bfind{how}.{kind} {{d}}, {{0}};", given) for how in ("", ".shiftamt")])
    places = [(~x % 2**bits if kind[0] == "s" and x >> (bits - 1) else x).bit_length() - 1 for x in VALUES[bits]]
    assert found[0].tolist() == [place % 2**32 for place in places]
    assert found[1].tolist() == [ALL if place < 0 else bits - 1 - place for place in places]
