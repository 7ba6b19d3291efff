"""Approximate instructions: inside their documented error, never better than it by design, corners as in the tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.runtime.emulator.arithmetic.evaluation import Case, evaluate

NAN, INF, ONE = 0x7FFFFFFF, 0x7F800000, 0x3F800000
Array = np.ndarray


def inputs(low: float, high: float, is_signed: bool, count: int = 1024) -> Array:
    rng = np.random.default_rng(7)
    x = np.exp2(rng.uniform(np.log2(low), np.log2(high), count)).astype(np.float32)
    return np.where(rng.random(count) < 0.5, -x, x) if is_signed else x


def ulps(found: Array, exact: Array) -> Array:
    """The distance in units in the last place of the exact value's binade."""
    exponent = np.maximum(np.floor(np.log2(np.abs(exact))), -126)
    return np.abs(found - exact) / np.exp2(exponent - 23)


def relative(found: Array, exact: Array) -> Array:
    return np.abs(found - exact) / np.abs(exact)


def absolute(found: Array, exact: Array) -> Array:
    return np.abs(found - exact)


CASES: list[tuple[str, Array, Callable[[Array], Array], Callable[[Array, Array], Array], float]] = [
    ("rcp.approx.f32", inputs(2.0**-120, 2.0**120, True), lambda x: 1 / x, ulps, 1.0),
    ("sqrt.approx.f32", inputs(2.0**-120, 2.0**120, False), np.sqrt, relative, 2.0**-23),
    ("sqrt.approx.f32", inputs(2.0**-148, 2.0**-126, False), np.sqrt, relative, 2.0**-23),
    ("rsqrt.approx.f32", inputs(2.0**-120, 2.0**120, False), lambda x: 1 / np.sqrt(x), relative, 2.0**-22.9),
    ("ex2.approx.f32", inputs(2.0**-20, 120.0, True), np.exp2, ulps, 2.0),
    ("ex2.approx.f32", inputs(2.0**-3, 1.0, False), np.exp2, absolute, 2.0**-22.5),
    ("lg2.approx.f32", inputs(0.5, 2.0, False), np.log2, absolute, 2.0**-22),
    ("lg2.approx.f32", inputs(2.0, 2.0**120, False), np.log2, relative, 2.0**-22),
]


def test_documented_errors_are_kept_and_used() -> None:
    found = evaluate([Case(f"{name} {{d}}, {{0}};", [x], np.float32) for name, x, *_ in CASES])
    for (name, x, exact, error, bound), result in zip(CASES, found):
        wanted = exact(x.astype(np.float64))
        errors = error(result.astype(np.float64), wanted)
        assert errors.max() <= bound, (name, errors.max() / bound)
        assert errors.max() >= bound / 2, (name, errors.max() / bound)
        order = np.argsort(x)
        if name.startswith(("ex2", "lg2", "sqrt")):
            assert (np.diff(result[order]) >= 0).all(), name
        if name.startswith("rsqrt"):
            assert (np.diff(result[order]) <= 0).all(), name


def test_quotients() -> None:
    x, y = inputs(2.0**-60, 2.0**60, True), inputs(2.0**-60, 2.0**60, True)[::-1].copy()
    ways = ("div.approx.f32", "div.full.f32")
    exact = x.astype(np.float64) / y.astype(np.float64)
    for name, found in zip(ways, evaluate([Case(f"{name} {{d}}, {{0}}, {{1}};", [x, y], np.float32) for name in ways])):
        errors = ulps(found.astype(np.float64), exact)
        assert 1.0 <= errors.max() <= 2.0, name
    a = np.array([ONE, INF, 0x00000001, ONE, 0x80000000 | ONE, ONE, ONE, 0], np.uint32)
    b = np.array([0x7F000001, 0x7F000001, ONE, 1, 0, 0x7FC00000, INF, 0], np.uint32)  # above 2**126 …
    approx, full = evaluate([Case(f"{name} {{d}}, {{0}}, {{1}};", [a, b]) for name in ways])
    assert approx.tolist() == [0, NAN, 0, INF, 0xFF800000, NAN, 0, NAN]
    assert full.tolist() == [0, INF, 0, INF, 0xFF800000, NAN, 0, NAN]  # 2**-127 is subnormal: flushed


CORNERS = {
    "rcp.approx.f32": {0xFF800000: 0x80000000, 0x80000000: 0xFF800000, 0: INF, INF: 0, 0x7F800001: NAN,
                       0x40000000: 0x3F000000},
    "sqrt.approx.f32": {0xFF800000: NAN, 0xBF800000: NAN, 0x80000000: 0x80000000, 0: 0, INF: INF, 0x7FC00000: NAN},
    "rsqrt.approx.f32": {0xFF800000: NAN, 0xBF800000: NAN, 0x80000000: 0xFF800000, 0: INF, INF: 0, 0x7FC00000: NAN},
    "lg2.approx.f32": {0xFF800000: NAN, 0x80000000: 0xFF800000, 0: 0xFF800000, INF: INF, 0x7FC00000: NAN, ONE: 0},
    "ex2.approx.f32": {0xFF800000: 0, 0x80000000: ONE, 0: ONE, INF: INF, 0x7FC00000: NAN, 0x40400000: 0x41000000,
                       0x43000000: INF, 0xC3170000: 0, 1: ONE},
    "ex2.approx.ftz.f32": {0xC2FE0000: 0, 0x80000001: ONE},
    "rcp.approx.ftz.f32": {1: INF, 0x80000001: 0xFF800000, 0x7F000000: 0},
    "lg2.approx.ftz.f32": {1: 0xFF800000},
    "sqrt.approx.ftz.f32": {0x80000001: 0x80000000, 1: 0},
}  # fmt: skip


def test_corners() -> None:
    cases = [Case(f"{name} {{d}}, {{0}};", [np.array(list(table), np.uint32)]) for name, table in CORNERS.items()]
    for (name, table), found in zip(CORNERS.items(), evaluate(cases)):
        assert found.tolist() == list(table.values()), name
