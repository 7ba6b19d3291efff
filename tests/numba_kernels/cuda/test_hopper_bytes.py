"""Hopper's products of e4m3: the rounding against ml_dtypes, the sums against float64."""

from __future__ import annotations

from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import hopper_bytes
from numba_kernels.cuda.packing import Packing, arrange
from runtime.device.assemble import assemble
from runtime.device.kernel_cache import KernelCache
from tests.numba_kernels.cuda.harness import empty, get, put
from tests.numba_kernels.cuda.packed_cases import PackedMatrix, packed_matrix, rounded_e4m3
from tools.kernel_costs.machine_code import disassemble, nvdisasm_if_any

pytestmark = pytest.mark.parametrize("gpu", ["emulated:sm_90a"], indirect=True)
SLOW = pytest.mark.exhaustive
CUT = 2.0**-9  # of the magnitudes that are added, at most, of a real device


def multiply(gpu, matrix: PackedMatrix, x: np.ndarray, activation: str = "", num_blocks: int = 1):
    """(what comes out, x as it was rounded in float64); so many blocks share K."""
    (m, k), n, name = x.shape, len(matrix.values) // (2 if activation else 1), matrix.packing.name
    is_grouped = name != "e4m3"
    memory, scales_at, codes, scales = rounded_e4m3(gpu, x, is_grouped=is_grouped)
    used = codes.astype(np.float64) * np.repeat(scales.astype(np.float64), 128 if is_grouped else k, axis=1)[:, :k]
    asked = gemm.Product(
        m, n, k, "bf16", name, "" if activation else "f32",
        gemm.Epilogue(has_residual=False, is_aligned=True, activation=activation),
    )  # fmt: skip
    machine = gemm.machine_of(gpu.arch, 2)
    assert not hopper_bytes.why_not(asked, machine)
    held, result = put(gpu, matrix.block), empty(gpu, (m, n), asked.out)
    with patch.object(hopper_bytes, "_blocks_of_a_tile", lambda *_: num_blocks):
        launch = hopper_bytes.plan(asked, machine)
    gpu.launch(
        launch, memory.address, held.address, 0, 0, result.address, m, n, k, 0, scales_at, 0,
        0.0, held.address, held.address,
    )  # fmt: skip
    return get(gpu, result, (m, n), asked.out).astype(np.float64), used


def check(gpu, name: str, n: int, x: np.ndarray, activation: str, num_blocks: int = 1) -> None:
    """A random matrix of n rows, or of n gates and n others, beside float64. A real Hopper's tensor cores cut what they
    add to 14 bits of the largest product or sum, in steps of 32; the emulated ones add in float32."""
    k = x.shape[1]
    matrix = packed_matrix(name, n * (2 if activation else 1), k, "bf16")
    got, used = multiply(gpu, matrix, x, activation, num_blocks)
    values = matrix.values
    exact = used @ values.T
    magnitude = np.abs(used) @ np.abs(values).T
    bound = 2 * (k + 4) * 2.0**-24 * magnitude
    if not gpu.driver.is_emulated:
        bound += CUT * magnitude
    if activation:
        with np.errstate(over="ignore"):
            gate = 1 / (1 + np.exp(-exact[:, :n]))
            slope = gate * (1 + np.abs(exact[:, :n]) * (1 - gate))
            bound = slope * bound[:, :n] * np.abs(exact[:, n:]) + np.abs(exact[:, :n]) * gate * bound[:, n:]
            exact = exact[:, :n] * gate * exact[:, n:]
        bound = bound + 2.0**-7 * np.abs(exact) + 1e-3
    assert (np.abs(got - exact) <= bound).all()
    assert np.abs(exact).max() > 0


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "activation"),
    [
        ("e4m3_g128", 131, 48, 1096, ""), ("e4m3_g128", 20, 80, 256, "silu"),
        *(pytest.param(*each, marks=SLOW) for each in (
            ("e4m3", 70, 150, 264, ""), ("e4m3", 300, 272, 1160, ""),
            ("e4m3", 129, 144, 72, "silu"), ("e4m3_g128", 270, 260, 128, ""),
        )),
    ],
)  # fmt: skip
@pytest.mark.exhaustive_cases("e4m3")
def test_products(gpu, name, m, n, k, activation):
    rng = np.random.default_rng([m, n, k])
    x = rng.standard_normal((m, k)) * 10.0 ** rng.uniform(-2, 2, (m, -(-k // 128))).repeat(128, axis=1)[:, :k]
    check(gpu, name, n, x.astype(ml_dtypes.bfloat16), activation)


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "activation", "num_blocks"),
    [
        ("e4m3_g128", 131, 48, 1096, "", 4),
        *(pytest.param(*each, marks=SLOW) for each in (
            ("e4m3", 70, 150, 2056, "", 8), ("e4m3_g128", 140, 144, 328, "silu", 2), ("e4m3", 33, 16, 648, "silu", 2),
        )),
    ],
)  # fmt: skip
def test_blocks_that_share_k(gpu, name, m, n, k, activation, num_blocks):
    """The sums are added in another order, in float32 all of them."""
    x = np.random.default_rng([m, n, k]).standard_normal((m, k)).astype(ml_dtypes.bfloat16)
    check(gpu, name, n, x, activation, num_blocks)


@pytest.mark.skipif(nvdisasm_if_any() is None, reason="no nvdisasm: pip install nvidia-cuda-nvdisasm")
@pytest.mark.parametrize("activation", ["", pytest.param("silu", marks=SLOW)])
def test_the_loop_over_stages_loads_nothing_from_device_memory(gpu, activation):
    """By the machine code: scales of groups are in the stage."""
    kernel = hopper_bytes._kernel("e4m3_g128", "bf16", "bf16", activation)
    text = KernelCache().get(kernel, gpu.arch, is_ptx=True).image.rstrip(b"\0").decode()
    code = disassemble(assemble(text, gpu.arch).cubin, nvdisasm_if_any())
    loops = [code[each.target : end] for end, each in enumerate(code) if each.target is not None and each.target < end]
    stages = min((loop for loop in loops if any("GMMA" in each.opcode for each in loop)), key=len)
    loads = [each.opcode for each in stages if each.opcode.startswith(("LD", "ATOM", "RED"))]
    assert len(loads) == 2 + hopper_bytes.TILE.block_n // hopper_bytes.TILE_COLUMNS
    assert {opcode.split(".")[0] for opcode in loads} == {"LDS"}


def test_few_tiles_are_shared(gpu):
    machine = gemm.machine_of("sm_90a", 132, ((2, 66), (4, 32), (8, 16)))

    def clusters(m, n, k):
        asked = gemm.Product(m, n, k, "bf16", "e4m3_g128", epilogue=gemm.Epilogue(has_residual=False, is_aligned=True))
        launch = hopper_bytes.plan(asked, machine)
        return launch.cluster[0], launch.grid[0]

    assert clusters(128, 8192, 8192) == (2, 128)
    assert clusters(128, 4096, 4096) == (4, 128)
    assert clusters(4096, 8192, 8192) == (1, 132)
    assert clusters(128, 4096, 512) == (1, 32)


def test_groups_are_rounded_by_their_largest_magnitude(gpu):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((11, 328)) * 10.0 ** rng.uniform(-3, 3, (11, 1))).astype(ml_dtypes.bfloat16)
    x[3] = 0
    x[5, 130] = np.nan
    _, _, codes, scales = rounded_e4m3(gpu, x, is_grouped=True)
    wide = np.zeros((11, 384), np.float32)
    wide[:, :328] = x
    largest = np.abs(wide).reshape(11, 3, 128).max(axis=2)
    finite = np.isfinite(largest)
    assert finite.sum() == 32
    assert (np.abs(scales[finite] - largest[finite] / 448) <= 1e-6 * largest[finite] / 448).all()
    assert not np.isfinite(scales[~finite]).any()
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(largest > 0, np.float32(448) / largest, 0).astype(np.float32).repeat(128, axis=1)[:, :328]
    known = finite.repeat(128, axis=1)[:, :328]
    expected = (wide[:, :328] * factor).astype(ml_dtypes.float8_e4m3fn)
    steps = np.abs(codes.view(np.uint8).astype(int) - expected.view(np.uint8).astype(int))[known]
    assert (steps <= 1).all()
    assert steps.mean() < 1e-2  # ties, by the reciprocal's last bit


def long_sums() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x [9, K], codes and values [16, K]), K = 16,384, all of them positive."""
    rng, k = np.random.default_rng(7), 16384
    x = np.abs(rng.standard_normal((9, k))).astype(ml_dtypes.bfloat16)
    codes = rng.integers(0, 0x7F, (16, k)).astype(np.uint8)
    return x, codes, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@SLOW
def test_what_14_bits_would_leave(gpu):
    """Of the same sums, if tensor cores cut 32 products and the sum to 14 bits from the largest one's first on: what
    docs/kernels.md says."""

    def added(sums: np.ndarray, products: np.ndarray) -> np.ndarray:
        both = np.concatenate([products, sums[..., None]], axis=-1)
        unit = np.ldexp(1.0, np.frexp(np.abs(both).max(axis=-1))[1] - 14)[..., None]
        return (np.trunc(both / unit) * unit).sum(axis=-1)

    x, _, values = long_sums()
    wide, k = x.astype(np.float32), x.shape[1]
    largest = wide.reshape(9, -1, 128).max(axis=-1).repeat(128, axis=1)
    codes = (wide * (448 / largest)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    used = codes * (largest / 448)
    one, two = np.zeros((9, 16)), {step: np.zeros((9, 16), np.float32) for step in (32, 64, 128)}
    for first in range(0, k, 128):
        sums = {step: np.zeros((9, 16)) for step in two}
        for at in range(first, first + 128, 32):
            some = slice(at, at + 32)
            one = added(one, used[:, None, some] * values[None, :, some])
            for step, total in two.items():
                sums[step] = added(sums[step], codes[:, None, some] * values[None, :, some])
                if (at + 32) % step == 0:  # promoted
                    total += (sums[step] * (largest[:, first] / 448)[:, None]).astype(np.float32)
                    sums[step] = np.zeros((9, 16))
    exact = used @ values.T
    errors = [np.sqrt(np.mean((found / exact - 1) ** 2)) for found in (*two.values(), one)]
    for error, expected in zip(errors, (2.1e-4, 4.3e-4, 1.0e-3, 0.12), strict=True):
        assert abs(error / expected - 1) < 0.1


def test_long_sums_lose_no_more_than_twice_what_float32_does(gpu):
    """Of positive numbers, whose sums grow and are rounded at each addition. The emulated tensor cores add in float32;
    those of Hopper keep fewer bits, which only the sums of 128 are left to: each group of products starts anew."""
    x, codes, values = long_sums()
    (n, k) = codes.shape
    packing = Packing("e4m3", 128, "value")
    block = arrange(packing, "bf16", codes, np.ones((n, k // 128), np.float32), None, None)
    got, used = multiply(gpu, PackedMatrix(packing, block, values), x)
    exact = used @ values.T
    plain = np.zeros((9, n), np.float32)
    used_32, values_32 = used.astype(np.float32), values.astype(np.float32)
    for i in range(k):
        plain += used_32[:, i, None] * values_32[None, :, i]
    limit = np.sqrt(np.mean((plain / exact - 1) ** 2))
    error = np.sqrt(np.mean((got / exact - 1) ** 2))
    if gpu.driver.is_emulated:
        assert error <= 2 * limit
    else:  # as `test_what_14_bits_would_leave` says, and an H200 did
        assert 0.9e-3 < error < 1.1e-3
    assert 1e-7 < limit < 1e-4
