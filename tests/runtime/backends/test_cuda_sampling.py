"""ops.sample and ops.log_softmax_topk give the same on the cpu and on a GPU, and refuse the same."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import ops
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph
from runtime.dtype import int32
from runtime.errors import InvalidArgumentError
from runtime.sampling_arrays import SAMPLING_FIELDS, SamplingArrays
from runtime.tensor.tensor import Tensor

DEVICE = "emulated:sm_80"
VOCAB = 700


def parameters(rows: int) -> SamplingArrays:
    """Greedy and drawn rows; filters, penalties, biases and a mask."""
    rng = np.random.default_rng(1)
    params = SamplingArrays.neutral(rows)
    params.temperature[:] = rng.choice([0.0, 0.7, 1.0, 1.5], rows)
    params.top_k[:] = rng.choice([0, 5, 50], rows)
    params.top_p[:] = rng.choice([1.0, 0.9], rows)
    params.repetition_penalty[::2] = 1.3
    params.frequency_penalty[::3] = 0.5
    params.seed[:] = rng.integers(0, 2**64, rows, dtype=np.uint64)
    params.position[:] = np.arange(rows)
    for name in ("prompt", "output", "bias"):
        setattr(params, f"{name}_ids", rng.integers(0, VOCAB, 4 * rows).astype(np.int32))
        setattr(params, f"{name}_start", np.arange(0, 4 * rows, 4, dtype=np.int32))
        setattr(params, f"{name}_end", np.arange(4, 4 * rows + 1, 4, dtype=np.int32))
    params.bias_values = rng.standard_normal(4 * rows).astype(np.float32)
    params.allowed_mask = rng.integers(0, 2**32, (rows, -(-VOCAB // 32)), dtype=np.uint32)
    return params


def test_the_same_tokens_and_logprobs() -> None:
    logits = Tensor.from_numpy((np.random.default_rng(2).standard_normal((24, VOCAB)) * 4).astype(np.float32))
    params = parameters(24)
    expected, actual = ops.sample(logits, params), ops.sample(logits.to(DEVICE), params)
    assert expected.ok.all()
    assert np.array_equal(actual.token_ids, expected.token_ids)
    assert np.array_equal(actual.ok, expected.ok)
    for ours, theirs in zip(
        ops.log_softmax_topk(logits.to(DEVICE), expected.token_ids, 5),
        ops.log_softmax_topk(logits, expected.token_ids, 5),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)


def test_nothing_to_sample() -> None:
    logits = Tensor.empty((0, VOCAB), device=DEVICE)
    assert ops.sample(logits, SamplingArrays.neutral(0)).token_ids.shape == (0,)
    assert ops.log_softmax_topk(logits, np.empty(0, np.int32), 3).top_ids.shape == (0, 3)


def test_a_row_of_nan_is_not_ok() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1, 600] = np.nan
    sampled = ops.sample(Tensor.from_numpy(logits).to(DEVICE), SamplingArrays.neutral(3))
    assert sampled.ok.tolist() == [True, False, True]
    assert sampled.token_ids.tolist() == [0, -1, 0]


def test_refusals() -> None:
    logits, params = Tensor.zeros((2, VOCAB), device=DEVICE), parameters(2)
    params.bias_ids[3] = VOCAB
    with pytest.raises(InvalidArgumentError, match=f"sample: params name a token id outside the vocabulary of {VOCAB}"):
        ops.sample(logits, params)
    with pytest.raises(InvalidArgumentError, match=r"sample: params.temperature is float32 \(3,\)"):
        ops.sample(logits, SamplingArrays.neutral(3))
    with pytest.raises(InvalidArgumentError, match="log_softmax_topk: chosen holds 0 to 700"):
        ops.log_softmax_topk(logits, np.array([0, VOCAB], np.int32), 1)


def test_an_id_outside_the_embedding_is_found_at_the_next_draw() -> None:
    table = Tensor.ones((5, VOCAB), device=DEVICE)
    rows = ops.embedding(Tensor.from_numpy(np.array([1, 5], np.int32)).to(DEVICE), table)
    with pytest.raises(InvalidArgumentError, match="embedding: an id is outside the table"):
        ops.sample(rows, SamplingArrays.neutral(2))
    ops.sample(rows, SamplingArrays.neutral(2))


def test_a_recorded_draw_is_one_kernel() -> None:
    """It copies nothing: the kernel leaves the flag for bad ids behind the statuses."""
    logits = Tensor.from_numpy(np.random.default_rng(4).standard_normal((3, VOCAB)).astype(np.float32)).to(DEVICE)
    params = SamplingArrays.neutral(3)
    arrays = [getattr(params, name) for name, _, _ in SAMPLING_FIELDS]
    fields = [Tensor.from_numpy(each.view(np.int64) if each.dtype == np.uint64 else each) for each in arrays]
    fields = [field.to(DEVICE) for field in fields]
    results = Tensor.zeros(7, int32, DEVICE)
    gpu = Gpu.of(logits.device)
    graph = Graph.capture(gpu, lambda: ops.sample_into(logits, fields, results, has_penalties=False))
    assert graph.num_nodes == len(graph.kernels) == 1
    graph.replay()
    assert results.to("cpu").array.tolist() == [*logits.to("cpu").array.argmax(1), 0, 0, 0, 0]
    graph.release()
    table = Tensor.ones((5, VOCAB), device=DEVICE)
    ops.embedding(Tensor.from_numpy(np.array([1, 5], np.int32)).to(DEVICE), table)
    ops.sample_into(logits, fields, results, has_penalties=False)
    assert results.to("cpu").array[6] != 0
    with pytest.raises(InvalidArgumentError, match="embedding: an id is outside the table"):
        ops.check_ids(logits.device)
