"""A product of one row with each kind of loads of its weight: `.nc` loads, which ptxas moves behind the wait for the
grid in front, and plain ones, which stay before it. Alone, and as a chain of dependent launches in a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import Product, gemv, machine_of
from numba_kernels.cuda.specialisation import Launch
from runtime.bench.kernels.cases import Inputs, numpy_dtype
from runtime.device.graph import Graph
from tools.gpu.kernels.speed import stopwatch_of
from tools.gpu.sections import Case, Options, Result

SHAPES = ((4096, 4096), (24576, 4096), (4096, 12288), (1024, 1024))
CHAIN = 36


def cases(options: Options) -> Iterator[Case]:
    shapes = ((128, 256),) if options.is_quick else SHAPES
    for n, k in shapes:
        yield Case(f"{n} x {k}", functools.partial(_times, options, n, k))


def launches(options: Options, n: int, k: int) -> dict[str, Launch]:
    """By the kind of loads."""
    gpu = stopwatch_of(options).gpu
    machine = machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters)
    planned = gemv.plan(Product(1, n, k, "bf16"), machine)
    constants = planned.specialisation.constants
    arguments = [constants[name] for name in ("dtype", "out_dtype", "rows", "is_aligned")]
    return {kind: replace(planned, specialisation=gemv._kernel(*arguments, kind)) for kind in gemv.LOADS}


def _times(options: Options, n: int, k: int) -> Result:
    """Microseconds by the kind of loads, of a launch, and of one in a chain; all give the same bits."""
    stopwatch = stopwatch_of(options)
    gpu, inputs = stopwatch.gpu, Inputs(stopwatch.gpu, n)
    x, out = inputs.put(inputs.normal((1, k), "bf16")), inputs.empty(2 * n)
    weights = [inputs.put_weight(inputs.normal((n, k), "bf16", k**-0.5)) for _ in range(2)]
    found: dict[str, bytes] = {}
    alone: dict[str, Callable[[], None]] = {}
    chains: dict[str, Graph] = {}
    for kind, launch in launches(options, n, k).items():
        gpu.fill(out, 0xFF, 2 * n)
        alone[kind] = inputs.bind((launch, (x, weights[0], 0, 0, out, 1, n, k, 0, *gemm.NO_SQUARES)))
        alone[kind]()
        result = np.empty(n, numpy_dtype("bf16"))
        gpu.read(out, result)
        found[kind] = result.tobytes()

        def chain(launch: Launch = launch) -> None:
            for number in range(2 if options.is_quick else CHAIN):
                gpu.launch(launch, x, weights[number % 2], 0, 0, out, 1, n, k, 0, *gemm.NO_SQUARES)

        chains[kind] = Graph.capture(gpu, chain, is_chained=True)
    if len(set(found.values())) != 1 or np.isnan(result.astype(np.float32)).any():
        raise AssertionError("the kinds of loads give other bits")
    length = 2 if options.is_quick else CHAIN
    times = stopwatch.times({**alone, **{f"chain, {kind}": graph.replay for kind, graph in chains.items()}})
    for graph in chains.values():
        graph.release()
    return {"bytes": 2 * n * k, "chain": length, "times": {kind: each.as_json() for kind, each in times.items()}}
