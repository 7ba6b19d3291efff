"""Cases of an operation of `runtime.ops`, or of sampling: one call's launches, recorded and repeated as in serving."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np

from runtime import ops
from runtime.bench.kernels.case import TOLERANCE, Array, Case, Inputs, Prepared, sampled
from runtime.device.gpu import Gpu
from runtime.dtype import int32
from runtime.sampling_arrays import SAMPLING_FIELDS, SamplingArrays
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


# Sampling as in a decode step, with parameters on the device, against the cpu's tokens

KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
}


def sampling_case(kind: str, rows: int, vocabulary: int) -> Case:
    """Rows of logits like a model's, sampled by one of `KINDS`; the result has their tokens, then their statuses."""

    def prepare(inputs: Inputs) -> Prepared:
        array, params = inputs.normal((rows, vocabulary), "f32", 3.0), SamplingArrays.neutral(rows)
        for name, value in KINDS[kind].items():
            getattr(params, name)[:] = value
        params.seed[:] = np.arange(rows, dtype=np.uint64)
        gpu, logits = inputs.gpu, put(inputs.gpu, array)
        columns = (getattr(params, name) for name, _, _ in SAMPLING_FIELDS)
        fields = [put(gpu, each.view(np.int64) if each.dtype == np.uint64 else each) for each in columns]
        results = Tensor.empty((2 * rows + 1,), int32, gpu.device)

        def sample() -> Tensor:
            ops.sample_into(logits, fields, results, has_penalties=False)
            return results

        drawn = ops.sample(Tensor.from_numpy(array), params)
        assert drawn.ok.all()
        expected = np.concatenate([drawn.token_ids, np.zeros(rows, np.int32)]).astype(np.float32)
        return recorded(gpu, sample, np.arange(2 * rows), expected)

    least_bytes, flops = rows * (4 * vocabulary + 12), 8 * rows * vocabulary
    return Case(kind, f"{rows} rows", least_bytes, flops, 0.0, prepare, "sampling")
