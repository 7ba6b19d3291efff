"""Finds the fastest kernel: every candidate of a plan, verified and then timed by itself.

Products of floats are the measurements of `tools/tune_kernels.py` for the plans' table, with Hopper's splits of K one
by one. Candidates for 2 to 256 rows of quantised weights are `skinny` in blocks of 16, 32 and 64 rows (up to 16 rows
with either number of streams of K), `mixed_input`, `hopper_packed` with each tile and split of K, rows that are
rounded to bytes first, and the weight dequantised before a 16-bit product.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

from numba_kernels.cuda import dequantize, dynamic_quantisation, gemm
from numba_kernels.cuda.experts import hopper as experts_hopper
from numba_kernels.cuda.gemm import hopper, hopper_packed, mixed_input, skinny, skinny_shape
from numba_kernels.cuda.gemm.hopper_ring import Tile
from runtime import ops
from runtime.backends import cuda_linear, cuda_plans
from runtime.backends.cuda_plans import Planned
from runtime.bench.kernels.case import Inputs, prepare, sampled, verify
from runtime.bench.kernels.operations import QWEN3_8B
from runtime.bench.kernels.timing import Stopwatch, Times
from runtime.device.gpu import Gpu
from runtime.linear.weight import PackedWeight
from tools import tune_kernels
from tools.gpu.kernels.cases import stopwatch_of
from tools.gpu.sections import Case, Options, Result
from tools.kernel_cases.experts import Mixture
from tools.kernel_cases.operation import put, recorded
from tools.kernel_cases.quantised import served_case
from tools.kernel_cases.quantised_layers import dynamic_quantisation as numpy_rounded
from tools.kernel_cases.quantised_layers import packed_layer
from tools.kernel_cases.suites import MIXTURES, TIMED_SHAPES

FLOAT_ROWS = (16, 32, 64, 128, 256, 512, 1024, 48, 96, 192, 384)
FORMATS = ("int4 g128", "fp8", "fp8 blocks", "mxfp4", "int8")
ROWS = (16, 2, 64, 32, 128, 8, 17, 48, 96, 256)
FULL_FORMATS = FORMATS[:3]
"""With all of these rows; the others have the first three."""
HOPPER_FORMATS, HOPPER_ROWS = ("int4 g128", "mxfp4"), (64, 128, 2048, 256, 32, 16, 512)
TUNED_ROWS = {
    ("gpt-oss-20b", "mxfp4"): (128, 8, 512, 64, 2, 256, 32), ("gpt-oss-20b", "bf16"): (32, 64, 128, 192, 256),
    ("qwen3-30b-a3b", "bf16"): (32, 64, 128, 256),
}  # fmt: skip
"""Rows of each expert, by model and format."""


def _medians(times: Mapping[str, Times]) -> dict[str, float]:
    return {name: round(each.median_us, 2) for name, each in times.items()}


def floats(options: Options) -> Iterator[Case]:
    """A case per product."""
    gpu = Gpu.of(options.device)
    shapes, rows = (tune_kernels.QUICK_SHAPES, (1,)) if options.is_quick else (QWEN3_8B, FLOAT_ROWS)
    for m in rows:
        for n, k in shapes:
            yield Case(f"{m} x {n} x {k}", functools.partial(_floats, gpu, options, m, n, k))


def _floats(gpu: Gpu, options: Options, m: int, n: int, k: int) -> Result:
    """{"us": {"tier tile": median}}; for Hopper's splits, "hopper tile/parts"."""
    splits = [] if options.is_quick else [(tile, parts) for tile in hopper.SPLIT_TILES for parts in (2, 4, 8)]
    _inputs, competitors, _ = tune_kernels.competitors_of(
        gpu, m, n, k, "bf16", more=splits, is_verified=not options.is_dry
    )
    hopeful = {name: run for name, run in competitors.items() if not name.startswith("tensor_core")}
    return {"us": _medians(stopwatch_of(options).times(hopeful))}


def packed(options: Options) -> Iterator[Case]:
    """A quantised weight and a number of rows each."""
    stopwatch = stopwatch_of(options)
    if options.is_real and not options.is_dry:
        stopwatch = Stopwatch(stopwatch.gpu, 10)
    for n, k in [(64, 128)] if options.is_quick else TIMED_SHAPES:
        for name in FORMATS[:2] if options.is_quick else FORMATS:
            for m in (17,) if options.is_quick else ROWS if name in FULL_FORMATS else ROWS[:3]:
                yield Case(f"{name}, {m} x {n} x {k}", functools.partial(_packed, options, stopwatch, name, m, n, k))


def hopper_cases(options: Options) -> Iterator[Case]:
    """The same for two formats and one shape, from a decode step's rows to a prompt's, the basis of choosing
    `hopper_packed`."""
    stopwatch = stopwatch_of(options)
    n, k = (64, 128) if options.is_quick else TIMED_SHAPES[0]
    for m in HOPPER_ROWS[:1] if options.is_quick else HOPPER_ROWS:
        for name in HOPPER_FORMATS[:1] if options.is_quick else HOPPER_FORMATS:
            yield Case(f"{name}, {m} x {n} x {k}", functools.partial(_packed, options, stopwatch, name, m, n, k))


def _packed(options: Options, stopwatch: Stopwatch, name: str, m: int, n: int, k: int) -> Result:
    """{"us": {way: median}, "modelled": {way: µs by the plans' models}, "plan": its way}."""
    gpu, case, layer = stopwatch.gpu, served_case(name, m, n, k), packed_layer(stopwatch.gpu, name, n, k)
    weight = layer.weight
    assert isinstance(weight, PackedWeight)
    x, rows = Inputs(gpu, m).normal((m, k), "bf16"), sampled(m)
    given = put(gpu, x)
    product = gemm.Product(
        m, n, k, "bf16", weight.elements, epilogue=gemm.Epilogue(has_residual=False, is_aligned=True)
    )
    machine = gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters)
    found = _ways(weight, product, machine)
    competitors: dict[str, Any] = {}
    for way, (planned, _) in found.items():
        weight.plans.clear()
        expected = layer.expected(numpy_rounded(x[rows], weight) if planned.rounding else x[rows])
        with patch.object(cuda_linear, "plan", lambda *_, planned=planned, **__: planned):
            ready = recorded(gpu, lambda: ops.linear(given, weight), rows, expected)
        competitors[way] = ready.run
        if not options.is_dry:
            verify(gpu, case, ready, whose=way)
    weight.plans.clear()
    chosen = cuda_plans.plan(gpu, weight, product)
    return {
        "us": _medians(stopwatch.times(competitors)),
        "modelled": {way: round(seconds * 1e6, 1) for way, (_, seconds) in found.items()},
        "plan": next((way for way, (planned, _) in found.items() if _key(planned) == _key(chosen)), "another"),
    }


def _ways(weight: PackedWeight, product: gemm.Product, machine: gemm.Machine) -> dict[str, tuple[Planned, float]]:
    """The launches of each candidate, and their modelled times."""
    found, best = dict[str, tuple[Planned, float]](), dict[tuple[int, int], skinny_shape.Shape]()
    for shape in skinny_shape.shapes(product, machine):
        kind = shape.row_tiles, shape.num_streams if product.m <= 16 else 0
        known = best.get(kind)
        seconds = skinny_shape.seconds_of(product, machine, shape)
        if known is None or seconds < skinny_shape.seconds_of(product, machine, known):
            best[kind] = shape
    for (tiles, _), shape in best.items():
        planned = Planned(skinny.plan_shape(product, machine, shape))
        name = f"skinny of {16 * tiles} rows, {shape.num_streams} streams, {shape.num_blocks} blocks"
        found[name] = planned, skinny_shape.seconds_of(product, machine, shape)
    if product.m > skinny_shape.MAX_ROWS:
        planned = Planned(mixed_input.plan(product, machine))
        found["mixed_input"] = planned, mixed_input.seconds(product, machine)
    if not hopper_packed.why_not(product, machine):
        for tile, parts in hopper_packed.options(product.k):
            seconds = hopper_packed.tile_seconds(product, machine, tile, parts)
            found[f"hopper_packed {tile} in {parts}"] = (
                Planned(hopper.plan_tile(product, machine, tile, parts)), seconds
            )  # fmt: skip
    if cuda_plans.can_round(weight, product, machine):
        found["rounded"] = (
            cuda_plans.plan_rounded(weight, product, machine, has_norm=False),
            (
                dynamic_quantisation.seconds(product.m, product.k, machine.memory_bytes)
                + cuda_plans.rounded_tier(product, machine).seconds(product, machine)
            ),
        )
    plain = gemm.Product(
        product.m, product.n, product.k, product.x, epilogue=gemm.Epilogue(has_residual=False, is_aligned=True)
    )
    made = dequantize.plan(weight.packing, *weight.shape, product.x)
    seconds = dequantize.seconds(weight.packing, *weight.shape, product.x, machine.sustained_bytes)
    found["dequantised"] = Planned(gemm.plan(plain, machine), made), seconds + gemm.modelled_s(plain, machine)
    return found


def _key(planned: Planned) -> tuple[Any, ...]:
    """Equal for two candidates with the same launches."""
    launch = planned.launch
    assert launch is not None
    return (
        launch.specialisation.name, launch.grid, launch.cluster, planned.dequantization is None,
        planned.rounding is None,
    )  # fmt: skip


def experts(options: Options) -> Iterator[Case]:
    """The fastest tile by rows per expert, which `runtime.backends.cuda_plans` chooses by models: `mma.sync` beside
    each tile of `wgmma`, for quantised experts dequantised before it, or unpacked by it."""
    stopwatch = stopwatch_of(options)
    found = [Mixture("tiny", "mxfp4", 6, 3, 2, 64, 64)]
    if not options.is_quick:
        found = [
            Mixture(model, name, rows * MIXTURES[model][0] // MIXTURES[model][1], *MIXTURES[model])
            for (model, name), counts in TUNED_ROWS.items() for rows in counts
        ]  # fmt: skip
    for each in found:
        yield Case(f"{each.name}, {each.tokens} tokens", functools.partial(_tiles, options, stopwatch, each))


def _tiles(options: Options, stopwatch: Stopwatch, mixture: Mixture) -> Result:
    """Microseconds of both products with sorting and sum, by tile. All experts have equally many rows."""
    gpu, case = stopwatch.gpu, mixture.case()
    tiles: dict[str, Tile | None] = {"mma.sync": None, **{str(tile): tile for tile in experts_hopper.TILES}}
    if mixture.format != "bf16" and gpu.arch == hopper.ARCH:
        tiles |= {f"unpacked {tile}": tile for tile in experts_hopper.UNPACKING_TILES}
    competitors, kept = {}, []
    for name, tile in tiles.items():
        with patch.object(cuda_plans, "hopper_tile", lambda *_, tile=tile: tile):
            inputs, ready = prepare(gpu, case, 1)
        if not options.is_dry:
            verify(gpu, case, ready, whose=name)
        competitors[name] = ready.run
        kept.append(inputs)
    return {
        "sizes": [mixture.tokens, mixture.num_experts, mixture.top_k, mixture.hidden, mixture.inner],
        "us": _medians(stopwatch.times(competitors)),
    }
