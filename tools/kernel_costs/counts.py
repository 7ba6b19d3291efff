"""A kernel's counts at run time, by the emulator: instructions, sectors, bank conflicts, tensor-core work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from cuda.bindings import driver as bindings

from numba_kernels.cuda.specialisation import Launch
from runtime.bench.kernels.cases import Case
from runtime.bench.kernels.counted import Counts
from runtime.bench.kernels.table import prepare, verify
from runtime.device.device import Device
from runtime.device.driver import Driver
from runtime.device.gpu import Gpu
from runtime.emulator.driver.architectures import A100, H100, H200, RTX_4090, RTX_5090, GpuModel
from runtime.emulator.driver.emulated_driver import EmulatedDriver
from runtime.emulator.execution.launch import Checks
from runtime.emulator.translation.ptx import parse

PRODUCTS = (A100, RTX_4090, RTX_5090, H100, H200)
LEAST_SECTOR_EFFICIENCY = 0.95
MOST_TILED_BYTES = 1.05
"""Times the least of its tiling that a kernel may move."""
LEAST_TENSOR_SHARE = 0.95
"""The share of the additions and multiplications of a kernel for tensor cores that they do."""

NUMPY = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True)
class Work:
    """A case's minimum work.

    Attributes:
        least_bytes: of device memory, read or written, each once.
        flops: multiply and add counted as two.
        is_tensor_core: whether tensor cores could do them (products of 16-bit factors).
    """

    least_bytes: int
    flops: int
    is_tensor_core: bool = False

    def roofline_us(self, model: GpuModel) -> float:
        """The lower bound in microseconds: its bytes at full bandwidth, or its arithmetic at full rate."""
        rate = model.bf16_flops if self.is_tensor_core else model.float32_flops
        return 1e6 * max(self.least_bytes / model.memory_bytes_per_s, self.flops / rate)


class Bench:
    """An emulated GPU that counts, with a case's uploads and launches."""

    def __init__(self, arch: str) -> None:
        self.emulator = EmulatedDriver(arch, num_devices=1, checks=Checks.TRAFFIC, is_order_checked=False)
        driver = Driver(self.emulator, bindings, arch=arch)
        driver.call("cuInit", 0)
        self.gpu = Gpu(Device(f"emulated:{arch}:0"), driver)
        self.rng = np.random.default_rng(0)
        self._held: list[Any] = []

    def put(self, array: np.ndarray[Any, Any]) -> int:
        """The address of an array's copy, kept until the case ends."""
        address = self.empty(array.nbytes)
        self.gpu.write(address, array)
        return address

    def normal(self, shape: tuple[int, ...] | int, dtype: str) -> int:
        """The address of normally distributed numbers."""
        return self.put(self.rng.standard_normal(shape, dtype=np.float32).astype(NUMPY[dtype]))

    def empty(self, size_bytes: int) -> int:
        block = self.gpu.allocate(size_bytes)
        self._held.append(block)
        return block.address

    def launch(self, launch: Launch | None, *arguments: float) -> None:
        """One launch. Raises ValueError for the plan of an empty result, which counts nothing."""
        if launch is None:
            raise ValueError("a case that launches nothing")
        self.gpu.launch(launch, *arguments)

    def check(self, case: Case) -> None:
        """Runs a case of `bench kernels`. Raises AssertionError if its result is wrong."""
        inputs, ready = prepare(self.gpu, case, 0)
        self._held.append(inputs)
        verify(self.gpu, case, ready, ready.run)

    def count(self, case: str, run: Callable[[Bench], None]) -> Counts:
        """Runs a case, ``run(bench)``, and counts its launches."""
        self.emulator.counters.clear()
        self.emulator.is_counting = True
        try:
            run(self)
            self.gpu.synchronize()
        finally:
            self.emulator.is_counting = False
            self._held.clear()
        found = Counts(case, tuple(self.emulator.counters))
        loaded = {kernel.compiled.name: kernel.compiled for kernel in self.gpu.loaded_kernels()}
        for name, counters in self.emulator.counters.items():
            (kernel,) = parse(loaded[name].image.rstrip(b"\0").decode()).kernels.values()
            found.add(counters, kernel)
        return found
