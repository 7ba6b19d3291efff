"""PTX that other compilers made of plain sources, at ragged shapes, all checkers on.

`tools/references/make_emulator_anchors.py`, a script until cc784e91, compiled them.

If one reading of the PTX manual had made both our kernels and this emulator, an error in it would not show. These texts
come from compilers that are right on hardware.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from runtime.emulator.execution.launch import Checks, LoadedKernel, launch, load
from runtime.emulator.memory.device_memory import Machine

FOLDER = Path(__file__).parent / "anchors"
ANCHORS: dict[str, Any] = json.loads((FOLDER / "anchors.json").read_text())
BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


@functools.cache
def kernel_of(name: str) -> LoadedKernel:
    return load((FOLDER / f"{name}.ptx").read_text()).kernel(ANCHORS[name]["kernel"])


def run(
    name: str, grid: Sequence[int], arguments: Sequence[np.ndarray | int | float], *, seed: int = 0,
    outputs: Sequence[int] = (),
) -> list[np.ndarray]:  # fmt: skip
    """Launches an anchor on arrays, those in `outputs` uninitialised. Returns what the arrays are afterwards."""
    facts, kernel = ANCHORS[name], kernel_of(name)
    machine = Machine(64 << 20)
    try:
        values: list[int | float] = []
        places: list[tuple[int, np.ndarray]] = []
        for index, argument in enumerate(arguments):
            if isinstance(argument, np.ndarray):
                address = machine.allocate(argument.nbytes)
                if index not in outputs:
                    machine.write(address, argument.tobytes())
                places.append((address, argument))
                values.append(address)
            else:
                values.append(argument)
        full = [*grid, *[1] * (3 - len(grid))]
        blocks = int(np.prod(full))
        scratch = facts["scratch_bytes"] * blocks
        values += [machine.allocate(scratch) if scratch else 0, 0]
        parameters = b""
        for value, variable in zip(values, kernel.kernel.parameters):
            parameters += b"\0" * (-len(parameters) % variable.align)
            data = (
                np.float32(value).tobytes()
                if isinstance(value, float)
                else (int(value) % (1 << 64)).to_bytes(8, "little")
            )
            parameters += data[: variable.size_bytes]
        launch(
            kernel, machine, tuple(full), (facts["threads"], 1, 1), facts["shared_bytes"], parameters,
            (facts["cluster"], 1, 1), checks=Checks.ALL, variables=kernel.program.place(machine), seed=seed,
        )  # fmt: skip
        return [
            np.frombuffer(machine.read(address, array.nbytes), array.dtype).reshape(array.shape).copy()
            for address, array in places
        ]
    finally:
        machine.close()


MATMULS = [
    # name, element type of a and b, of c, is b transposed, shapes
    ("matmul_bf16_sm80", BF16, np.float32, False, [(65, 72, 40), (1, 8, 8), (130, 136, 200)]),
    ("matmul_f16_nt_sm80", np.float16, np.float16, True, [(70, 129, 104), (3, 5, 8)]),
    ("matmul_tf32_sm80", np.float32, np.float32, False, [(66, 36, 100), (5, 4, 4)]),
    ("matmul_s8_sm80", np.int8, np.int32, False, [(67, 80, 144), (2, 16, 16)]),
    ("matmul_e4m3_sm89", E4M3, np.float32, True, [(65, 67, 144), (4, 3, 16)]),
    ("matmul_bf16_sm90", BF16, BF16, False, [(65, 136, 200), (7, 8, 8), (128, 256, 264)]),
    ("matmul_e4m3_sm90", E4M3, np.float32, True, [(131, 70, 272), (2, 9, 16)]),
    ("matmul_tma_sm90", BF16, BF16, False, [(129, 72, 200), (5, 8, 8), (256, 128, 320)]),
    ("matmul_tma_f16_small_sm90", np.float16, np.float16, False, [(65, 24, 72), (64, 16, 8)]),
    ("matmul_warp_specialised_sm90", BF16, np.float32, True, [(129, 136, 456), (3, 8, 8), (128, 128, 64)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "out", "transposed", "shape"),
    [(name, dtype, out, transposed, shape) for name, dtype, out, transposed, shapes in MATMULS for shape in shapes],
)
@pytest.mark.parametrize("seed", [0, pytest.param(7, marks=pytest.mark.exhaustive)])
def test_matmul_of_small_integers_is_exact(
    name: str, dtype: Any, out: Any, transposed: bool, shape: tuple[int, int, int], seed: int
) -> None:
    m, n, k = shape
    random = np.random.default_rng(m * n + k)
    numbers = ANCHORS[name]["numbers"]
    a, b = (random.integers(-2, 3, (rows, k)).astype(np.float32).astype(dtype) for rows in (m, n))
    grid = (-(-m // numbers["BM"]), -(-n // numbers["BN"]))
    given = b if transposed else np.ascontiguousarray(b.T)
    actual = run(name, grid, [a, given, np.zeros((m, n), out), m, n, k], seed=seed, outputs=(2,))[2]
    expected = a.astype(np.float32) @ b.astype(np.float32).T
    assert np.array_equal(actual, expected.astype(out))


@pytest.mark.parametrize("shape", [(65, 40, 200), (64, 32, 64)])
def test_split_k_by_tma_reduction(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    random = np.random.default_rng(1)
    a = random.integers(-2, 3, (m, k)).astype(BF16)
    b = random.integers(-2, 3, (k, n)).astype(BF16)
    c = random.integers(-9, 9, (m, n)).astype(np.float32)
    grid = (-(-m // 64), -(-n // 32), -(-k // 64))
    actual = run("matmul_split_k_sm90", grid, [a, b, c, m, n, k])[2]
    assert np.array_equal(actual, c + a.astype(np.float32) @ b.astype(np.float32))


@pytest.mark.parametrize(
    ("name", "dtype", "heads", "length"),
    [
        ("attention_sm80", np.float16, 2, 77), ("attention_sm80", np.float16, 1, 1),
        ("attention_sm80", np.float16, 3, 128),
        ("attention_sm90", BF16, 2, 131), ("attention_sm90", BF16, 1, 5), ("attention_sm90", BF16, 1, 256),
    ],
)  # fmt: skip
def test_flash_attention(name: str, dtype: Any, heads: int, length: int) -> None:
    random = np.random.default_rng(length)
    q, k, v = (random.standard_normal((heads, length, 64)).astype(dtype) for _ in range(3))
    scale = 0.125 * float(np.log2(np.e))
    grid = (-(-length // ANCHORS[name]["numbers"]["BM"]), heads)
    actual = run(name, grid, [q, k, v, np.zeros_like(q), length, scale], outputs=(3,))[3]
    scores = q.astype(np.float64) @ k.astype(np.float64).transpose(0, 2, 1) * 0.125
    scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64)
    tolerance = 2e-3 if dtype == np.float16 else 1.6e-2
    assert np.all(np.abs(actual.astype(np.float64) - expected) <= tolerance)


@pytest.mark.parametrize("columns", [1, 33, 1000, 1024])
def test_softmax(columns: int) -> None:
    x = np.random.default_rng(columns).standard_normal((3, columns)).astype(np.float32) * 4
    actual = run("softmax_sm80", (3,), [x, np.zeros_like(x), columns], outputs=(1,))[1]
    weights = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    assert np.allclose(actual, weights / weights.sum(-1, keepdims=True), rtol=1e-5, atol=0)


@pytest.mark.parametrize("columns", [7, 768, 2047])
def test_layer_norm(columns: int) -> None:
    random = np.random.default_rng(columns)
    x = (random.standard_normal((4, columns)) * 3 + 1).astype(BF16)
    weight, bias = (random.standard_normal(columns).astype(np.float32) for _ in range(2))
    arguments = [x, weight, bias, np.zeros_like(x), columns, 1e-5]
    actual = run("layer_norm_sm90", (4,), arguments, outputs=(3,))[3].astype(np.float64)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5) * weight + bias
    assert np.all(np.abs(actual - expected) <= 2.0**-8 * np.abs(expected) + 1e-4)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("n", [1, 255, 2000])
def test_atomics(n: int, seed: int) -> None:
    x = np.random.default_rng(n).integers(0, 1000, n).astype(np.int32)
    zeros = np.zeros(64, np.int32)
    arguments = [x, zeros, np.array([0, 2000], np.int32), np.zeros(2, np.float32), np.zeros(1, np.int32), n]
    _, counts, extremes, sums, lock = run("atomics_sm80", (-(-n // 256),), arguments, seed=seed)
    assert np.array_equal(counts, np.bincount(x % 64, minlength=64))
    assert extremes.tolist() == [x.max(), x.min()]
    assert sums.tolist() == [x.sum(), x.sum()]
    assert lock[0] == 0


@pytest.mark.parametrize("n", [1, 77, 256])
def test_scan_and_sort(n: int) -> None:
    x = np.random.default_rng(n).integers(-500, 500, (3, n)).astype(np.int32)
    arguments = [x, np.zeros_like(x), np.zeros_like(x), np.zeros(3, np.int32), n]
    _, scanned, ordered, best = run("scan_sort_sm90", (3,), arguments, outputs=(1, 2, 3))
    assert np.array_equal(scanned, np.cumsum(x, 1))
    assert np.array_equal(ordered, np.sort(x, 1))
    assert np.array_equal(best, x.argmax(1))


def test_casts() -> None:
    """Values that overflow, ties, subnormals of each type, infinities and NaN."""
    random = np.random.default_rng(5)
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        448,
        464,
        465,
        57344,
        61440,
        1e30,
        2.0**-9,
        2.0**-10,
        1.5 * 2.0**-9,
        2.0**-16,
        2.0**-17,
    ]
    x = np.concatenate([special, random.standard_normal(999) * 10.0 ** random.integers(-8, 6, 999)]).astype(np.float32)
    outs = [np.zeros(x.size, kind) for kind in (E4M3, E5M2, np.float16, BF16, np.float32)]
    _, e4m3, e5m2, half, brain, back = run("casts_sm90", (2,), [x, *outs, x.size], outputs=(1, 2, 3, 4, 5))

    def same(actual: np.ndarray, expected: np.ndarray) -> bool:
        wide, wanted = actual.astype(np.float32), expected.astype(np.float32)
        return bool(
            np.all((wide == wanted) & (np.signbit(wide) == np.signbit(wanted)) | np.isnan(wide) & np.isnan(wanted))
        )

    limited = {E4M3: np.clip(x, -448, 448), E5M2: np.clip(x, -57344, 57344)}
    assert same(e4m3, limited[E4M3].astype(E4M3))
    assert same(e5m2, limited[E5M2].astype(E5M2))
    with np.errstate(over="ignore"):
        assert same(half, x.astype(np.float16))
    assert same(brain, x.astype(BF16))
    assert same(back, e4m3.astype(np.float32) + e5m2.astype(np.float32))


def test_every_anchor_is_run_here() -> None:
    source = Path(__file__).read_text()
    assert len(ANCHORS) >= 12
    assert all(f'"{name}"' in source for name in ANCHORS)
