"""One launch each of new features: a copy by the TMA, a cluster with a multicast, a dependent pair inside a graph, and
a product whose warps reallocate registers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import hopper
from runtime.bench.kernels.case import Inputs, numpy_dtype
from runtime.bench.kernels.operations import product_case
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph
from tools.gpu.kernels.cases import check
from tools.gpu.kernels.first_kernels import CLUSTER, COLUMNS, ROWS, plan_copy
from tools.gpu.sections import Case, Options, Result


def cases(options: Options) -> Iterator[Case]:
    gpu = Gpu.of(options.device)
    if gpu.capability >= (9, 0):
        yield Case("copy by TMA", lambda: _copy(gpu, 1))
        yield Case("multicast to a cluster", lambda: _copy(gpu, CLUSTER))
    yield Case("dependent pair in a graph", lambda: _dependent_pair(gpu, options.is_quick))
    if gpu.arch == hopper.ARCH:
        size = 256 if options.is_quick else 1024
        product = product_case("hopper", size, size, 256, tile=hopper.LARGE)
        yield Case("setmaxnreg product", lambda: check(gpu, product))


def _copy(gpu: Gpu, num_blocks: int) -> Result:
    inputs = Inputs(gpu, num_blocks)
    tile = inputs.normal((ROWS, COLUMNS), "bf16")
    target = inputs.empty(num_blocks * tile.nbytes)
    gpu.fill(target, 0xFF, num_blocks * tile.nbytes)
    gpu.launch(plan_copy(num_blocks), inputs.put(tile), target)
    found = np.empty((num_blocks, *tile.shape), tile.dtype)
    gpu.read(target, found)
    if any(each.tobytes() != tile.tobytes() for each in found):
        raise AssertionError("the tile did not arrive as it was sent")
    return {"bytes": found.nbytes}


def _dependent_pair(gpu: Gpu, is_quick: bool) -> Result:
    """y = W x and z = W y; the second may start before the first has ended."""
    size = 128 if is_quick else 2048
    inputs = Inputs(gpu, 3)
    x, weight = inputs.normal((1, size), "bf16"), inputs.normal((size, size), "bf16", size**-0.5)
    product = gemm.Product(1, size, size, "bf16", epilogue=gemm.Epilogue(has_residual=False, is_aligned=True))
    launch = gemm.plan(product, gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters))
    assert launch is not None
    first, weights, y, z = inputs.put(x), inputs.put_weight(weight), inputs.empty(2 * size), inputs.empty(2 * size)

    def work() -> None:
        for source, target in ((first, y), (y, z)):
            gpu.launch(launch, source, weights, 0, 0, target, 1, size, size, 0, *gemm.NO_SQUARES)

    graph = Graph.capture(gpu, work, is_chained=True)
    gpu.fill(y, 0xFF, 2 * size)
    gpu.fill(z, 0xFF, 2 * size)
    graph.replay()
    found = np.empty(size, numpy_dtype("bf16"))
    gpu.read(z, found)
    wide = weight.astype(np.float32)
    between = (wide @ x[0].astype(np.float32)).astype(x.dtype).astype(np.float32)
    error = float(np.abs(found.astype(np.float32) - wide @ between).max() / np.abs(wide @ between).max())
    if not error <= 2e-2:
        raise AssertionError(f"the second product is off by {error:.3g} of its largest value")
    result = {"kernels": [kernel.specialisation.name for kernel in graph.kernels], "error_share": error}
    graph.release()
    return result
