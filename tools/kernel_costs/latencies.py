"""A model of the time of kernels that stream weights, and of decode steps, with its error on an H200's measured rows.

    python -m tools.kernel_costs.latencies      # every row, modelled with its own family left out; steps, modelled

A launch takes a start, the latency of reads that wait for each other, and the largest of three limits, softened where
two are close: device memory, instruction issue, the second-level cache. `fit` finds the four rates from rows; a family
is predicted by the rates of all other families. (`CHAINED`, `CHAINED_S` and `_SHARPNESS` were chosen with all rows in
view.)

A step of one sequence takes the stream of its bytes and a boundary a kernel. The boundary is measured where neighbours
do not fit on a multiprocessor. Where they fit (`residency`), the successor streams meanwhile what it asks for before
`griddepcontrol.wait`, weights or keys: the boundary shrinks by the time of these bytes. Attention that prepares its
heads saves a boundary. None of it was ever measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from numba_kernels.cuda.attention.decode_block import NUM_KEYS, decode_block
from numba_kernels.cuda.attention.decode_tensor_core import HALF_BLOCKS
from numba_kernels.cuda.attention.parts import MIN_PART_KEYS
from numba_kernels.cuda.gemm import gemv, quantised_gemv
from numba_kernels.cuda.gemm.packed_stream import ROWS
from numba_kernels.cuda.gemm.product import Epilogue, Product, machine_of
from numba_kernels.cuda.gemm.rings import hopper_few
from numba_kernels.cuda.gemm.rings.few_weights import Block
from numba_kernels.cuda.gemm.skinny_shape import unpacking
from numba_kernels.cuda.packing import packing_of

MEASUREMENTS = Path(__file__).resolve().parents[2] / "docs" / "measurements"
_FILE = "2026-11-26-gpu-check-{}.json"
CHAINED_S = 1.5e-6  # a read of device memory, with its address computed from an earlier one's number
CHAINED = {
    "attention": 3,
    "experts gather": 2,
    "experts packed_gather": 3,
    "experts tensor_core": 1,
    "experts packed": 1,
}
"""Reads of a family that wait for an earlier one: lengths and block tables before keys; the choice and the table of
experts before weights; largest numbers of x before its digits."""
GEMV_INSTRUCTIONS, SKINNY_INSTRUCTIONS, EXPERTS_INSTRUCTIONS = 375, 300, 1032
"""Machine instructions of a warp for 4 KB: of 16-bit weights, one row and up to 16, and of MXFP4 experts in tiles."""
ROW_INSTRUCTIONS = {"u4": 254, "u8": 95, "e4m3": 334, "e2m1": 498}
"""The same of packed weights and one row, when they were measured."""
E2M1_INSTRUCTIONS = 914  # and of e2m1 and 16 rows, in `skinny`
FEW_INSTRUCTIONS = {16: 118, 32: 122}  # of 16-bit weights in `hopper_few`, in Qwen3-8B's four products
SKINNY_COLUMNS = 32  # for which x is read again
_SHARPNESS = 2  # of the largest limit: 1 would add the limits up


@dataclass(frozen=True, slots=True)
class Row:
    """A measured case.

    Attributes:
        family: of kernels.
        num_bytes: from device memory.
        instructions: of warps, for the weight.
        cache_bytes: asked of the second-level cache.
        seconds: measured.
    """

    family: str
    case: str
    num_bytes: float
    instructions: float
    cache_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of a start, bytes a second from device memory, warp instructions a second of the device, and bytes a
    second from the second-level cache."""

    start_s: float = 6e-6
    memory: float = 5e12
    issue: float = 8e11
    cache: float = 7e12

    def seconds(self, row: Row) -> float:
        """The modelled time of a launch, or of the two or four of a layer's experts."""
        limits = row.num_bytes / self.memory, row.instructions / self.issue, row.cache_bytes / self.cache
        longest: float = sum(limit**_SHARPNESS for limit in limits) ** (1 / _SHARPNESS)
        return self.start_s + CHAINED_S * CHAINED.get(row.family, 0) + longest


def fit(rows: Sequence[Row]) -> Rates:
    """The rates with the least errors, by steps along one rate at a time: the same rows give the same rates."""

    def loss(rates: Rates) -> float:
        errors = [abs(math.log(rates.seconds(row) / row.seconds)) for row in rows]
        return fmean(errors) + 0.15 * max(errors)

    best, step = Rates(), 0.3
    least = loss(best)
    while step > 0.004:
        is_better = False
        for name in ("start_s", "memory", "issue", "cache"):
            for factor in (math.exp(step), math.exp(-step)):
                values = {each: getattr(best, each) for each in ("start_s", "memory", "issue", "cache")}
                tried = Rates(**values | {name: values[name] * factor})
                found = loss(tried)
                if found < least - 1e-9:
                    best, least, is_better = tried, found, True
        step = step if is_better else step / 2
    return best


def predicted(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Each row with its modelled seconds, by rates of the other families alone."""
    for family in dict.fromkeys(row.family for row in rows):
        rates = fit([row for row in rows if row.family != family])
        yield from ((row, rates.seconds(row)) for row in rows if row.family == family)


def errors(pairs: Sequence[tuple[Any, float]]) -> tuple[float, float]:
    """The median and the largest error, as shares of what was measured."""
    shares = [abs(modelled / row.seconds - 1) for row, modelled in pairs]
    return median(shares), max(shares)


# Rows of the files


def measured_rows() -> list[Row]:
    """Products of 1 to 16 rows, experts of 1 to 64 tokens and decode attention: those whose instructions are counted.
    Measured before weights came through rings."""
    rows = [
        row for section, make, run in (
            ("kernels", _plain, "h200-first"), ("quantized speed", _quantised, "h200-evening"),
            ("experts speed", _experts, "h200-evening"),
        ) for case, result, seconds in _cases(run, section) for row in [make(case, result, seconds)] if row is not None
    ]  # fmt: skip
    if len(rows) < 40:
        raise RuntimeError(f"{len(rows)} rows of measurements, at least 40 are needed")
    return rows


def _cases(run: str, section: str) -> Iterator[tuple[str, dict[str, Any], float]]:
    found = json.loads((MEASUREMENTS / _FILE.format(run)).read_text(encoding="utf-8"))["sections"][section]["cases"]
    for case, each in found.items():
        result = each.get("result", each)
        if "times" in result:
            yield case, result, result["times"]["ours"]["median_us"] * 1e-6


def _plain(case: str, result: dict[str, Any], seconds: float) -> Row | None:
    num_bytes = float(result["least_bytes"])
    product = re.match(r"gemm auto bf16, (\d+) x (\d+) x (\d+)", case)
    if product is None:
        is_decode = re.match(r"attention auto bf16, \d+ x 1 queries", case)
        return Row("attention", case, num_bytes, 0, num_bytes, seconds) if is_decode else None
    m, n, k = map(int, product.groups())
    if m == 1:
        return Row("gemv", case, num_bytes, n * k / 2048 * GEMV_INSTRUCTIONS, num_bytes, seconds)
    if m not in (4, 16):
        return None
    x_bytes = n / SKINNY_COLUMNS * m * k * 2
    return Row("skinny", case, num_bytes, n * k / 2048 * SKINNY_INSTRUCTIONS, num_bytes + x_bytes, seconds)


def _quantised(case: str, result: dict[str, Any], seconds: float) -> Row | None:
    (kernel, *others), num_bytes = result["kernels"], float(result["least_bytes"])
    m, n, k = (int(each) for each in re.findall(r"(\d+) x (\d+) x (\d+)", case)[0])
    found = re.match(r"gemm_(packed_row|few_rows)_(.*?)_bf16", kernel)  # as the two tiers were called then
    packing = None if found is None else packing_of(found[2])
    if found is None or others or packing is None or m > 16:
        return None
    weight_bytes = num_bytes - 2 * m * (n + k)
    if found[1] == "packed_row":
        instructions = weight_bytes / 4096 * ROW_INSTRUCTIONS[packing.element]
        return Row("quantised_gemv", case, num_bytes, instructions, num_bytes, seconds)
    count = E2M1_INSTRUCTIONS if packing.element == "e2m1" else unpacking(packing.name)
    instructions = weight_bytes / 4096 * count
    x_bytes = n / SKINNY_COLUMNS * 16 * k * 2
    return Row("skinny, packed", case, num_bytes, instructions, num_bytes + x_bytes, seconds)


def _experts(case: str, result: dict[str, Any], seconds: float) -> Row | None:
    kernels, num_bytes = " ".join(result["kernels"]), float(result["least_bytes"])
    packed = re.search(r"packed_gather_([a-z]+\d[a-z0-9]*)", kernels)
    if packed is not None:
        count = ROW_INSTRUCTIONS[packed[1]]
        return Row("experts packed_gather", case, num_bytes, num_bytes / 4096 * count, num_bytes, seconds)
    if "experts_gather" in kernels:
        return Row("experts gather", case, num_bytes, num_bytes / 4096 * GEMV_INSTRUCTIONS, num_bytes, seconds)
    if "experts_tensor_core_bf16_16x" in kernels:
        return Row("experts tensor_core", case, num_bytes, 0, num_bytes, seconds)
    if "experts_packed_e2m1_g32_exponents_bf16_16" in kernels:
        return Row("experts packed", case, num_bytes, num_bytes / 4096 * EXPERTS_INSTRUCTIONS, num_bytes, seconds)
    return None


# Steps of one sequence

READ_BYTES = 4.283e12  # a second, measured on an H200
CHAIN = 144, 13.89e9, 3715e-6
"""Products of one row, their bytes and seconds, where neighbours do not fit: "graph of a step" in
docs/measurements/2026-11-26-gpu-check-h200.json."""
BOUNDARY_S = (CHAIN[2] - CHAIN[1] / READ_BYTES) / CHAIN[0]
MACHINE = machine_of("sm_90a", 132)
Asked = tuple[int, float]
"""Equal launches: how many, and the bytes that each asks for before it waits for the previous grid."""


def _hidden_s(asked: Sequence[Asked]) -> float:
    """The time of boundaries that streams of these bytes take."""
    return sum(count * min(BOUNDARY_S, num_bytes / READ_BYTES) for count, num_bytes in asked)


def _asked_weights(rows: int, n: int, k: int, weight: str, activation: str) -> float:
    """The bytes of a weight that the rings of one or two rows hold, by the launch's plan."""
    product = Product(rows, n, k, "bf16", weight, epilogue=Epilogue(activation=activation))
    tier, columns = (gemv, gemv.COLUMNS[1]) if weight == "bf16" else (quantised_gemv, ROWS)
    launch = tier.plan(product, MACHINE)
    x_bytes = 2 * rows * k if weight == "bf16" else quantised_gemv.rows_bytes(product)
    tiles, blocks = math.ceil(product.weight_rows / (columns * launch.block[2])), launch.grid[0]
    tile_bytes, ring_bytes = product.weight_bytes / tiles, launch.shared_bytes - x_bytes
    return float(sum(min(ring_bytes, len(range(block, tiles, blocks)) * tile_bytes) for block in range(blocks)))


def _asked_keys(seqs: int, context: int, kv_heads: int, head_dim: int) -> float:
    """The bytes of keys and values that decode attention's warps ask for: two tiles of keys, and one of values."""
    block = decode_block("bf16", head_dim, 8)
    turns = math.ceil(context / block.turn_keys)
    run = math.ceil(seqs * turns / (MACHINE.num_multiprocessors * HALF_BLOCKS // kv_heads))
    run = max(run, MIN_PART_KEYS // block.turn_keys)
    num_blocks = seqs * math.ceil(turns / run) * kv_heads
    return num_blocks * (3 if run > 1 else 2) * block.warps * NUM_KEYS * head_dim * 2


@dataclass(frozen=True, slots=True)
class Step:
    """A model's decode step of one sequence.

    Attributes:
        least_s: the stream of its bytes.
        num_kernels: of its graph.
        asked: what its kernels ask for early.
        seconds: measured before weights came through rings.
        num_gone: kernels that it has no more since: those that prepared heads, which attention does now, and norms,
            which products of packed weights apply.
    """

    case: str
    least_s: float
    num_kernels: int
    asked: tuple[Asked, ...]
    seconds: float
    num_gone: int

    def before_s(self) -> float:
        """The time if no neighbours fit."""
        return self.least_s + self.num_kernels * BOUNDARY_S

    def now_s(self) -> float:
        """The time if they fit, never measured."""
        return self.before_s() - _hidden_s(self.asked) - self.num_gone * BOUNDARY_S


def _qwen3(layers: int, hidden: int, inner: int, heads: int, weight: str, seqs: int = 1) -> tuple[Asked, ...]:
    """Products of a Qwen3 (q, k and v; o; gate and up; down), and attention with 1,024 tokens a sequence."""
    sizes = (heads + 16 * 128, hidden, ""), (hidden, heads, ""), (inner, hidden, "silu"), (hidden, inner, "")
    products = tuple((layers, _asked_weights(seqs, n, k, weight, activation)) for n, k, activation in sizes)
    return *products, (layers, _asked_keys(seqs, 1024, 8, 128))


STEPS = (
    Step("Qwen3-8B bf16", 3.57e-3, 219, _qwen3(36, 4096, 12_288, 4096, "bf16"), 4.45e-3, 36),
    Step("Qwen3-8B int4", 1.16e-3, 293, _qwen3(36, 4096, 12_288, 4096, "u4_g128"), 2.12e-3, 108),
    Step("Qwen3-8B FP8 blocks", 1.95e-3, 293, _qwen3(36, 4096, 12_288, 4096, "e4m3_g128"), 3.03e-3, 108),
    Step(
        "gpt-oss-20b", 0.87e-3, 171,
        (
            (24, _asked_weights(1, 5120, 2880, "bf16", "")), (24, _asked_weights(1, 2880, 4096, "bf16", "")),
            (24, 132 * (68 << 10)), (12, _asked_keys(1, 1024, 8, 64)),
        ), 1.75e-3, 24,
    ),
    Step("Qwen3-0.6B bf16", 0.31e-3, 171, _qwen3(28, 1024, 3072, 2048, "bf16"), 0.81e-3, 28),
)  # fmt: skip


# Steps of several sequences, and prompts

Work = tuple[float, float, float, float]
"""Equal launches: how many, bytes from device memory, instructions of warps, bytes from the second-level cache."""
TENSOR_FLOPS, ATTENTION_FLOPS, BYTE_FLOPS = 790e12, 480e12, 1088e12
"""A second: products of bfloat16 and attention of a prompt, measured; of e4m3 with groups' scales, `hopper_bytes`'
model, never measured."""
LAYERS, HEAD_BYTES, TOKEN_BYTES = 36, 1.24e9, 147_456  # Qwen3-8B: its output matrix, a token's keys and values
SIZES = (6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288)  # q, k and v; o; gate and up; down
PROMPT = 2048


@dataclass(frozen=True, slots=True)
class BatchStep:
    """A model's step of several sequences, or a prompt.

    Attributes:
        before: the kernels that were measured.
        now: those of today.
        num_before, num_now: kernels of the graph.
        asked: what today's kernels ask for early.
        seconds: measured.
        more_s: seconds before and now that are no stream: a prompt's arithmetic.
    """

    case: str
    before: tuple[Work, ...]
    now: tuple[Work, ...]
    num_before: int
    num_now: int
    asked: tuple[Asked, ...]
    seconds: float
    more_s: tuple[float, float] = (0.0, 0.0)

    def before_s(self, rates: Rates) -> float:
        """The time of the measured kernels."""
        return _total(self.before, rates) + self.num_before * BOUNDARY_S + self.more_s[0]

    def now_s(self, rates: Rates) -> float:
        """The time of today's kernels, never measured."""
        boundaries = self.num_now * BOUNDARY_S - _hidden_s(self.asked)
        return _total(self.now, rates) + boundaries + self.more_s[1]


def _total(works: Sequence[Work], rates: Rates) -> float:
    without = dataclasses.replace(rates, start_s=0.0)
    return sum(work[0] * without.seconds(Row("", "", work[1], work[2], work[3], 0.0)) for work in works)


def _products(a_number: float, instructions: float, x_columns: int, rows: int) -> tuple[Work, ...]:
    """Qwen3-8B's, for so many instructions for 4 KB of the weight; x is read again for each `x_columns` columns."""
    return tuple(
        (
            LAYERS, n * k * a_number, n * k * a_number / 4096 * instructions,
            n * k * a_number + n / x_columns * rows * k * 2,
        )
        for n, k in SIZES
    )  # fmt: skip


def _rest(seqs: int, context: int) -> tuple[Work, ...]:
    """Attention of Qwen3-8B, and its output matrix."""
    key_bytes = seqs * context * TOKEN_BYTES / LAYERS
    return (LAYERS, key_bytes, 0, key_bytes), (1, HEAD_BYTES, 0, HEAD_BYTES)


def _few(weight: str, rows: int) -> tuple[Work, ...]:
    """Products in `hopper_few`, as it plans them on an H200."""
    products = [Product(rows, n, k, "bf16", weight) for n, k in SIZES]
    width = 16 if rows <= 16 else 32
    instructions = FEW_INSTRUCTIONS[width] if weight == "bf16" else hopper_few.instructions(weight, width)
    return tuple(
        (LAYERS, each.weight_bytes, each.weight_bytes / 4096 * instructions, hopper_few.cache_reads(each, MACHINE))
        for each in products
    )


def _few_asked(weight: str, seqs: int, context: int) -> tuple[Asked, ...]:
    """The bytes of their rings, and of attention's first tiles."""
    block = Block(16 if seqs <= 16 else 32, "" if weight == "bf16" else weight)
    ring_bytes = MACHINE.num_multiprocessors * block.num_stages * (block.weight_bytes + block.scale_bytes)
    return (4 * LAYERS, ring_bytes), (LAYERS, _asked_keys(seqs, context, 8, 128))


def _gpt_oss(instructions: float, cache_share: float) -> tuple[Work, ...]:
    """gpt-oss-20b with 32 sequences of 256 tokens: all experts; attention's products; the output matrix; keys."""
    experts, products, head, keys = 433e6, 53.1e6, 1.16e9, 32 * 256 * 2048
    return (
        (24, experts, experts / 4096 * instructions, experts * cache_share), (48, products / 2, 0, products / 2),
        (24, keys, 0, keys), (1, head, 0, head),
    )  # fmt: skip


_WEIGHTS = sum(n * k for n, k in SIZES) * LAYERS
_ATTENTION_S = 2.0 * PROMPT**2 * 4096 * LAYERS / ATTENTION_FLOPS
_BF16_S = 2.0 * PROMPT * _WEIGHTS / TENSOR_FLOPS + _ATTENTION_S
BATCHES = (
    BatchStep("Qwen3-8B bf16, 8 of 1,024", (*_products(2, 300, 32, 16), *_rest(8, 1024)),
              (*_few("bf16", 8), *_rest(8, 1024)), 219, 183, _few_asked("bf16", 8, 1024), 4.84e-3),
    BatchStep("bf16, 32 of 1,024", (*_products(2, 300, 32, 32), *_rest(32, 1024)),
              (*_few("bf16", 32), *_rest(32, 1024)), 219, 183, _few_asked("bf16", 32, 1024), 6.38e-3),
    BatchStep("int4, 2 of 1,024", (*_products(0.516, 624, 32, 16), *_rest(2, 1024)),
              (*_products(0.516, 270, 10**9, 2), *_rest(2, 1024)), 293, 185,
              _qwen3(36, 4096, 12_288, 4096, "u4_g128", 2), 3.24e-3),
    BatchStep("int4, 32 of 256", (*_products(0.516, 749, 32, 32), *_rest(32, 256)),
              (*_few("u4_g128", 32), *_rest(32, 256)), 293, 257, _few_asked("u4_g128", 32, 256), 4.60e-3),
    BatchStep("FP8 blocks, 32 of 256", (*_products(1.03, 569, 32, 32), *_rest(32, 256)),
              (*_few("e4m3_g128", 32), *_rest(32, 256)), 293, 257, _few_asked("e4m3_g128", 32, 256), 5.29e-3),
    BatchStep("gpt-oss-20b, 32 of 256", _gpt_oss(1032, 1.38), _gpt_oss(674, 1.08), 222, 198,
              ((72, 132 * 83_285), (12, _asked_keys(32, 256, 8, 64))), 5.28e-3),
    BatchStep("bf16, prompt of 2,048", (), (), 219, 219, (), 46.57e-3, more_s=(_BF16_S, _BF16_S)),
    BatchStep("FP8 blocks, prompt of 2,048", (), (), 363, 363, (), 51.29e-3, more_s=(
        _BF16_S + 3 * _WEIGHTS / READ_BYTES, 2.0 * PROMPT * _WEIGHTS / BYTE_FLOPS + _ATTENTION_S)),
)  # fmt: skip
"""Those of the goals. gpt-oss hides q, k, v, o and 51 KB of down."""


def page() -> str:
    """The rows and steps as tables, with the model's error."""
    measured = measured_rows()
    pairs = list(predicted(measured))
    steps = [(step, step.before_s()) for step in STEPS]
    lines = ["| family | case | measured, µs | modelled | error |", "|---|---|--:|--:|--:|"]
    lines += [_line(f"{row.family} | {row.case}", row.seconds, modelled, 1e6, ".1f") for row, modelled in pairs]
    middle, worst = errors(pairs)
    lines += ["", f"{len(pairs)} rows, each family's by the others: median error {middle:.1%}, worst {worst:.1%}.", ""]
    lines += ["| family | rows | median error | worst |", "|---|--:|--:|--:|"]
    for family in dict.fromkeys(row.family for row in measured):
        own = [pair for pair in pairs if pair[0].family == family]
        middle, worst = errors(own)
        lines.append(f"| {family} | {len(own)} | {middle:.1%} | {worst:.1%} |")
    lines += ["", "| step | measured before, ms | modelled | error | now, modelled, never measured |"]
    lines += ["|---|--:|--:|--:|--:|"]
    lines += [
        f"{_line(step.case, step.seconds, modelled, 1e3, '.2f')} {step.now_s() * 1e3:.2f} |" for step, modelled in steps
    ]
    rates = fit(measured)
    batches = [(step, step.before_s(rates)) for step in BATCHES]
    lines += [
        f"{_line(step.case, step.seconds, modelled, 1e3, '.2f')} {step.now_s(rates) * 1e3:.2f} |"
        for step, modelled in batches
    ]
    middle, worst = errors([*steps, *batches])
    return "\n".join([*lines, "", f"{len(steps + batches)} steps: median error {middle:.1%}, worst {worst:.1%}.", ""])


def _line(case: str, measured: float, modelled: float, scale: float, digits: str) -> str:
    return f"| {case} | {measured * scale:{digits}} | {modelled * scale:{digits}} | {modelled / measured - 1:+.0%} |"


if __name__ == "__main__":
    print(page())
