"""`/v1/decisions` by OpenAI's SDK on the bundled model, beside the engine's own logits."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM
from tests.server.real_server import Real, serving_real, write_tiny_model
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
    """All but the first question find the whole input in the prefix cache."""
    text = "A long text about many things. " * 12
    assert demo.client.info.block_size == 16
    questions = [{"type": "predicate", "instructions": f"Does number {number} occur?"} for number in range(40)]
    usage = ask(demo, questions, input=text).usage
    tokenizer = Tokenizer.from_pretrained(DEMO)
    of_text = len(tokenizer.encode(text, add_special_tokens=False))
    assert usage.input_tokens_details.cached_tokens >= 39 * of_text


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
        ({"refusal_threshold": 2}, "refusal_threshold"),
        ({"prompt_cache_options": 3}, "prompt_cache_options"),
        ({"input": []}, "input"),
        ({"input": "x" * 100_000}, "input"),
        ({"temperature": 1}, "temperature"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(demo: Real, fields: dict[str, Any], param: str) -> None:
    answer = demo.http.post("/v1/decisions", json={"model": demo.model, "input": "a", "questions": QUESTIONS, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param), answer.text


def test_255_choices(demo: Real, tmp_path: Path) -> None:
    """The bundled model has 62 labels of one token, and then numbers; so has one whose tokens are bytes."""
    choices = [{"value": chr(0x4E00 + number)} for number in range(255)]
    fewer = ask(demo, [{"type": "choice", "instructions": "b", "choices": choices[:62]}]).answers[0]
    assert len(fewer.probabilities) == 62
    write_tiny_model(tmp_path)
    with serving_real(tmp_path, load_format="dummy") as tiny:
        questions = [{"type": "choice", "instructions": "b", "choices": choices}, QUESTIONS[0]]
        decision = ask(tiny, questions, input="a")
        assert [each.value for each in decision.answers[0].probabilities] == [each["value"] for each in choices]
        assert sum(each.probability for each in decision.answers[0].probabilities) == pytest.approx(1)
        assert decision.answers[1] == ask(tiny, questions[1:], input="a").answers[0]
        assert decision.usage.input_tokens_details.cached_tokens < decision.usage.input_tokens
    with LLM(tmp_path, load_format="dummy", use_tqdm_on_load=False, compile_ahead=False) as llm:
        (found,) = llm.decide("a", questions, use_tqdm=False)
    shares = [[each.probability for each in answers[0].probabilities] for answers in (found.answers, decision.answers)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-6)


def probabilities(answer: Any) -> list[float]:
    return [each.probability for each in ([answer] if answer.type == "predicate" else answer.probabilities)]


def test_400_questions(demo: Real) -> None:
    """In their order, and each as it is alone; the input is computed once."""
    questions = [{**QUESTIONS[number % 3], "name": str(number // 2)} for number in range(400)]
    decision = ask(demo, questions)
    assert [each.name for each in decision.answers] == [each["name"] for each in questions]
    for number, question in enumerate(QUESTIONS):
        (alone,) = ask(demo, [question]).answers
        for each in decision.answers[number::3]:
            assert each.type == alone.type
            assert probabilities(each) == pytest.approx(probabilities(alone), rel=1e-3)
    tokenizer = Tokenizer.from_pretrained(DEMO)
    of_text = len(tokenizer.encode(TEXT, add_special_tokens=False))
    assert decision.usage.input_tokens_details.cached_tokens >= 399 * of_text


def test_a_refusal(demo: Real) -> None:
    refused = ask(demo, QUESTIONS, extra_body={"refusal_threshold": 1}).answers
    assert [(each.type, each.name) for each in refused] == [
        ("refusal", "france"), ("refusal", None), ("refusal", "quality"),
    ]  # fmt: skip


def test_every_item_that_the_sdk_sends(tmp_path: Path) -> None:
    """Calls of functions and custom tools with their results, phases, refusals, marks for a cache, nulls."""
    write_tiny_model(tmp_path)
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    given: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Judge.", **mark}]},
        {"role": "user", "content": "One."},
        {"type": "message", "role": "assistant", "phase": "commentary", "content": [
            {"type": "output_text", "text": "I look."}, {"type": "refusal", "refusal": "No."}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}", "id": None, "namespace": None,
         "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "seen", **mark}]},
        {"type": "custom_tool_call", "call_id": "2", "name": "run", "input": "ls \"a\""},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "b", "status": None},
        {"role": "user", "content": [
            {"type": "input_json", "data": [{"a": None}]}, {"type": "input_text", "text": "x"}]},
    ]  # fmt: skip
    with serving_real(tmp_path, load_format="dummy") as tiny:
        assert (
            len(ask(tiny, QUESTIONS, input=given, prompt_cache_options={"mode": "explicit", "ttl": "30m"}).answers) == 3
        )
        for wrong, param in (
            ({"type": "custom_tool_call", "call_id": "2", "name": "run"}, "input[0].input"),
            ({"type": "custom_tool_call_output", "call_id": "9", "output": "b"}, "input[0].call_id"),
            ({"role": "user", "content": [{"type": "input_json", "data": 3}]}, "input[0].content[0].data"),
            ({"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}, "input[0].content[0].type"),
        ):
            answer = tiny.http.post("/v1/decisions", json={"input": [wrong], "questions": QUESTIONS[:1]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        mine = {**QUESTIONS[0], "instructions": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]}
        answer = tiny.http.post("/v1/decisions", json={"input": "a", "questions": [mine]})
        assert answer.json()["error"]["param"] == "questions[0].instructions[1].type", answer.text


def test_images() -> None:
    """An image of the input is computed once for all questions; a question may have its own."""
    vision = DEMO.parent / "demo_vision"
    chart = f"data:image/png;base64,{base64.b64encode((vision / 'chart.png').read_bytes()).decode()}"
    image = {"type": "input_image", "image_url": chart}
    given = [{"role": "user", "content": [image, {"type": "input_text", "text": "Look."}]}]
    questions = [{"type": "predicate", "instructions": f"Is {number} in it?"} for number in range(4)]
    with serving_real(vision) as server:
        token_id = server.client.info.images.token_id
        decision = ask(server, questions, input=given)
        assert [ask(server, [each], input=given).answers[0] for each in questions] == decision.answers
        body = {"model": server.model, "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": chart}}, {"type": "text", "text": "Look."}]}]}  # fmt: skip
        ids = server.http.post("/tokenize", json=body).json()["tokens"]
        assert ids.count(token_id) > 16
        assert decision.usage.input_tokens_details.cached_tokens >= 3 * ids.count(token_id)
        own = [{"type": "predicate", "instructions": [{"type": "input_text", "text": "Is it like this?"}, image]}]
        without, with_image = (ask(server, own, input=each).usage.input_tokens for each in ("a", given))
        assert with_image - without >= ids.count(token_id)
        assert without > ids.count(token_id)
        broken = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]
        answer = server.http.post("/v1/decisions", json={"input": broken, "questions": questions})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "input[0].content[0].image_url"


def test_another_model_is_not_found(demo: Real) -> None:
    with pytest.raises(openai.NotFoundError):
        demo.openai.decisions.create(model="other", input="a", questions=QUESTIONS)
