"""Which tier `auto` takes where nothing has been measured."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import hopper, product, skinny
from numba_kernels.cuda.intrinsics.element_types import INTEGERS
from numba_kernels.cuda.packing import GROUPS, Packing
from runtime.bench.kernels.counted import SECTOR_BYTES, counting
from runtime.emulator.driver.architectures import H200
from tests.numba_kernels.cuda.gemm_cases import case, plan

SIZES = ((4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))


def chosen_tier(m: int, n: int, k: int, dtype: str, arch: str) -> str:
    return gemm.choose(gemm.Product(m, n, k, dtype), gemm.machine_of(arch))


def few_rows_tier(arch: str) -> str:
    return "hopper_few" if arch == "sm_90a" else "skinny"


@pytest.mark.parametrize("arch", [*product.RATES, "sm_87"])
def test_rows_decide(arch):
    for n, k in SIZES:
        chosen, few = [chosen_tier(m, n, k, "bf16", arch) for m in (1, 2, 3, 8, 64)], few_rows_tier(arch)
        assert chosen == ["gemv", "gemv", few, few, few]
        assert chosen_tier(2048, n, k, "bf16", arch) == ("hopper" if arch == "sm_90a" else "tensor_core")
        assert chosen_tier(8, n, k, "f32", arch) == "gemv"
        assert chosen_tier(9, n, k, "f32", arch) == "register"
        order = [chosen_tier(m, n, k, "f16", arch) for m in range(1, 70)]
        last = "hopper" if arch == "sm_90a" else "tensor_core"
        assert [a for a, b in zip(order, [*order[1:], ""], strict=True) if a != b] == ["gemv", few, last]


def test_auto_asks_it_where_it_may():
    def name(m: int, **options: object) -> str:
        launch = plan("auto", m, 24576, 4096, "bf16", **options)
        return launch.specialisation.name

    assert name(1).startswith("gemv_bf16_bf16_1_")
    assert name(2).startswith("gemv_bf16_bf16_2_")
    assert name(3).startswith("gemm_skinny_bf16_bf16_16")
    assert name(64).startswith("gemm_skinny_bf16_bf16_64")
    assert name(65).startswith("gemm_tensor_core")
    assert name(1, exact=True).startswith("gemm_tensor_core")
    assert name(1, is_aligned=False).startswith("gemv_bf16_bf16_2_any")
    assert name(3, is_aligned=False).startswith("gemm_tensor_core")
    assert name(3, is_weight_layout=False).startswith("gemm_tensor_core")


@pytest.mark.emulator
@pytest.mark.parametrize("gpu", ["emulated:sm_90a"], indirect=True)
@pytest.mark.exhaustive
def test_what_tiers_read_of_the_cache_is_what_the_emulator_counts(gpu):
    """All sectors but those of the result, to the byte: by these numbers one of the two is chosen."""
    m, n, _ = sizes = 48, 512, 1024
    arrays, work = case(sizes, "bf16", bias=None, residual=False), gemm.Product(*sizes, "bf16")
    machine = gemm.machine_of("sm_90a", H200.num_sms, H200.max_clusters)
    launches = {
        skinny.cache_reads(work, machine): skinny.plan(work, machine),
        hopper.cache_reads(work, hopper.NARROW): hopper.plan_tile(work, machine, hopper.NARROW, 4),
    }
    for expected, launch in launches.items():
        with counting(gpu) as counted:
            arrays.check(arrays.run_launch(gpu, launch))
        assert counted.sectors * SECTOR_BYTES == expected + 2 * m * n, launch.specialisation.name


def every_packing() -> list[str]:
    """The names of all packings that there may be, published or not."""
    names = []
    for element, group, scale, has_zeros in itertools.product(
        (*INTEGERS, "e4m3", "e2m1"), GROUPS, ("", "value", "exponent", "e4m3"), (False, True)
    ):
        with contextlib.suppress(ValueError):
            names.append(Packing(element, group, scale, has_zeros).name)
    return names


@pytest.mark.parametrize("arch", [*product.RATES, "sm_87"])
@pytest.mark.parametrize("weight", every_packing())
def test_every_packing_has_a_tier_and_a_launch_for_any_rows(weight, arch):
    """The tiers' models know packings that nobody has counted."""
    machine = gemm.machine_of(arch)
    for x, m in itertools.product(("bf16", "f16"), (1, 2, 3, 5, 8, 16, 32, 64, 300, 2048)):
        for activation in ("", "silu"):
            each = gemm.Product(m, 512, 1024, x, weight, epilogue=gemm.Epilogue(activation=activation))
            if gemm.can_read(each, machine):
                assert gemm.plan(each, machine) is not None or activation
                assert 0.0 < gemm.modelled_s(each, machine) < 1.0
