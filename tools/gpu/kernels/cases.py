"""Kernel cases on the device: verified, and timed with their peers, torch's cuBLAS and SDPA among them; and the goals
of `xserv bench kernels`. Everything timed is verified just before, on the same input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from numba_kernels.cuda.gemm import hopper
from runtime.bench.kernels import bench_kernels, case, host_costs
from runtime.bench.kernels.timing import Stopwatch
from runtime.device.gpu import Gpu
from tools.gpu.sections import Case, Options, Result
from tools.kernel_cases.suites import SUITES

NUM_RUNS = 30


def stopwatch_of(options: Options) -> Stopwatch:
    """A stopwatch, with few runs if times are meaningless."""
    return Stopwatch(Gpu.of(options.device), NUM_RUNS if options.is_real and not options.is_dry else 2)


def checked(options: Options, suite: str) -> Iterator[Case]:
    """A suite's cases against their oracles. Nothing is timed."""
    gpu = Gpu.of(options.device)
    if suite == "hopper gemm" and gpu.arch != hopper.ARCH:
        yield Case("any", lambda: {"skipped": f"needs {hopper.ARCH}"})
        return
    for number, each in enumerate(SUITES[suite](options.is_quick)):
        yield Case(each.title, functools.partial(check, gpu, each, number))


def check(gpu: Gpu, each: case.Case, seed: int = 0) -> Result:
    """A right case's errors, and notes. Raises AssertionError for a wrong one."""
    _inputs, ready = case.prepare(gpu, each, seed)
    return {**ready.notes, **case.verify(gpu, each, ready)}


def timed(options: Options, suite: str) -> Iterator[Case]:
    """A suite's cases, timed with their peers."""
    stopwatch, torch = stopwatch_of(options), None
    if options.is_real and not options.is_dry:
        torch = Torch.find(stopwatch.gpu)
    for number, each in enumerate(SUITES[suite](options.is_quick)):
        yield Case(each.title, functools.partial(_row, options, stopwatch, each, number, torch))


def _row(options: Options, stopwatch: Stopwatch, each: case.Case, seed: int, torch: Torch | None) -> Result:
    gpu = stopwatch.gpu
    _inputs, ready = case.prepare(gpu, each, seed)
    row = case.row_of(each, ready, {} if options.is_dry else case.verify(gpu, each, ready))
    competitors = {"ours": ready.run, **ready.peers}
    if torch is not None and ready.torch is not None:
        try:
            competitors["torch"], row["torch_error_share"] = bind(torch, each, ready)
        except Exception as error:  # an older torch, or one without this kernel: ours is timed alone, with a note
            row["torch_error"] = f"{type(error).__name__}: {error}"[:500]
    return case.timed(row, each, competitors, stopwatch)


def bandwidth(options: Options) -> Iterator[Case]:
    """Reads, copies, and both ways over the bus."""
    stopwatch = stopwatch_of(options)
    yield Case("bandwidth", lambda: host_costs.bandwidth(stopwatch.gpu, stopwatch, options.is_quick))


def goals(options: Options) -> Iterator[Case]:
    """`xserv bench kernels`, part by part, for the goals' table."""
    stopwatch = stopwatch_of(options)

    @functools.cache
    def rates() -> Result:
        if options.is_dry:
            return {"read": {}, "host to device": {}}
        return host_costs.bandwidth(stopwatch.gpu, stopwatch, options.is_quick)

    for part in bench_kernels.PARTS:
        yield Case(part, functools.partial(_goal, options, part, rates))


def _goal(options: Options, part: str, rates: Callable[[], Result]) -> Result:
    runs = NUM_RUNS if not options.is_dry else 2
    return bench_kernels.bench_kernels(options.device, parts=(part,), num_runs=runs, rates=rates())


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


def bind(torch: Torch, each: case.Case, ready: case.Prepared) -> tuple[Callable[[], Any], float]:
    """A function that runs torch's call of a case, and its error. Raises AssertionError if it is wrong."""
    assert ready.torch is not None, f"{each.name}: torch has no such call"
    theirs = ready.torch(torch.module, torch.tensor)
    found = torch.array(theirs()).reshape(ready.shape)
    return theirs, case.errors(found[ready.rows], ready, each.tolerance, "torch's")["error_share"]
