"""The bundled model with experts over HTTP: it thinks, calls its calculator, and answers, by OpenAI's package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import models.demo_moe
from runtime.commands.chat_session import ChatSession
from runtime.llm import LLM
from tests.server.real_server import Real, serving_real

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
