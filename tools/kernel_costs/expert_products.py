"""How long products of experts take by the model of an H200, beside dense ones: tables for docs/kernels.md.

python -m tools.kernel_costs.expert_products
"""

from __future__ import annotations

import argparse
from typing import Any

from numba_kernels.cuda import gemm
from numba_kernels.cuda.experts import hopper, packed, packed_gather, tensor_core
from numba_kernels.cuda.gemm.hopper_ring import BLOCK_K
from numba_kernels.cuda.gemm.tensor_core import EFFICIENCY
from numba_kernels.cuda.packing import packing_of
from runtime.device.emulator.driver.architectures import GpuModel, model_of
from tools.gpu.serving.models import IN_SHORT
from tools.kernel_costs.latencies import EDGES, Timing
from tools.kernel_costs.launch_lists import Launched, decode_step
from tools.kernel_costs.page import table
from tools.kernel_costs.roofline import (
    Band,
    Context,
    Modelled,
    floor_s,
    gathered,
    issue_s,
    peers_per_operation,
    per_operation,
    product,
    step_s,
)

SHAPES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880)}
"""Experts, how many of them a token chooses, hidden, inner."""
PREFILL_ROWS = (64, 128, 256, 512)
TOKENS = (1, 4, 16, 64)
MXFP4 = "e2m1_g32_exponents"

GPT_OSS: dict[str, Any] = IN_SHORT["gpt-oss-20b"] | {
    "num_local_experts": 4, "layer_types": ["full_attention"] * 24, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
"""Of 32 experts four are declared: a token's launches are the same, and the zeros that stand for weights take less."""
CONTEXT_TOKENS, WINDOW = 1024, 128
DRAW_INSTRUCTIONS = 85_455 * 201_088 / 151_936  # of a greedy row (docs/kernels.md), by the vocabulary


def by_wgmma(rows: int, num_experts: int, n: int, k: int, timing: Timing) -> Modelled:
    """So many rows of each of the experts, by the tile that is planned."""
    model = timing.model
    machine = gemm.machine_of(model.arch, model.num_sms, model.max_clusters)
    tile = min(hopper.TILES, key=lambda each: hopper.seconds(each, rows * num_experts, num_experts, n, k, machine))
    clusters = num_experts * -(-rows // hopper.tile_rows(tile)) * -(-n // tile.block_n)
    rounds, blocks = -(-clusters // machine.clusters_at_once(tile.cluster)), clusters * tile.cluster
    steps = -(-k // BLOCK_K)
    step_bytes = 2 * BLOCK_K * (tile.block_m + tile.block_n // tile.cluster)
    return Modelled(
        {
            "tensor cores": rounds * 2.0 * tile.block_m * tile.block_n * k / (timing.tensor_flops / model.num_sms),
            "memory": 2.0 * num_experts * (n * k + rows * (k + n)) / timing.bytes_per_s,
            "second-level cache": blocks * steps * step_bytes / timing.of("cache_bandwidth"),
        },
        timing.gap_s(is_dependent=True) + timing.of("memory") + timing.of("ends"),
    )


def by_mma(rows: int, num_experts: int, n: int, k: int, timing: Timing) -> Modelled:
    """The same by `mma.sync`, at the rate that `gemm` takes for it."""
    model = timing.model
    machine = gemm.machine_of(model.arch, model.num_sms, model.max_clusters)
    tile = tensor_core.choose_tile(rows * num_experts, num_experts, n, model.num_sms)
    rounds = -(-num_experts * -(-rows // tile.block_m) * -(-n // tile.block_n) // model.num_sms)
    rate = machine.tensor_flops * EFFICIENCY[tile] / model.num_sms
    return Modelled(
        {
            "tensor cores": rounds * 2.0 * tile.block_m * tile.block_n * k / rate,
            "memory": 2.0 * num_experts * (n * k + rows * (k + n)) / timing.bytes_per_s,
        },
        timing.gap_s(is_dependent=True) + timing.of("memory") + timing.of("ends"),
    )


def _without_cache(found: Modelled) -> Modelled:
    """The same with no limit by the second-level cache, whose rate is the model's least certain number."""
    needs = {name: need for name, need in found.needs_s.items() if name != "second-level cache"}
    return Modelled(needs, found.latencies_s)


def _ours(rows: int, num_experts: int, n: int, k: int, timing: Timing, *, is_gated: bool) -> Modelled:
    """A product of a layer as ours; a gated one writes half of its columns."""
    found = by_wgmma(rows, num_experts, n, k, timing)
    saved = num_experts * rows * n if is_gated else 0
    needs = _without_cache(found).needs_s
    needs["memory"] -= saved / timing.bytes_per_s
    loop = per_operation("experts", "hopper", "128x256x64", timing.model.arch)
    needs["issue"] = issue_s(loop * 2.0 * num_experts * rows * n * k / 4096, timing)
    return Modelled(needs, found.latencies_s)


def _tritons(rows: int, num_experts: int, n: int, k: int, timing: Timing) -> Modelled:
    """A product of a layer as Triton's, by the better one of its two counted tiles."""
    model, depth = timing.model, 64

    def of(height: int, width: int) -> Modelled:
        blocks = num_experts * -(-rows // height) * -(-n // width)
        flops = 2.0 * height * width * k
        loop = peers_per_operation("experts", f"{height}x{width}x{depth}", model.arch)
        return Modelled(
            {
                "tensor cores": -(-blocks // model.num_sms) * flops / (timing.tensor_flops / model.num_sms),
                "memory": 2.0 * num_experts * (n * k + rows * (k + n)) / timing.bytes_per_s,
                "issue": issue_s(loop * blocks * flops / 4096, timing),
            },
            timing.gap_s(is_dependent=False) + timing.of("memory") + timing.of("ends"),
        )  # fmt: skip

    return min((of(128, 256), of(64, 256)), key=lambda each: each.seconds)


def layer_rows(model: GpuModel) -> list[list[str]]:
    """A layer's experts with their order and sum: µs as ours, as Triton's, and of two dense products.

    Triton's launches are the padded order, both products, the activation between them and the sum. None of them is
    launched dependently. The second-level cache limits nothing here: of it Triton's tile asks 1.5 times what our pair
    of blocks asks, which share the weight.
    """
    timing, found = Timing(model), []
    for name, (num_experts, _, hidden, inner) in SHAPES.items():
        for rows in PREFILL_ROWS:
            total = rows * num_experts

            def moved_s(columns: float, *, is_dependent: bool, total: int = total) -> float:
                """A launch that reads and writes so many 16-bit columns of each row."""
                return timing.small_s(is_dependent=is_dependent) + 2 * total * columns / timing.bytes_per_s

            ours = [
                timing.small_s(is_dependent=True),
                _ours(rows, num_experts, 2 * inner, hidden, timing, is_gated=True).seconds,
                _ours(rows, num_experts, hidden, inner, timing, is_gated=False).seconds,
                moved_s(hidden, is_dependent=True),
            ]
            theirs = [
                timing.small_s(is_dependent=False),
                _tritons(rows, num_experts, 2 * inner, hidden, timing).seconds,
                moved_s(3 * inner, is_dependent=False),
                _tritons(rows, num_experts, hidden, inner, timing).seconds,
                moved_s(hidden, is_dependent=False),
            ]
            dense = [_without_cache(product(total, n, k, timing, is_dependent=True)).seconds
                     for n, k in ((2 * inner, hidden), (hidden, inner))]  # fmt: skip
            sums = [sum(each) for each in (ours, theirs, dense)]
            found.append([
                name, str(rows), *(f"{1e6 * each:.0f}" for each in sums), f"{sums[1] / sums[0]:.2f}",
                f"{1e6 * theirs[2]:.0f}",
            ])  # fmt: skip
    return found


def prefill_rows(model: GpuModel) -> list[list[str]]:
    """Gate and up of a layer: µs by `mma.sync`, by `wgmma`, of one dense product with as many rows, and what limits."""
    timing, found = Timing(model), []
    for name, (num_experts, _, hidden, inner) in SHAPES.items():
        for rows in PREFILL_ROWS:
            shape = rows, num_experts, 2 * inner, hidden
            ours, slower = by_wgmma(*shape, timing), by_mma(*shape, timing)
            dense = product(rows * num_experts, 2 * inner, hidden, timing, is_dependent=True)
            least = 2.0 * num_experts * 2 * inner * hidden / timing.bytes_per_s
            found.append([
                name, str(rows), *(f"{1e6 * each:.0f}" for each in (slower.seconds, ours.seconds, dense.seconds)),
                f"{dense.seconds / ours.seconds:.2f}", ours.limit, f"{1e6 * least:.0f}",
            ])  # fmt: skip
    return found


def _launches(name: str, weight: str, tokens: int, touched: float, model: GpuModel) -> list[Launched]:
    """Both products of a layer's experts for a step of so many tokens."""
    num_experts, top_k, hidden, inner = SHAPES[name]
    packing = packing_of(weight)
    found = []
    for n, k, is_gated in ((2 * inner, hidden, True), (hidden, inner, False)):
        each = 2 * n * k if packing is None else packing.size_bytes(n, k, "bf16")
        if packing is not None and tokens <= 4:
            if is_gated:
                launch = packed_gather.plan_gate_up(tokens * top_k, inner, hidden, packing, "silu", model.num_sms)
            else:
                launch = packed_gather.plan_down(tokens, top_k, hidden, inner, packing)
            registers = 128
        elif packing is not None:
            rows = tokens * top_k
            tile_rows = packed.choose_tile_rows(rows, num_experts)
            launch = packed.plan(
                round(touched), n // 2 if is_gated else n, "bf16", weight, "silu" if is_gated else "", tile_rows
            )
            registers = 128
        else:
            tile = tensor_core.choose_tile(tokens * top_k, num_experts, n, model.num_sms)
            columns, gate = (n // 2, "silu") if is_gated else (n, "")
            launch = tensor_core.plan(round(touched), columns, "bf16", gate, tile)
            registers = 128
        found.append(
            Launched(
                launch.specialisation.name, launch.grid[0] * launch.grid[1], launch.block[0], launch.shared_bytes,
                is_dependent=True, num_registers=registers, weight_bytes=int(touched * each),
            )
        )  # fmt: skip
    return found


def decode_rows(model: GpuModel) -> list[list[str]]:
    """Both products of a layer over the experts that tokens touch, on average, if they choose freely."""
    found = []
    for name, (num_experts, top_k, _, _) in SHAPES.items():
        for weight in ("bf16", MXFP4):
            for tokens in TOKENS:
                if weight == "bf16" and tokens <= 4:
                    continue  # `gather`, which goes over no list
                touched = num_experts * (1 - (1 - top_k / num_experts) ** tokens)
                launches = _launches(name, weight, tokens, touched, model)

                def seconds(timing: Timing, launches: list[Launched] = launches) -> tuple[float, str]:
                    return sum(gathered(each, timing).seconds for each in launches), ""

                band = Band.of(seconds, [Timing(model, edge) for edge in EDGES])
                num_bytes = sum(each.weight_bytes for each in launches)
                share = num_bytes / band.expected / model.memory_bytes_per_s
                found.append([
                    name, weight, str(tokens), f"{touched:.1f} of {num_experts}", f"{num_bytes / 1e6:.0f}",
                    f"{1e6 * band.expected:.1f} ({1e6 * band.fast:.1f} to {1e6 * band.slow:.1f})", f"{share:.2f}",
                ])  # fmt: skip
    return found


def gpt_oss_step(model: GpuModel) -> list[list[str]]:
    """A decode step of one sequence."""
    step = decode_step(GPT_OSS, max_model_len=8192, arch=model.arch)
    kept = (CONTEXT_TOKENS + WINDOW) / 2  # every second layer looks back no further than its window
    context = Context(kept * 2 * 2 * GPT_OSS["num_key_value_heads"] * GPT_OSS["head_dim"], DRAW_INSTRUCTIONS)
    timings = [Timing(model, edge) for edge in EDGES]
    band = Band.of(lambda timing: (1e3 * step_s(timing, step, context), ""), timings)
    floor = 1e3 * floor_s(Timing(model), step, context)
    return [[
        "gpt-oss-20b", model.name, str(step.num_launches), str(len(step.layer)), f"{step.weight_bytes / 1e9:.2f}",
        f"{floor:.2f}", f"{band.expected:.2f} ({band.fast:.2f} to {band.slow:.2f})",
    ]]  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    model = model_of("H200")
    heads = ["experts", "rows of each", "`mma.sync` (µs)", "`wgmma`", "dense", "dense / `wgmma`", "limit"]
    print(table([*heads, "weights alone"], prefill_rows(model)))
    print()
    heads = ["experts", "rows of each", "ours (µs)", "Triton's", "two dense products", "Triton's / ours"]
    print(table([*heads, "of Triton's: the activation"], layer_rows(model)))
    print()
    heads = ["experts", "weight", "tokens", "touched", "MB", "both products (µs)", "of the bandwidth"]
    print(table(heads, decode_rows(model)))
    print()
    heads = ["model", "GPU", "launches", "a layer", "GB", "floor (ms)", "modelled (ms)"]
    print(table(heads, gpt_oss_step(model)))


if __name__ == "__main__":
    main()
