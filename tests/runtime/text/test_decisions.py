"""Questions and their answers, beside sums written here; labels of one token and of several."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from runtime.engine.errors import RequestError
from runtime.errors import XservError
from runtime.llm import LLM
from runtime.text.decisions import (
    ChoiceQuestion,
    Options,
    PredicateQuestion,
    Question,
    RefusalAnswer,
    ScoreQuestion,
    answer,
    content_start,
    options_of,
    question_parts,
    with_question,
)
from runtime.text.formats import AnswerFormat
from tests.runtime.text.harmony.small_model import small_tokenizer
from tests.server.byte_tokenizer import END_OF_TURN, make_byte_tokenizer, write_byte_tokenizer
from tests.server.real_server import write_tiny_model
from tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"


def choices(*values: str | bool) -> ChoiceQuestion:
    return msgspec.convert(
        {"type": "choice", "instructions": "Which?", "choices": [{"value": each} for each in values]}, ChoiceQuestion
    )


def test_labels_of_one_token_need_one_row() -> None:
    tokenizer = Tokenizer.from_pretrained(DEMO)
    options = options_of(choices("New York", "New Jersey", "巴黎", True, "true"), tokenizer, [9], "questions[0]")
    assert list(options.named()) == [()]
    assert len(set(options.labels)) == 5
    for line in ("A: New York\n", "B: New Jersey\n", "C: 巴黎\n", "D: true\n", "E: true\n"):
        assert line in options.text
    assert options.end_ids == ()
    assert options.logprobs({(): {token: -float(place) for place, (token,) in enumerate(options.labels)}}) == [
        0, -1, -2, -3, -4,
    ]  # fmt: skip


def test_numbers_of_several_tokens_end(tmp_path: Path) -> None:
    """ "1" gets its probability times that of the end, "12" that of both digits and the end."""
    tokenizer = make_byte_tokenizer(tmp_path)
    options = options_of(choices(*map(str, range(100))), tokenizer, [END_OF_TURN, 7], "questions[0]")
    named = options.named()
    one, two = ord("1"), ord("2")
    assert set(named[(one,)]) == {*range(ord("0"), ord("9") + 1), END_OF_TURN, 7}
    assert named[one, two] == [END_OF_TURN, 7]
    assert len(named) == 101  # the empty one, and every label
    found = {given: dict.fromkeys(ids, -2.0) for given, ids in named.items()}
    found[(one,)][two] = -0.5
    logprobs = options.logprobs(found)
    assert logprobs[1] == pytest.approx(-2 - 2 + math.log(2))
    assert logprobs[12] == pytest.approx(-2 - 0.5 - 2 + math.log(2))


def test_their_probabilities_are_the_models(tmp_path: Path) -> None:
    """255 options by numbers of up to three tokens, beside the logits of each whole answer."""
    write_tiny_model(tmp_path)
    question = choices(*(chr(0x4E00 + number) for number in range(255)))
    with LLM(tmp_path, load_format="dummy", use_tqdm_on_load=False, compile_ahead=False) as llm:
        tokenizer, ends = llm.get_tokenizer(), llm.client.info.eos_token_ids
        options = options_of(question, tokenizer, ends, "questions[0]")
        (decision,) = llm.decide("text", [msgspec.to_builtins(question)], use_tqdm=False)
        (part,) = question_parts(question, options, "questions[0]")
        content = with_question("text", [part])
        prompt = llm.chat_prompt([{"role": "user", "content": content}])
        sums = []
        for number in (0, 1, 12, 123, 254):
            label = list(str(number).encode())
            logits = llm.logits(prompt + label)[len(prompt) - 1 :].astype(np.float64)
            logprobs = logits - logits.max(-1, keepdims=True)
            logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
            own = [logprobs[place, token] for place, token in enumerate(label)]
            sums.append(sum(own) + math.log(sum(math.exp(logprobs[len(label), end]) for end in ends)))
    (found,) = decision.answers
    shares = np.array([each.probability for each in found.probabilities])  # type: ignore[union-attr]
    assert shares.sum() == pytest.approx(1)
    np.testing.assert_allclose(np.log(shares[[0, 1, 12, 123, 254]] / shares[0]), np.array(sums) - sums[0], atol=1e-4)
    assert len(set(shares.tolist())) > 200


def test_answers_of_log_probabilities() -> None:
    logprobs = [math.log(each) for each in (0.1, 0.3, 0.2)]
    chosen = answer(choices("a", "b", "c"), logprobs)
    assert (chosen.choice, chosen.confidence) == ("b", pytest.approx(0.3))  # type: ignore[union-attr]
    assert [each.probability for each in chosen.probabilities] == pytest.approx([1 / 6, 1 / 2, 1 / 3])  # type: ignore[union-attr]
    levels = {"type": "score", "instructions": "a", "levels": [{"label": each} for each in "xyz"], "name": "n"}
    rated = answer(msgspec.convert(levels, ScoreQuestion), logprobs)
    assert rated.score == pytest.approx(1 / 2 + 2 / 3)  # type: ignore[union-attr]
    told = answer(PredicateQuestion(instructions="a"), logprobs[:2])
    assert (told.probability, told.confidence) == (pytest.approx(0.25), pytest.approx(0.3))  # type: ignore[union-attr]


def test_a_refusal_is_one_questions_own() -> None:
    question = PredicateQuestion(instructions="a", name="n")
    logprobs = [math.log(0.01), math.log(0.03)]
    assert answer(question, logprobs, 0.05) == RefusalAnswer(name="n")
    assert not isinstance(answer(question, logprobs, 0.039), RefusalAnswer)
    assert answer(question, [-math.inf, -math.inf]) == RefusalAnswer(name="n")
    with pytest.raises(XservError, match="not numbers"):
        answer(question, [math.nan, -1.0])
    assert answer(question, [-math.inf, -800.0]).probability == 0  # type: ignore[union-attr]


def test_a_question_stands_after_the_users_text() -> None:
    question = PredicateQuestion(instructions=[{"type": "input_text", "text": "Is it?"}, {"type": "input_image"}])
    options = Options(" Answer.", ((1,), (2,)))
    parts = question_parts(question, options, "q")
    assert [each.get("text") for each in parts] == ["Is it?", None, " Answer."]
    assert [each.get("text") for each in with_question("Given.", parts)] == ["Given.", "\n\nIs it?", None, " Answer."]  # type: ignore[union-attr]
    assert with_question("Given.", question_parts(PredicateQuestion(instructions="Is it?"), options, "q")) == (
        "Given.\n\nIs it? Answer."
    )
    with pytest.raises(RequestError, match=r"q.instructions\[0\].data must be an object or an array of objects"):
        question_parts(PredicateQuestion(instructions=[{"type": "input_json", "data": [1]}]), options, "q")


def test_reasoning_that_the_template_opens_is_closed(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, template="{{ messages[0].content }}<s>assistant:<think>\n")
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    started = content_start(tokenizer, AnswerFormat.of(tokenizer), prompt)
    assert tokenizer.decode(started) == "\n</think>\n\n"
    assert content_start(tokenizer, AnswerFormat.of(tokenizer), prompt + started) == []


def test_harmony_answers_on_the_final_channel() -> None:
    tokenizer = small_tokenizer()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    started = content_start(tokenizer, AnswerFormat.of(tokenizer), prompt)
    assert tokenizer.decode(started, skip_special_tokens=False) == "<|channel|>final<|message|>"


def test_questions_of_an_sdk_and_wrong_ones() -> None:
    with LLM(DEMO, use_tqdm_on_load=False) as llm:
        given = {"type": "predicate", "instructions": "Is it?", "name": None}
        first, second = llm.decide(["one", [{"role": "system", "content": "two"}]], [given] * 2, use_tqdm=False)
        assert first.answers[0] == first.answers[1]
        assert first.num_cached_tokens > first.num_prompt_tokens // 3
        assert second.answers[0].name is None
        for questions, problem in (
            ([], "questions must have 1 to 400 entries, got 0"),
            ([given] * 401, "questions must have 1 to 400 entries, got 401"),
            ([{"type": "guess", "instructions": "a"}], r"questions\[0\]: Invalid value 'guess'"),
            ([given, {"type": "choice", "instructions": "a", "choices": [{"value": "b"}]}], r"questions\[1\]: "),
            ([{"type": "choice", "instructions": "a", "choices": [{"value": "b"}] * 2}],
             r"questions\[0\].choices has the value 'b' twice"),
        ):  # fmt: skip
            with pytest.raises(RequestError, match=problem):
                llm.decide("one", questions)
        with pytest.raises(RequestError, match="refusal_threshold must be from 0 to 1, got nan"):
            llm.decide("one", [given], refusal_threshold=math.nan)
        refused = llm.decide("one", [given], refusal_threshold=1.0, use_tqdm=False)[0].answers
        assert refused == [RefusalAnswer(name=None)]


def test_every_type_is_a_question() -> None:
    assert {each.__struct_config__.tag for each in Question.__args__} == {"predicate", "choice", "score"}
