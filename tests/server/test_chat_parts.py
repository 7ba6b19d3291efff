"""Reasoning and tool calls in chat completions: whole, streamed, and the same in both."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.lib.streaming._deltas import accumulate_delta

from server.config import ServerConfig
from tests.runtime.text.answers import FRAGMENTS, WHOLES
from tests.server.byte_tokenizer import END_OF_TURN, TEMPLATE, make_byte_tokenizer
from tests.server.conftest import Served, answer_of, as_new, say, serving
from tests.server.fake_engine import FakeEngineClient
from tests.server.openapi import check_answer
from tokenizer import Tokenizer

STREAMS = Path(__file__).parents[3] / "shared" / "data" / "openai" / "recorded_streams"

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("get_weather", "get_time")
]
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Röm 😀"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nThey ask for it.\n</think>\n\n"
ASKED: dict[str, Any] = {"model": "fake-model", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngineClient]:
    engine = FakeEngineClient(answer_of, max_model_len=4096)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def parts_server(engine: FakeEngineClient, tokenizer: Tokenizer) -> Iterator[Served]:
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="think")
    with serving(engine, tokenizer, config=config) as served:
        yield served


@pytest.fixture
def served(parts_server: Served) -> Iterator[Served]:
    yield from as_new(parts_server)


def saying(served: Served, *texts: str) -> None:
    """Choice i says the i-th text."""
    served.engine.script = lambda request, index: say(texts[index])


def whole(served: Served, **fields: Any) -> dict[str, Any]:
    response = served.http.post("/v1/chat/completions", json={**ASKED, "tools": TOOLS, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    check_answer("CreateChatCompletionResponse", answer)
    return answer


def streamed(served: Served, **fields: Any) -> list[dict[str, Any]]:
    asked = {**ASKED, "tools": TOOLS, "stream": True, **fields}
    response = served.http.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for chunk in {json.dumps(shape(chunk)): chunk for chunk in chunks}.values():
        check_answer("CreateChatCompletionStreamResponse", chunk)
    return chunks


def accumulated(chunks: list[dict[str, Any]], index: int = 0) -> tuple[dict[str, Any], str, list[Any]]:
    """A choice's message as OpenAI's SDK puts it together, how it ended, and its log probabilities."""
    message: dict[object, object] = {}
    reason, logprobs = "", []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                message = accumulate_delta(message, copy.deepcopy(choice["delta"]))
                reason = choice["finish_reason"] or reason
                logprobs += (choice["logprobs"] or {}).get("content") or []
    return message, reason, logprobs  # type: ignore[return-value]


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two answers (ids), or stands in one form only (the pieces' index)."""
    calls = [
        {"type": call["type"], "function": call["function"]}
        for call in message.get("tool_calls", [])
        if call["id"].startswith("call_")
    ]
    assert len(calls) == len(message.get("tool_calls", []))
    return {**message, "tool_calls": calls}


def test_reasoning_content_and_calls(served: Served) -> None:
    saying(served, THOUGHT + "Let me see.\n" + ROME + "\n" + TIME)
    answer = whole(served)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert message["content"] == "Let me see."
    assert message["reasoning_content"] == "They ask for it."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Röm 😀"}'},
        {"name": "get_time", "arguments": "{}"},
    ]
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("They ask for it.")}


def test_content_is_null_where_there_are_only_calls(served: Served) -> None:
    saying(served, THOUGHT + ROME)
    assert whole(served)["choices"][0]["message"]["content"] is None
    message, reason, _ = accumulated(streamed(served))
    assert message["content"] is None
    assert reason == "tool_calls"


def test_a_stop_string_counts_in_the_content_of_every_api(served: Served) -> None:
    thought, said = "17 + 25:\n\nI add.", "17 + 25 = 42\n\nNext: 1 + 1"
    saying(served, f"<think>\n{thought}\n</think>\n\n{said}")
    message = {"role": "user", "content": "17 + 25?"}
    expected = (thought, "17 + 25 = 42")

    def post(path: str, **fields: Any) -> Any:
        answer = served.http.post(path, json={"model": "fake-model", **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    chat = whole(served, stop="\n\n")["choices"][0]
    assert (chat["message"]["reasoning_content"], chat["message"]["content"]) == expected
    assert (chat["finish_reason"], chat["stop_reason"]) == ("stop", "\n\n")
    streams, reason, _ = accumulated(streamed(served, stop=["\n\n"]))
    assert (streams["reasoning_content"], streams["content"], reason) == (*expected, "stop")
    anthropic = post("/v1/messages", max_tokens=999, messages=[message], stop_sequences=["\n\n"])
    assert (anthropic["content"][0]["thinking"], anthropic["content"][1]["text"]) == expected
    assert (anthropic["stop_reason"], anthropic["stop_sequence"]) == ("stop_sequence", "\n\n")
    ollama = post("/api/chat", stream=False, messages=[message], options={"stop": ["\n\n"]})
    assert (ollama["message"]["thinking"], ollama["message"]["content"]) == expected
    generated = post("/api/generate", stream=False, prompt="17 + 25?", options={"stop": ["\n\n"]})
    assert (generated["thinking"], generated["response"]) == expected
    *_, output = post("/v1/responses", input="17 + 25?", stop="\n\n")["output"]
    assert output["content"][0]["text"] == expected[1]
    # All text of a completion is its content.
    text = "<think>\n17 + 25:"
    completion = post("/v1/completions", prompt="17 + 25?", stop="\n\n", max_tokens=999)["choices"][0]
    raw = post("/api/generate", stream=False, raw=True, prompt="17 + 25?", options={"stop": ["\n\n"]})
    assert (completion["text"], raw["response"]) == (text, text)


@pytest.mark.parametrize("text", ["", "<think>\nnever closed", "<think></think>"])
def test_content_is_empty_where_there_is_nothing_else(served: Served, text: str) -> None:
    saying(served, text)
    assert whole(served)["choices"][0]["message"]["content"] == ""
    assert accumulated(streamed(served))[0]["content"] == ""


def test_the_first_piece_of_a_call_names_it(served: Served) -> None:
    saying(served, "Well. " + ROME + TIME)
    chunks = streamed(served)
    pieces = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", [])]
    firsts = [piece for piece in pieces if "id" in piece]
    assert [set(piece) for piece in firsts] == [{"index", "id", "type", "function"}] * 2
    assert [(piece["index"], piece["type"], piece["function"]) for piece in firsts] == [
        (0, "function", {"name": "get_weather", "arguments": ""}),
        (1, "function", {"name": "get_time", "arguments": ""}),
    ]
    later = [piece for piece in pieces if "id" not in piece]
    assert all(set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"} for piece in later)
    assert all(len(piece["function"]["arguments"]) == 1 for piece in later if piece["index"] == 0)  # byte by byte
    assert len(firsts) == len([c for c in chunks if "tool_calls" in c["choices"][0]["delta"]]) - len(later)


def stumbling(seed: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(FRAGMENTS + WHOLES * 3) for _ in range(rng.randrange(1, 8)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["</think>", '"}', "world"], "include_stop_str_in_output": True, "min_tokens": 9},
        {"max_tokens": 40, "parallel_tool_calls": False},
        {"logprobs": True, "top_logprobs": 1, "tool_choice": "none"},
    ],
)
def test_the_pieces_make_the_whole(served: Served, fields: dict[str, Any]) -> None:
    for seed in range(4):
        texts = [stumbling(3 * seed), THOUGHT + stumbling(3 * seed + 1), ROME + stumbling(3 * seed + 2)]
        saying(served, *texts)
        answer = whole(served, n=3, **fields)
        chunks = streamed(served, n=3, stream_options={"include_usage": True}, **fields)
        for choice in answer["choices"]:
            message, reason, logprobs = accumulated(chunks, choice["index"])
            assert comparable(message) == comparable(choice["message"]), texts
            assert reason == choice["finish_reason"]
            assert logprobs == (choice["logprobs"] or {"content": []})["content"]
        assert chunks[-1]["usage"] == answer["usage"]


def test_the_sdk_s_own_stream(served: Served) -> None:
    saying(served, THOUGHT + "Let me see.\n" + ROME + TIME)
    with served.openai.chat.completions.stream(**ASKED, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final: Any = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "Let me see."
    assert final.message.reasoning_content == "They ask for it."
    assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls] == [
        ("get_weather", '{"city": "Röm 😀"}'),
        ("get_time", "{}"),
    ]


def shape(value: Any) -> Any:
    """The fields in their order, with what is null and what is empty, and what ends it; not what it says."""
    if isinstance(value, dict):
        return {key: value[key] if key == "finish_reason" else shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return value if value in (None, "") else type(value).__name__


@pytest.mark.parametrize("file", sorted(STREAMS.glob("*.bin")), ids=lambda file: file.name[:8])
def test_chunks_have_the_shapes_of_recorded_ones(served: Served, file: Path) -> None:
    """What OpenAI's model said, said by ours."""
    lines = [line for line in file.read_text().splitlines() if line.startswith("data: {")]
    theirs = [json.loads(line.removeprefix("data: ")) for line in lines]
    message, reason, _ = accumulated(theirs)
    calls = [call["function"] for call in message.get("tool_calls", [])]
    text = (message["content"] or "") + "".join(
        f'<tool_call>{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}</tool_call>' for call in calls
    )
    if not text:
        pytest.skip("a refusal: our models make none")
    saying(served, text)
    limit = {"max_tokens": len(text.encode())} if reason == "length" else {}
    ours = streamed(served, stream_options={"include_usage": True}, **limit)
    said, ended, _ = accumulated(ours)
    assert (comparable(said), ended) == (comparable(message), reason)
    for chunk in theirs + ours:  # of which OpenAI's newer ones have more
        if "usage" in chunk:
            chunk["usage"] = sorted(chunk["usage"])[:1]
    assert distinct(shape(chunk) for chunk in ours) == distinct(shape(chunk) for chunk in theirs)


def distinct(shapes: Iterable[Any]) -> list[str]:
    """In the order in which they come first."""
    return list(dict.fromkeys(map(json.dumps, shapes)))


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
def test_calls_are_looked_for_where_there_are_tools(served: Served, fields: dict[str, Any]) -> None:
    saying(served, THOUGHT + ROME)
    (choice,) = whole(served, **fields)["choices"]
    assert choice["message"]["content"] == ROME
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_one_call_where_they_must_not_be_parallel(served: Served) -> None:
    saying(served, ROME + "\n" + TIME)
    (choice,) = whole(served, parallel_tool_calls=False)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["message"]["content"] is None


def test_a_call_that_is_cut_off_keeps_what_there_is(served: Served) -> None:
    saying(served, ROME)
    (choice,) = whole(served, max_tokens=len(ROME.split("Röm")[0]))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    (choice,) = whole(served, max_tokens=20)["choices"]
    assert choice["message"]["content"] == ROME[:20]


def test_log_probabilities_are_those_of_the_content(served: Served) -> None:
    saying(served, THOUGHT + "Sö.\n" + ROME)
    for fields in ({"logprobs": True}, {"logprobs": True, "return_token_ids": True}):
        (choice,) = whole(served, **fields)["choices"]
        assert bytes(b for entry in choice["logprobs"]["content"] for b in entry["bytes"]) == "Sö.".encode()
        chunks = streamed(served, **fields)
        assert accumulated(chunks)[2] == choice["logprobs"]["content"]
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == choice["token_ids"] == [*(THOUGHT + "Sö.\n" + ROME).encode(), END_OF_TURN]


@pytest.mark.parametrize(
    ("choice", "start", "names"),
    [
        ("required", '\nanswer: call ("\\n" call)*\n', ["get_weather", "get_time"]),
        ({"type": "function", "function": {"name": "get_time"}}, "\nanswer: call\n", ["get_time"]),
    ],
)
def test_a_forced_call_is_a_grammar(served: Served, choice: Any, start: str, names: list[str]) -> None:
    """Which leaves room for reasoning before it."""
    saying(served, TIME)
    (answered,) = whole(served, tool_choice=choice)["choices"]
    assert answered["finish_reason"] == "tool_calls"
    grammar = served.engine.requests[-1].params.grammar
    assert grammar is not None
    assert grammar.kind == "lark"
    assert grammar.text.startswith("start: thinking? answer\n")
    assert start in grammar.text
    assert [name for name in ("get_weather", "get_time") if name in grammar.text] == names
    whole(served, tool_choice="required", parallel_tool_calls=False)
    grammar = served.engine.requests[-1].params.grammar
    assert grammar is not None
    assert "\nanswer: call\n" in grammar.text
    whole(served, tool_choice="auto")
    assert served.engine.requests[-1].params.grammar is None


def test_a_structure_holds_behind_the_reasoning(served: Served) -> None:
    saying(served, THOUGHT + "{}")
    message = whole(served, tools=None, response_format={"type": "json_object"})["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("They ask for it.", "{}")
    grammar = served.engine.requests[-1].params.grammar
    assert grammar is not None
    assert grammar.text.startswith("start: thinking? answer\n")
    own = "start: /(?s:.*)/"
    message = whole(served, tools=None, structured_outputs={"grammar": own})["choices"][0]["message"]
    assert message["content"] == THOUGHT + "{}"
    grammar = served.engine.requests[-1].params.grammar
    assert grammar is not None
    assert grammar.text == own


def test_a_call_that_cannot_be_forced_is_refused(
    engine: FakeEngineClient, served: Served, tokenizer: Tokenizer
) -> None:
    unknown = {"type": "function", "function": {"name": "unknown"}}
    for fields in ({"tool_choice": "required", "tools": None}, {"tool_choice": unknown}):
        response = served.http.post("/v1/chat/completions", json={**ASKED, "tools": TOOLS, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")
    asked = {**ASKED, "tools": TOOLS, "tool_choice": "required"}
    with serving(engine, tokenizer, config=ServerConfig(tool_call_parser="none")) as other:
        response = other.http.post("/v1/chat/completions", json=asked)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")
    with serving(engine, tokenizer) as other:  # whose template has tools, and calls of an unknown kind
        saying(other, THOUGHT + ROME)
        assert whole(other)["choices"][0]["message"]["content"] == THOUGHT + ROME
        saying(other, '{"name": "get_time", "arguments": {"a": 1}}')
        message = whole(other, tool_choice="required")["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "get_time", "arguments": '{"a": 1}'}


def test_reasoning_effort_is_the_template_s_to_know(engine: FakeEngineClient, tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer(tmp_path)
    asked = {**ASKED, "reasoning_effort": "low"}

    def ask(template: str, taken: str | None = None, **fields: Any) -> Any:
        tokenizer.chat_templates = {"default": template}
        response = served.http.post("/v1/chat/completions", json={**asked, **fields})
        assert response.headers.get("x-xserv-ignored") == taken
        if response.status_code != 200:
            return response.status_code, response.json()["error"]["param"]
        return bytes(i for i in engine.requests[-1].prompt_token_ids if i < 256).decode()

    with serving(engine, tokenizer) as served:
        assert ask(TEMPLATE, "reasoning_effort").endswith("assistant:")
        assert ask(TEMPLATE, reasoning_effort=None).endswith("assistant:")
        assert ask("{{ reasoning_effort }}!") == "low!"
        thinker = "{{ 'no' if enable_thinking is false else 'yes' }}"
        assert ask(thinker, "reasoning_effort=on") == "yes"
        assert ask(thinker, "reasoning_effort=off", chat_template_kwargs={"enable_thinking": False}) == "no"
        assert ask(thinker, reasoning_effort="none") == "no"
        # A template that has names for some: what it does not know becomes the nearest one.
        two = "{% if reasoning_effort == 'high' %}HIGH{% elif reasoning_effort == 'none' %}NONE{% else %}SO{% endif %}"
        for level, text, taken in (
            ("none", "NONE", None), ("minimal", "SO", "medium"), ("low", "SO", "medium"), ("medium", "SO", None),
            ("high", "HIGH", None), ("xhigh", "HIGH", "high"), ("max", "HIGH", "high"),
        ):  # fmt: skip
            assert ask(two, taken and f"reasoning_effort={taken}", reasoning_effort=level) == text
        strict = "{{ reasoning_effort if reasoning_effort in ['low', 'max'] else raise_exception('no') }}"
        for level, taken in (("none", "low"), ("medium", "low"), ("high", "low"), ("xhigh", "max")):
            assert ask(strict, f"reasoning_effort={taken}", reasoning_effort=level) == taken
        both = thinker + "{{ reasoning_effort if reasoning_effort in ['low', 'high'] }}"
        assert ask(both, reasoning_effort="none") == "no"
        assert ask(both, "reasoning_effort=high", reasoning_effort="max") == "yeshigh"
        contradiction = {"chat_template_kwargs": {"reasoning_effort": "high"}}
        assert ask("{{ reasoning_effort }}!", **contradiction) == (400, "reasoning_effort")
        # what was sent counts, not what it is taken for
        for template in (two, strict, "no variable"):
            assert ask(template, reasoning_effort="xhigh", **contradiction) == (400, "reasoning_effort")
        switched = {"chat_template_kwargs": {"enable_thinking": True}}
        assert ask(thinker, reasoning_effort="none", **switched) == (400, "reasoning_effort")
        same = {"chat_template_kwargs": {"reasoning_effort": "max"}}
        assert ask(strict, reasoning_effort="max", **same) == "max"


def test_reasoning_of_the_history_reaches_the_template(engine: FakeEngineClient, tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer(tmp_path)
    tokenizer.chat_templates = {"default": "{% for m in messages %}{{ m.reasoning_content }}|{% endfor %}"}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": "a", "reasoning_content": "one"},
        {"role": "assistant", "content": None, "reasoning": "two"},
    ]
    with serving(engine, tokenizer) as served:
        served.http.post("/v1/chat/completions", json={**ASKED, "messages": messages}).raise_for_status()
    assert bytes(engine.requests[-1].prompt_token_ids).decode() == "|one|two|"


def test_a_history_of_tool_calls_reaches_the_template(engine: FakeEngineClient, tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer(tmp_path)
    call: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history: dict[str, Any] = {
        **ASKED,
        "messages": [
            *ASKED["messages"],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "hot"},
        ],
    }
    one = "{% if m.content is none %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}|"
    with serving(engine, tokenizer) as served:
        tokenizer.chat_templates = {"default": "{% for m in messages %}" + one + "{% endfor %}"}
        served.http.post("/v1/chat/completions", json=history).raise_for_status()
        assert bytes(engine.requests[-1].prompt_token_ids).decode() == "Hello|" + '{"name": "f", "arguments": {}}|hot|'
        function = call["function"]
        for given, told in (({"a": [1]}, '{"a": [1]}'), ('{"a": 1}', '{"a": 1}'), ("", "{}"), (None, "{}"), ({}, "{}")):
            history["messages"][1]["tool_calls"] = [{**call, "function": {**function, "arguments": given}}]
            served.http.post("/v1/chat/completions", json=history).raise_for_status()
            prompt = bytes(engine.requests[-1].prompt_token_ids).decode()
            assert prompt == "Hello|" + f'{{"name": "f", "arguments": {told}}}|hot|'
        history["messages"][1]["tool_calls"] = [{**call, "function": {**function, "arguments": [1]}}]
        message = served.http.post("/v1/chat/completions", json=history).json()["error"]["message"]
        assert "arguments: expected string or object, got array" in message
        history["messages"][1]["tool_calls"] = [call]
        tokenizer.chat_templates = {"default": "{% for m in messages if m.role != 'tool' %}" + one + "{% endfor %}"}
        refused = served.http.post("/v1/chat/completions", json=history)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[2]")


def test_a_prompt_that_has_opened_the_reasoning(engine: FakeEngineClient, tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer(tmp_path)
    with serving(engine, tokenizer, config=ServerConfig(reasoning_parser="think")) as served:
        for opening, reasoning, content in (
            ("<think>\n", "Hm.", "Yes."),
            ("<think>\n\n</think>\n\n", None, "Hm.\n</think>\nYes."),
            ("", None, "Hm.\n</think>\nYes."),
        ):
            tokenizer.chat_templates = {"default": "<s>assistant" + opening.replace("\n", "{{ '\\n' }}")}
            saying(served, "Hm.\n</think>\nYes.")
            message = whole(served, tools=None)["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
