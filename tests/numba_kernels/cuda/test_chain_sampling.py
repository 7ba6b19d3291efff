"""Sampling with chains on the device draws what the cpu kernels draw, which llama.cpp is the oracle of."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels import sampler_chain as chain
from numba_kernels.cuda import chain_sampling
from runtime import ops
from runtime.device.gpu import Gpu
from runtime.sampling_arrays import SamplingArrays
from runtime.tensor.tensor import Tensor
from tests.numba_kernels.cuda.harness import both_archs

CHAINS: list[dict[int, float] | None] = [
    {chain.TYPICAL_P: 0.5}, {chain.TYPICAL_P: 0.95}, {chain.TYPICAL_P: 1e-9}, {chain.TOP_N_SIGMA: 1.0},
    {chain.XTC_PROBABILITY: 1.0, chain.XTC_THRESHOLD: 0.05}, {chain.XTC_PROBABILITY: 0.5, chain.XTC_THRESHOLD: 0.01},
    {chain.DYNATEMP_RANGE: 0.5, chain.DYNATEMP_EXPONENT: 1.3}, {chain.DYNATEMP_RANGE: 1.0, chain.DYNATEMP_EXPONENT: 0},
    {chain.MIROSTAT: 2, chain.MIROSTAT_TAU: 5.0, chain.MIROSTAT_ETA: 0.1, chain.MU: 4.0},
    {chain.MIROSTAT: 2, chain.MIROSTAT_TAU: 2.0, chain.MIROSTAT_ETA: 1.0, chain.MU: -1.0},
    {
        chain.TYPICAL_P: 0.9, chain.TOP_N_SIGMA: 2.0, chain.XTC_PROBABILITY: 0.5, chain.XTC_THRESHOLD: 0.1,
        chain.DYNATEMP_RANGE: 0.3,
    },
    {}, None,
]  # fmt: skip
COPIES = 5


def _arrays(rng: np.random.Generator, vocab: int) -> SamplingArrays:
    """A row for each of `CHAINS`, and that several times, with other numbers, orders and lowered tokens."""
    num = len(CHAINS) * COPIES
    arrays = SamplingArrays.neutral(num)
    arrays.temperature[:], arrays.top_k[:] = rng.choice([1.0, 0.7, 1.5, 0.0], num), rng.choice([0, 5, 40], num)
    arrays.top_p[:], arrays.min_p[:] = rng.choice([1.0, 0.9], num), rng.choice([0.0, 0.02], num)
    arrays.seed[:], arrays.position[:] = rng.integers(0, 2**63, num), np.arange(num)
    lists = []
    for row in range(num):
        given = CHAINS[row % len(CHAINS)]
        lowered = rng.choice(vocab, min(vocab, row % 4), replace=False)
        words = np.zeros(chain.NUM_WORDS + 2 * len(lowered), np.int32)
        numbers = words.view(np.float32)
        numbers[[chain.TYPICAL_P, chain.DYNATEMP_EXPONENT]] = 1.0
        for place, number in (given or {}).items():
            (words if place == chain.MIROSTAT else numbers)[place] = number
        stages = [*(chain.USUAL_STAGES if row % 2 else chain.STAGES.values()), chain.IS_MIROSTAT]
        words[chain.ORDER] = np.uint32(chain.packed(stages if words[chain.MIROSTAT] else stages[:-1])).view(np.int32)
        words[chain.NUM_WORDS : chain.NUM_WORDS + len(lowered)] = lowered
        numbers[chain.NUM_WORDS + len(lowered) :] = 1.5
        lists.append(words if given is not None else words[:0])
    arrays.chain_words = np.concatenate(lists)
    arrays.chain_end = np.cumsum([len(each) for each in lists]).astype(np.int32)
    arrays.chain_start = arrays.chain_end - np.array([len(each) for each in lists], np.int32)
    return arrays


def _logits(rng: np.random.Generator, num: int, vocab: int) -> np.ndarray:
    logits = rng.standard_normal((num, vocab), dtype=np.float32) * 3
    logits[1::3] = np.round(logits[1::3])  # many ties
    if vocab > 30:
        logits[2::3, ::3] = -np.inf
    return logits


def _compare(gpu: Gpu, logits: np.ndarray, arrays: SamplingArrays) -> None:
    expected = ops.sample(Tensor.from_numpy(logits), arrays)
    found = ops.sample(Tensor.from_numpy(logits).to(gpu.device), arrays)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.ok, expected.ok)
    np.testing.assert_array_equal(found.mus, expected.mus)


@pytest.mark.parametrize("vocab", [1, 2, 31, 257, 2052])
@both_archs
def test_draws_what_the_cpu_draws(gpu, vocab):
    rng = np.random.default_rng(vocab)
    arrays = _arrays(rng, vocab)
    _compare(gpu, _logits(rng, arrays.num_rows, vocab), arrays)


def test_masks_biases_and_penalties_come_first(gpu):
    rng = np.random.default_rng(3)
    vocab = 100
    arrays = _arrays(rng, vocab)
    num = arrays.num_rows
    arrays.allowed_mask = rng.integers(0, 2**32, (num, 4), dtype=np.uint32)
    arrays.repetition_penalty[:], arrays.presence_penalty[:] = rng.choice([1.0, 1.3], num), 0.5
    for name in ("prompt", "output", "bias"):
        setattr(arrays, f"{name}_ids", rng.integers(0, vocab, 5 * num).astype(np.int32))
        setattr(arrays, f"{name}_start", np.arange(0, 5 * num, 5, dtype=np.int32))
        setattr(arrays, f"{name}_end", np.arange(5, 5 * num + 5, 5, dtype=np.int32))
    arrays.bias_values = rng.standard_normal(5 * num).astype(np.float32)
    _compare(gpu, _logits(rng, num, vocab), arrays)


def test_spoilt_rows_and_wrong_ids(gpu):
    rng = np.random.default_rng(4)
    arrays = _arrays(rng, 50)
    logits = _logits(rng, arrays.num_rows, 50)
    logits[0, 7], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    _compare(gpu, logits, arrays)
    arrays.chain_words[int(arrays.chain_start[2]) + chain.NUM_WORDS] = 50
    for device in ("cpu", gpu.device):
        with pytest.raises(Exception, match="outside the vocabulary"):
            ops.sample(Tensor.from_numpy(_logits(rng, arrays.num_rows, 50)).to(device), arrays)


def test_plan_refuses_impossible_vocabularies():
    assert chain_sampling.plan(0, 5) is None
    with pytest.raises(ValueError, match="vocab is 0, must be 1 to 1048575"):
        chain_sampling.plan(1, 0)
