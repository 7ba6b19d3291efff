"""`logprobs_mode`: what an answer tells as log probabilities, beside the oracle of sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from runtime import LLM, SamplingParams
from runtime.engine.errors import RequestError
from tests.oracles.sampling import kept_tokens, processed
from tests.runtime.engine.logits.cases import MODEL, PROMPTS, top_k

MODES = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128}
DRAWN = {
    "temperature": 0.7, "top_k": 9, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 1.2, "presence_penalty": 0.1,
    "frequency_penalty": 0.2, "logit_bias": {5: 1.5}, "seed": 3,
}  # fmt: skip


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(mode: str) -> Iterator[LLM]:
    with LLM(MODEL, logprobs_mode=mode, **OPTIONS) as made:
        yield made


def told(raw: Any, mode: str, fields: dict[str, Any], prompt: list[int], output: list[int]) -> Any:
    """What the mode tells of all tokens, in float64."""
    if mode.startswith("processed"):
        values = processed(
            raw, bias=list(fields.get("logit_bias", {}).items()), prompt=prompt, output=output,
            repetition=fields.get("repetition_penalty", 1.0), presence=fields.get("presence_penalty", 0.0),
            frequency=fields.get("frequency_penalty", 0.0),
        )  # fmt: skip
        if fields["temperature"]:
            filters = {
                name: fields.get(name, default) for name, default in (("top_k", 0), ("top_p", 1.0), ("min_p", 0))
            }
            kept, _ = kept_tokens(values, fields["temperature"], **filters)
            scaled = np.asarray(values, np.float32) / np.float32(fields["temperature"])
            values = np.full(len(scaled), -np.inf)
            values[kept] = scaled[kept]
    else:
        values = raw
    values = np.asarray(values, np.float64)
    if mode.endswith("logits"):
        return values
    return values - np.logaddexp.reduce(values)


@pytest.mark.parametrize(
    "fields", [DRAWN, {"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.5}], ids=str
)
def test_all_told_values(llm: LLM, mode: str, fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields, max_tokens=10, logprobs=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    for prompt, each in zip(PROMPTS, outputs, strict=True):
        ids = each.outputs[0].token_ids
        logits = llm.logits([*prompt, *ids])
        assert each.outputs[0].logprobs is not None
        for at, entries in enumerate(each.outputs[0].logprobs):
            wanted = told(logits[len(prompt) - 1 + at], mode, fields, prompt, ids[:at])
            assert ids[at] in entries
            for token_id, entry in entries.items():
                assert entry.logprob == pytest.approx(wanted[token_id], abs=2e-5), (mode, at, token_id)
                if np.isfinite(wanted[token_id]):
                    assert entry.rank == 1 + np.count_nonzero(wanted > wanted[token_id])
            told_ids = [i for i in entries if np.isfinite(wanted[i])]
            assert len(told_ids) == min(len(entries), np.count_nonzero(np.isfinite(wanted)))


def test_named_ids_and_prompts(llm: LLM, mode: str) -> None:
    """`logprob_token_ids` are told the same way; prompts' log probabilities are raw in every mode."""
    params = SamplingParams(temperature=0.5, max_tokens=3, logprob_token_ids=[7, 67], prompt_logprobs=1, seed=1)
    output = llm.generate([{"prompt_token_ids": PROMPTS[2]}], params)[0]
    logits = llm.logits([*PROMPTS[2], *output.outputs[0].token_ids])
    assert output.outputs[0].logprobs is not None
    for at, entries in enumerate(output.outputs[0].logprobs):
        wanted = told(logits[2 + at], mode, {"temperature": 0.5}, [], [])
        for token_id in (7, 67):
            assert entries[token_id].logprob == pytest.approx(wanted[token_id], abs=2e-5)
    assert output.prompt_logprobs is not None
    for at in (1, 2):
        raw = told(logits[at - 1], "raw_logprobs", {}, [], [])
        entry = (output.prompt_logprobs[at] or {})[PROMPTS[2][at]]
        assert entry.logprob == pytest.approx(raw[PROMPTS[2][at]], abs=2e-5)


def test_the_same_tokens_and_values_in_any_schedule(llm: LLM, mode: str) -> None:
    params = SamplingParams(**DRAWN, max_tokens=12, logprobs=2, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
    alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    for options in ({"speculation": "ngram", "overlap": "on"}, {"num_blocks": 9, "max_model_len": 64, "block_size": 8}):
        with LLM(MODEL, logprobs_mode=mode, **{**OPTIONS, **options}) as other:
            together = [each.outputs[0] for each in other.generate(prompts, params)]
        assert [(o.token_ids, o.logprobs) for o in together] == [(o.token_ids, o.logprobs) for o in alone]


def test_after_logits_processors() -> None:
    """Raw values are the model's own, processed ones have what processors did."""
    params = SamplingParams(temperature=1.0, max_tokens=4, logprobs=8, seed=5, ignore_eos=True)
    values = {}
    for mode in MODES:
        with LLM(MODEL, logprobs_mode=mode, logits_processors=[top_k], **OPTIONS) as llm:
            output = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params)[0].outputs[0]
            assert output.logprobs is not None
            values[mode] = [[entry.logprob for entry in entries.values()] for entries in output.logprobs]
    for mode, lists in values.items():
        num_finite = {int(np.isfinite(each).sum()) for each in lists}
        assert num_finite == {5} if mode.startswith("processed") else num_finite <= {8, 9}
    for logprobs in values["processed_logprobs"]:
        assert sum(np.exp(logprobs)) == pytest.approx(1.0, abs=1e-5)


def test_an_unknown_mode() -> None:
    with pytest.raises(RequestError, match="logprobs_mode must be one of raw_logprobs, processed_logprobs, raw_logits"):
        LLM(MODEL, logprobs_mode="cooked", **OPTIONS)
