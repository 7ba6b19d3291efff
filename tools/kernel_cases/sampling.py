"""Sampling as in a decode step, with parameters on the device: the cpu's tokens."""

from __future__ import annotations

import numpy as np

from runtime import ops
from runtime.bench.kernels.case import Case, Inputs, Prepared
from runtime.dtype import int32
from runtime.sampling_arrays import SAMPLING_FIELDS, SamplingArrays
from runtime.tensor.tensor import Tensor
from tools.kernel_cases.operation import put, recorded

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
