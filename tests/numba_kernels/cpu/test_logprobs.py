"""Log-probabilities, ranks and the best few, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import ops
from tests.numba_kernels.cpu.cases import normal, tensor


def _oracle(logits, chosen, top_n):
    logits = logits.astype(np.float64)
    largest = logits.max(-1, keepdims=True)
    logprobs = logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :top_n]
    picked = np.take_along_axis(logits, chosen[:, None].astype(np.int64), -1)
    return logprobs, (logits > picked).sum(-1) + 1, order


@pytest.mark.parametrize(
    ("rows", "vocab", "top_n"),
    [
        (1, 1, 0), (1, 1, 1), (2, 3, 3), (3, 16, 5), (5, 17, 1), (7, 100, 0), (4, 101, 20), (9, 1009, 8), (1, 50257, 5),
        (3, 151936, 20), (64, 257, 2), (0, 10, 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scale", [0.01, 4.0])
def test_equal_float64(rows, vocab, top_n, scale):
    rng = np.random.default_rng(vocab)
    logits = normal(rng, (rows, vocab)) * np.float32(scale)
    logits[:, vocab // 2 :: 7] = logits[:, :1]  # ties
    chosen = rng.integers(0, vocab, rows).astype(np.int32)
    result = ops.log_softmax_topk(tensor(logits), chosen, top_n)
    logprobs, ranks, order = _oracle(logits, chosen, top_n) if rows else (np.empty((0, 10)), [], np.empty((0, 3)))
    np.testing.assert_array_equal(result.chosen_rank, ranks)
    np.testing.assert_array_equal(result.top_ids, order)
    if rows:
        rows_index = np.arange(rows)
        np.testing.assert_allclose(result.chosen_logprob, logprobs[rows_index, chosen], rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(result.top_logprobs, np.take_along_axis(logprobs, order, -1), rtol=2e-6, atol=1e-6)


def test_bad_rows_give_nan_and_others_do_not():
    logits = normal(np.random.default_rng(0), (4, 50))
    logits[0, 7], logits[1, 8] = np.nan, np.inf
    logits[2] = -np.inf
    result = ops.log_softmax_topk(tensor(logits), np.zeros(4, np.int32), 3)
    assert np.isnan(result.chosen_logprob[:3]).all()
    assert np.isnan(result.top_logprobs[:3]).all()
    assert np.isfinite(result.chosen_logprob[3])


def test_masked_logits_have_probability_zero():
    logits = np.array([[0.0, -np.inf, 0.0]], np.float32)
    result = ops.log_softmax_topk(tensor(logits), np.array([1], np.int32), 3)
    assert result.chosen_logprob[0] == -np.inf
    np.testing.assert_array_equal(result.top_ids, [[0, 2, 1]])
    np.testing.assert_allclose(result.top_logprobs[0, :2], np.log(0.5), rtol=1e-6)
