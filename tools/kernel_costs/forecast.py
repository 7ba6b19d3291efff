"""The goals by the model, each as a band in its own measure, and the steps of whole models that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_kernels.cuda import attention, gemm
from runtime.bench.kernels.bench_kernels import QWEN3_8B
from runtime.device.emulator.driver.architectures import H100, H200, GpuModel
from tools.gpu.serving.models import MODELS
from tools.kernel_costs.counts import Bench
from tools.kernel_costs.latencies import EDGES, Timing
from tools.kernel_costs.launch_lists import FactsOf, Launched, Step, compiled, decode_step, launched_of
from tools.kernel_costs.roofline import (
    Band,
    Context,
    floor_s,
    megakernel_s,
    prefill,
    product,
    step_s,
    streamed,
)

CONTEXT = 1024  # tokens of each sequence
CUBLAS_FLOPS = 797.8e12  # bf16 8192³ on an H100 (pranjalssh/fast.cu), whose tensor cores an H200 has, too
SDPA_FLOPS = 602e12  # FlashAttention-3, causal, 8k tokens, head dim 128 (arXiv 2407.08608)
MOST_MEGAKERNEL_BYTES = 4e9  # of weights in bf16: below 2B parameters
STEPS = (("qwen3-8b", H200), ("qwen3-8b", H100), ("qwen3-0.6b", H200), ("qwen3-0.6b", H100))


@dataclass(frozen=True, slots=True)
class StepForecast:
    """A decode step of one sequence of `CONTEXT` tokens. `tpot_ms`, `floor_ms`: of the floor without latencies."""

    name: str
    product: str
    num_launches: int
    launches_a_layer: int
    floor_ms: float
    tpot_ms: Band


def timings(model: GpuModel) -> list[Timing]:
    """In the order of `EDGES`."""
    return [Timing(model, edge) for edge in EDGES]


def step_of(name: str, *, num_seqs: int = 1, facts_of: FactsOf | None = None) -> Step:
    """The launches of a model's decode step, as they are planned today."""
    return decode_step(MODELS[name], num_seqs=num_seqs, facts_of=facts_of)


def context_of(config: Mapping[str, Any], draw_instructions: float, *, num_seqs: int = 1) -> Context:
    """Sequences of `CONTEXT` tokens each, in bf16."""
    cached = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
    return Context(float(num_seqs * CONTEXT * cached), draw_instructions * num_seqs)


def draw_instructions(vocabulary: int, arch: str = "sm_90a") -> float:
    """Warp instructions that a greedy draw from one row of logits takes, counted by the emulator.

    Raises ValueError where the kernel was renamed.
    """
    from runtime import ops
    from runtime.sampling_arrays import SamplingArrays
    from runtime.tensor.tensor import Tensor

    bench = Bench(arch)
    logits = np.random.default_rng(0).standard_normal((1, vocabulary), dtype=np.float32)
    with bench.gpu.installed():
        row = Tensor.from_numpy(logits).to(bench.gpu.device)
        bench.emulator.counters.clear()
        bench.emulator.is_counting = True
        ops.sample(row, SamplingArrays.neutral(1))
    counted = bench.emulator.counters.items()
    found = sum(each.warp_instructions for name, each in counted if name.startswith("sampling"))
    if not found:
        raise ValueError(f"no kernel of the draw is called sampling: {', '.join(bench.emulator.counters)}")
    return float(found)


def forecast(name: str, model: GpuModel, step: Step, draw: float) -> StepForecast:
    """One sequence's step."""
    context = context_of(MODELS[name], draw)
    band = Band.of(lambda timing: (1e3 * step_s(timing, step, context), ""), timings(model))
    floor = 1e3 * floor_s(Timing(model), step, context)
    return StepForecast(name, model.name, step.num_launches, len(step.layer), floor, band)


def megakernel_forecast(name: str, model: GpuModel, step: Step, draw: float) -> StepForecast:
    """The same step by one launch for all layers, behind what completes its inputs and in front of the draw."""
    context = context_of(MODELS[name], draw)
    layers = step.num_layers
    drawn = next(each for each in step.once if each.name.startswith("sampling"))

    def value(timing: Timing) -> tuple[float, str]:
        whole = megakernel_s(timing, step.weight_bytes, layers * context.kv_bytes, layers)
        around = 2 * timing.small_s(is_dependent=False) + timing.draw_s(drawn, context.draw_instructions)
        return 1e3 * (whole + around), ""

    floor = 1e3 * floor_s(Timing(model), step, context)
    return StepForecast(f"{name}, megakernel", model.name, 4, 0, floor, Band.of(value, timings(model)))


def forecasts() -> list[StepForecast]:
    """`STEPS`, of kernels that are compiled for their registers, and those of a small model by one launch."""
    facts = compiled("sm_90a")
    steps = {name: step_of(name, facts_of=facts) for name in dict(STEPS)}
    draw = draw_instructions(MODELS["qwen3-8b"]["vocab_size"])
    found = [forecast(name, model, steps[name], draw) for name, model in STEPS]
    small = [(name, model) for name, model in STEPS if steps[name].weight_bytes < MOST_MEGAKERNEL_BYTES]
    return found + [megakernel_forecast(name, model, steps[name], draw) for name, model in small]


def modelled(model: GpuModel) -> dict[str, Band]:
    """By the goal's name, in its measure, the worst of its shapes; only goals that the model says something of."""
    facts, every = compiled(model.arch), timings(model)
    step, large = step_of("qwen3-8b", facts_of=facts), step_of("qwen3-8b", num_seqs=256)
    draw = draw_instructions(MODELS["qwen3-8b"]["vocab_size"], model.arch)
    alone, many = (context_of(MODELS["qwen3-8b"], draw, num_seqs=count) for count in (1, 256))

    def gemm_share(timing: Timing) -> tuple[float, str]:
        shapes = ((8192, 8192, 8192), *((2048, n, k) for n, k in QWEN3_8B.values()))
        found = [(2.0 * m * n * k / CUBLAS_FLOPS, product(m, n, k, timing)) for m, n, k in shapes]
        peer, ours = min(found, key=lambda each: each[0] / each[1].seconds)
        return peer / ours.seconds, ours.limit

    def linear_share(rows: int) -> Callable[[Timing], tuple[float, str]]:
        shapes = [linear(rows, n, k, model, facts) for n, k in QWEN3_8B.values()]

        def share(timing: Timing) -> tuple[float, str]:
            found = [(each.weight_bytes / timing.bytes_per_s, streamed(each, timing)) for each in shapes]
            least, ours = min(found, key=lambda each: each[0] / each[1].seconds)
            return least / ours.seconds, ours.limit

        return share

    def prefill_share(timing: Timing) -> tuple[float, str]:
        ours = prefill(8192, 32, 8, 128, timing)
        return 2.0 * 32 * 8192**2 * 128 / SDPA_FLOPS / ours.seconds, ours.limit

    def decode_share(timing: Timing) -> tuple[float, str]:
        launched, num_bytes = decode_attention(32, 4096, model, facts)
        time = timing.attention_s(launched, num_bytes)
        return num_bytes / timing.bytes_per_s / time, "memory"

    def prefill_ms(timing: Timing) -> tuple[float, str]:
        products = sum(product(2048, n, k, timing, is_dependent=True).seconds for n, k in QWEN3_8B.values())
        activations = 2 * 2048 * (6144 + 4096 + 2048)  # of what prepares q, k and v
        small = timing.small_s(is_dependent=True) + activations / timing.of("cache_bandwidth")
        head = Launched("gemv", blocks=4748, threads=256, is_dependent=True, weight_bytes=2 * 151936 * 4096)
        layer = products + prefill(2048, 32, 8, 128, timing).seconds + small
        return 1e3 * (36 * layer + streamed(head, timing).seconds), "tensor cores"

    few = [linear_share(rows) for rows in (16, 64)]
    return {
        "gemm": Band.of(gemm_share, every),
        "linear_1": Band.of(linear_share(1), every),
        "linear_few": Band.of(lambda timing: min(share(timing) for share in few), every),
        "prefill": Band.of(prefill_share, every),
        "decode": Band.of(decode_share, every),
        "tpot": Band.of(lambda timing: (1e3 * step_s(timing, step, alone), "memory"), every),
        "batch_256": Band.of(
            lambda timing: (floor_s(timing, large, many) / step_s(timing, large, many), "memory"), every
        ),
        "prefill_2k": Band.of(prefill_ms, every),
    }


def linear(rows: int, n: int, k: int, model: GpuModel, facts_of: FactsOf | None) -> Launched:
    """A linear layer as it is planned, launched alone."""
    epilogue = gemm.Epilogue(has_residual=False, is_aligned=True)
    launch = gemm.plan(
        gemm.Product(rows, n, k, "bf16", epilogue=epilogue),
        gemm.machine_of(model.arch, model.num_sms, model.max_clusters),
    )
    assert launch is not None, "a product that is not empty"
    return launched_of(launch, {"weight": 0, "m": rows, "n": n, "k": k}, facts_of=facts_of)


def decode_attention(seqs: int, length: int, model: GpuModel, facts_of: FactsOf | None) -> tuple[Launched, float]:
    """Paged decode attention, 32 query heads on 8 KV heads of 128, and the bytes of its keys and values."""
    plan = attention.plan(
        num_tokens=seqs, num_seqs=seqs, max_query_len=1, max_seq_len=length, num_q_heads=32, num_kv_heads=8,
        head_dim=128, table_width=length // 16, dtype="bf16", block_size=16, num_sms=model.num_sms, arch=model.arch,
        num_blocks=seqs * length // 16,
    )  # fmt: skip
    return launched_of(plan.launch, {}, facts_of=facts_of), 2.0 * 2 * seqs * length * 8 * 128
