"""shfl, vote, match and redux against loops over the lanes of each warp."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from runtime.emulator.execution.fault import EmulatorFault
from tests.runtime.emulator.arithmetic.evaluation import Case, check, evaluate

ALL = 0xFFFFFFFF
POISON = 0x7FEDBEEF
RNG = np.random.default_rng(9)
X = RNG.integers(0, 2**32, 64, dtype=np.uint32)
LANE = np.arange(64) % 32


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, int]:
    """Source lane and predicate, as the manual's pseudocode has them."""
    b, segment = b & 31, (c >> 8) & 31
    most = (lane & segment) | (c & 31 & ~segment)
    least = lane & segment
    source, inside = {
        "up": (lane - b, lane - b >= most),
        "down": (lane + b, lane + b <= most),
        "bfly": (lane ^ b, lane ^ b <= most),
        "idx": (least | (b & ~segment), least | (b & ~segment) <= most),
    }[mode]
    return (source, 1) if inside else (lane, 0)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode: str) -> None:
    cases, expected = [], []
    for c in (0x1F, 0, 0x181F, 0x1C07):
        for b in (1, 5, 16, 33):
            found = [shuffled(mode, int(lane), b, c) for lane in LANE]
            values = [int(X[(k & ~31) + source]) for k, (source, _) in enumerate(found)]
            literal = f"shfl.sync.{mode}.b32 {{d}}|%p, {{0}}, {b}, {c}, -1;"
            register = "mov.u32 %w, -1; " + f"shfl.sync.{mode}.b32 {{d}}|%p, {{0}}, {{1}}, {{2}}, %w;"
            columns = [X, np.full(64, b, np.uint32), np.full(64, c, np.uint32)]
            inside = " selp.u32 {d}, 1, 0, %p;"
            cases += [
                Case(literal, [X]),
                Case(literal + inside, [X]),
                Case(register, columns),
                Case(register + inside, columns),
            ]
            expected += [values, [p for _, p in found]] * 2
    half = len(cases) // 2
    check(cases[:half], expected[:half])
    check(cases[half:], expected[half:])


def test_shuffles_with_different_lanes_and_from_absent_ones() -> None:
    index = RNG.integers(0, 32, 64).astype(np.uint32)
    here = (LANE % 4 != 3).astype(np.uint32)
    present = "setp.ne.u32 %p, {1}, 0; mov.u32 {d}, 5; "
    check(
        [
            Case("shfl.sync.idx.b32 {d}, {0}, {1}, 0x1f, -1;", [X, index]),
            Case(present + "@%p shfl.sync.bfly.b32 {d}, {0}, 1, 0x1f, 0x77777777;", [X, here]),
            Case("shfl.sync.down.b32 {d}, {0}, {1}, 0x1f, -1;", [X, index]),
            Case("mov.u32 {d}, {0}; shfl.sync.bfly.b32 {d}, {d}, 16, 31, -1;", [X]),
        ],
        [
            [int(X[(k & ~31) + int(index[k])]) for k in range(64)],
            [5 if k % 4 == 3 else POISON if k % 4 == 2 else int(X[k ^ 1]) for k in range(64)],
            [int(X[k + int(index[k])]) if k % 32 + index[k] < 32 else int(X[k]) for k in range(64)],
            [int(X[k ^ 16]) for k in range(64)],
        ],
    )


def test_votes() -> None:
    odd = (LANE % 2).astype(np.uint32)
    none, whole = np.zeros(64, np.uint32), np.ones(64, np.uint32)
    low = (LANE < 16).astype(np.uint32)
    start, end = "setp.ne.u32 %q, {0}, 0; ", " selp.u32 {d}, 1, 0, %p;"
    cases, expected = [], []
    for column in (odd, none, whole, low):
        first = column[:32].astype(bool)
        ballot = sum(int(v) << k for k, v in enumerate(first))
        cases += [
            Case(start + "vote.sync.ballot.b32 {d}, %q, -1;", [column]),
            Case(start + "vote.sync.ballot.b32 {d}, !%q, -1;", [column]),
            *(Case(start + f"vote.sync.{mode}.pred %p, %q, -1;" + end, [column]) for mode in ("all", "any", "uni")),
            Case(start + "vote.sync.uni.pred %p, !%q, -1;" + end, [column]),
        ]
        uniform = int(first.all() or not first.any())
        expected += [
            [value] * 64 for value in (ballot, ballot ^ ALL, int(first.all()), int(first.any()), uniform, uniform)
        ]
    members = np.where(LANE < 16, 0xFFFF, 0xFFFF0000).astype(np.uint32)  # a tile of 16 lanes sees itself alone
    cases.append(Case(start + "vote.sync.ballot.b32 {d}, %q, {1};", [odd, members]))
    expected.append([0xAAAA if lane < 16 else 0xAAAA0000 for lane in LANE])
    cases.append(Case(start + "vote.sync.all.pred %p, %q, {1};" + end, [low, members]))
    expected.append([int(lane < 16) for lane in LANE])
    check(cases, expected)


def test_votes_of_lanes_that_have_parted() -> None:
    """Both sides of a branch vote at the same time; only a side's own lanes count."""
    statement = (
        "setp.ne.u32 %p, {0}, 0; @%p bra right; vote.sync.ballot.b32 {d}, 1, 0x55555555; bra over;"
        "right: activemask.b32 %w; vote.sync.ballot.b32 {d}, 1, 0xAAAAAAAA; over: bar.warp.sync -1;"
    )
    odd = (LANE % 2).astype(np.uint32)
    check([Case(statement, [odd])], [[0xAAAAAAAA if lane % 2 else 0x55555555 for lane in LANE]])


def signed(x: int) -> int:
    return x - 2**32 if x >> 31 else x


def reduced(combine: Callable[[list[int]], int], members: np.ndarray, values: list[int]) -> list[int]:
    found = []
    for k, mask in enumerate(members):
        first = k & ~31
        found.append(combine([values[first + j] for j in range(32) if int(mask) >> j & 1]) % 2**32)
    return found


def test_reductions() -> None:
    halves = np.where(LANE < 16, 0xFFFF, 0xFFFF0000).astype(np.uint32)
    whole = np.full(64, ALL, np.uint32)
    unsigned = {"add": sum, "min": min, "max": max}
    bitwise = {
        "and": lambda v: int(np.bitwise_and.reduce(np.array(v, np.uint32))),
        "or": lambda v: int(np.bitwise_or.reduce(np.array(v, np.uint32))),
        "xor": lambda v: int(np.bitwise_xor.reduce(np.array(v, np.uint32))),
    }
    cases, expected = [], []
    plain, low_half = X.tolist(), [signed(v) for v in X.tolist()]
    for kinds, table, values in (("u32", unsigned, plain), ("s32", unsigned, low_half), ("b32", bitwise, plain)):
        for name, combine in table.items():
            for members in (whole, halves):
                cases.append(Case(f"redux.sync.{name}.{kinds} {{d}}, {{0}}, {{1}};", [X, members]))
                expected.append(reduced(combine, members, values))
    check(cases, expected)


def test_a_lane_outside_of_its_member_mask_is_a_fault() -> None:
    with pytest.raises(EmulatorFault, match="LANE_NOT_IN_MASK"):
        evaluate([Case("shfl.sync.bfly.b32 {d}, {0}, 1, 0x1f, 0x0000ffff;", [X])])
