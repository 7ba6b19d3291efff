"""Cases of an operation of `runtime.ops`: the launches of one call, recorded and repeated like a graph in serving."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np

from runtime.bench.kernels.case import TOLERANCE, Array, Case, Inputs, Prepared, sampled
from runtime.device.gpu import Gpu
from runtime.tensor.tensor import Tensor


class Recorded:
    """The launches of an operation, for repetition; its allocations are kept. The host's planning time does not count.

    Raises AssertionError if the operation fills or copies memory, which is not recorded.
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


def put(gpu: Gpu, array: Array) -> Tensor:
    """The array on the device."""
    return Tensor.from_numpy(np.ascontiguousarray(array)).to(gpu.device)


def recorded(gpu: Gpu, work: Callable[[], Tensor], rows: Array, expected: Array, **more: Any) -> Prepared:
    """An operation's call, ready to run: its result at `rows` is to be `expected`."""
    ours = Recorded(gpu, work)
    result: Tensor = ours.result
    return Prepared(
        ours, result.address, result.shape, result.dtype.name, rows, expected, guard_bytes=0,
        notes={"kernels": ours.kernels, **more},
    )  # fmt: skip


def operation_case(
    name: str, family: str, shape: str, least_bytes: int, flops: int, call: Callable[..., Tensor],
    arrays: Callable[[Inputs], tuple[Array, ...]], *, tolerance: float = TOLERANCE["bf16"], scattered_because: str = "",
) -> Case:  # fmt: skip
    """``call(*arrays)`` on the device against the same call on the cpu, where floats of 16 bits become float32."""

    def prepare(inputs: Inputs) -> Prepared:
        given = arrays(inputs)
        on_gpu = [put(inputs.gpu, each) for each in given]
        wide = (each.astype(np.float32) if each.dtype == ml_dtypes.bfloat16 else each for each in given)
        expected = call(*map(Tensor.from_numpy, wide)).array.astype(np.float32)
        rows = sampled(len(expected))
        return recorded(inputs.gpu, lambda: call(*on_gpu), rows, expected[rows])

    return Case(
        name, shape, least_bytes, flops, tolerance, prepare, family, scattered_because=scattered_because
    )  # fmt: skip
