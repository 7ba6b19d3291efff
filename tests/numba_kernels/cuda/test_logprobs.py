"""Log-probabilities, ranks and the best few on the device, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import logprobs
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import assert_close, both_archs, empty, get, put


def _run(gpu: Gpu, logits: np.ndarray, chosen: np.ndarray, top_n: int) -> tuple[np.ndarray, ...]:
    rows, vocab = logits.shape
    source, ids = put(gpu, logits), put(gpu, chosen)
    shapes = [((rows,), np.float32), ((rows,), np.int32), ((rows, top_n), np.int32), ((rows, top_n), np.float32)]
    outputs = [empty(gpu, *shape) for shape in shapes]
    launch = logprobs.plan(rows, vocab, top_n)
    if launch is not None:
        gpu.launch(launch, source.address, ids.address, *(block.address for block in outputs), vocab, top_n)
    return tuple(get(gpu, block, *shape) for block, shape in zip(outputs, shapes))


def _oracle(logits: np.ndarray, chosen: np.ndarray, top_n: int) -> tuple[np.ndarray, ...]:
    logits = logits.astype(np.float64)
    largest = logits.max(-1, keepdims=True)
    values = logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :top_n]
    picked = np.take_along_axis(logits, chosen[:, None].astype(np.int64), -1)
    rows = np.arange(len(logits))
    return values[rows, chosen], (logits > picked).sum(-1) + 1, order, np.take_along_axis(values, order, -1)


SHAPES = [
    (1, 1, 0), (1, 1, 1), (2, 3, 3), (3, 16, 5), (5, 17, 1), (7, 100, 0), (4, 101, 20), (9, 1009, 8), (2, 2048, 512),
    (1, 50257, 5), (2, 65536, 20), (16, 257, 2),
]  # fmt: skip


@pytest.mark.parametrize("scale", [0.01, 4.0])
@both_archs
def test_equal_float64(gpu, scale):
    for rows, vocab, top_n in SHAPES:
        rng = np.random.default_rng(vocab)
        logits = rng.standard_normal((rows, vocab), dtype=np.float32) * np.float32(scale)
        logits[:, vocab // 2 :: 7] = logits[:, :1]  # ties
        logits[:, vocab // 3 :: 11] *= 0  # zeros of both signs are equal
        chosen = rng.integers(0, vocab, rows).astype(np.int32)
        chosen_logprob, rank, ids, values = _run(gpu, logits, chosen, top_n)
        expected = _oracle(logits, chosen, top_n)
        np.testing.assert_array_equal(rank, expected[1])
        np.testing.assert_array_equal(ids, expected[2])
        assert_close(chosen_logprob, expected[0], rtol=2e-6, atol=1e-6)
        assert_close(values, expected[3], rtol=2e-6, atol=1e-6)


def test_bad_rows_give_nan_and_others_do_not(gpu):
    logits = np.random.default_rng(0).standard_normal((4, 50), dtype=np.float32)
    logits[0, 7], logits[1, 8] = np.nan, np.inf
    logits[2] = -np.inf
    chosen_logprob, _, ids, values = _run(gpu, logits, np.zeros(4, np.int32), 3)
    assert np.isnan(chosen_logprob[:3]).all()
    assert np.isnan(values[:3]).all()
    assert (ids[:3] == -1).all()
    assert np.isfinite(chosen_logprob[3])
    np.testing.assert_array_equal(ids[3], np.argsort(-logits[3])[:3])


def test_masked_logits_have_probability_zero_and_no_choice_has_none(gpu):
    logits = np.array([[0.0, -np.inf, 0.0], [1.0, 1.0, 1.0]], np.float32)
    chosen_logprob, rank, ids, values = _run(gpu, logits, np.array([1, -1], np.int32), 3)
    assert chosen_logprob[0] == -np.inf
    assert np.isnan(chosen_logprob[1])
    np.testing.assert_array_equal(rank, [3, 0])
    np.testing.assert_array_equal(ids, [[0, 2, 1], [0, 1, 2]])
    assert_close(values[0, :2], np.full(2, np.log(0.5)), rtol=1e-6)


def test_plan(gpu):
    assert [array.shape for array in _run(gpu, np.zeros((0, 10), np.float32), np.zeros(0, np.int32), 3)] == [
        (0,), (0,), (0, 3), (0, 3)
    ]  # fmt: skip
    for sizes, words in (
        ((1, 0, 0), "vocab is 0"),
        ((1, 2**20, 0), "vocab is"),
        ((1, 9, 10), "top_n is 10, must be 0 to 9"),
    ):
        with pytest.raises(ValueError, match=words):
            logprobs.plan(*sizes)
