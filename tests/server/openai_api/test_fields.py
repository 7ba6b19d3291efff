"""Every field of the generation requests: where it arrives, and that the operator's page knows it."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.engine.messages import EngineRequest
from server.anthropic_api.schema import MessagesRequest
from server.ollama_api.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from server.openai_api.extensions import EXTENSIONS, SAME_AS
from server.openai_api.fields import tables_of
from server.openai_api.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from server.responses_api.schema import ResponsesRequest
from tests.server.byte_tokenizer import END_OF_TURN
from tests.server.conftest import ANSWER, Served, serving
from tests.server.fake_engine import FakeEngineClient
from tests.waiting import TIMEOUT_S, wait_until
from tokenizer import Tokenizer

CHAT: dict[str, Any] = {"model": "fake-model", "messages": [{"role": "user", "content": "Hello"}]}
COMPLETION: dict[str, Any] = {"model": "fake-model", "prompt": "Hello"}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]

ARRIVES: dict[str, tuple[Any, str, Any]] = {
    # field: (value, the engine's name, what it is there)
    "n": (2, "n", 2),
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.25, "top_p", 0.25),
    "top_k": (7, "top_k", 7),
    "min_p": (0.125, "min_p", 0.125),
    "typical_p": (0.5, "typical_p", 0.5),
    "typ_p": (0.5, "typical_p", 0.5),
    "top_n_sigma": (1.5, "top_n_sigma", 1.5),
    "nsigma": (1.5, "top_n_sigma", 1.5),
    "xtc_probability": (0.5, "xtc_probability", 0.5),
    "xtc_threshold": (0.25, "xtc_threshold", 0.25),
    "dynatemp_range": (0.5, "dynatemp_range", 0.5),
    "dynatemp_exponent": (2, "dynatemp_exponent", 2.0),
    "mirostat": (2, "mirostat", 2),
    "mirostat_tau": (4, "mirostat_tau", 4.0),
    "mirostat_eta": (0.5, "mirostat_eta", 0.5),
    "dry_multiplier": (0.5, "dry_multiplier", 0.5),
    "dry_base": (2, "dry_base", 2.0),
    "dry_allowed_length": (4, "dry_allowed_length", 4),
    "dry_penalty_last_n": (64, "dry_penalty_last_n", 64),
    "dry_range": (64, "dry_penalty_last_n", 64),
    "samplers": (["top-k", "temperature", "infill"], "samplers", ["top_k", "temperature"]),
    "temperature_last": (True, "temperature_last", True),
    "presence_penalty": (1.5, "presence_penalty", 1.5),
    "frequency_penalty": (-1.5, "frequency_penalty", -1.5),
    "repetition_penalty": (1.25, "repetition_penalty", 1.25),
    "seed": (11, "seed", 11),
    "stop": ("done", "stop", ["done"]),
    "stop_token_ids": ([65, 66], "stop_token_ids", [65, 66]),
    "ignore_eos": (True, "ignore_eos", True),
    "include_stop_str_in_output": (True, "include_stop_str_in_output", True),
    "skip_special_tokens": (False, "skip_special_tokens", False),
    "max_tokens": (9, "max_tokens", 9),
    "min_tokens": (3, "min_tokens", 3),
    "logit_bias": ({"65": 2}, "logit_bias", {65: 2.0}),
    "allowed_token_ids": ([70, END_OF_TURN], "allowed_token_ids", [70, END_OF_TURN]),
    "bad_words": (["ab", " c"], "bad_words_token_ids", [[97, 98], [99]]),
    "prompt_logprobs": (2, "prompt_logprobs", 2),
}


def asked(served: Served, route: str, body: dict[str, Any]) -> EngineRequest:
    answer = served.http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return served.engine.requests[-1]


@pytest.mark.parametrize("field", ARRIVES)
@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_sampling_field_arrives(served: Served, route: str, body: dict[str, Any], field: str) -> None:
    value, name, expected = ARRIVES[field]
    plain = getattr(asked(served, route, body).params, name)
    assert getattr(asked(served, route, {**body, field: value}).params, name) == expected != plain


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_scheduling_field_arrives(served: Served, route: str, body: dict[str, Any]) -> None:
    request = asked(served, route, {**body, "priority": 3, "cache_salt": "salt"})
    assert (request.priority, request.cache_salt) == (3, "salt")
    assert asked(served, route, {**body, "ttft_target_s": 0.5, "tpot_target_s": 0.25}).tpot_target_s == 0.25


@pytest.mark.parametrize(("route", "body"), ROUTES)
@pytest.mark.parametrize(("most", "left"), [(3, 3), (1, 1), (100, None), (-1, None)])
def test_a_prompt_is_cut(served: Served, route: str, body: dict[str, Any], most: int, left: int | None) -> None:
    whole = asked(served, route, body).prompt_token_ids
    cut = asked(served, route, {**body, "truncate_prompt_tokens": most}).prompt_token_ids
    assert cut == (whole if left is None else whole[-left:])


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_prompt_is_cut_to_leave_room(served: Served, route: str, body: dict[str, Any]) -> None:
    text = "x" * 1000
    body = {**body, "prompt": text} if "prompt" in body else {**body, "messages": [{"role": "user", "content": text}]}
    request = asked(served, route, {**body, "truncate_prompt_tokens": -1, "max_tokens": 20})
    assert len(request.prompt_token_ids) == served.engine.info.max_model_len - 20
    refused = served.http.post(route, json={**body, "truncate_prompt_tokens": 0}).json()["error"]
    assert refused["param"] == "truncate_prompt_tokens"
    assert served.http.post(route, json=body).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("words", [[""], [" "], ["a"] * 200, [1], "a"])
def test_bad_words_have_limits(served: Served, words: Any) -> None:
    answer = served.http.post("/v1/completions", json={**COMPLETION, "bad_words": words})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("bad_words")


def test_a_model_without_tokenizer_has_no_words(fake_engine: FakeEngineClient) -> None:
    with serving(fake_engine, None) as served:
        body = {"model": "fake-model", "prompt": [1, 2], "bad_words": ["a"]}
        assert served.http.post("/v1/completions", json=body).json()["error"]["param"] == "bad_words"
        assert served.http.post("/tokenize", json={"prompt": "a"}).status_code == 400


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_request_is_cancelled_by_its_names(served: Served, route: str, body: dict[str, Any]) -> None:
    """A stream ends with the error, an answer that was waited for is one."""
    served.engine.script = lambda request, index: [65] * 10_000
    served.engine.step_s = 0.05
    for name, headers, fields in (
        ("mine-1", {}, {"request_id": "mine-1"}),
        ("given/2", {"X-Request-Id": "given/2"}, {}),
    ):
        answers: list[Any] = []

        def ask(headers: Any = headers, fields: Any = fields, answers: list[Any] = answers) -> None:
            content = {**body, "max_tokens": 200, "ignore_eos": True, **fields}
            answers.append(served.http.post(route, json=content, headers=headers))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: served.engine.num_open == 1)
        cancelled = served.http.post(f"/v1/requests/{name}/cancel")
        assert cancelled.json() == {"id": name, "cancelled": 1}
        thread.join(TIMEOUT_S)
        (answer,) = answers
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "request_cancelled")
        wait_until(lambda: served.engine.num_open == 0)
        assert served.http.post(f"/v1/requests/{name}/cancel").status_code == 404
    with served.http.stream("POST", route, json={**body, "stream": True, "max_tokens": 200}) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        answer_id = msgspec.json.decode(next(lines))["id"]
        assert served.http.post(f"/v1/requests/{answer_id}/cancel").json()["cancelled"] == 1
        assert msgspec.json.decode(list(lines)[-1])["error"]["code"] == "request_cancelled"


def test_tokens_and_back(served: Served) -> None:
    def post(path: str, **fields: Any) -> Any:
        return served.http.post(path, json=fields).json()

    found = post("/tokenize", prompt="Hé</s>", return_token_strs=True)
    assert found["tokens"] == [*"Hé".encode(), END_OF_TURN]
    assert (found["count"], found["max_model_len"]) == (4, served.engine.info.max_model_len)
    assert found["token_strs"] == ["H", "Ã", "©", "</s>"]
    assert post("/detokenize", tokens=found["tokens"], model="fake-model") == {"prompt": "Hé</s>"}
    chat = post("/tokenize", messages=CHAT["messages"], chat_template_kwargs={"flavour": "x"})
    served.http.post("/v1/chat/completions", json={**CHAT, "chat_template_kwargs": {"flavour": "x"}})
    assert chat["tokens"] == served.engine.requests[-1].prompt_token_ids
    assert chat["token_strs"] is None
    for path, fields, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": CHAT["messages"], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": CHAT["messages"], "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"model": "other", "prompt": "a"}, "model"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ):
        assert post(path, **fields)["error"]["param"] == param, (path, fields)


def test_embeddings_are_refused_by_name(served: Served) -> None:
    for fields, param in (
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": "x" * 1000}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "median"}, "pooling"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"input": "a", "model": "other"}, "model"),
    ):
        answer = served.http.post("/v1/embeddings", json={"model": "fake-model", **fields})
        assert answer.status_code == (404 if param == "model" else 400), fields
        assert answer.json()["error"]["param"] == param, fields


def test_a_field_of_another_route_is_unknown(served: Served, tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size > 256
    for route, body in (
        ("/v1/completions", {**COMPLETION, "tools": []}),
        ("/v1/completions", {**COMPLETION, "reasoning_effort": "low"}),
        ("/v1/chat/completions", {**CHAT, "input": "x"}),
        ("/v1/embeddings", {"model": "fake-model", "input": "x", "store": True}),
    ):
        error = served.http.post(route, json=body).json()["error"]
        assert error["code"] == "unknown_parameter", body
    assert served.http.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"] == ANSWER


def test_the_operators_page_names_every_field() -> None:
    text = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_0-9]+)(?:\.[a-z_]+)*`", text))
    schemas = (
        ChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
        MessagesRequest,
        EmbeddingRequest,
        OllamaChatRequest,
        OllamaGenerateRequest,
        OllamaOptions,
        OllamaEmbedRequest,
        OllamaEmbeddingsRequest,
    )
    for schema in schemas:
        accepted, refused = tables_of(schema)
        fields = {*schema.__struct_fields__, *accepted, *refused}
        assert fields - named == set(), schema.__name__
    dotted = set(re.findall(r"`([a-zA-Z0-9_.]+)`", text))
    assert {*EXTENSIONS, *SAME_AS} - named - dotted == set()
    for schema in (TokenizeRequest, DetokenizeRequest):
        assert not tables_of(schema)[0]
