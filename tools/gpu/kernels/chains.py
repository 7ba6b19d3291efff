"""A decode step's products by rings of shared memory and by loads into registers, in chains of dependent launches and
of plain ones: the time that a boundary takes where neighbours fit on a multiprocessor, and where they do not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba_kernels.cuda import gemm
from numba_kernels.cuda.specialisation import HALF_SHARED_BYTES, Launch
from runtime.bench.kernels.case import Inputs
from runtime.bench.kernels.host_costs import NUM_LAYERS, TINY_LAYER
from runtime.bench.kernels.operations import QWEN3_8B
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph
from tools.gpu.kernels.cases import stopwatch_of
from tools.gpu.sections import Case, Options, Result
from tools.kernel_cases.quantised_layers import FORMATS, float_layer, packed_layer

STORED = ("bf16", "int4 g128", "fp8 blocks", "mxfp4")
ROWS = (1, 2)
REGISTERS_ARCH = "sm_80"  # which has no bulk copies: its plans load weights into registers


def cases(options: Options) -> Iterator[Case]:
    """A case for each format of the weights and number of rows."""
    gpu = Gpu.of(options.device)
    if gpu.arch not in HALF_SHARED_BYTES:
        yield Case("any", lambda: {"skipped": f"{gpu.arch} has no bulk copies"})
        return
    for stored in STORED[:2] if options.is_quick else STORED:
        for rows in ROWS[:1] if options.is_quick else ROWS:
            yield Case(f"{stored}, {rows} rows", functools.partial(_chain, options, stored, rows))


def _chain(options: Options, stored: str, rows: int) -> Result:
    """Times by way and start, all of the same bits. Raises AssertionError if they are not."""
    stopwatch = stopwatch_of(options)
    gpu, num_layers = stopwatch.gpu, 2 if options.is_quick else NUM_LAYERS
    inputs, layer = Inputs(gpu, 7), TINY_LAYER if options.is_quick else QWEN3_8B
    machines = {
        "rings": gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters),
        "registers": gemm.machine_of(REGISTERS_ARCH, gpu.properties.num_sms),
    }  # fmt: skip
    tier, weight_bytes = gemm.TIERS["gemv" if stored == "bf16" else "quantised_gemv"], 0
    launches: dict[str, list[tuple[Launch, tuple[int | float, ...]]]] = {way: [] for way in machines}
    outs = []
    for n, k in layer:
        made = float_layer(gpu, n, k) if stored == "bf16" else packed_layer(gpu, stored, n, k)
        inputs.keep(made)
        name = "" if stored == "bf16" else FORMATS[stored].packing.name
        epilogue = gemm.Epilogue(has_residual=False, is_aligned=True)
        product = gemm.Product(rows, n, k, "bf16", name, epilogue=epilogue)
        weight_bytes += product.weight_bytes
        x, out = inputs.put(inputs.normal((rows, k), "bf16")), inputs.empty(2 * rows * n)
        outs.append((out, 2 * rows * n))
        for way, machine in machines.items():
            arguments = x, made.weight.address, 0, 0, out, rows, n, k, 0, *gemm.NO_SQUARES
            launches[way].append((tier.plan(product, machine), arguments))

    def step(way: str) -> None:
        for _ in range(num_layers):
            for launch, arguments in launches[way]:
                gpu.launch(launch, *arguments)

    def results() -> list[bytes]:
        return [inputs.contents(*out) for out in outs]

    expected: list[bytes] | None = None
    graphs: dict[str, Graph] = {}
    for way in machines:
        for start in ("early", "late"):
            graph = Graph.capture(gpu, functools.partial(step, way), is_chained=start == "early")
            for address, size in outs:
                gpu.fill(address, 0xFF, size)
            graph.replay()
            found, graphs[f"{way}, {start}"] = results(), graph
            expected = expected or found
            if found != expected:
                raise AssertionError(f"{way}, {start}: other bits than by rings")
    times = stopwatch.times({name: graph.replay for name, graph in graphs.items()})
    for graph in graphs.values():
        graph.release()
    return {
        "kernels": {way: [launch.specialisation.name for launch, _ in each] for way, each in launches.items()},
        "products": num_layers * len(layer), "weight_bytes": num_layers * weight_bytes,
        "us": {name: round(each.median_us, 2) for name, each in times.items()},
    }  # fmt: skip
