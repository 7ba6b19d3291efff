"""Chains of samplers through the engine: an answer depends on its request and seed alone, whatever runs beside it, and
however its tokens are computed."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM

PROMPTS = ["One two three. One two three. One two three. One two", "The cat: the mat, the cat: the"]
CASES: list[dict[str, Any]] = [
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    {"mirostat": 2, "mirostat_tau": 0.5, "temperature": 2.0, "logprobs": 2},
    {"dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_sequence_breakers": [":"]},
    {"dry_multiplier": 3.0, "dry_allowed_length": 0, "temperature": 0.0},
    {"typical_p": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.02, "top_n_sigma": 2.0, "dynatemp_range": 1.0},
    {"temperature_last": True, "top_k": 40, "typical_p": 0.95, "repetition_penalty": 1.2, "n": 3},
    {"samplers": ["penalties", "dry", "top-k", "xtc"], "top_k": 9, "xtc_probability": 1.0, "dry_multiplier": 0.5,
     "min_tokens": 8, "max_tokens": 16, "logit_bias": {5: 2.0}, "frequency_penalty": 0.2},
    {},
]  # fmt: skip


def _params() -> list[SamplingParams]:
    usual = {"temperature": 2.5, "max_tokens": 40, "seed": 9, "ignore_eos": True}
    return [SamplingParams(**(usual | case)) for case in CASES for _ in PROMPTS]  # type: ignore[arg-type]


def _answers(llm: LLM, *, together: bool) -> list[list[tuple[list[int], Any]]]:
    prompts, params = PROMPTS * len(CASES), _params()
    if together:
        answers = llm.generate(prompts, params)
    else:
        answers = [llm.generate([prompt], [each])[0] for prompt, each in zip(prompts, params)]
    return [[(list(each.token_ids), each.cumulative_logprob) for each in answer.outputs] for answer in answers]


@pytest.fixture(scope="module")
def alone() -> list[list[tuple[list[int], Any]]]:
    """One after another, each step done at once."""
    with LLM(max_num_seqs=4, decode_graphs="off", enable_prefix_caching=False) as llm:
        return _answers(llm, together=False)


def _tokens(answers: list[list[tuple[list[int], Any]]]) -> list[list[list[int]]]:
    return [[token_ids for token_ids, _ in outputs] for outputs in answers]


def test_each_sampler_changes_the_answer(alone: list[list[tuple[list[int], Any]]]) -> None:
    first = [outputs[0][0] for outputs in alone[:: len(PROMPTS)]]
    assert all(first.count(each) == 1 for each in first)
    *_, (choices, _) = [_tokens(alone)[i : i + 2] for i in range(10, 12, 2)]
    assert len({tuple(each) for each in choices}) == 3, "n choices differ"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_seqs": 32}, id="graphs"),
        pytest.param({"max_num_seqs": 32, "num_blocks": 40, "block_size": 8, "max_num_batched_tokens": 16,
                      "swap_space_bytes": 0}, id="preempted"),
        pytest.param({"max_num_seqs": 3, "overlap": "on"}, id="overlapped"),
    ],
)  # fmt: skip
def test_an_answer_depends_on_its_request_alone(
    alone: list[list[tuple[list[int], Any]]], options: dict[str, Any]
) -> None:
    with LLM(**options) as llm:
        assert _tokens(_answers(llm, together=True)) == _tokens(alone)
        stats = llm.client.stats()
        if "num_blocks" in options:
            assert stats.num_preemptions > 0
        if options == {"max_num_seqs": 32}:
            assert stats.num_graph_steps > 0
