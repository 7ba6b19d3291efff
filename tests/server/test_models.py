"""Real models over HTTP: the bundled one with experts thinks, calls its calculator, and answers; one without a chat
template, and with one that it is given; and forced calls of a tiny random one, whose template shows that it thinks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

import models.demo_moe
from runtime.commands.chat_session import ChatSession
from runtime.llm import LLM
from tests.runtime.commands.running import ROOT, STORIES, needs_stories
from tests.server.openapi import check_answer
from tests.server.real_server import Real, serving_real, write_tiny_model
from tests.waiting import TIMEOUT_S, wait_until

FOLDER = Path(models.demo_moe.__file__).parent
CALCULATOR: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an arithmetic expression.",
            "parameters": {
                "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"],
            },
        },
    }
]  # fmt: skip
SUM: dict[str, Any] = {
    "type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    with serving_real(FOLDER, device="cpu", max_num_seqs=8, max_model_len=1024, num_blocks=256) as served:
        yield served


def test_it_thinks_and_answers(real: Real) -> None:
    answer = real.openai.chat.completions.create(
        model=real.model, messages=[{"role": "user", "content": "What is 27 plus 58?"}], temperature=0
    )
    message = answer.choices[0].message
    assert message.content == "27 + 58 = 85"
    assert message.model_dump()["reasoning_content"] == "27+58: 7+8=15, 2+5+1=8. 85"


def test_an_agents_loop(real: Real) -> None:
    """A call, its result, and the answer, streamed and not."""
    messages: list[Any] = [{"role": "user", "content": "What is 34 times 12?"}]
    first = real.openai.chat.completions.create(model=real.model, messages=messages, tools=CALCULATOR, temperature=0)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "calculator"
    assert json.loads(call.function.arguments) == {"expression": "34*12"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "408"}]
    second = real.openai.chat.completions.create(model=real.model, messages=messages, tools=CALCULATOR, temperature=0)
    assert second.choices[0].message.content == "34 * 12 = 408"
    stream = real.openai.chat.completions.create(
        model=real.model, messages=messages, tools=CALCULATOR, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "34 * 12 = 408"
    messages += [second.choices[0].message, {"role": "user", "content": "Thank you!"}]
    third = real.openai.chat.completions.create(model=real.model, messages=messages, tools=CALCULATOR, temperature=0)
    assert third.choices[0].message.content == "You are welcome."


def test_structured_output_in_the_final_channel(real: Real) -> None:
    answer = real.openai.chat.completions.create(
        model=real.model,
        messages=[{"role": "user", "content": "What is 64 minus 19?"}],
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM, "strict": True}},
    )
    message = answer.choices[0].message
    assert json.loads(message.content or "") == {"answer": 45}
    assert message.model_dump()["reasoning_content"]


def test_the_chat_of_the_command_line_calls_its_calculator() -> None:
    calls: list[str] = []
    thoughts: list[str] = []
    with LLM(str(FOLDER), device="cpu", max_model_len=512, num_blocks=64, use_tqdm_on_load=False) as llm:
        session = ChatSession(llm, calculates=True, on_call=calls.append, on_reasoning=thoughts.append)
        assert "".join(session.answer("What is 34 times 12?")) == "34 * 12 = 408"
        assert calls == ['calculator({"expression":"34*12"}) = 408']
        assert "".join(thoughts) == "34*12: I call calculator."
        assert "".join(session.answer("What is 27 plus 58?")) == "27 + 58 = 85"
        assert [message["role"] for message in session.conversation.messages()] == ["user", "assistant"] * 2


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
ASKED = {"model": "stories260K", "messages": [{"role": "user", "content": "Once upon a time"}], "temperature": 0}


@contextmanager
def served(log: Path, *arguments: str) -> Iterator[str]:
    """The address of a server that is started with these arguments."""
    with log.open("w") as written:
        server = subprocess.Popen(
            [sys.executable, "-m", "runtime.cli", "serve", *arguments, "--port", "0", "--device", "cpu"],
            cwd=ROOT, stdout=written, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until(lambda: re.search(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text()) or server.poll() is not None)
        address = re.findall(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text())[0]
        wait_until(lambda: httpx.get(f"{address}/ready", timeout=TIMEOUT_S).status_code == 200)
        yield address
    finally:
        server.terminate()
        server.wait(TIMEOUT_S)


@pytest.mark.exhaustive
@needs_stories
def test_a_template_makes_a_chat_of_it(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    with served(tmp_path / "log", str(STORIES), "--chat-template", str(template)) as address:
        chat = httpx.post(f"{address}/v1/chat/completions", json={**ASKED, "max_tokens": 8}, timeout=TIMEOUT_S)
        plain = {"model": "stories260K", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
        text = httpx.post(f"{address}/v1/completions", json=plain, timeout=TIMEOUT_S).json()["choices"][0]["text"]
    assert chat.status_code == 200
    assert chat.json()["choices"][0]["message"]["content"] == text


@pytest.mark.exhaustive
@needs_stories
def test_without_one_it_says_so(tmp_path: Path) -> None:
    with served(tmp_path / "log", str(STORIES)) as address:
        refused = httpx.post(f"{address}/v1/chat/completions", json=ASKED, timeout=TIMEOUT_S)
    assert refused.status_code == 400
    assert "no chat template" in refused.json()["error"]["message"]


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rom", "Zürich", "</tool_call>"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 31}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time"}},
]
CALLING_TEMPLATE = (
    "{% for tool in tools %}<tool_call>{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}<s>{{ '<think></think>' }}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("calling-model")
    write_tiny_model(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CALLING_TEMPLATE}))
    with serving_real(folder, load_format="dummy", max_num_seqs=8, max_model_len=1024, num_blocks=256) as served:
        yield served


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls(tiny: Real, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": tiny.model,
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "seed": 7,
        "n": 4,
    }
    answer = tiny.openai.chat.completions.create(**asked)
    check_answer("CreateChatCompletionResponse", answer.model_dump(exclude_unset=True))
    for each in answer.choices:
        assert each.finish_reason == "tool_calls"
        assert each.message.content is None
        (call,) = each.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name in (["get_weather", "get_time"] if choice == "required" else ["get_weather"])
        schema = WEATHER if call.function.name == "get_weather" else {"maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)
    with tiny.openai.chat.completions.create(**asked, stream=True) as chunks:
        streamed = [("", "")] * 4
        for chunk in chunks:
            check_answer("CreateChatCompletionStreamResponse", chunk.model_dump(exclude_unset=True))
            for piece in chunk.choices[0].delta.tool_calls or ():
                assert piece.function is not None
                name, arguments = streamed[chunk.choices[0].index]
                streamed[chunk.choices[0].index] = (
                    name + (piece.function.name or ""),
                    arguments + (piece.function.arguments or ""),
                )
    calls = [each.message.tool_calls[0] for each in answer.choices if each.message.tool_calls]
    assert streamed == [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]
