"""The kernel report's cases: a launch with its minimum work, and an emulated GPU that counts what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from cuda.bindings import driver as bindings

from numba_kernels.cuda.specialisation import Launch
from runtime.bench.kernels.cases import Case as Operation
from runtime.bench.kernels.counted import Counts, counting
from runtime.bench.kernels.table import prepare, verify
from runtime.device.device import Device
from runtime.device.driver import Driver
from runtime.device.gpu import Gpu
from runtime.emulator.driver.architectures import A100, H100, H200, RTX_4090, RTX_5090, GpuModel
from runtime.emulator.driver.emulated_driver import EmulatedDriver
from runtime.emulator.execution.launch import Checks

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

    def check(self, case: Operation) -> None:
        """Runs a case of `bench kernels`. Raises AssertionError if its result is wrong."""
        inputs, ready = prepare(self.gpu, case, 0)
        self._held.append(inputs)
        verify(self.gpu, case, ready, ready.run)

    def count(self, case: str, run: Callable[[Bench], None]) -> Counts:
        """Runs a case, ``run(bench)``, and counts its launches."""
        try:
            with counting(self.gpu) as found:
                run(self)
        finally:
            self._held.clear()
        found.case = case
        return found


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the report.

    Attributes:
        name, family, shape: its name, its family, its sizes in words.
        work: its minimum work.
        run: uploads and launches.
        scattered_because: why its accesses cannot fill whole sectors; "" if they should.
        tiled_bytes: the minimum traffic of its tiling, without tables and lengths; 0 if unchecked.
        is_on_tensor_cores: whether its products should run there.
        arch: of its emulated GPU; the report's if "".
    """

    name: str
    family: str
    shape: str
    work: Work
    run: Callable[[Bench], None]
    scattered_because: str = ""
    tiled_bytes: int = 0
    is_on_tensor_cores: bool = False
    arch: str = ""


def counted(
    operation: Operation, family: str, *, suffix: str = "", scattered_because: str = "", tiled_bytes: int = 0,
    is_on_tensor_cores: bool = False, has_16_bits: bool = False,
) -> Case:  # fmt: skip
    """A line for a case of `bench kernels`; its result is compared with numpy's.

    `has_16_bits`: its products have 16-bit factors, so that tensor cores could do them."""
    return Case(
        operation.name + suffix, family, operation.shape, Work(operation.least_bytes, operation.flops, has_16_bits),
        lambda bench: bench.check(operation), scattered_because, tiled_bytes, is_on_tensor_cores,
    )  # fmt: skip
