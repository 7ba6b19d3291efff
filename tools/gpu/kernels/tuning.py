"""Finds the fastest kernel for the products of serving: the measurements of `tools/tune_kernels.py` for the plans'
table. Hopper's splits of K are measured one by one, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import hopper
from runtime.bench.kernels.cases import product_case
from runtime.bench.kernels.table import prepare, verify
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
    inputs, ready = prepare(gpu, product_case("auto", m, n, k, "bf16"), m + n + k)
    product = gemm.Product(m, n, k, "bf16", epilogue=gemm.Epilogue(has_residual=False, is_aligned=True))
    machine = gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters)
    launches = {
        f"{each.tier} {each.tile}".strip(): gemm.plan(product, machine, each.tier, each.tile)
        for each in gemm.candidates(product, machine) if each.tier != "tensor_core"
    }  # fmt: skip
    if not hopper.why_not(product, machine) and not options.is_quick:
        for tile in hopper.SPLIT_TILES:
            for parts in (2, 4, 8):
                launches[f"hopper {tile}/{parts}"] = hopper.plan_tile(product, machine, tile, parts)
    competitors: dict[str, Callable[[], Any]] = {}
    for name, launch in launches.items():
        run = inputs.bind((launch, (*ready.operands, 0, 0, ready.out, m, n, k, 0, *gemm.NO_SQUARES)))
        if options.is_dry:
            run()
        else:
            verify(gpu, product_case("auto", m, n, k, "bf16"), ready, run, name)
        competitors[name] = run
    times = stopwatch_of(options).times(competitors)
    return {"us": {name: round(each.median_us, 2) for name, each in times.items()}}
