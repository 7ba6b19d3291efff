"""Products with packed weights: against float64 of what the weight means."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import quantised_gemv, skinny, skinny_shape
from numba_kernels.cuda.packing import PACKINGS
from numba_kernels.cuda.specialisation import Launch
from runtime.device.assemble import assemble
from runtime.device.kernel_cache import KernelCache
from tests.numba_kernels.cuda.harness import assert_equal, empty, get, numpy_dtype, put
from tests.numba_kernels.cuda.packed_cases import check_squares, packed_matrix

pytestmark = pytest.mark.exhaustive_cases(r"\bf16\b", "e2m1_g16_e4m3")

UNITS = {"bf16": 2.0**-8, "f16": 2.0**-11}
DEFAULT = [
    ("u8", "bf16", (3, 70, 264), "emulated:sm_90a"), ("e4m3_g128", "bf16", (4, 33, 264), "emulated:sm_90a"),
    ("u4_g128", "bf16", (16, 100, 520), "emulated:sm_80"),
    ("u4_g128_zeros", "f16", (1, 33, 648), "emulated:sm_90a"),
    ("e2m1_g16_e4m3", "bf16", (2, 40, 328), "emulated:sm_90a"),
]  # fmt: skip
SWEEP = [
    ("u8", "bf16", (1, 9000, 72), "emulated:sm_90a"),  # in two turns
    ("u4_g128_zeros", "bf16", (70, 40, 264), "emulated:sm_120a"),
    ("u4_g128", "bf16", (70, 40, 264), "emulated:sm_90a"), ("u4_g32", "bf16", (1, 100, 1304), "emulated:sm_90a"),
    ("e4m3_g128", "bf16", (1, 33, 264), "emulated:sm_80"), ("e4m3_g128", "bf16", (2, 33, 264), "emulated:sm_80"),
    ("u8", "bf16", (4, 9000, 72), "emulated:sm_90a"),  # in turns
] + [
    (name, dtype, shape, arch)
    for name in (*PACKINGS, "u4_g64", "u8_g32_zeros", "u8_g128", "u4_g32_zeros")
    for dtype, arch in (("bf16", "emulated:sm_90a"), ("f16", "emulated:sm_80"), ("bf16", "emulated:sm_89"))
    for shape in ((1, 17, 8), (9, 260, 1160), (33, 64, 2056), (64, 47, 1304), (150, 300, 520))
] + [
    (name, "bf16", shape, arch)
    for name in ("u8", "u4_g128", "u4_g32", "e4m3", "e4m3_g128", "e2m1_g32_exponents", "u4_g64", "u8_g128")
    for arch in ("emulated:sm_90a", "emulated:sm_80")
    for shape in ((2, 50, 1304), (3, 33, 264), (4, 48, 1160), (5, 40, 1160))
]  # fmt: skip


def product(
    gpu,
    name,
    dtype,
    sizes,
    *,
    out_dtype="",
    activation="",
    bias=False,
    residual=False,
    tier="auto",
    is_aligned=True,
    plan=None,
):
    """(what a device gives, what it should, by how much it may be off). Few rows go to `quantised_gemv` where they may.
    `plan`: what makes the launch of a product and a machine, in place of `gemm.plan`."""
    m, n, k = sizes
    rng = np.random.default_rng([m, n, k])
    matrix = packed_matrix(name, n * (2 if activation else 1), k, dtype)
    x = rng.standard_normal((m, k), dtype=np.float32).astype(numpy_dtype(dtype))
    out_dtype = out_dtype or dtype
    terms = [
        rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(kind)) if is_there else None
        for shape, kind, is_there in (((n,), "f32", bias), ((m, n), out_dtype, residual))
    ]
    epilogue = gemm.Epilogue(has_residual=residual, is_aligned=is_aligned, activation=activation)
    asked = gemm.Product(m, n, k, dtype, name, out_dtype, epilogue)
    machine = gemm.machine_of(gpu.arch, gpu.properties.num_sms)
    if m <= 4 and gemm.can_read(asked, machine, "quantised_gemv"):
        tier = "quantised_gemv"
    assert gemm.can_read(asked, machine, tier)
    launch = gemm.plan(asked, machine, tier) if plan is None else plan(asked, machine)
    assert launch is not None
    assert name in launch.specialisation.name
    held = [put(gpu, x), put(gpu, matrix.block), *(None if term is None else put(gpu, term) for term in terms)]
    gpu.declare_immutable(held[1])
    out = empty(gpu, (m, n), out_dtype)
    addresses = [0 if block is None else block.address for block in held]
    launch = dataclasses.replace(launch, is_dependent=gpu.arch != "sm_80" and gpu.arch != "sm_89")
    gpu.launch(launch, *addresses, out.address, m, n, k, 1, *gemm.NO_SQUARES)
    exact = x.astype(np.float64) @ matrix.values.T
    # Group scales are multiplied in 16 bits, rounded once; sums are float32.
    unit = UNITS[dtype] if matrix.packing.group else 0.0
    bound = (unit + 2 * (k + 2) * 2.0**-24) * (np.abs(x.astype(np.float64)) @ np.abs(matrix.values).T)
    if activation:
        gate, up = exact[:, :n], exact[:, n:]
        gate_bound, up_bound = bound[:, :n], bound[:, n:]
        sigmoid = 1 / (1 + np.exp(-gate))
        exact = gate * sigmoid * up
        bound = 1.2 * (gate_bound * np.abs(up) + up_bound * np.abs(gate) + gate_bound * up_bound) + 1e-6 * np.abs(exact)
    for term in terms:
        if term is not None:
            exact = exact + term.astype(np.float64)
    bound = bound + UNITS.get(out_dtype, 2.0**-24) * (np.abs(exact) + bound) + 1e-7
    return get(gpu, out, (m, n), out_dtype).astype(np.float64), exact, bound


@pytest.mark.parametrize(
    ("name", "dtype", "sizes", "gpu"),
    [*DEFAULT, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in SWEEP)], indirect=["gpu"],
)  # fmt: skip
@pytest.mark.exhaustive_cases("u8")
def test_equals_float64(gpu, name, dtype, sizes):
    got, expected, bound = product(gpu, name, dtype, sizes, bias=sizes[0] != 2, residual=sizes[0] != 3)
    assert (np.abs(got - expected) <= bound).all(), (np.abs(got - expected) / bound).max()
    assert np.abs(expected).max() > 50 * np.median(bound)  # so that the bound tells


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("e2m1_g32_exponents", (1, 48, 1160)), pytest.param("u8", (5, 48, 136), marks=pytest.mark.exhaustive),
        pytest.param("u4_g32", (17, 112, 328), marks=pytest.mark.exhaustive),
        pytest.param("u4_g128", (1, 5008, 264), marks=pytest.mark.exhaustive),  # in turns
    ],
)  # fmt: skip
@pytest.mark.exhaustive
def test_gated_units(gpu, name, sizes):
    got, expected, bound = product(gpu, name, "bf16", sizes, activation="silu")
    assert (np.abs(got - expected) <= bound).all(), (np.abs(got - expected) / bound).max()


@pytest.mark.parametrize(
    ("name", "m", "activation"),
    [
        ("u4_g32", 4, "silu"), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (
            ("e2m1_g32_exponents", 2, ""), ("e4m3_g128", 3, ""), ("u8", 2, "silu"), ("e4m3", 4, "silu"),
            ("u4_g128", 3, ""), ("e2m1_g32_exponents", 7, "silu"), ("u4_g128", 5, ""), ("u8", 5, "silu"),
        ))
    ],
)  # fmt: skip
@pytest.mark.exhaustive_cases("e4m3")
def test_normalised_rows_are_the_same_alone(gpu, name, m, activation):
    """Not exact mode's kernel, but each of a few rows has its own norm, factor and sums. One of them is not finite."""
    n, k = 48, 1096
    matrix = packed_matrix(name, n * (2 if activation else 1), k, "bf16")
    x = np.random.default_rng(m).standard_normal((m, k)) * np.logspace(-20, 3, m)[:, None]
    x[m - 1, 100] = np.inf
    x, weight = x.astype(numpy_dtype("bf16")), put(gpu, matrix.block)
    norm = put(gpu, np.random.default_rng(9).uniform(-2, 2, k).astype(np.float32))

    def rows(first: int, last: int) -> np.ndarray:
        count = last - first
        epilogue = gemm.Epilogue(has_residual=False, is_aligned=True, activation=activation)
        asked = gemm.Product(count, n, k, "bf16", name, "bf16", epilogue)
        launch = gemm.plan(asked, gemm.machine_of(gpu.arch), "quantised_gemv")
        assert "quantised_gemv" in launch.specialisation.name
        given, out = put(gpu, x[first:last]), empty(gpu, (count, n), "bf16")
        gpu.launch(launch, given.address, weight.address, 0, 0, out.address, count, n, k, 0, norm.address, 0, 1e-6, 0)
        return get(gpu, out, (count, n), "bf16").view(np.uint16)

    whole = rows(0, m)
    for row in range(m):
        assert_equal(rows(row, row + 1), whole[row : row + 1])
    values = whole.view(numpy_dtype("bf16")).astype(np.float32)
    assert np.isnan(values[m - 1]).all()
    wide = x[: m - 1].astype(np.float64)
    scaled = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * get(gpu, norm, (k,), "f32")
    expected = scaled @ matrix.values.T
    bound = (2.0**-8 + 2 * k * 2.0**-24) * (np.abs(scaled) @ np.abs(matrix.values).T)
    if activation:
        (gate, up), (of_gate, of_up) = np.split(expected, 2, 1), np.split(bound, 2, 1)
        expected = gate / (1 + np.exp(-gate)) * up
        bound = 1.2 * (of_gate * np.abs(up) + of_up * np.abs(gate) + of_gate * of_up)
    error = np.abs(values[: m - 1] - expected)
    assert (error <= bound + 2.0**-8 * np.abs(expected) + 1e-37).all()


@pytest.mark.parametrize("gpu", ["emulated:sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("name", "sizes", "activation", "slots"),
    [
        ("u4_g128", (1, 1700, 1304), "", 4), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (
            ("u4_g128", (2, 40, 12_288), "", 2), ("e2m1_g32_exponents", (4, 48, 1096), "silu", 4),
            ("e4m3_g128", (3, 3200, 264), "", 4), ("e2m1_g32_exponents", (5, 1616, 520), "", 4),
            ("u8", (1, 100, 8), "", 4), ("u4_g32", (2, 1616, 520), "silu", 4),
        )),
    ],
)  # fmt: skip
def test_a_ring_gives_the_bits_of_registers(gpu, name, sizes, activation, slots):
    """From sm_90 on the weight comes through shared memory; a team then has as many warps as where it does not."""
    found = []
    for arch in ("sm_80", "sm_90a"):

        def plan(asked, _, arch=arch):
            launch = quantised_gemv.plan(asked, gemm.machine_of(arch, 3 if arch == "sm_90a" else 132))
            assert launch.specialisation.constants["ring_slots"] == (slots if arch == "sm_90a" else 0)
            assert arch == "sm_80" or launch.grid[0] <= 3
            return launch

        found.append(product(gpu, name, "bf16", sizes, activation=activation, bias=not activation, plan=plan))
    (registers, expected, bound), (ring, _, _) = found
    assert_equal(ring, registers)
    assert (np.abs(ring - expected) <= bound).all()


@pytest.mark.parametrize("m", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("turns", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_few_rows_leave_squares_for_the_norm_behind(gpu, m, turns):
    def plan(asked: gemm.Product, _: gemm.Machine) -> Launch:
        launch = gemm.plan(asked, gemm.machine_of(gpu.arch, 4 // turns), "quantised_gemv")
        assert launch is not None
        assert (launch.grid[0] < 4) == (turns > 1)
        return launch

    check_squares(gpu, plan, 264, quantised_gemv.ROWS, m)


@pytest.mark.exhaustive
def test_exact_rows_are_the_same_in_any_company(gpu):
    """By one kernel, whose split of K is the weight's; others may split it further for more rows."""
    matrix, x = packed_matrix("u8", 40, 1096, "bf16"), np.random.default_rng(3).standard_normal((130, 1096))
    x = x.astype(numpy_dtype("bf16"))
    weight = put(gpu, matrix.block)

    def rows(first: int, last: int) -> np.ndarray:
        m = last - first
        asked = gemm.Product(m, 40, 1096, "bf16", "u8", "f32", gemm.Epilogue(has_residual=False), exact=True)
        launch = gemm.plan(asked, gemm.machine_of(gpu.arch))
        given, out = put(gpu, x[first:last]), empty(gpu, (m, 40), "f32")
        gpu.launch(launch, given.address, weight.address, 0, 0, out.address, m, 40, 1096, 0, *gemm.NO_SQUARES)
        return get(gpu, out, (m, 40), "f32")

    whole = rows(0, 130)
    for first, last in ((0, 1), (3, 20), (60, 124)):
        assert_equal(rows(first, last), whole[first:last])


@pytest.mark.parametrize(
    ("name", "sizes", "activation"),
    [("u4_g128", (16, 300, 2056), ""), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (
        ("e4m3_g128", (33, 48, 1096), "silu"),
        ("u8", (64, 1030, 520), ""), ("u4_g128", (64, 40, 1304), ""), ("u4_g32", (5, 17, 4104), ""),
        ("u4_g128_zeros", (17, 64, 1304), "silu"),
        ("e2m1_g16_e4m3", (7, 5200, 1024), ""), ("e4m3", (9, 33, 1096), ""),
        ("u4_g32", (64, 48, 1304), "silu"), ("e2m1_g32_exponents", (50, 48, 1304), "silu"),
        ("e2m1_g16_e4m3", (60, 48, 1304), "silu"),
    ))],
)  # fmt: skip
@pytest.mark.exhaustive
def test_blocks_that_share_k_change_no_bit(gpu, monkeypatch, name, sizes, activation):
    """Of 1 to 8 blocks of a cluster, as many as have a stream each."""
    found, launched = [], []
    monkeypatch.setattr(skinny, "seconds", lambda *_: 0.0)
    for num_blocks in (1, 2, 4, 8):

        def plan(asked, machine, most=num_blocks):
            shape = max(skinny_shape.shapes(asked, machine), key=lambda shape: shape.row_tiles)
            shape = dataclasses.replace(shape, num_blocks=min(most, shape.num_streams))
            launched.append(skinny.plan_shape(asked, machine, shape))
            return launched[-1]

        monkeypatch.setattr(skinny, "plan", plan)
        found.append(product(gpu, name, "bf16", sizes, activation=activation, bias=not activation))
    got, expected, bound = found[0]
    assert (np.abs(got - expected) <= bound).all()
    for other, _, _ in found[1:]:
        assert_equal(other, got)
    assert len({launch.cluster for launch in launched}) > 1


@pytest.mark.parametrize(
    ("arch", "m", "row_blocks", "rows"),
    [("sm_90a", 70, 2, 64), ("sm_90a", 30, 1, 32), ("sm_120a", 30, 1, 32), ("sm_100a", 30, 2, 16)],
)
def test_blocks_have_other_rows_where_a_kernel_spills(arch, m, row_blocks, rows):
    epilogue = gemm.Epilogue(has_residual=False, is_aligned=True)
    launch = skinny.plan(gemm.Product(m, 8192, 8192, "bf16", "u4_g128", epilogue=epilogue), gemm.machine_of(arch))
    assert (launch.grid[1], launch.specialisation.name) == (row_blocks, f"gemm_skinny_u4_g128_bf16_bf16_{rows}_c")


def test_clusters_are_those_that_run_at_once():
    """A H200 of 132 multiprocessors ran 30 clusters of 4 where 33 would have room: 32 of them took twice the time."""
    product = gemm.Product(64, 8192, 8192, "bf16", "u4_g128", epilogue=gemm.Epilogue(has_residual=False))
    for fours, most in ((30, 2), (33, 4)):
        machine = gemm.machine_of("sm_90a", 132, ((2, 66), (4, fours), (8, 14)))
        for shape in skinny_shape.shapes(product, machine):
            assert 1 < shape.num_blocks <= most
            assert shape.rounds(product, machine) == -(-shape.row_blocks(product) * 128 // 132)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_shared_memory_of_every_shape_fits_the_smallest_gpu(arch):
    for m in (1, 17, 64, 128, 300):
        for n, k in ((64, 4096), (4096, 12288), (8192, 8192)):
            product = gemm.Product(m, n, k, "bf16", "u4_g32", epilogue=gemm.Epilogue(has_residual=False))
            for shape in skinny_shape.shapes(product, gemm.machine_of(arch)):
                assert skinny.plan_shape(product, gemm.machine_of(arch), shape).shared_bytes <= 99 << 10


@pytest.mark.parametrize(("arch", "most"), [("sm_80", 163), ("sm_90a", 227), ("sm_120a", 99)])
def test_few_rows_fit_shared_memory(arch, most):
    """The longest rows, with the shared memory that a kernel has besides."""
    machine, epilogue = gemm.machine_of(arch), gemm.Epilogue(has_residual=False, is_aligned=True)
    for rows in (1, 2) if arch == "sm_80" else (1, 2, 5):
        asked = [gemm.Product(rows, 64, k, "bf16", "u8", "bf16", epilogue) for k in range(1 << 10, 1 << 17, 1 << 9)]
        longest = [each for each in asked if not gemm.TIERS["quantised_gemv"].why_not(each, machine)][-1]
        launch = gemm.plan(longest, machine, "quantised_gemv")
        text = KernelCache().get(launch.specialisation, arch, is_ptx=True).image.rstrip(b"\0").decode()
        assert launch.shared_bytes + assemble(text, arch).static_shared_bytes <= most << 10
        assert longest.k >= 8192 or rows == 5


def test_what_is_refused():
    for options in ({"x": "f32"}, {"k": 9}, {"num_segments": 8, "out": "f32", "exact": True}):
        options = {"m": 2, "n": 8, "k": 8, "x": "bf16", "epilogue": gemm.Epilogue(has_residual=False), **options}
        assert not gemm.can_read(gemm.Product(weight="u8", **options), gemm.machine_of("sm_90a"))
    for weight, m, reason in (("e4m3", 9, "1 to 8 rows"), ("u4_g128", 6, "1 to 5 rows"), ("u4_g128", 5, "")):
        epilogue = gemm.Epilogue(has_residual=False, is_aligned=True)
        found = quantised_gemv.why_not(
            gemm.Product(m, 64, 512, "bf16", weight, "bf16", epilogue), gemm.machine_of("sm_90a")
        )
        assert (reason in found, found != "") == (True, reason != "")
