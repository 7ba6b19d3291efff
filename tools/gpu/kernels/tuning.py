"""Finds the fastest kernel for the products of serving: the measurements of `tools/tune_kernels.py` for the plans'
table. Hopper's splits of K are measured one by one, too."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba_kernels.cuda.gemm import hopper
from runtime.device.gpu import Gpu
from tools import tune_kernels
from tools.gpu.kernels.speed import stopwatch_of
from tools.gpu.sections import Case, Options, Result

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
ROWS = (16, 32, 64, 128, 256, 512, 1024, 48, 96, 192, 384)


def cases(options: Options) -> Iterator[Case]:
    """A case per product."""
    gpu = Gpu.of(options.device)
    shapes, rows = (tune_kernels.QUICK_SHAPES, (1,)) if options.is_quick else (SHAPES, ROWS)
    for m in rows:
        for n, k in shapes:
            yield Case(f"{m} x {n} x {k}", functools.partial(_measure, gpu, options, m, n, k))


def _measure(gpu: Gpu, options: Options, m: int, n: int, k: int) -> Result:
    """{"us": {"tier tile": median}}; for Hopper's splits, "hopper tile/parts"."""
    splits = [] if options.is_quick else [(tile, parts) for tile in hopper.SPLIT_TILES for parts in (2, 4, 8)]
    _inputs, competitors, _ = tune_kernels.competitors_of(
        gpu, m, n, k, "bf16", more=splits, is_verified=not options.is_dry
    )
    hopeful = {name: run for name, run in competitors.items() if not name.startswith("tensor_core")}
    times = stopwatch_of(options).times(hopeful)
    return {"us": {name: round(each.median_us, 2) for name, each in times.items()}}
