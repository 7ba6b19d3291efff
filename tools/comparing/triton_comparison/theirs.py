"""Triton's side of the comparison: recorded PTX, and its launch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from numba_kernels.cuda.specialisation import Launch, TensorMapLayout
from tools.comparing.triton_comparison.ours import Experts, Prefill, Product
from tools.kernel_costs.counts import Bench

PTX = Path(__file__).resolve().parent / "ptx"
_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}  # Triton's code of a tensor map's swizzle: bytes


def peers(work: str, arch: str) -> dict[str, dict[str, Any]]:
    """The recorded kernels for a kind of work ("matmul", "experts", "attention") on an architecture, by name."""
    index = json.loads((PTX / "peers.json").read_text(encoding="utf-8"))
    return {name: facts for name, facts in index.items() if (facts["work"], facts["arch"]) == (work, arch)}


def text_of(name: str) -> str:
    return (PTX / f"{name}.ptx").read_text(encoding="utf-8")


def tile_of(facts: dict[str, Any]) -> tuple[int, ...]:
    """A recorded kernel's tile."""
    return tuple(facts["numbers"][name] for name in ("BM", "BN", "BK") if name in facts["numbers"])


def _launch_peer(bench: Bench, name: str, facts: dict[str, Any], grid: tuple[int, int], arguments: list[Any]) -> None:
    scratch = facts["scratch_bytes"] * grid[0] * grid[1]
    arguments = [*arguments, bench.empty(scratch) if scratch else 0, 0]
    launch = Launch(None, (*grid, 1), (facts["threads"], 1, 1), facts["shared_bytes"])  # type: ignore[arg-type]
    bench.launch_text(text_of(name), facts["kernel"], launch, arguments)


def launch_matmul(name: str, facts: dict[str, Any], bench: Bench, work: Product) -> None:
    rows, columns, _ = tile_of(facts)
    grid = -(-work.m // rows) * -(-work.n // columns), 1
    arguments = [work.x, work.weight, work.y, work.m, work.n, work.k, work.k, work.k, work.n]
    _launch_peer(bench, name, facts, grid, arguments)


def launch_experts(name: str, facts: dict[str, Any], bench: Bench, work: Experts) -> None:
    """Launches experts with draws padded to whole tiles: `num_draws` marks padding."""
    rows, columns, _ = tile_of(facts)
    assert facts["numbers"]["TOP_K"] == work.top_k
    num_draws, tiles = len(work.order), work.tiles(rows)
    draws = np.full((len(tiles), rows), num_draws, np.int32)
    for at, (_, first, count) in enumerate(tiles):
        draws[at, :count] = work.order[first : first + count]
    owners = np.array([expert for expert, _, _ in tiles], np.int32)
    arguments = [
        work.x, work.weight, work.y, bench.put(draws), bench.put(owners), bench.put(np.array([draws.size], np.int32)),
        num_draws, work.n, work.k, work.k, work.n * work.k, work.k, work.n,
    ]  # fmt: skip
    _launch_peer(bench, name, facts, (len(tiles) * -(-work.n // columns), 1), arguments)


def launch_attention(name: str, facts: dict[str, Any], bench: Bench, work: Prefill) -> None:
    rows, _ = tile_of(facts)
    height = work.heads * work.length
    tensors: list[Any] = []
    for index, address in enumerate((work.q, work.k, work.v, work.out)):
        if not facts["maps"]:
            tensors.append(address)
            continue
        known = facts["maps"][index]
        box, swizzle = tuple(reversed(known["box"])), _SWIZZLES[known["swizzle"]]
        layout = TensorMapLayout("bf16", (work.head_dim, height), (2 * work.head_dim,), box, swizzle)
        tensors += [bench.gpu.tensor_map(address, layout), height, work.head_dim, work.head_dim, 1]
    logsumexp = bench.empty(4 * height)
    arguments = [float(work.head_dim**-0.5), logsumexp, *tensors, work.heads, work.length]
    _launch_peer(bench, name, facts, (work.length // rows, work.heads), arguments)


def nearest(tile: Sequence[int], known: dict[str, dict[str, Any]], spill_bytes: Mapping[str, int]) -> str:
    """The recorded kernel with the nearest tile: by the ratios of its sizes, then of its depth, then by the fewest
    spills, as a tuner would."""

    def distance(name: str) -> tuple[float, float, int]:
        ratios = [abs(math.log2(a / b)) for a, b in zip(tile, tile_of(known[name]))]
        return sum(ratios[:2]), sum(ratios), spill_bytes[name]

    return min(known, key=distance)
