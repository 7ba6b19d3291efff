"""How long a GPU must take for a kernel, by what it needs: a bound, not a forecast.

A kernel is as slow as the slowest of what it needs, each at the product's peak rate: the bytes of its sectors from
memory, tensor-core work with its padding and the last round of tiles, the exponentials of a softmax, and the
instructions that warps issue (four a clock and multiprocessor). For products and prefill these are the main loop's
machine instructions (docs/triton_comparison.json), for the others all of the kernel's PTX instructions as the emulator
counts them. Latencies are not modelled: no kernel can be faster, most are slower.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from numba_kernels.cuda import attention, gemm
from numba_kernels.cuda.gemm import hopper
from runtime.bench.kernels.bench_kernels import QWEN3_8B
from runtime.device.emulator.driver.architectures import GpuModel
from tools.kernel_costs.counts import Bench

COMPARISON = Path(__file__).resolve().parents[2] / "docs" / "triton_comparison.json"
VOCABULARY = 151936 * 4096  # elements of Qwen3-8B's last layer
ISSUES = 4  # warp instructions a clock and multiprocessor
EXPONENTIALS = 16  # a clock and multiprocessor (CUDA Programming Guide, "Arithmetic Instructions", throughput)


@dataclass(frozen=True, slots=True)
class Modelled:
    """Seconds that a kernel needs of each resource, and those of the roofline: the work alone."""

    roofline_s: float
    needs_s: dict[str, float]

    @property
    def share(self) -> float:
        return self.roofline_s / self.seconds

    @property
    def seconds(self) -> float:
        return max(self.needs_s.values())

    @property
    def limit(self) -> str:
        return max(self.needs_s, key=lambda name: self.needs_s[name])


def per_operation(work: str, tier: str, tile: str, arch: str) -> float:
    """Machine instructions of a main loop for each product of 16 x 8 x 16. Raises KeyError where it was not counted."""
    for row in json.loads(COMPARISON.read_text())["rows"]:
        ours = row["ours"]
        if (row["work"], row["arch"], ours["name"]) == (work, arch, tier) and tile in (ours["tile"], row["shape"]):
            return float(ours["machine_per_operation"])
    raise KeyError(f"{COMPARISON.name} has no {work} by {tier} {tile} on {arch}")


def _issue_s(instructions: float, model: GpuModel) -> float:
    return instructions / (ISSUES * model.num_sms * model.clock_khz * 1e3)


def product(m: int, n: int, k: int, model: GpuModel) -> Modelled:
    """A product of many rows by the Hopper tile, and the parts of K, that are planned for it."""
    machine = gemm.machine_of(model.arch, model.num_sms, model.max_clusters)
    tile, parts = hopper.choose(m, n, k, machine, exact=False)
    clusters = -(-m // (tile.block_m * tile.cluster)) * -(-n // tile.block_n)
    blocks = clusters * tile.cluster * parts
    block_flops = 2.0 * tile.block_m * tile.block_n * k / parts
    rounds = -(-clusters // machine.clusters_at_once(tile.cluster * parts))
    loop = per_operation("matmul", "hopper", f"128x{tile.block_n}x64", model.arch)
    memory_s = 2 * (m * k + n * k + m * n) / model.memory_bytes_per_s
    return Modelled(
        max(memory_s, 2.0 * m * n * k / model.bf16_flops),
        {
            "tensor cores": rounds * block_flops / (model.bf16_flops / model.num_sms), "memory": memory_s,
            "issue": _issue_s(loop * blocks * block_flops / 4096, model),
        },
    )  # fmt: skip


def prefill(length: int, heads: int, kv_heads: int, head_dim: int, model: GpuModel) -> Modelled:
    """Causal attention by Hopper's tile of 128 queries and 128 keys."""
    tile = 128
    pairs = heads * length * (length + 1) / 2
    tiles = length // tile
    done = heads * tile * tile * tiles * (tiles + 1) / 2
    loop = per_operation("attention", "flash_hopper", f"2 heads, 512 tokens, head dim {head_dim}", model.arch)
    memory_s = 2 * (2 * length * heads + 2 * length * kv_heads) * head_dim / model.memory_bytes_per_s
    clocks_s = model.num_sms * model.clock_khz * 1e3
    return Modelled(
        max(memory_s, 4 * pairs * head_dim / model.bf16_flops),
        {
            "tensor cores": 4 * done * head_dim / model.bf16_flops, "memory": memory_s,
            "issue": _issue_s(loop * 4 * done * head_dim / 4096, model),
            "exponentials": done / (EXPONENTIALS * clocks_s),
        },
    )  # fmt: skip


def _streamed(bench: Bench, run: Callable[[Bench], None], least_bytes: int, model: GpuModel) -> Modelled:
    """What streams from memory: its sectors, instructions and tensor-core work, counted at a smaller size."""
    counts = bench.count("goal", run)
    unread = max(counts.sectors / max(counts.useful_sectors, 1.0), 1.0)
    return Modelled(
        least_bytes / model.memory_bytes_per_s,
        {
            "memory": unread * least_bytes / model.memory_bytes_per_s,
            "issue": _issue_s(counts.warp_instructions, model),
            "tensor cores": counts.tensor_flops / model.bf16_flops,
        },
    )


def linear(bench: Bench, m: int, model: GpuModel, n: int = 2048, k: int = 2048) -> Modelled:
    """A linear layer of few rows, by what is planned for it."""

    def run(bench: Bench) -> None:
        product = gemm.Product(m, n, k, "bf16", epilogue=gemm.Epilogue(has_residual=False, is_aligned=True))
        launch = gemm.plan(product, gemm.machine_of(model.arch, model.num_sms, model.max_clusters))
        x, weight = bench.normal((m, k), "bf16"), bench.normal((n, k), "bf16")
        bench.launch(launch, x, weight, 0, 0, bench.empty(2 * m * n), m, n, k, 0)

    return _streamed(bench, run, 2 * (m * k + n * k + m * n), model)


def decode(bench: Bench, model: GpuModel, seqs: int = 4, length: int = 1024) -> Modelled:
    """Paged decode attention, 32 query heads on 8 KV heads of 128, by what is planned for it."""
    heads, kv_heads, head_dim, page = 32, 8, 128, 16
    blocks = length // page

    def run(bench: Bench) -> None:
        plan = attention.plan(
            num_tokens=seqs, num_seqs=seqs, max_query_len=1, max_seq_len=length, num_q_heads=heads,
            num_kv_heads=kv_heads, head_dim=head_dim, table_width=blocks, dtype="bf16", block_size=page,
            num_sms=1, arch=model.arch, num_blocks=seqs * blocks,
        )  # fmt: skip
        q, out = bench.normal((seqs, heads, head_dim), "bf16"), bench.empty(2 * seqs * heads * head_dim)
        k, v = (bench.normal((seqs * blocks, kv_heads, page, head_dim), "bf16") for _ in range(2))
        integers = (np.arange(seqs + 1), np.full(seqs, length), np.arange(seqs * blocks))
        starts, lengths, tables = (bench.put(each.astype(np.int32)) for each in integers)
        workspace = bench.empty(plan.workspace_bytes) if plan.workspace_bytes else 0
        bench.launch(
            plan.attend, *plan.attend_arguments(q, k, v, out, workspace, starts, lengths, tables, head_dim**-0.5)
        )
        if plan.combine is not None:
            bench.launch(plan.combine, *plan.combine_arguments(workspace, out))

    return _streamed(bench, run, 2 * (2 * seqs * heads + 2 * seqs * length * kv_heads) * head_dim, model)


def _sum(parts: Sequence[tuple[float, Modelled]]) -> Modelled:
    """Kernels one after another, each so many times."""
    total = sum(count * each.seconds for count, each in parts)
    slowest = max(parts, key=lambda part: part[0] * part[1].seconds)[1]
    return Modelled(sum(count * each.roofline_s for count, each in parts), {f"kernels, {slowest.limit} first": total})


def _scaled(each: Modelled, roofline_s: float) -> Modelled:
    """The same share and limit at another size."""
    ratio = roofline_s / each.roofline_s
    return Modelled(roofline_s, {name: ratio * seconds for name, seconds in each.needs_s.items()})


def modelled(model: GpuModel) -> dict[str, Modelled]:
    """By the goal's name, the worst of its shapes; only those goals that counts say something of.

    Of Qwen3-8B's steps: the products of its 36 layers and of its vocabulary, and attention; what works along rows is
    left out.
    """
    bench = Bench(model.arch)
    products = [product(8192, 8192, 8192, model), *(product(2048, n, k, model) for n, k in QWEN3_8B.values())]
    one, attending = linear(bench, 1, model), decode(bench, model)
    few = [linear(bench, rows, model) for rows in (16, 64)]
    shapes, layers = list(QWEN3_8B.values()), 36

    def bytes_s(count: float) -> float:
        return count / model.memory_bytes_per_s

    cached = 2 * 8 * 128 * 2  # bytes of a token's keys and values in a layer
    return {
        "gemm": min(products, key=lambda each: each.share), "linear_1": one,
        "linear_few": min(few, key=lambda each: each.share), "prefill": prefill(8192, 32, 8, 128, model),
        "decode": attending,
        "tpot": _sum([
            *((layers, _scaled(one, bytes_s(2 * n * k))) for n, k in shapes),
            (1, _scaled(one, bytes_s(2 * VOCABULARY))), (layers, _scaled(attending, bytes_s(128 * cached))),
        ]),
        "batch_256": _sum([
            *((layers, product(256, n, k, model)) for n, k in shapes),
            (1, product(256, VOCABULARY // 4096, 4096, model)),
            (layers, _scaled(attending, bytes_s(256 * 1024 * cached))),
        ]),
        "prefill_2k": _sum([
            *((layers, product(2048, n, k, model)) for n, k in shapes), (layers, prefill(2048, 32, 8, 128, model)),
            (1, _scaled(one, bytes_s(2 * VOCABULARY))),
        ]),
    }  # fmt: skip
