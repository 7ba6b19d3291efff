"""Speed of memory, of the goals of `xserv bench kernels`, and of kernels compared with torch's cuBLAS and SDPA.

Everything timed is verified just before, on the same input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from runtime.bench.kernels import bandwidth as memory
from runtime.bench.kernels import bench_kernels
from runtime.bench.kernels import cases as bench
from runtime.bench.kernels.table import error_share, prepare, row_of, timed, verify
from runtime.bench.kernels.timing import Stopwatch
from runtime.device.gpu import Gpu
from tools.gpu.sections import Case, Options, Result

NUM_RUNS = 30


def stopwatch_of(options: Options) -> Stopwatch:
    """A stopwatch, with few runs if times are meaningless."""
    return Stopwatch(Gpu.of(options.device), NUM_RUNS if options.is_real and not options.is_dry else 2)


def bandwidth(options: Options) -> Iterator[Case]:
    """Reads, copies, and both ways over the bus."""
    stopwatch = stopwatch_of(options)
    yield Case("bandwidth", lambda: memory.bandwidth(stopwatch.gpu, stopwatch, options.is_quick))


def goals(options: Options) -> Iterator[Case]:
    """`xserv bench kernels`, part by part, for the goals' table."""
    stopwatch = stopwatch_of(options)

    @functools.cache
    def rates() -> Result:
        if options.is_dry:
            return {"read": {}, "host to device": {}}
        return memory.bandwidth(stopwatch.gpu, stopwatch, options.is_quick)

    for part in bench_kernels.PARTS:
        yield Case(part, functools.partial(_goal, options, part, rates))


def _goal(options: Options, part: str, rates: Callable[[], Result]) -> Result:
    runs = NUM_RUNS if not options.is_dry else 2
    return bench_kernels.bench_kernels(options.device, parts=(part,), num_runs=runs, rates=rates())


def kernels(options: Options) -> Iterator[Case]:
    """The shapes of serving, and ladders of tiers at one shape."""
    stopwatch, torch = stopwatch_of(options), None
    if options.is_real and not options.is_dry:
        torch = Torch.find(stopwatch.gpu)
    for number, case in enumerate(_timed_cases(options.is_quick)):
        yield Case(f"{case.name}, {case.shape}", functools.partial(_row, stopwatch, case, number, torch))


def _row(stopwatch: Stopwatch, case: bench.Case, seed: int, torch: Torch | None) -> Result:
    gpu = stopwatch.gpu
    _inputs, ready = prepare(gpu, case, seed)
    row = row_of(case, verify(gpu, case, ready, ready.run))
    competitors: dict[str, Callable[[], Any]] = {"ours": ready.run}
    if torch is not None:
        try:
            competitors["torch"], row["torch_error_share"] = bind(torch, case, ready)
        except Exception as error:  # an older torch, or one without this kernel: ours is timed alone, with a note
            row["torch_error"] = f"{type(error).__name__}: {error}"[:500]
    return timed(row, case, competitors, stopwatch)


def _timed_cases(is_quick: bool) -> Iterator[bench.Case]:
    product, attention = bench.product_case, bench.attention_case
    if is_quick:
        yield product("auto", 1, 64, 128, "bf16")
        yield attention("auto", "bf16", 1, 0, 33, 4, 2, 64)
        yield bench.softmax_case(2, 300)
        return
    for rows in (1, 16, 256, 2048, 4, 64):
        for n, k in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)):
            yield product("auto", rows, n, k, "bf16")
    yield product("auto", 4096, 4096, 4096, "bf16")
    yield attention("auto", "bf16", 1, 0, 8192, 32, 8, 128)
    yield attention("auto", "bf16", 1, 0, 2048, 32, 8, 128)
    for seqs, context in ((1, 1023), (1, 4095), (1, 16383), (32, 2047), (256, 1023)):
        yield attention("auto", "bf16", seqs, context, 1, 32, 8, 128)
    yield attention("auto", "bf16", 4, 0, 1024, 16, 8, 128)
    for rows in (1, 32, 4096):
        yield bench.rms_norm_case(rows, 4096)
    for rows in (1, 32, 2048):
        yield bench.swiglu_case(rows, 12288)
    yield bench.softmax_case(32, 151936)
    yield bench.layer_norm_case(4096, 768)
    yield attention("auto", "bf16", 8, 0, 512, 12, 12, 64)
    for rows in (1, 32):
        yield product("auto", rows, 2304, 768, "bf16")
    for tier, dtype in (
        ("tensor_core", "bf16"), ("register", "bf16"), ("tiled", "bf16"), ("naive", "bf16"),
        ("register", "f32"), ("tiled", "f32"), ("naive", "f32"),
    ):  # fmt: skip
        yield product(tier, 2048, 2048, 2048, dtype)
    yield attention("flash", "bf16", 1, 0, 2048, 32, 8, 128)
    yield attention("flash", "f32", 1, 0, 1024, 12, 12, 64)
    yield attention("naive", "bf16", 1, 0, 1024, 16, 8, 128)


class Torch:
    """torch on the same stream as ours."""

    def __init__(self, module: Any, gpu: Gpu) -> None:
        self.module = module
        self._device = module.device("cuda", gpu.device.index)
        module.cuda.set_device(self._device)
        module.cuda.set_stream(module.cuda.ExternalStream(int(gpu.stream.handle), device=self._device))
        module.backends.cuda.matmul.allow_tf32 = False
        module.set_grad_enabled(False)

    @staticmethod
    def find(gpu: Gpu) -> Torch | None:
        """torch, or None if it is not installed or sees no GPU, which the environment's section reports."""
        try:
            import torch
        except ImportError:
            return None
        return Torch(torch, gpu) if torch.cuda.is_available() else None

    def tensor(self, array: np.ndarray) -> Any:
        if array.dtype.itemsize == 2:
            name = "float16" if array.dtype == np.float16 else "bfloat16"
            return self.module.from_numpy(array.view(np.int16)).to(self._device).view(getattr(self.module, name))
        return self.module.from_numpy(array).to(self._device)

    def array(self, tensor: Any) -> np.ndarray:
        return np.asarray(tensor.float().contiguous().cpu().numpy())


def bind(torch: Torch, case: bench.Case, ready: bench.Prepared) -> tuple[Callable[[], Any], float]:
    """A function that runs torch's call of a case, and its error. Raises AssertionError if it is wrong."""
    assert ready.torch is not None, f"{case.name}: torch has no such call"
    theirs = ready.torch(torch.module, torch.tensor)
    found = torch.array(theirs()).reshape(ready.shape)
    return theirs, error_share(found[ready.rows], ready, case.tolerance, "torch's")
