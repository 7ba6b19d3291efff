"""Completions through OpenAI's SDK: every form of prompt, echo, the legacy log probabilities."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from models.checkpoints.hub import BUNDLED_MODEL
from runtime.engine.messages import EngineRequest
from runtime.text.load import load_tokenizer
from server.openai_api.logprobs import Echo
from server.openai_api.schema import CompletionRequest
from server.requests.sampling import completion_params
from tests.server.byte_tokenizer import END_OF_TURN
from tests.server.conftest import ANSWER, Served, faked, say
from tests.server.openapi import check_answer

MODEL = "fake-model"
NUM_ANSWER_TOKENS = len(ANSWER.encode()) + 1


def complete(served: Served, prompt: Any, **options: Any) -> Any:
    """The answer, validated; `max_tokens` is enough for all of ANSWER unless given."""
    answer = served.openai.completions.create(model=MODEL, prompt=prompt, **{"max_tokens": 100, **options})
    plain = answer.model_dump(exclude_unset=True)
    if not options.get("echo"):  # an echoed prompt's first token has no probability, which the schema forgets
        check_answer("CreateCompletionResponse", plain)
    return answer


def streamed(served: Served, prompt: Any, **options: Any) -> list[Any]:
    with served.openai.completions.create(
        model=MODEL, prompt=prompt, stream=True, **{"max_tokens": 100, **options}
    ) as stream:
        return list(stream)


def test_a_string(served: Served) -> None:
    answer = complete(served, "Hi")
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert [choice.text for choice in answer.choices] == [ANSWER]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == NUM_ANSWER_TOKENS
    assert served.engine.requests[0].prompt_token_ids == list(b"Hi")


def test_the_default_is_sixteen_tokens(served: Served) -> None:
    served.engine.script = lambda request, index: [120] * 1000
    answer = served.openai.completions.create(model=MODEL, prompt="Hi")
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "expected"), [(["a", "bc"], [[97], [98, 99]]), ([1, 2, 3], [[1, 2, 3]]), ([[1, 2], [3]], [[1, 2], [3]])]
)
def test_other_prompts(served: Served, prompt: Any, expected: list[list[int]]) -> None:
    answer = complete(served, prompt)
    assert [request.prompt_token_ids for request in served.engine.requests] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert all(choice.text == ANSWER for choice in answer.choices)
    assert answer.usage.prompt_tokens == sum(map(len, expected))
    assert answer.usage.completion_tokens == NUM_ANSWER_TOKENS * len(expected)


def test_choices_are_numbered_over_all_prompts(served: Served) -> None:
    answer = complete(served, ["a", "b"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [
        (0, ANSWER),
        (1, f"{ANSWER} 1"),
        (2, ANSWER),
        (3, f"{ANSWER} 1"),
    ]
    texts = ["", "", "", ""]
    for chunk in streamed(served, ["a", "b"], n=2):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in answer.choices]


def test_a_stream_says_the_same(served: Served) -> None:
    chunks = streamed(served, "Hi", stream_options={"include_usage": True})
    *pieces, last, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == ANSWER
    assert all(chunk.choices[0].finish_reason is None for chunk in pieces)
    assert last.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage.completion_tokens == NUM_ANSWER_TOKENS
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_logprobs(served: Served) -> None:
    logprobs = complete(served, "Hi", logprobs=2).choices[0].logprobs
    assert logprobs.tokens[:4] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc"]
    assert logprobs.token_logprobs == [-0.25] * NUM_ANSWER_TOKENS
    assert logprobs.top_logprobs[0] == {"G": -0.25, "H": -1.25}
    assert logprobs.text_offset[:7] == [0, 1, 2, 2, 3, 3, 4]
    assert max(logprobs.text_offset) == len(ANSWER)
    parts = [chunk.choices[0].logprobs for chunk in streamed(served, "Hi", logprobs=2)]
    parts = [part for part in parts if part is not None]
    assert [token for part in parts for token in part.tokens] == logprobs.tokens
    assert [top for part in parts for top in part.top_logprobs] == logprobs.top_logprobs


def test_logprobs_of_the_drawn_token_alone(served: Served) -> None:
    logprobs = complete(served, "Hi", logprobs=0).choices[0].logprobs
    assert logprobs.top_logprobs[0] == {"G": -0.25}


@pytest.mark.parametrize("prompt", ["aü", list("aü".encode())])
def test_echo(served: Served, prompt: Any) -> None:
    assert complete(served, prompt, echo=True).choices[0].text == f"aü{ANSWER}"
    chunks = streamed(served, prompt, echo=True, n=2)
    for index, answer in enumerate((ANSWER, f"{ANSWER} 1")):
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == index)
        assert text == f"aü{answer}"


def test_places_in_an_echoed_prompt_with_special_tokens() -> None:
    """Those that the text spells are part of it; one that the tokenizer puts in front is not."""
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    text = "<|user|>Hi<|end|>\n<|assistant|>"
    ids = tokenizer.encode(text)
    for in_front in ([], [tokenizer.token_to_id("<|pad|>")]):
        echo = Echo.of([*in_front, *ids], text, tokenizer, has_offsets=True)
        pieces = [text[a:b] for a, b in pairwise([*echo.token_offsets, len(text)])]
        assert pieces == ["" for _ in in_front] + [tokenizer.decode([each]) for each in ids]


def test_a_long_echo_with_logprobs_comes_in_parts(served: Served) -> None:
    """Nobody waits for all of it: a stream has several chunks of it, which are the whole answer's."""
    prompt = "aü ß€ " * 20
    fields: Any = {"echo": True, "logprobs": 1, "max_tokens": 2, "n": 2, "extra_body": {"return_token_ids": True}}
    whole = complete(served, prompt, **fields).choices
    chunks = [chunk.choices[0] for chunk in streamed(served, prompt, **fields)]
    for choice in whole:
        parts = [chunk for chunk in chunks if chunk.index == choice.index]
        assert len(parts) > 10
        assert max(len(part.logprobs.tokens) for part in parts) < 32
        assert "".join(part.text for part in parts) == choice.text
        assert choice.text.startswith(prompt)
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [each for part in parts for each in getattr(part.logprobs, name)] == getattr(choice.logprobs, name)
        assert len(choice.logprobs.tokens) == len(prompt.encode()) + 2
        assert parts[0].prompt_token_ids == choice.prompt_token_ids == list(prompt.encode())
        assert [each for part in parts for each in part.token_ids] == choice.token_ids
        assert len(choice.token_ids) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_has_those_of_the_prompt(served: Served, stream: bool) -> None:
    if stream:
        chunks = streamed(served, "abc", echo=True, logprobs=1, max_tokens=2)
        parts = [chunk.choices[0].logprobs for chunk in chunks]
        tokens = [token for part in parts for token in part.tokens]
        values = [value for part in parts for value in part.token_logprobs]
        offsets = [offset for part in parts for offset in part.text_offset]
        tops = [top for part in parts for top in part.top_logprobs]
    else:
        choice = complete(served, "abc", echo=True, logprobs=1, max_tokens=2).choices[0]
        assert choice.text == "abcGr"
        logprobs = choice.logprobs
        tokens, values, offsets = logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset
        tops = logprobs.top_logprobs
    assert tokens == ["a", "b", "c", "G", "r"]
    assert values == [None, -0.25, -0.25, -0.25, -0.25]
    assert offsets == [0, 1, 2, 3, 4]
    assert tops == [None, {"b": -0.25}, {"c": -0.25}, {"G": -0.25}, {"r": -0.25}]


def test_no_tokens_but_the_prompt(served: Served) -> None:
    """What evaluation tools ask for: the log probabilities of a text."""
    answer = complete(served, "abc", echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    assert complete(served, "abc", max_tokens=0).choices[0].text == ""


def test_prompt_logprobs(served: Served) -> None:
    (choice,) = complete(served, "ab", extra_body={"prompt_logprobs": 0}).choices
    assert choice.prompt_logprobs == [None, {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}}]


def test_a_stop_token(served: Served) -> None:
    choice = complete(served, "Hi", extra_body={"stop_token_ids": [ord("!")]}).choices[0]
    assert choice.text == "Grüße, 世界"
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == ord("!")


def test_the_end_can_be_ignored(served: Served) -> None:
    body = {"ignore_eos": True, "return_token_ids": True}
    choice = complete(served, "Hi", max_tokens=NUM_ANSWER_TOKENS + 3, extra_body=body).choices[0]
    assert choice.token_ids == say(ANSWER)[: NUM_ANSWER_TOKENS + 3]
    assert choice.prompt_token_ids == [72, 105]
    assert choice.text == f"{ANSWER}   "
    shown = {**body, "skip_special_tokens": False}
    choice = complete(served, "Hi", max_tokens=NUM_ANSWER_TOKENS + 1, extra_body=shown).choices[0]
    assert choice.text == f"{ANSWER}</s> "


def test_log_probabilities_by_ids(served: Served) -> None:
    body = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = complete(served, "Hi", logprobs=1, echo=True, extra_body=body).choices[0]
    assert choice.logprobs is not None
    names = [f"token_id:{each}" for each in [*choice.prompt_token_ids, *choice.token_ids]]
    assert choice.logprobs.tokens == names
    assert choice.logprobs.top_logprobs is not None
    assert all(set(top) <= {name, f"token_id:{int(name[9:]) + 1}"} for name, top in
               zip(names[1:], choice.logprobs.top_logprobs[1:], strict=True))  # fmt: skip


def test_every_sampling_parameter_reaches_the_engine(served: Served) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.75,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "seed": 7,
        "max_tokens": 9,
        "stop": "stop",
        "n": 2,
        "logprobs": 3,
    }
    extra: dict[str, Any] = {
        "top_k": 5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "min_tokens": 1,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "allowed_token_ids": [120, 121],
        "prompt_logprobs": 1,
    }
    scheduling = {"priority": 3, "cache_salt": "tenant", "ttft_target_s": 0.5, "tpot_target_s": 0.05}
    complete(served, "Hi", **asked, logit_bias={"120": 2}, extra_body={**extra, **scheduling})
    (request,) = served.engine.requests
    for name, value in {**asked, **extra, "stop": ["stop"], "logit_bias": {120: 2.0}}.items():
        assert getattr(request.params, name) == value, name
    for name, value in scheduling.items():
        assert getattr(request, name) == value, name
    assert request.eos_token_ids == (END_OF_TURN,)
    assert request.arrival_time_s > 0


def test_a_model_without_tokenizer_serves_ids() -> None:
    with faked(None, lambda request, index: [5, 6, 7, END_OF_TURN]) as served:
        answer = complete(served, [1, 2], logprobs=1)
        assert answer.choices[0].token_ids == [5, 6, 7, END_OF_TURN]
        assert answer.choices[0].text == ""
        assert answer.choices[0].logprobs.tokens == ["token_id:5", "token_id:6", "token_id:7", "token_id:258"]
        ids = [i for chunk in streamed(served, [1, 2]) for i in chunk.choices[0].token_ids]
        assert ids == [5, 6, 7, END_OF_TURN]
        for body in ({"prompt": "text"}, {"prompt": [1], "echo": True}, {"prompt": [1], "stop": "x"}):
            response = served.http.post("/v1/completions", json={"model": MODEL, **body})
            assert response.status_code == 400
            assert "tokenizer" in response.json()["error"]["message"] or "stop" in body
        messages = [{"role": "user", "content": "x"}]
        response = served.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [({}, 0.0), ({"n": 2}, 1.0), ({"seed": 1}, 1.0), ({"top_p": 0.5}, 1.0), ({"n": 2, "temperature": 0}, 0.0)],
)
def test_who_asks_for_draws_of_a_greedy_model_gets_them(fields: dict[str, Any], temperature: float) -> None:
    request = CompletionRequest(model="m", prompt="x", **fields)
    assert completion_params(request, {"temperature": 0.0}, None).temperature == temperature


def test_the_models_own_defaults_hold_where_the_request_is_silent(tokenizer: Any) -> None:
    defaults = {"temperature": 0.5, "top_k": 20, "max_tokens": 7}
    with faked(tokenizer, lambda request, index: [120] * 1000, default_sampling=defaults, model_name="named") as served:

        def asked(route: str, **fields: Any) -> EngineRequest:
            body = {"model": "named", **fields}
            assert served.http.post(route, json=body).status_code == 200
            return served.engine.requests[-1]

        chat, messages = "/v1/chat/completions", [{"role": "user", "content": "x"}]
        params = asked(chat, messages=messages).params
        assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 20, 1.0, 7)
        params = asked(chat, messages=messages, temperature=0, max_tokens=3).params
        assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 20, 3)
        assert asked("/v1/completions", prompt="x").params.max_tokens == 16
