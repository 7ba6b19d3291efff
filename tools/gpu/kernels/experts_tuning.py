"""Finds the fastest tile by rows per expert, which `runtime.backends.cuda_experts` chooses by models.

`mma.sync` is compared with each tile of `wgmma`. Quantised experts are dequantised before these, or unpacked by them.
The layers are those of "experts speed", which defines and verifies them; here tiles are compared with each other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np

from numba_kernels.cuda.experts import hopper
from numba_kernels.cuda.gemm.hopper import ARCH
from numba_kernels.cuda.gemm.hopper_ring import Tile
from runtime import ops
from runtime.backends import cuda_experts
from runtime.bench.kernels.cases import TOLERANCE, Inputs
from runtime.bench.kernels.timing import Stopwatch
from runtime.routing import Routing, RoutingRule
from tools.gpu.kernels.quantized import put
from tools.gpu.kernels.quantized_speed import MIXTURES, Mixture, Recorded, mixture_weights
from tools.gpu.kernels.speed import stopwatch_of
from tools.gpu.sections import Case, Options, Result

ROWS = {
    ("gpt-oss-20b", "mxfp4"): (128, 8, 512, 64, 2, 256, 32), ("gpt-oss-20b", "bf16"): (32, 64, 128, 192, 256),
    ("qwen3-30b-a3b", "bf16"): (32, 64, 128, 256),
}  # fmt: skip
"""Rows of each expert, by model and format."""


def cases(options: Options) -> Iterator[Case]:
    """One case for each number of rows."""
    stopwatch = stopwatch_of(options)
    if options.is_quick:
        tiny = Mixture("tiny", "mxfp4", 6, 3, 2, 64, 64)
        yield Case(tiny.name, functools.partial(_times, options, stopwatch, tiny))
        return
    for (model, name), counts in ROWS.items():
        num_experts, top_k, *_ = sizes = MIXTURES[model]
        for rows in counts:
            mixture = Mixture(model, name, rows * num_experts // top_k, *sizes)
            yield Case(f"{model}, {name}, {rows} rows each", functools.partial(_times, options, stopwatch, mixture))


def _times(options: Options, stopwatch: Stopwatch, mixture: Mixture) -> Result:
    """Microseconds of both products with sorting and sum, by tile. All experts have equally many rows.

    Raises AssertionError if a tile's results are not near those of `mma.sync`.
    """
    gpu, tokens, top_k = stopwatch.gpu, mixture.tokens, mixture.top_k
    gate_up, down = mixture_weights(gpu, mixture.format, mixture.num_experts, mixture.hidden, mixture.inner)[0]
    x = put(gpu, Inputs(gpu, 1).normal((tokens, mixture.hidden), "bf16"))
    turns = np.arange(tokens * top_k).reshape(tokens, top_k)
    ids = np.random.default_rng(0).permutation(mixture.num_experts)[turns % mixture.num_experts].astype(np.int32)
    rule = RoutingRule(num_experts=mixture.num_experts, top_k=top_k)
    chosen = Routing(put(gpu, ids), put(gpu, np.full(ids.shape, 1 / top_k, np.float32)), rule)

    def recorded(tile: Tile | None) -> Recorded:
        with patch.object(cuda_experts, "_hopper_tile", lambda *_: tile):
            return Recorded(gpu, lambda: ops.experts(x, chosen, gate_up, down, "silu"))

    tiles: dict[str, Tile | None] = {"mma.sync": None, **{str(tile): tile for tile in hopper.TILES}}
    if gate_up.packing is not None and gpu.arch == ARCH:
        tiles |= {f"unpacked {tile}": tile for tile in hopper.UNPACKING_TILES}
    competitors = {name: recorded(tile) for name, tile in tiles.items()}
    if not options.is_dry:
        results = {name: each.result.to("cpu").array.astype(np.float32) for name, each in competitors.items()}
        wanted = results["mma.sync"]
        for name, found in results.items():
            error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
            if not error <= TOLERANCE["bf16"]:
                raise AssertionError(f"{name}: off by {error:.3g} of the largest value of mma.sync's")
    times = stopwatch.times(competitors)
    return {
        "sizes": [tokens, mixture.num_experts, top_k, mixture.hidden, mixture.inner],
        "us": {name: round(each.median_us, 2) for name, each in times.items()},
    }
