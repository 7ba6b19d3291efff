"""A model of what LoRA adapters add to decode steps of Qwen3-8B on an H200. Nothing of it was measured there.

    python -m tools.kernel_costs.adapter_costs [--json FILE]

A map's adapters ride on its product's launch (`numba_kernels.cuda.gemm.adapters`), so that a step has no launch more.
They add to each product

- their own bytes, `down` and `up` of each adapter in the batch;
- for many rows the end of a block: reads that wait for each other, together as long as one of device memory under load,
  and the instructions that expand. Blocks of packed weights that run one after another have an end each; for
  16-bit weights and for one row other warps expand meanwhile (their instructions are not counted). A block of one row
  ends with the instructions that finish its tiles;
- for many rows and packed weights the atomic additions by which blocks count themselves out. Their latency overlaps
  with the first of these reads (the machine code waits for both), so what is left is one address's rate: a clock of the
  cache for each block that runs at once, as if all ended at once. Other warps count while theirs multiply;
- what shrinking (and expanding for one row) takes beyond a block's first tile, or for one row the tiles that a block
  finishes together, whose end waits for it. For one row and for `hopper_few` this is what the stream and unpacking of
  these tiles take after the previous grid has ended: rings are full then, but for those of blocks whose places in the
  previous grid's other halves are taken by blocks that shrink: their share of the stream is added. Where not all blocks
  run at once, the time of the multiprocessors that shrink is added. Reads wait for each other, each as long as one of
  device memory under load: the adapter (for both as long as x, which a block without adapters waits for, too), rows of
  `down`, the counter, and for one row `between`, once for each sum of a lane. An address is read early, but for further
  items of a block. `hopper_few` meets a cluster's blocks for each item;
- another tier of the product where the usual one takes no adapters.

The base of one sequence is `latencies`'; that of more is the tiers' models and a boundary a launch, without attention's
reads, which makes the shares larger. A step without adapters launches what it launches without
`--enable-lora` (`tests/runtime/engine/test_launch_counts.py`), so it costs nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import packed_stream, quantised_gemv
from numba_kernels.cuda.gemm.adapters import riding, tiles
from numba_kernels.cuda.gemm.packed_factors import ROW_GAP
from numba_kernels.cuda.gemm.product import (
    ISSUES_A_SECOND,
    LATENCY_S,
    Epilogue,
    Machine,
    Product,
    machine_of,
    unpacking_s,
)
from numba_kernels.cuda.gemm.rings import gemv_ring
from numba_kernels.cuda.gemm.rings.few_weights import BLOCK_ROWS, Block
from numba_kernels.cuda.packing import packing_of
from numba_kernels.cuda.specialisation import Launch
from tools.kernel_costs.latencies import (
    BOUNDARY_S,
    GEMV_INSTRUCTIONS,
    READ_BYTES,
    STEPS,
    errors,
    measured_rows,
    predicted,
)

LAYERS, RANK, MULTIPROCESSORS = 36, 16, 132
MAPS = ((6144, 4096, 3, ""), (4096, 4096, 1, ""), (12_288, 4096, 2, "silu"), (4096, 12_288, 1, ""))
"""Outputs, inputs, parts and gate of a layer's maps: q, k and v; o; gate and up; down."""
WEIGHTS = {"bf16": ("bf16", 0), "int4": ("u4_g32", 1), "fp8": ("e4m3", 2)}
"""How a weight is stored, and its step of one sequence in `STEPS`."""
SKINNY_ENDS_S = 4.5e-6
"""A launch of `skinny` and its ends, which its model of packed weights counts (`skinny_shape`)."""
CHAIN = 4  # reads of one row which wait for each other, besides those of further parts of K
MEETING_S = 1e-6  # of a cluster's blocks, as `hopper_few` has it
ADDITION_S = 0.6e-9  # of an atomic addition to one address, a clock of the second-level cache: an estimate
EXPANDING, FINISHING = 170, 110
"""Instructions with which a warp expands its share of a part, as the emulator counts them (without moves), and with
which it finishes 32 elements of kept tiles, as the machine code has them."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A step's time without adapters and what they add, in seconds: bytes, ends, counting out, shrinking, and other
    tiers."""

    weights: str
    sequences: int
    adapters: int
    base_s: float
    bytes_s: float
    ends_s: float
    counting_s: float
    shrinking_s: float
    tiers_s: float

    @property
    def share(self) -> float:
        """All of it, over the step without adapters."""
        return (self.bytes_s + self.ends_s + self.counting_s + self.shrinking_s + self.tiers_s) / self.base_s


def cost(weights: str, sequences: int, adapters: int) -> Cost:
    """The modelled cost of a step whose sequences share so many adapters evenly."""
    (stored, step), machine = WEIGHTS[weights], machine_of("sm_90a", MULTIPROCESSORS)
    products_s = bytes_s = ends_s = counting_s = shrinking_s = tiers_s = 0.0
    for outputs, inputs, parts, gate in MAPS:
        product = Product(
            sequences, outputs, inputs, "bf16", stored, "bf16", Epilogue(has_residual=not gate, activation=gate)
        )
        usual_s = _seconds(product, machine, "")
        tier = _tier(product, machine)
        own_s = _seconds(product, machine, tier)
        launch = gemm.TIERS[tier].plan(product, machine, parts * RANK)
        own_bytes = adapters * 2 * RANK * (parts * inputs + product.weight_rows)
        products_s += usual_s
        tiers_s += max(0.0, own_s - usual_s)
        bytes_s += own_bytes / READ_BYTES
        beside = MULTIPROCESSORS * (2 if launch.specialisation.min_blocks > 1 else 1)
        is_beside = launch.team_warps or tier == "hopper_few"  # other warps expand
        rounds = 0 if is_beside else 1 if weights == "bf16" else -(-launch.grid[0] // beside)
        expanding_s, has_ends = 0.0, tier == "skinny" and weights != "bf16"
        if tier == "skinny":
            expanding_s = launch.block[1] * launch.block[2] * EXPANDING * (2 if gate else 1) / ISSUES_A_SECOND
        ends_s += rounds * (LATENCY_S + expanding_s)
        counting_s += 0.0 if is_beside else _multiplying(launch) * ADDITION_S
        shrink_s, turns, kept = _shrinking(product, parts, adapters, launch), _turns(product, launch, beside), 1
        if launch.team_warps:
            kept = min(turns, riding.most_kept(sequences))
            elements = kept * product.n / turns / (launch.grid[0] - launch.num_shrinking)
            sums_of_lane = -(-elements * (2 if gate else 1) // 32)
            shrink_s += (sums_of_lane - 1) * LATENCY_S
            ends_s += -(-turns // kept) * -(-elements // 32) * FINISHING / ISSUES_A_SECOND
        first_s = (own_s - (SKINNY_ENDS_S if has_ends else 0.0)) / turns
        if launch.team_warps:
            first_s = _after_wait(product, launch, kept / turns)
        elif tier == "hopper_few":
            first_s, late_s = _first_tiles(product, launch, turns)
            shrinking_s += late_s
        shrinking_s += max(0.0, shrink_s - first_s - (LATENCY_S if is_beside else 0.0))
        if -(-launch.grid[0] * launch.grid[1] // beside) > -(-_multiplying(launch) // beside):  # they delay others
            shrinking_s += shrink_s * launch.num_shrinking / beside
    launches = 6 if weights == "bf16" else 8
    base_s = STEPS[step].now_s() / LAYERS if sequences == 1 else products_s + launches * BOUNDARY_S
    return Cost(
        weights, sequences, adapters, LAYERS * base_s, LAYERS * bytes_s, LAYERS * ends_s, LAYERS * counting_s,
        LAYERS * shrinking_s, LAYERS * tiers_s,
    )  # fmt: skip


def _tier(product: Product, machine: Machine) -> str:
    """The tier that takes the adapters."""
    names = "gemv", "quantised_gemv", "hopper_few", "skinny"
    return next(name for name in names if gemm.TIERS[name].can_take_adapters(product, machine))


def _seconds(product: Product, machine: Machine, tier: str) -> float:
    """By the models of a tier that takes adapters, or of the fastest, and the least by bytes."""
    least = product.weight_bytes / READ_BYTES
    both = Product(product.m, product.weight_rows, product.k, product.x, product.weight, product.out)
    if tier == "skinny":
        modelled = gemm.skinny.seconds_with_adapters(product, machine)
    elif (chosen := tier or gemm.choose(both, machine)) == "hopper_few":
        modelled = gemm.hopper_few.stream_s(both, machine)
    else:
        modelled = gemm.TIERS[chosen].seconds(both, machine)
    return max(least, modelled)


def _multiplying(launch: Launch) -> int:
    return launch.grid[0] * launch.grid[1] - launch.num_shrinking


def _asked_early(product: Product, launch: Launch) -> int:
    """Bytes of the weight that rings of `hopper_few` hold when the previous grid ends."""
    packed = "" if product.weight == product.x else product.weight
    block = Block(int(launch.specialisation.constants["width"]), packed, takes_adapters=True)
    steps = -(-product.k // (block.depth * launch.grid[1]))
    return _multiplying(launch) * min(block.num_stages, steps) * (block.weight_bytes + block.scale_bytes)


def _first_tiles(product: Product, launch: Launch, turns: int) -> tuple[float, float]:
    """How long the first tiles of `hopper_few` take once the previous grid has ended, and how much longer all take
    because some rings are not full then."""
    stream_s, early_s, unpacking = product.weight_bytes / READ_BYTES, _asked_early(product, launch) / READ_BYTES, 0.0
    if product.weight != product.x:
        instructions = gemm.hopper_few.instructions(product.weight, int(launch.specialisation.constants["width"]))
        unpacking = unpacking_s(product.weight_bytes, instructions, MULTIPROCESSORS)
    late = max(0, launch.grid[0] * launch.grid[1] - MULTIPROCESSORS) / _multiplying(launch)
    late_s = max(unpacking, stream_s - (1 - late) * early_s) - max(unpacking, stream_s - early_s)
    return max(unpacking / turns, stream_s / turns - early_s), late_s


def _after_wait(product: Product, launch: Launch, share: float) -> float:
    """How long the first tiles of a product with rings take once the previous grid has ended: this share of all."""
    num_bytes, packing = share * product.weight_bytes, packing_of(product.weight)
    if packing is None:
        instructions, x_bytes = GEMV_INSTRUCTIONS, 2 * product.k
    else:
        instructions = quantised_gemv.instructions_of(launch.specialisation)
        x_bytes = packed_stream.row_bytes(packing, product.k) + ROW_GAP
    ring_bytes = (launch.grid[0] - launch.num_shrinking) * (launch.shared_bytes - x_bytes)
    issued_s = unpacking_s(int(num_bytes), instructions, launch.grid[0] - launch.num_shrinking)
    return max(issued_s, (num_bytes - ring_bytes) / READ_BYTES)


def _shrinking(product: Product, parts: int, adapters: int, launch: Launch) -> float:
    """How long the block that shrinks most takes, and for one row the warps that wait for it."""
    is_few = launch.specialisation.name.startswith("gemm_hopper_few")
    is_tiled = is_few or launch.specialisation.name.startswith("gemm_skinny")
    rows = tiles.GROUP if is_tiled else riding.rows_at_once(product.m)
    share = -(-product.m // adapters)
    groups = adapters * -(-share // rows)
    items = groups * -(-parts * RANK // (tiles.RANKS if is_tiled else riding.RANKS))
    warps = launch.block[1] * launch.block[2]
    steps = (
        gemm.hopper_few.steps_in_flight(16 if product.m <= 16 else 32, is_packed=product.weight != product.x)
        if is_few
        else tiles.steps_in_flight(-(-product.m // 16))
    )
    elements, parts_of_k = 32 * steps if is_tiled else 32 * 8 * (2 if rows == 1 else 1), launch.grid[1]
    rounds = -(-product.k // (parts_of_k * warps * elements))
    turns = -(-items * parts_of_k // launch.num_shrinking)
    expanding = 2 if is_few else 0  # reads of warps that expand beside the others, which wait for them
    chain = (CHAIN - 1 if is_tiled else CHAIN) + expanding
    reads = chain + turns * rounds - 1 + turns - 1  # a further turn needs an address
    return reads * LATENCY_S + (turns * MEETING_S if is_few else 0.0)


def _turns(product: Product, launch: Launch, beside: int) -> int:
    """The tiles that a block with a ring takes, or how many other blocks a place takes, one after another."""
    multiplying = _multiplying(launch)
    if launch.specialisation.name.startswith("gemm_hopper_few"):
        return -(-product.weight_rows // (BLOCK_ROWS * (multiplying // launch.grid[1])))
    if not launch.team_warps:
        return -(-multiplying // beside)
    is_packed = "ring_slots" in launch.specialisation.constants
    columns = (packed_stream.ROWS if is_packed else gemv_ring.COLUMNS) * gemv_ring.BLOCK_WARPS // launch.team_warps
    return -(-product.weight_rows // (columns * multiplying))


def costs() -> Iterator[Cost]:
    """Each kind of weights with one adapter and with eight."""
    for weights in WEIGHTS:
        for sequences, adapters in ((1, 1), (32, 1), (32, 8)):
            yield cost(weights, sequences, adapters)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the table to this file, too")
    options = parser.parse_args()
    rows, steps = errors(list(predicted(measured_rows()))), errors([(step, step.before_s()) for step in STEPS])
    cases = list(costs())
    found = {
        "command": "python -m tools.kernel_costs.adapter_costs",
        "what": "shares that adapters of rank 16 on all maps add to Qwen3-8B's decode steps on an H200, modelled",
        "error_of_launches": {"median": round(rows[0], 3), "worst": round(rows[1], 3)},
        "error_of_steps": {"median": round(steps[0], 3), "worst": round(steps[1], 3)},
        "cases": [{**asdict(each), "share": round(each.share, 4)} for each in cases],
    }
    print("| weights | sequences | adapters | step, ms | bytes, us | ends | counting | shrinking | tiers | share |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for each in cases:
        parts = (each.bytes_s, each.ends_s, each.counting_s, each.shrinking_s, each.tiers_s)
        print(
            f"| {each.weights} | {each.sequences} | {each.adapters} | {each.base_s * 1e3:.2f} |"
            f" {' | '.join(f'{part * 1e6:.0f}' for part in parts)} | {each.share:.1%} |"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
