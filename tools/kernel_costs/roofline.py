"""Models a kernel's time on a GPU: its resources at sustained rates, and latencies.

A kernel takes the time of its slowest resource: the bytes of its sectors from memory and from the second-level
cache, tensor-core work with its padding and the last round of tiles (clusters lie in one GPC), the exponentials of a
softmax, and the instructions that warps issue (four a clock and multiprocessor; for products and prefill the main
loop's machine instructions, docs/triton_comparison.json). Added to that are gaps, first bytes, waves and ends
(`latencies.ASSUMPTIONS`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import hopper
from numba_kernels.cuda.gemm.hopper_ring import BLOCK_K
from numba_kernels.cuda.gemm.quantised_gemv import UNPACKING
from tools.kernel_costs.latencies import Launched, Timing, under_way_bytes

COMPARISON = Path(__file__).resolve().parents[2] / "docs" / "triton_comparison.json"
ISSUES = 4  # warp instructions a clock and multiprocessor
EXPONENTIALS = 16  # a clock and multiprocessor (CUDA Programming Guide, "Arithmetic Instructions", throughput)
GATHERED_LOOPS = {
    "experts_packed_gather_e2m1_g32_exponents": UNPACKING["e2m1"], "experts_packed_gather_u4_g128": UNPACKING["u4"],
    "experts_packed_gather_u8": UNPACKING["u8"], "experts_packed_e2m1_g32_exponents": 1032,
}  # fmt: skip
"""Machine instructions of a warp in the main loop, for each 4 KB of the weight (nvdisasm, sm_90a)."""
FEW_ROWS = 64  # up to here a product streams its weight


@dataclass(frozen=True, slots=True)
class Modelled:
    """Seconds of each of a kernel's resources, and of its latencies."""

    needs_s: dict[str, float]
    latencies_s: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.needs_s.values()) + self.latencies_s

    @property
    def limit(self) -> str:
        needs = self.needs_s | {"latencies": self.latencies_s}
        return max(needs, key=lambda name: needs[name])


def per_operation(work: str, tier: str, tile: str, arch: str) -> float:
    """Machine instructions of a main loop for each product of 16 x 8 x 16. Raises KeyError if it was not counted."""
    for row in json.loads(COMPARISON.read_text(encoding="utf-8"))["rows"]:
        ours = row["ours"]
        if (row["work"], row["arch"], ours["name"]) == (work, arch, tier) and tile in (ours["tile"], row["shape"]):
            return float(ours["machine_per_operation"])
    raise KeyError(f"{COMPARISON.name} has no {work} by {tier} {tile} on {arch}")


def issue_s(instructions: float, timing: Timing) -> float:
    return instructions / (ISSUES * timing.model.num_sms * timing.model.clock_khz * 1e3)


def product(m: int, n: int, k: int, timing: Timing, *, is_dependent: bool = False) -> Modelled:
    """A product of many rows by its planned Hopper tile and parts of K."""
    model = timing.model
    machine = gemm.machine_of(model.arch, model.num_sms, model.max_clusters)
    tile, parts = hopper.choose(m, n, k, machine, exact=False)
    clusters = -(-m // (tile.block_m * tile.cluster)) * -(-n // tile.block_n)
    blocks = clusters * tile.cluster * parts
    block_flops = 2.0 * tile.block_m * tile.block_n * k / parts
    rounds = -(-clusters // machine.clusters_at_once(tile.cluster * parts))
    loop = per_operation("matmul", "hopper", f"128x{128 if tile.block_n < 256 else 256}x64", model.arch)
    steps = -(-k // BLOCK_K) // parts
    step_bytes = 2 * BLOCK_K * (tile.block_m + tile.block_n // tile.cluster)  # a cluster's blocks share the weight's
    return Modelled(
        {
            "tensor cores": rounds * block_flops / (timing.tensor_flops / model.num_sms),
            "memory": 2 * (m * k + n * k + m * n) / timing.bytes_per_s,
            "second-level cache": blocks * steps * step_bytes / timing.of("cache_bandwidth"),
            "issue": issue_s(loop * blocks * block_flops / 4096, timing),
        },
        timing.gap_s(is_dependent=is_dependent) + timing.of("memory") + timing.of("ends"),
    )


def prefill(
    length: int, heads: int, kv_heads: int, head_dim: int, timing: Timing, *, is_causal: bool = True
) -> Modelled:
    """Attention of one sequence by Hopper's tile of 128 queries and 128 keys."""
    tile = 128
    tiles, model = length // tile, timing.model
    done = heads * tile * tile * tiles * ((tiles + 1) / 2 if is_causal else tiles)
    loop = per_operation("attention", "flash_hopper", f"2 heads, 512 tokens, head dim {head_dim}", model.arch)
    exponentials_s = done / (EXPONENTIALS * model.num_sms * model.clock_khz * 1e3)
    return Modelled(
        {
            "tensor cores": 4 * done * head_dim / timing.tensor_flops + timing.of("softmax") * exponentials_s,
            "memory": 2 * (2 * length * heads + 2 * length * kv_heads) * head_dim / timing.bytes_per_s,
            "issue": issue_s(loop * 4 * done * head_dim / 4096, timing),
            "exponentials": exponentials_s,
        },
        timing.gap_s(is_dependent=False) + timing.of("memory") + timing.of("ends"),
    )


def streamed(launched: Launched, timing: Timing, num_bytes: float = 0.0) -> Modelled:
    """A product of few rows: its weight from memory, x repeatedly from the second-level cache; or another kernel that
    reads so many bytes once."""
    num_bytes = num_bytes or launched.weight_bytes
    total = timing.streaming_s(launched, num_bytes)
    needs = {"memory": num_bytes / timing.bytes_per_s}
    if launched.product is not None and launched.name.startswith(("gemm_skinny", "gemm_quantised_gemv")):
        m, _, k = launched.product
        reads = 4.0 if launched.name.startswith("gemm_quantised_gemv") else 2.0  # bytes of each number of x, a block
        x_bytes = reads * launched.blocks / launched.cluster * m * k  # blocks of a cluster each read a part of K
        needs["second-level cache"] = (num_bytes + x_bytes) / timing.of("cache_bandwidth")
        total += timing.of("cluster") if launched.cluster > 1 else 0.0
    return Modelled(needs, total - needs["memory"])


def gathered(launched: Launched, timing: Timing) -> Modelled:
    """A launch over chosen experts: their indices and addresses are read from the cache before the first byte of a
    weight."""
    num_bytes = launched.weight_bytes
    streaming = timing.stream_s(num_bytes, launched.blocks, timing.blocks_at_once(launched), under_way_bytes(launched))
    before = timing.gap_s(is_dependent=launched.is_dependent) + 2 * timing.of("cache") + timing.of("memory")
    needs = {"memory": num_bytes / timing.bytes_per_s}
    loop = next((loop for name, loop in GATHERED_LOOPS.items() if launched.name.startswith(name)), 0)
    needs["issue"] = issue_s(loop * num_bytes / 4096, timing)
    return Modelled(needs, before + streaming - needs["memory"] + timing.of("ends"))


@dataclass(frozen=True, slots=True)
class Context:
    """The launch's context, beyond its arguments.

    Attributes:
        kv_bytes: of keys and values read by a layer's attention.
        draw_instructions: warp instructions of the draw.
    """

    kv_bytes: float
    draw_instructions: float


def launch_s(timing: Timing, launched: Launched, context: Context) -> float:
    """One launch of a decode step."""
    if launched.product is not None and launched.product[0] > FEW_ROWS:
        return product(*launched.product, timing, is_dependent=launched.is_dependent).seconds
    if launched.name.startswith("experts_"):
        return gathered(launched, timing).seconds
    if launched.weight_bytes:
        return streamed(launched, timing).seconds
    if launched.name.startswith("attention"):
        return timing.attention_s(launched, context.kv_bytes)
    if launched.name.startswith("sampling"):
        return timing.draw_s(launched, context.draw_instructions)
    return timing.small_s(is_dependent=launched.is_dependent)
