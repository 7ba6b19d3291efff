"""Finds the fastest kernel for 2 to 256 rows of quantised weights: every candidate of a plan, timed by itself.

The candidates are `skinny` in blocks of 16, 32 and 64 rows (up to 16 rows with either number of streams of K),
`mixed_input`, `hopper_packed` with each tile and split of K, rows that are rounded to bytes first, and the weight
dequantised before a 16-bit product. The plans' modelled time of each is in "modelled".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np

from numba_kernels.cuda import dequantize, dynamic_quantisation, gemm
from numba_kernels.cuda.gemm import hopper, hopper_packed, mixed_input, skinny, skinny_shape
from runtime import ops
from runtime.backends import cuda_linear, cuda_plans
from runtime.backends.cuda_plans import Planned
from runtime.bench.kernels.cases import Inputs, sampled
from runtime.bench.kernels.timing import Stopwatch
from runtime.linear.weight import PackedWeight
from tools.gpu.kernels.packed_layers import dynamic_quantisation as numpy_rounded
from tools.gpu.kernels.packed_layers import packed_layer
from tools.gpu.kernels.quantized import errors, put
from tools.gpu.kernels.quantized_speed import Recorded
from tools.gpu.kernels.speed import stopwatch_of
from tools.gpu.sections import Case, Options, Result

FORMATS = ("int4 g128", "fp8", "fp8 blocks", "mxfp4", "int8")
SHAPES = ((8192, 8192), (6144, 4096), (4096, 12288))
ROWS = (16, 2, 64, 32, 128, 8, 17, 48, 96, 256)
HOPPER_FORMATS, HOPPER_ROWS = ("int4 g128", "mxfp4"), (64, 128, 2048, 256, 32, 16, 512)
FULL_FORMATS = FORMATS[:3]
"""With all of these rows; the others have the first three."""


def cases(options: Options) -> Iterator[Case]:
    """A weight and a number of rows each."""
    stopwatch = stopwatch_of(options)
    if options.is_real and not options.is_dry:
        stopwatch = Stopwatch(stopwatch.gpu, 10)
    for width, depth in [(64, 128)] if options.is_quick else SHAPES:
        for name in FORMATS[:2] if options.is_quick else FORMATS:
            for rows in (17,) if options.is_quick else ROWS if name in FULL_FORMATS else ROWS[:3]:
                run = functools.partial(_measure, options, stopwatch, name, rows, width, depth)
                yield Case(f"{name}, {rows} x {width} x {depth}", run)


def hopper_cases(options: Options) -> Iterator[Case]:
    """The same for two formats and one shape, from a decode step's rows to a prompt's, the basis of choosing
    `hopper_packed`."""
    stopwatch = stopwatch_of(options)
    width, depth = (64, 128) if options.is_quick else SHAPES[0]
    for rows in HOPPER_ROWS[:1] if options.is_quick else HOPPER_ROWS:
        for name in HOPPER_FORMATS[:1] if options.is_quick else HOPPER_FORMATS:
            run = functools.partial(_measure, options, stopwatch, name, rows, width, depth)
            yield Case(f"{name}, {rows} x {width} x {depth}", run)


def _measure(options: Options, stopwatch: Stopwatch, name: str, rows: int, width: int, depth: int) -> Result:
    """{"us": {way: median}, "modelled": {way: µs}, "plan": its way}. Each is verified first."""
    gpu, layer = stopwatch.gpu, packed_layer(stopwatch.gpu, name, width, depth)
    weight = layer.weight
    assert isinstance(weight, PackedWeight)
    x = Inputs(gpu, rows).normal((rows, depth), "bf16")
    given, some = put(gpu, x), sampled(rows)
    product = gemm.Product(
        rows, width, depth, "bf16", weight.elements, epilogue=gemm.Epilogue(has_residual=False, is_aligned=True)
    )
    machine = gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters)
    found = _ways(weight, product, machine)
    competitors: dict[str, Any] = {}
    for way, (planned, _) in found.items():
        weight.plans.clear()
        with patch.object(cuda_linear, "plan", lambda *_, planned=planned, **__: planned):
            ours = competitors[way] = Recorded(gpu, lambda: ops.linear(given, weight))
        if not options.is_dry:
            result = ours.result.to("cpu").array[some].astype(np.float32)
            errors(result, layer.expected(numpy_rounded(x[some], weight) if planned.rounding else x[some]))
    weight.plans.clear()
    chosen = cuda_plans.plan(gpu, weight, product)
    way_of_plan = next((way for way, (planned, _) in found.items() if _is_same(planned, chosen)), "another")
    times = stopwatch.times(competitors)
    return {
        "us": {way: round(each.median_us, 2) for way, each in times.items()},
        "modelled": {way: round(seconds * 1e6, 1) for way, (_, seconds) in found.items()},
        "plan": way_of_plan,
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


def _is_same(one: Planned, other: Planned) -> bool:
    """Whether two candidates have the same launches."""

    def key(planned: Planned) -> tuple[Any, ...]:
        launch = planned.launch
        assert launch is not None
        return (
            launch.specialisation.name, launch.grid, launch.cluster, planned.dequantization is None,
            planned.rounding is None,
        )  # fmt: skip

    return key(one) == key(other)
