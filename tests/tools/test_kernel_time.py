"""The model of a kernel's time meets published timings, and the page of goals shows those that there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.bench.kernels.goals import GOALS
from runtime.emulator.driver.architectures import H100, H200
from tools.kernel_costs.latencies import ASSUMPTIONS, EDGES, Launched, Timing
from tools.kernel_costs.roofline import Context, Modelled, launch_s, per_operation, prefill, product, streamed

MOST_ERROR = 0.2
EXPECTED = Timing(H100)


def one_product(m: int) -> float:
    """8192 x 8192 by a library: as many blocks as cover the weight in tiles of 64 columns, launched alone."""
    launched = Launched("product", blocks=512, threads=256, product=(m, 8192, 8192), weight_bytes=2 * 8192**2)
    return streamed(launched, EXPECTED).seconds


@pytest.mark.parametrize(
    ("source", "flops", "tflops", "modelled"),
    [
        ("torch, 1 row: inclusionAI/humming, benchmarks", 2 * 8192**2, 2.68, lambda: one_product(1)),
        ("torch, 16 rows: the same page", 32 * 8192**2, 42.1, lambda: one_product(16)),
        ("8192^3, tiles of 128 x 256, clusters of 2: pranjalssh/fast.cu, README", 2 * 8192**3, 799.1,
         lambda: product(8192, 8192, 8192, EXPECTED).seconds),
        ("6144^3: the same kernel", 2 * 6144**3, 774.4, lambda: product(6144, 6144, 6144, EXPECTED).seconds),
        ("16 heads of 128, 8k tokens, causal: FlashAttention-3, arXiv 2407.08608, figure 5", 2 * 16 * 8192**2 * 128,
         602, lambda: prefill(8192, 16, 16, 128, EXPECTED).seconds),
        ("16k tokens, not causal: the same figure", 4 * 16 * 16384**2 * 128, 648,
         lambda: prefill(16384, 16, 16, 128, EXPECTED, is_causal=False).seconds),
    ],
)  # fmt: skip
def test_the_model_meets_published_timings_of_an_h100(
    source: str, flops: float, tflops: float, modelled: Callable[[], float]
) -> None:
    assert abs(modelled() / (flops / (1e12 * tflops)) - 1) < MOST_ERROR, source


def test_a_kernel_is_as_slow_as_what_it_needs_most_and_its_latencies() -> None:
    kernel = Modelled({"issue": 0.5, "tensor cores": 1.25}, 0.25)
    assert kernel.seconds == 1.5
    assert kernel.limit == "tensor cores"
    assert Modelled({"memory": 0.5}, 1.0).limit == "latencies"


def test_each_family_is_modelled_by_what_it_waits_for() -> None:
    weight, context = 32 << 20, Context(kv_bytes=64 << 20, draw_instructions=1e6)
    read_s = weight / EXPECTED.bytes_per_s
    kernels = {
        "gemv": Launched("gemv_bf16", 512, 256, weight_bytes=weight, product=(1, 4096, 4096)),
        "experts": Launched("experts_gather_bf16", 512, 256, weight_bytes=weight),
        "attention": Launched("attention_decode", 264, 128, 64 << 10),
        "sampling": Launched("sampling_block", 1, 1024), "norm": Launched("rms_norm", 1, 256),
    }  # fmt: skip
    found = {name: launch_s(EXPECTED, launched, context) for name, launched in kernels.items()}
    assert read_s < found["gemv"] < found["experts"] < 2 * read_s
    assert 2 * read_s < found["attention"] < 4 * read_s
    assert found["norm"] < found["sampling"]
    assert found["norm"] < 4e-6
    many = launch_s(EXPECTED, Launched("gemm_hopper", product=(8192, 8192, 8192)), context)
    assert many == product(8192, 8192, 8192, EXPECTED).seconds


def test_assumptions_are_in_order() -> None:
    rates = {"bandwidth", "tensor", "cache_bandwidth", "issue"}
    for name, each in ASSUMPTIONS.items():
        values = [each.fast, each.expected, each.slow]
        assert values == sorted(values, reverse=name in rates), name
        assert each.because, name


def test_large_products_and_prefill_are_bound_by_the_tensor_cores_last_round() -> None:
    timing = Timing(H200)
    square = product(8192, 8192, 8192, timing)
    rounds = -(-64 * 32 // H200.num_sms)
    least = 2 * 8192**3 / timing.tensor_flops
    assert square.needs_s["tensor cores"] == pytest.approx(least * rounds * H200.num_sms / (64 * 32))
    assert square.limit == "tensor cores"
    assert prefill(8192, 32, 8, 128, timing).limit == "tensor cores"
    with pytest.raises(KeyError, match="no matmul by naive"):
        per_operation("matmul", "naive", "1x1", "sm_90a")


def test_a_last_wave_costs_what_its_blocks_have_on_their_way() -> None:
    model, at_once = H200, 2 * H200.num_sms
    fast, expected, slow = (Timing(model, edge) for edge in EDGES)
    whole = 1e9 / expected.bytes_per_s
    assert expected.stream_s(1e9, at_once, at_once, 1 << 20) == pytest.approx(whole)
    alone = [each.stream_s(1e9, at_once + 1, at_once, 1 << 15) * each.bytes_per_s for each in (fast, expected, slow)]
    assert alone[0] < alone[1] < alone[2]
    each = 1e9 / (at_once + 1)
    last = each * slow.of("memory") / (1 << 15)
    assert slow.stream_s(1e9, at_once + 1, at_once, 1 << 15) == pytest.approx(at_once * each / slow.bytes_per_s + last)
    few = expected.stream_s(1e9, 4, at_once, 1 << 15)
    assert few == pytest.approx(1e9 * expected.of("memory") / (4 << 15), rel=0.5)


def test_the_page_shows_every_goal() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    for goal in GOALS.values():
        bound = f"{'≤' if goal.is_most else '≥'} {goal.must:g}"
        assert f"| {goal.work} | {goal.measure} | {bound} | {goal.ahead:g} |" in page, goal.name
