"""Converts OpenAI's messages and tools to harmony's messages.

Leading system and developer messages become one developer message, which also describes the tools; later ones become
developer messages in place. An assistant's text beside calls is a preamble on the commentary channel, its reasoning is
analysis. Analysis before the last final answer is dropped, as in the model's training; later analysis, between calls
and their answers, is kept.

The system message is a fixed form, and not the API's: instructions of the API's system and developer messages go to
harmony's developer message, with the tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runtime.engine.errors import RequestError
from runtime.text.harmony.message import CHANNELS, CONSTRAIN, FUNCTIONS, HarmonyMessage
from runtime.text.harmony.typescript import typescript_type

MODEL_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
KNOWLEDGE_CUTOFF = "2024-06"
EFFORTS = ("low", "medium", "high")


def system_text(
    *,
    model_identity: str | None = MODEL_IDENTITY,
    knowledge_cutoff: str | None = KNOWLEDGE_CUTOFF,
    current_date: str | None = None,
    reasoning_effort: str | None = "medium",
    channels: Sequence[str] = CHANNELS,
    has_functions: bool = False,
) -> str:
    """None, and no channels, omit a line. has_functions: the developer message has tools"""
    top = [
        f"{label}{value}"
        for label, value in (
            ("", model_identity),
            ("Knowledge cutoff: ", knowledge_cutoff),
            ("Current date: ", current_date),
        )
        if value is not None
    ]
    sections = ["\n".join(top)] if top else []
    if reasoning_effort is not None:
        sections.append(f"Reasoning: {reasoning_effort}")
    if channels:
        valid = f"# Valid channels: {', '.join(channels)}. Channel must be included for every message."
        if has_functions:
            valid += f"\nCalls to these tools must go to the commentary channel: '{FUNCTIONS}'."
        sections.append(valid)
    return "\n\n".join(sections)


def developer_text(instructions: str | None, functions: Sequence[Mapping[str, Any]]) -> str:
    """functions: name, description and parameters, as in OpenAI's tools"""
    sections = [] if instructions is None else ["# Instructions", instructions]
    return "\n\n".join([*sections, *([_tools_text(functions)] if functions else [])])


def _tools_text(functions: Sequence[Mapping[str, Any]]) -> str:
    lines = ["# Tools\n", f"## {FUNCTIONS}\n", f"namespace {FUNCTIONS} {{\n"]
    for function in functions:
        lines += [f"// {line}" for line in _lines(function.get("description") or "")]
        parameters = function.get("parameters")
        argument = "" if parameters is None else f"_: {typescript_type(parameters)}"
        lines.append(f"type {function['name']} = ({argument}) => any;\n")
    return "\n".join([*lines, f"}} // namespace {FUNCTIONS}"])


def _lines(text: str) -> list[str]:
    """Splits as `openai-harmony` does: at line feeds alone, dropping a preceding carriage return."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


_INSTRUCTING = ("system", "developer")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def harmony_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    current_date: str,
    reasoning_effort: str | None = None,
    model_identity: str | None = None,
    keeps_last_reasoning: bool = False,
) -> list[HarmonyMessage]:
    """
    current_date          in the system message: "2026-11-23"
    keeps_last_reasoning  the last message is to be continued, with its reasoning

    Raises ``RequestError`` for a role or an effort that harmony does not have, and for an answer without a call.
    """
    if reasoning_effort not in (None, *EFFORTS):
        problem = f"reasoning_effort must be {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]} for this model"
        raise RequestError(f"{problem}, got {reasoning_effort!r}", param="reasoning_effort")
    functions = [tool.get("function", tool) for tool in tools or ()]
    system = system_text(
        model_identity=MODEL_IDENTITY if model_identity is None else model_identity,
        current_date=current_date,
        reasoning_effort=reasoning_effort or "medium",
        has_functions=bool(functions),
    )
    num_leading = next((i for i, each in enumerate(messages) if each.get("role") not in _INSTRUCTING), len(messages))
    leading = [text for i in range(num_leading) if (text := _content(messages[i], i))]
    built = [HarmonyMessage("system", system)]
    if leading or functions:
        instructions = "\n\n".join(leading) if leading else None
        built.append(HarmonyMessage("developer", developer_text(instructions, functions)))
    calls = _Calls()
    finals = [i for i, message in enumerate(messages) if _is_final(message)]
    last_final = finals[-1] if finals else -1
    for i in range(num_leading, len(messages)):
        is_last = i == len(messages) - 1
        keeps_reasoning = i > last_final or (keeps_last_reasoning and is_last)
        built += _of_message(messages[i], i, calls, keeps_reasoning=keeps_reasoning)
    return built


class _Calls:
    """The called functions, by id or in order of the calls, which name the answers."""

    def __init__(self) -> None:
        self._by_id: dict[str, str] = {}
        self._unanswered: list[str] = []

    def add(self, call_id: Any, name: str) -> None:
        if isinstance(call_id, str):
            self._by_id[call_id] = name
        else:
            self._unanswered.append(name)

    def answered(self, message: Mapping[str, Any], index: int) -> str:
        given, name = message.get("tool_call_id"), message.get("name")
        if given in self._by_id:
            return self._by_id[given]
        if isinstance(name, str):
            return name.removeprefix(f"{FUNCTIONS}.")
        if given is None and self._unanswered:
            return self._unanswered.pop(0)
        raise RequestError(
            f"messages[{index}].tool_call_id: {given!r} is the id of no call in front of it", param=f"messages[{index}]"
        )


def _of_message(
    message: Mapping[str, Any], index: int, calls: _Calls, *, keeps_reasoning: bool
) -> Iterator[HarmonyMessage]:
    role, content = message.get("role"), _content(message, index)
    if role in _INSTRUCTING:
        yield HarmonyMessage("developer", developer_text(content, ()))
    elif role == "user":
        yield HarmonyMessage("user", content)
    elif role == "tool":
        name = f"{FUNCTIONS}.{calls.answered(message, index)}"
        yield HarmonyMessage("tool", content, name, "commentary", "assistant")
    elif role == "assistant":
        reasoning = _reasoning(message)
        if reasoning and keeps_reasoning:
            yield HarmonyMessage("assistant", reasoning, channel="analysis")
        if _is_final(message):
            yield HarmonyMessage("assistant", content, channel="final")
        elif content:
            yield HarmonyMessage("assistant", content, channel="commentary")
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            calls.add(call.get("id"), function["name"])
            arguments = function.get("arguments", "")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            recipient = f"{FUNCTIONS}.{function['name']}"
            yield HarmonyMessage("assistant", text, None, "commentary", recipient, f"{CONSTRAIN}json")
    else:
        problem = f"messages[{index}].role must be system, developer, user, assistant or tool, got {role!r}"
        raise RequestError(problem, param=f"messages[{index}]")


def _is_final(message: Mapping[str, Any]) -> bool:
    """Whether it is the assistant's answer: no call, and not reasoning alone."""
    return (
        message.get("role") == "assistant"
        and not message.get("tool_calls")
        and bool(message.get("content") or not _reasoning(message))
    )


def _reasoning(message: Mapping[str, Any]) -> str:
    texts = [message.get(name) for name in _REASONING_FIELDS]
    return next((text for text in texts if isinstance(text, str) and text), "")


def _content(message: Mapping[str, Any], index: int) -> str:
    """The text; parts, which must all be text, are joined by newlines."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"messages[{index}].content must be text: the model reads nothing else", param="messages")
    return "\n".join(text for text in texts if text is not None)
