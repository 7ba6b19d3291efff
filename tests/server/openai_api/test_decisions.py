"""`/v1/decisions` by OpenAI's SDK on the bundled model, beside the engine's own logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM
from tests.server.real_server import Real, serving_real
from tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
TEXT = "Paris is the capital of France. " * 8
QUESTIONS: list[Any] = [
    {"type": "predicate", "instructions": "Is it about France?", "name": "france"},
    {
        "type": "choice", "instructions": [{"type": "input_text", "text": "Which city?"}],
        "choices": [
            {"value": "Paris"}, {"value": True, "description": "a boolean"}, {"value": "true"}, {"value": "巴黎"},
        ],
    },
    {
        "type": "score", "instructions": "How good?", "name": "quality",
        "levels": [{"label": "bad"}, {"label": "fair"}, {"label": "good", "description": "no fault"}],
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> Iterator[Real]:
    with serving_real(DEMO) as server:
        yield server


def ask(demo: Real, questions: list[Any], **fields: Any) -> Any:
    return demo.openai.decisions.create(model=demo.model, questions=questions, **{"input": TEXT, **fields})


def test_answers(demo: Real) -> None:
    decision = ask(demo, QUESTIONS, safety_identifier="someone", prompt_cache_key="key")
    predicate, choice, score = decision.answers
    assert (predicate.type, predicate.name) == ("predicate", "france")
    assert 0 <= predicate.probability <= 1
    assert (choice.type, choice.name) == ("choice", None)
    assert [each.value for each in choice.probabilities] == ["Paris", True, "true", "巴黎"]
    assert choice.choice == max(choice.probabilities, key=lambda each: each.probability).value
    assert [(each.label, each.value) for each in score.probabilities] == [("bad", 0), ("fair", 1), ("good", 2)]
    assert score.score == pytest.approx(sum(each.value * each.probability for each in score.probabilities))
    for answer in (choice, score):
        assert sum(each.probability for each in answer.probabilities) == pytest.approx(1)
        assert 0 < answer.confidence <= max(each.probability for each in answer.probabilities)
    assert [ask(demo, [each]).answers[0] for each in QUESTIONS] == decision.answers  # alone
    usage = decision.usage
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (3, 0)
    details = usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == usage.input_tokens


def test_one_prefix_for_all_questions(demo: Real) -> None:
    """All but the first question find the input in the prefix cache, but for its last page."""
    text = "A long text about many things. " * 12
    assert demo.client.info.block_size == 16
    questions = [{"type": "predicate", "instructions": f"Does number {number} occur?"} for number in range(40)]
    usage = ask(demo, questions, input=text).usage
    tokenizer = Tokenizer.from_pretrained(DEMO)
    of_text = len(tokenizer.encode(text, add_special_tokens=False))
    assert usage.input_tokens_details.cached_tokens >= 39 * (of_text - 16)


def test_the_probabilities_are_the_models(demo: Real) -> None:
    with LLM(DEMO, use_tqdm_on_load=False) as llm:
        ids = llm.get_tokenizer().encode("Paris is the capital of")
        named = [5, 300, 7, 5]
        params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=named, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": ids}] * 3, params, use_tqdm=False)[1].outputs
        logits = llm.logits(ids)[-1].astype(np.float64)
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert output.logprobs is not None
        found = output.logprobs[0]
        np.testing.assert_allclose([found[each].logprob for each in named], expected[named], rtol=1e-5, atol=1e-5)
    with pytest.raises(RequestError, match="logprob_token_ids must not be empty"):
        SamplingParams(logprob_token_ids=[])
    with pytest.raises(RequestError, match="logprobs must be 0 or None beside logprob_token_ids, got 3"):
        SamplingParams(logprob_token_ids=[1], logprobs=3)


def test_messages_and_json(demo: Real) -> None:
    given = [
        {"role": "system", "content": "You judge texts."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": TEXT, "prompt_cache_breakpoint": {"mode": "explicit"}}],
        },
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": [{"type": "input_json", "data": {"city": "Paris"}}]},
    ]  # fmt: skip
    assert len(ask(demo, QUESTIONS, input=given).answers) == 3


MANY = [{"value": str(number)} for number in range(256)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": QUESTIONS[:1] * 401}, "questions"),
        ({"questions": [{"type": "guess", "instructions": "a"}]}, "questions[0]"),
        ({"questions": [{"type": "choice", "instructions": "a", "choices": [{"value": "b"}]}]}, "questions[0].choices"),
        ({"questions": [{"type": "choice", "instructions": "a", "choices": MANY}]}, "questions[0].choices"),
        ({"questions": [{"type": "choice", "instructions": "a", "choices": MANY[:1] * 2}]}, "questions[0].choices"),
        ({"questions": [{"type": "score", "instructions": "a", "levels": [{"label": "b"}]}]}, "questions[0].levels"),
        ({"questions": [{"type": "predicate", "instructions": [{"type": "input_json", "data": 3}]}]},
         "questions[0].instructions[0].data"),
        ({"input": []}, "input"),
        ({"input": "x" * 100_000}, "input"),
        ({"temperature": 1}, "temperature"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(demo: Real, fields: dict[str, Any], param: str) -> None:
    answer = demo.http.post("/v1/decisions", json={"model": demo.model, "input": "a", "questions": QUESTIONS, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param), answer.text


def test_as_many_labels_as_the_tokenizer_has(demo: Real) -> None:
    choices = MANY[:255]
    answer = demo.http.post("/v1/decisions", json={
        "model": demo.model, "input": "a", "questions": [{"type": "choice", "instructions": "b", "choices": choices}],
    })  # fmt: skip
    if answer.status_code == 400:
        assert "labels of one token: send fewer" in answer.json()["error"]["message"]
    else:
        assert len(answer.json()["answers"][0]["probabilities"]) == 255
    fewer = ask(demo, [{"type": "choice", "instructions": "b", "choices": choices[:30]}]).answers[0]
    assert len(fewer.probabilities) == 30


def test_another_model_is_not_found(demo: Real) -> None:
    with pytest.raises(openai.NotFoundError):
        demo.openai.decisions.create(model="other", input="a", questions=QUESTIONS)
