"""Chains of samplers keep the tokens that llama.cpp keeps, with its probabilities; DRY subtracts what it subtracts.
The file is made by `tools.references.make_sampler_goldens`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_kernels import sampler_chain as chain
from runtime import ops
from runtime.engine.dry import Dry, DryBreakers
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.steps.chains import Chains
from runtime.engine.steps.step_input import RowLoad
from runtime.sampling_arrays import SamplingArrays
from runtime.sampling_table import KERNEL_COLUMNS
from runtime.tensor.tensor import Tensor

_FILE = np.load(Path(__file__).parent / "llama_samplers.npz")
_DESCRIBED: dict[str, Any] = json.loads(_FILE["described"].tobytes())


def _cases(kind: str) -> list[dict[str, Any]]:
    cases = [case | {"number": i} for i, case in enumerate(_DESCRIBED["cases"]) if case["kind"] == kind]
    assert cases
    return cases


def _array(case: dict[str, Any], name: str) -> np.ndarray:
    return _FILE[f"{case['number']}.{name}"]


def arrays_of(params: list[SamplingParams], mus: list[float] | None = None) -> SamplingArrays:
    """Each of these as a row, as the engine loads it."""
    arrays, chains, words = SamplingArrays.neutral(len(params)), Chains(len(params)), []
    for row, each in enumerate(params):
        for name in KERNEL_COLUMNS:
            getattr(arrays, name)[row] = each.numbers[name]
        mu = 2 * each.mirostat_tau if mus is None else mus[row]
        load = RowLoad(row=row, seed=0, choice_index=0, num_prompt_tokens=1, last_token_id=0, numbers=each.numbers,
                       stages=each.stages, mirostat_mu=mu)  # fmt: skip
        chains.load(load)
        words.append(chains.words(row, np.empty(0, np.int32)))
    arrays.chain_words = np.concatenate(words)
    arrays.chain_end = np.cumsum([len(each) for each in words]).astype(np.int32)
    arrays.chain_start = arrays.chain_end - np.array([len(each) for each in words], np.int32)
    return arrays


def _probabilities(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _compare(logits: np.ndarray, left: np.ndarray, params: list[SamplingParams], mus: list[float] | None = None):
    found = ops.distributions(Tensor.from_numpy(np.ascontiguousarray(logits)), arrays_of(params, mus))
    expected = _probabilities(left)
    # A kept token may be too improbable for a float32.
    assert ((found > 0) == (left > -np.inf))[(expected > 1e-30) | (left == -np.inf)].all()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("case", _cases("filters"), ids=lambda case: str(case["number"]))
def test_a_chain_keeps_what_llama_keeps(case: dict[str, Any]):
    logits, left = _array(case, "logits"), _array(case, "left")
    params = [SamplingParams(temperature_last=True, **numbers) for numbers in _DESCRIBED["chains"]]
    assert all(each.stages for each in params)
    _compare(np.repeat(logits[None], len(left), 0), left, params)


@pytest.mark.parametrize("case", _cases("mirostat"), ids=lambda case: str(case["number"]))
def test_mirostat_follows_llamas_draws(case: dict[str, Any]):
    """mu after each of its draws, by the formula, is what the next step keeps by."""
    params = SamplingParams(mirostat=2, **case["numbers"])
    mu = 2 * params.mirostat_tau
    for logits, left, drawn in zip(_array(case, "logits"), _array(case, "left"), _array(case, "drawn").tolist()):
        _compare(logits[None], left[None], [params], [mu])
        surprise = -np.log2(_probabilities(left)[drawn])
        mu -= params.mirostat_eta * (surprise - params.mirostat_tau)


def test_the_kernel_returns_the_next_mu():
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((64, 40)) * 2).astype(np.float32)
    params = SamplingParams(mirostat=2, mirostat_tau=3.0, mirostat_eta=0.25)
    arrays = arrays_of([params] * 64, [2.5] * 64)
    arrays.seed[:] = np.arange(64)
    drawn = ops.sample(Tensor.from_numpy(logits), arrays)
    kept = ops.distributions(Tensor.from_numpy(logits), arrays)
    surprises = -np.log2(kept[np.arange(64), drawn.token_ids].astype(np.float64))
    assert drawn.mus is not None
    assert drawn.ok.all()
    assert len(set(drawn.token_ids.tolist())) > 8
    np.testing.assert_allclose(drawn.mus, 2.5 - 0.25 * (surprises - 3.0), rtol=1e-5)


@pytest.mark.parametrize("case", _cases("dry"), ids=lambda case: str(case["number"]))
def test_dry_subtracts_what_llama_subtracts(case: dict[str, Any]):
    breakers = _breakers(tuple(case["breakers"]))
    history = _array(case, "history")
    for cut in {0, len(history) // 2, len(history)}:  # prompt and output are one text
        ids, penalties = Dry(case["numbers"], breakers, history[:cut]).penalties(history[cut:])
        order = np.argsort(ids)
        np.testing.assert_array_equal(ids[order], _array(case, "ids"))
        np.testing.assert_allclose(penalties[order], _array(case, "penalties"), rtol=1e-6)


def _breakers(texts: tuple[str, ...]) -> DryBreakers:
    """Of the few tokens that the texts consist of, read without a tokenizer."""
    (case,) = _cases("dry_vocabulary")
    words = {int(token): text for token, text in case["tokens"].items()}
    ids = {text: token for token, text in words.items()}
    singles, sequences = set(), []
    for text in texts:
        for token, word in words.items():
            if text in word:
                singles.add(token)
                continue
            for count in range(1, len(text)):
                rest = _AFTER.get(text[count:])
                if word.endswith(text[:count]) and rest is not None:
                    sequences.append([token, *(ids[piece] for piece in rest)])
    return DryBreakers(token_ids=sorted(singles), sequences=sequences)


_AFTER = {":": [":"], " end": [" end"], "nd": ["nd"]}
"""Ends of the breakers as the vocabulary's tokens."""


def test_a_neutral_chain_is_the_usual_draw():
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((40, 300)) * 3).astype(np.float32)
    usual = SamplingArrays.neutral(40)
    usual.temperature[:], usual.top_k[:], usual.top_p[:], usual.min_p[:] = 0.8, 30, 0.9, 0.01
    usual.seed[:] = np.arange(40)
    params = SamplingParams(
        temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, samplers=["temperature", "min_p", "top_k", "top_p"]
    )
    assert chain.packed(params.stages) == chain.packed((1, 2, 3, 5))
    chained = arrays_of([params] * 40)
    chained.seed[:] = np.arange(40)
    tokens = [ops.sample(Tensor.from_numpy(logits), each).token_ids for each in (usual, chained)]
    np.testing.assert_array_equal(*tokens)
