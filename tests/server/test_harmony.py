"""A model that speaks harmony, over HTTP: channels become reasoning, calls and content, in every API that chats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.engine.grammar.compiler import compile_grammar
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.matcher import Vocabulary
from runtime.later import later
from tests.runtime.text.harmony.small_model import ids_of, small_ids, small_tokenizer
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngineClient
from tests.server.test_chat_parts import accumulated
from tests.waiting import wait_until

anthropic = later("anthropic")  # takes a second to import

ADD: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}]
QUESTION: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
THOUGHT = "<|channel|>analysis<|message|>I should add.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 2}'
FINAL = "<|channel|>final<|message|>It is 4."


@pytest.fixture(scope="module")
def harmony_server() -> Iterator[Served]:
    ids = small_ids()
    engine = FakeEngineClient(
        lambda request, index: [], vocab_size=small_tokenizer().vocab_size, eos_token_ids=(ids.return_,),
        max_model_len=4096,
    )  # fmt: skip
    with serving(engine, small_tokenizer()) as served:
        yield served
    engine.close()


@pytest.fixture
def served(harmony_server: Served) -> Iterator[Served]:
    harmony_server.engine.reset(lambda request, index: ids_of(FINAL + "<|return|>"))
    yield harmony_server
    wait_until(lambda: harmony_server.engine.num_open == 0)


def saying(served: Served, *answers: str) -> None:
    """Each request gets the next answer, token by token."""
    left = list(answers)
    served.engine.script = lambda request, index: ids_of(left.pop(0) if len(left) > 1 else left[0])


def prompt_of(served: Served) -> str:
    return small_tokenizer().decode(served.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def accepts(text: str, grammar: Grammar) -> bool:
    vocabulary = Vocabulary(small_tokenizer(), small_tokenizer().vocab_size, (small_ids().return_,))
    (matcher,) = compile_grammar(grammar, vocabulary, 1)
    return all(map(matcher.consume, ids_of(text))) and bool(matcher.ll_matcher.is_accepting())


def metric(served: Served) -> float:
    found = re.search(r"^xserv:malformed_headers_total\{.*\} (\S+)$", served.http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_an_agent_calls_its_tool_and_answers(served: Served) -> None:
    """As users of OpenAI's package write it: call, result, final answer."""
    saying(served, THOUGHT + PREAMBLE + CALL + "<|call|>", "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
           + FINAL + "<|return|>")  # fmt: skip
    messages = list(QUESTION)
    first = served.openai.chat.completions.create(
        model="fake-model", messages=messages, tools=TOOLS, reasoning_effort="low"
    )
    assert "Reasoning: low" in prompt_of(served)
    assert "type add = (_: {\na: number,\nb: number,\n}) => any;" in prompt_of(served)
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "One moment.")
    assert choice.message.reasoning_content == "I should add."  # type: ignore[attr-defined]
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 2})
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    messages += [choice.message.model_dump(exclude_none=True), result]
    second = served.openai.chat.completions.create(model="fake-model", messages=messages, tools=TOOLS)
    assert prompt_of(served).endswith(
        f"<|start|>assistant{THOUGHT}{PREAMBLE.removesuffix('<|start|>assistant')}"
        "<|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json<|message|>"
        '{"a": 2, "b": 2}<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|>'
        "<|start|>assistant"
    )
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "It is 4.")
    assert second.usage is not None
    assert second.usage.completion_tokens_details is not None
    assert second.usage.completion_tokens_details.reasoning_tokens == len(ids_of("So."))
    messages += [second.choices[0].message.model_dump(exclude_none=True), *QUESTION]
    served.openai.chat.completions.create(model="fake-model", messages=messages)
    assert "analysis<|message|>" not in prompt_of(served)  # what was thought before the last final answer is dropped


def test_streamed_equals_whole(served: Served) -> None:
    saying(served, THOUGHT + PREAMBLE + CALL + "<|call|>")
    body = {"model": "fake-model", "messages": QUESTION, "tools": TOOLS}
    whole = served.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    with served.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    message, reason, _ = accumulated([json.loads(line) for line in lines])
    assert reason == whole["finish_reason"] == "tool_calls"
    assert [message[key] for key in ("content", "reasoning_content")] == [
        whole["message"][key] for key in ("content", "reasoning_content")
    ]
    assert message["tool_calls"][0]["function"] == whole["message"]["tool_calls"][0]["function"]


def test_the_other_apis(served: Served) -> None:
    saying(served, THOUGHT + CALL + "<|call|>", THOUGHT + FINAL + "<|return|>")
    function = {"type": "function", **TOOLS[0]["function"]}
    called = served.openai.responses.create(model="fake-model", input="What is 2 + 2?", tools=[function])
    assert [item.type for item in called.output] == ["reasoning", "function_call"]
    assert called.output[1].arguments == '{"a": 2, "b": 2}'  # type: ignore[union-attr]
    answered = served.openai.responses.create(
        model="fake-model", reasoning={"effort": "high"}, instructions="Be brief.",
        input=[{"role": "user", "content": "What is 2 + 2?"}, *called.output,
               {"type": "function_call_output", "call_id": called.output[1].call_id, "output": "4"}],
    )  # type: ignore[union-attr,misc,list-item]  # fmt: skip
    assert answered.output_text == "It is 4."
    assert "Reasoning: high" in prompt_of(served)
    assert "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>" in prompt_of(served)
    assert "functions.add to=assistant<|channel|>commentary<|message|>4<|end|>" in prompt_of(served)
    saying(served, THOUGHT + CALL + "<|call|>")
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    message = client.messages.create(
        model="fake-model", max_tokens=500, messages=QUESTION, tools=[{"name": "add", "input_schema": ADD}],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )  # fmt: skip
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    assert message.content[1].input == {"a": 2, "b": 2}  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call(served: Served, choice: Any) -> None:
    saying(served, THOUGHT + CALL + "<|call|>")
    answer = served.openai.chat.completions.create(
        model="fake-model", messages=QUESTION, tools=TOOLS, tool_choice=choice
    )
    assert [call.function.name for call in answer.choices[0].message.tool_calls or ()] == ["add"]  # type: ignore[union-attr]
    grammar = served.engine.requests[-1].params.grammar
    assert grammar is not None
    assert accepts(THOUGHT + CALL, grammar)
    assert accepts(CALL, grammar)
    for refused in (FINAL, THOUGHT + FINAL, CALL.replace('"b": 2', '"b": "x"'), CALL.replace("add", "sub"), PREAMBLE):
        assert not accepts(refused, grammar), refused


def test_no_calls_where_none_are_wanted(served: Served) -> None:
    saying(served, CALL + "<|call|>")
    answer = served.openai.chat.completions.create(
        model="fake-model", messages=QUESTION, tools=TOOLS, tool_choice="none"
    )
    assert (answer.choices[0].message.tool_calls, answer.choices[0].finish_reason) == (None, "stop")
    assert "namespace functions" not in prompt_of(served)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_structured_output_is_the_final_channel(served: Served, tools: Any) -> None:
    final = '<|channel|>final<|message|>{"a":1,"b":2}'
    saying(served, THOUGHT + final + "<|return|>")
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": ADD, "strict": True}}
    body = {"model": "fake-model", "messages": QUESTION, "response_format": form, **({"tools": tools} if tools else {})}
    message = served.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert json.loads(message["content"]) == {"a": 1, "b": 2}
    grammar = served.engine.requests[-1].params.grammar
    assert grammar is not None
    assert accepts(THOUGHT + final, grammar)
    assert accepts(THOUGHT + CALL, grammar) == bool(tools)
    assert not accepts(THOUGHT + FINAL, grammar)
    assert not accepts(final.replace("final", "analysis"), grammar)


def test_a_malformed_answer_is_content_and_is_counted(served: Served) -> None:
    before = metric(served)
    saying(served, "It is 4, I think.<|return|>")
    answer = served.openai.chat.completions.create(model="fake-model", messages=QUESTION)
    assert answer.choices[0].message.content == "It is 4, I think."
    assert metric(served) == before + 1


EFFORTS: list[tuple[str, str, Any, str, str | None]] = [
    ("/v1/chat/completions", "reasoning_effort", "none", "low", ""),
    ("/v1/chat/completions", "reasoning_effort", "minimal", "low", ""),
    ("/v1/chat/completions", "reasoning_effort", "low", "low", None),
    ("/v1/chat/completions", "reasoning_effort", "xhigh", "high", ""),
    ("/v1/chat/completions", "reasoning_effort", "max", "high", ""),
    ("/v1/chat/completions", "think", "max", "high", ""),
    ("/v1/chat/completions", "think", False, "low", ""),
    ("/v1/chat/completions", "thinking", {"type": "disabled"}, "low", ""),
    ("/v1/chat/completions", "thinking", {"type": "enabled"}, "medium", None),
    ("/v1/chat/completions", "chat_template_kwargs.enable_thinking", False, "low", "enable_thinking=low"),
    ("/v1/responses", "reasoning.effort", "xhigh", "high", ""),
    ("/v1/responses", "reasoning.effort", "none", "low", ""),
    ("/v1/messages", "output_config.effort", "max", "high", ""),
    ("/v1/messages", "thinking", {"type": "disabled"}, "low", ""),
    ("/v1/messages", "thinking", {"type": "enabled", "budget_tokens": 1024}, "low", "thinking.budget_tokens=low"),
    ("/v1/messages", "thinking", {"type": "enabled", "budget_tokens": 512}, "low", "thinking.budget_tokens=low"),
    ("/v1/messages", "thinking", {"type": "enabled", "budget_tokens": 9000}, "high", "thinking.budget_tokens=high"),
    ("/api/chat", "think", False, "low", ""),
    ("/api/chat", "think", "none", "low", ""),
    ("/api/chat", "think", "max", "high", ""),
    ("/api/chat", "think", "high", "high", None),
    ("/api/chat", "think", True, "medium", None),
    ("/api/generate", "think", False, "low", ""),
]


@pytest.mark.parametrize(("path", "name", "value", "level", "told"), EFFORTS)
def test_an_effort_that_harmony_has_not(
    served: Served, path: str, name: str, value: Any, level: str, told: str | None
) -> None:
    """It becomes the nearest level, which the answer names."""
    outer, _, inner = name.partition(".")
    body = {
        "/v1/responses": {"input": "Hi"}, "/v1/messages": {"messages": QUESTION, "max_tokens": 99},
        "/api/generate": {"prompt": "Hi"},
    }.get(path, {"messages": QUESTION})  # fmt: skip
    answer = served.http.post(path, json={"model": "fake-model", **body, outer: {inner: value} if inner else value})
    assert answer.status_code == 200, answer.text
    assert f"Reasoning: {level}\n" in prompt_of(served)
    assert answer.headers.get("x-xserv-ignored") == (f"{name}={level}" if told == "" else told)
