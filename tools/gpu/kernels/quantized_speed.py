"""Speed of products with quantised weights, compared with bfloat16's at the same sizes.

Ours is verified just before it is timed, on the same input; bfloat16's products are in "kernels". The launches of an
operation are recorded once and repeated, like a graph in serving: the host's planning time does not count.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from runtime import ops
from runtime.bench.kernels.cases import Inputs
from runtime.bench.kernels.timing import Stopwatch
from runtime.device.gpu import Gpu
from tools.gpu.kernels.packed_layers import float_layer, packed_layer
from tools.gpu.kernels.quantized import Wanted, check, put
from tools.gpu.kernels.speed import stopwatch_of
from tools.gpu.sections import Case, Options, Result

FORMATS = ("int4 g128", "mxfp4", "fp8 blocks", "fp8", "w8a8", "int8", "int4 g32", "nvfp4")
ROWS = (1, 16, 2048, 64, 128)
SHAPES = ((8192, 8192), (6144, 4096), (4096, 12288))


class Recorded:
    """The launches of an operation, for repetition; its allocations are kept.

    Raises AssertionError if it also fills or copies memory, which is not recorded.
    """

    def __init__(self, gpu: Gpu, work: Callable[[], Any]) -> None:
        self._gpu, self._held = gpu, list[Any]([work])  # the work holds its inputs
        self._launches: list[tuple[Any, tuple[Any, ...]]] = []
        allocate, launch = gpu.allocate, gpu.launch

        def kept(*arguments: Any, **more: Any) -> Any:
            self._held.append(allocate(*arguments, **more))
            return self._held[-1]

        def noted(what: Any, *arguments: Any, **more: Any) -> None:
            self._launches.append((what, arguments))
            launch(what, *arguments, **more)

        def missing(*_: Any, **__: Any) -> None:
            raise AssertionError("an operation that is timed copies or fills memory")

        with contextlib.ExitStack() as patches:
            for name, instead in (("allocate", kept), ("launch", noted), ("copy", missing), ("fill", missing)):
                patches.enter_context(patch.object(gpu, name, instead))
            self.result = work()

    def __call__(self) -> None:
        with self._gpu.chained():
            for launch, arguments in self._launches:
                self._gpu.launch(launch, *arguments)

    @property
    def kernels(self) -> list[str]:
        """The kernels' names, in order."""
        return [launch.specialisation.name for launch, _ in self._launches]


def linear(options: Options) -> Iterator[Case]:
    """Products of few rows and of many."""
    stopwatch = stopwatch_of(options)
    for width, depth in [(64, 128)] if options.is_quick else SHAPES:
        for name in FORMATS[:1] if options.is_quick else FORMATS:
            for rows in (1,) if options.is_quick else ROWS:
                wanted = Wanted(name, rows, width, depth)
                yield Case(wanted.name, functools.partial(_linear, options, stopwatch, wanted))


def _linear(options: Options, stopwatch: Stopwatch, wanted: Wanted) -> Result:
    gpu, (m, n, k) = stopwatch.gpu, (wanted.rows, wanted.width, wanted.depth)
    row: Result = {"format": wanted.format, "sizes": [m, n, k], **check(gpu, wanted, is_dry=options.is_dry)}
    x = put(gpu, Inputs(gpu, 1).normal((m, k), "bf16"))
    weight, floats = packed_layer(gpu, wanted.format, n, k).weight, float_layer(gpu, n, k).weight
    ours, theirs = (Recorded(gpu, lambda each=each: ops.linear(x, each)) for each in (weight, floats))  # type: ignore[misc]
    row["bf16_kernels"] = theirs.kernels
    return row | timed(stopwatch, {"ours": ours, "bf16": theirs}, weight.size_bytes + 2 * m * (n + k), 2.0 * m * n * k)


def timed(stopwatch: Stopwatch, competitors: Mapping[str, Recorded], least_bytes: int, flops: float) -> Result:
    """`least_bytes`, `flops`: of "ours"."""
    times = stopwatch.times(competitors)
    row: Result = {"least_bytes": least_bytes, "flops": flops}
    row["times"] = {name: each.as_json() for name, each in times.items()}
    if not stopwatch.is_emulated and (ours := times["ours"].median_us):
        row["gb_per_s"] = round(least_bytes / ours / 1e3, 1)
        row["tflop_per_s"] = round(flops / ours / 1e6, 2)
        row["times_as_fast_as_bf16"] = round(times["bf16"].median_us / ours, 3)
    return row
