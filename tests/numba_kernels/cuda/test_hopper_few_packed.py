"""Products of 3 to 32 rows with packed weights, unpacked into `wgmma`'s registers: against float64, the same bits in
any company, several tiles a block; what a launch reads, and when it is chosen."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm.rings import hopper_few
from numba_kernels.cuda.packing import PACKINGS
from numba_kernels.cuda.specialisation import Launch
from runtime.bench.kernels.counted import SECTOR_BYTES, counting
from runtime.bench.kernels.operations import QWEN3_8B
from runtime.emulator.driver.architectures import H200
from tests.numba_kernels.cuda.harness import assert_equal, empty, get, numpy_dtype, put
from tests.numba_kernels.cuda.packed_cases import check_squares, packed_matrix
from tests.numba_kernels.cuda.test_skinny_packed import product

pytestmark = [pytest.mark.emulator, pytest.mark.exhaustive_cases(r"\bu4_g128\b")]
MACHINE = gemm.machine_of("sm_90a", H200.num_sms, H200.max_clusters)
FEW = gemm.machine_of("sm_90a", 2)  # multiprocessors: blocks go from tile to tile
SHAPES = [  # K ends within a slot, a step and a stage; parts of K, and none; rows of the weight end within a tile
    (6, 130, 520), (3, 33, 264), (16, 257, 2056), (9, 1000, 72), (12, 47, 1304),
]  # fmt: skip
WIDE = [(17, 40, 264), (32, 300, 1304), (20, 130, 4104), (31, 9, 8)]
NAMES = (*PACKINGS, "u4_g64", "u8_g128", "u8_g32_zeros", "u4_g32_zeros")


def usual(asked: gemm.Product, machine: gemm.Machine) -> Launch:
    return hopper_few.plan(asked, MACHINE)


def few(asked: gemm.Product, machine: gemm.Machine) -> Launch:
    return hopper_few.plan(asked, FEW)


@pytest.mark.parametrize(
    ("name", "dtype", "shapes"),
    [
        ("u4_g128", "bf16", SHAPES),
        *(
            pytest.param(name, dtype, shapes, marks=pytest.mark.exhaustive)
            for name in NAMES for dtype in ("bf16", "f16") for shapes in (SHAPES, WIDE)
        ),
    ],
)  # fmt: skip
def test_equals_float64(gpu, name, dtype, shapes):
    for index, sizes in enumerate(shapes):
        for plan in (usual, few):
            got, expected, bound = product(
                gpu, name, dtype, sizes, bias=index != 2, residual=index != 3, tier="hopper_few", plan=plan
            )
            assert (np.abs(got - expected) <= bound).all(), (sizes, (np.abs(got - expected) / bound).max())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(7, 144, 1304), (29, 176, 328)], ids=str)
def test_gated_units(gpu, name, sizes):
    for plan in (usual, few):
        got, expected, bound = product(gpu, name, "bf16", sizes, activation="silu", tier="hopper_few", plan=plan)
        assert (np.abs(got - expected) <= bound).all(), (np.abs(got - expected) / bound).max()


def run(gpu, x, matrix, n, name="u4_g128"):
    m, k = x.shape
    launch = hopper_few.plan(gemm.Product(m, n, k, "bf16", name), MACHINE)
    held, weight, out = put(gpu, x), put(gpu, matrix.block), empty(gpu, (m, n), "bf16")
    gpu.launch(launch, held.address, weight.address, 0, 0, out.address, m, n, k, 0, *gemm.NO_SQUARES)
    return get(gpu, out, (m, n), "bf16")


def test_a_row_has_the_same_bits_in_any_company(gpu):
    n, k = 260, 1304
    matrix = packed_matrix("u4_g128", n, k, "bf16")
    x = np.random.default_rng(0).standard_normal((16, k), dtype=np.float32).astype(numpy_dtype("bf16"))
    x[3, 71] = np.nan
    whole = run(gpu, x, matrix, n)
    assert np.isnan(whole[3].astype(np.float32)).all()
    assert np.isfinite(np.delete(whole.astype(np.float32), 3, 0)).all()
    for rows in (slice(5, 8), slice(4, 16)):
        assert_equal(run(gpu, np.ascontiguousarray(x[rows]), matrix, n), whole[rows])


@pytest.mark.exhaustive
def test_squares_are_left_for_the_norm_behind(gpu):
    check_squares(gpu, usual, 456, 32)


@pytest.mark.parametrize(("name", "share"), [("u4_g128", 1.33), ("e4m3_g128", 1.17)])
def test_a_layer_reads_little_more_than_its_weights_from_the_cache(name, share):
    """x has four and two times as many bytes a number; `skinny` reads 1.84 and 1.55 times the weights."""
    products = [gemm.Product(32, n, k, "bf16", name) for n, k in QWEN3_8B]
    assert {gemm.choose(each, MACHINE) for each in products} == {"hopper_few"}
    read = sum(hopper_few.cache_reads(each, MACHINE) for each in products)
    assert read <= share * sum(each.weight_bytes for each in products)


def test_what_is_read_of_the_cache_is_what_the_emulator_counts(gpu):
    m, n, k = 16, 1024, 1024
    matrix = packed_matrix("u4_g128", n, k, "bf16")
    work = gemm.Product(m, n, k, "bf16", "u4_g128")
    x = np.ones((m, k), numpy_dtype("bf16"))
    with counting(gpu) as counted:
        run(gpu, x, matrix, n)
    again = 4 * (m - 1) * n  # rows' scales, which each row of x asks for: of the first-level cache, on hardware
    assert counted.sectors * SECTOR_BYTES == hopper_few.cache_reads(work, MACHINE) + 2 * m * n + again
    assert not counted.conflicts


def test_when_it_is_chosen():
    """Beyond `quantised_gemv`'s rows, or where its rows leave no room for a ring."""

    def chosen(m: int, k: int, name: str, **options: bool) -> str:
        return gemm.choose(gemm.Product(m, 4096, k, "bf16", name, **options), MACHINE)

    assert [chosen(m, 4096, "u4_g128") for m in (2, 5, 6, 32)] == [*["quantised_gemv"] * 2, *["hopper_few"] * 2]
    assert chosen(33, 4096, "u4_g128") != "hopper_few"
    assert chosen(5, 12_288, "u4_g128") == "hopper_few"
    assert [chosen(m, 4096, "u4_g128_zeros") for m in (2, 3)] == ["skinny", "hopper_few"]
    assert chosen(8, 4096, "u4_g128", exact=True) == "skinny"
    assert [chosen(m, 4096, "e4m3_g128") for m in (2, 9)] == ["quantised_gemv", "hopper_few"]
