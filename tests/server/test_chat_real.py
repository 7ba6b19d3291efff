"""Forced tool calls on the real engine: a tiny random model, whose template shows that it thinks and calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.server.openapi import check_answer
from tests.server.real_server import Real, serving_real, write_tiny_model

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
TEMPLATE = (
    "{% for tool in tools %}<tool_call>{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}<s>{{ '<think></think>' }}"
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("calling-model")
    write_tiny_model(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    with serving_real(folder, load_format="dummy", max_num_seqs=8, max_model_len=1024, num_blocks=256) as served:
        yield served


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls(real: Real, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": real.model,
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "seed": 7,
        "n": 4,
    }
    answer = real.openai.chat.completions.create(**asked)
    check_answer("CreateChatCompletionResponse", answer.model_dump(exclude_unset=True))
    for each in answer.choices:
        assert each.finish_reason == "tool_calls"
        assert each.message.content is None
        (call,) = each.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name in (["get_weather", "get_time"] if choice == "required" else ["get_weather"])
        schema = WEATHER if call.function.name == "get_weather" else {"maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)
    with real.openai.chat.completions.create(**asked, stream=True) as chunks:
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
