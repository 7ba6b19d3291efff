"""Converts OpenAI's messages and tools to harmony's messages.

Leading system and developer messages become one developer message, which also describes the tools; later ones become
developer messages in place. An assistant's text beside calls is a preamble on the commentary channel, its reasoning is
analysis. Analysis before the last final answer is dropped, as in the model's training; later analysis, between calls
and their answers, is kept.

The system message is a fixed form, and not the API's: instructions of the API's system and developer messages go to
harmony's developer message, with the tools. A function's JSON schema becomes a TypeScript type by the rules of the
package `openai-harmony`, which supports objects, arrays, oneOf, enums of strings, nullable and lists of types; any
other schema (anyOf, $ref) is `any`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runtime.engine.errors import RequestError
from runtime.text.harmony.message import CHANNELS, CONSTRAIN, FUNCTIONS, HarmonyMessage

MODEL_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
KNOWLEDGE_CUTOFF = "2024-06"
EFFORTS = ("low", "medium", "high")


def system_text(model_identity: str, current_date: str, reasoning_effort: str, *, has_functions: bool) -> str:
    """has_functions: the developer message has tools"""
    valid = f"# Valid channels: {', '.join(CHANNELS)}. Channel must be included for every message."
    if has_functions:
        valid += f"\nCalls to these tools must go to the commentary channel: '{FUNCTIONS}'."
    top = f"{model_identity}\nKnowledge cutoff: {KNOWLEDGE_CUTOFF}\nCurrent date: {current_date}"
    return f"{top}\n\nReasoning: {reasoning_effort}\n\n{valid}"


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
    identity = MODEL_IDENTITY if model_identity is None else model_identity
    system = system_text(identity, current_date, reasoning_effort or "medium", has_functions=bool(functions))
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


_MAX_DEPTH = 64
"""Deepest nesting; below it, a type is `any`."""


def typescript_type(schema: Any, indent: str = "", depth: int = 0) -> str:
    """The type, with `indent` before all lines but the first."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return "any"
    variants, kind = schema.get("oneOf"), schema.get("type")
    if isinstance(variants, list):
        return "".join(_variant_line(variant, indent, depth) for variant in variants)
    if isinstance(kind, list) and (names := [each for each in kind if isinstance(each, str)]):
        return " | ".join("number" if name == "integer" else name for name in names)
    if kind == "object":
        return _object_type(schema, indent, depth)
    if kind == "array":
        return f"{typescript_type(schema['items'], indent, depth + 1)}[]" if "items" in schema else "Array<any>"
    if kind == "string":
        values = schema.get("enum")
        texts = [f'"{value}"' for value in values if isinstance(value, str)] if isinstance(values, list) else []
        return " | ".join(texts) or "string"
    if kind == "integer":
        return "number"
    return kind if kind in ("number", "boolean") else "any"


def _object_type(schema: Mapping[str, Any], indent: str, depth: int) -> str:
    description = _text(schema, "description")
    lines = [] if description is None else [f"{indent}// {description}\n"]
    lines.append("{\n")
    properties, required = schema.get("properties"), schema.get("required")
    names = required if isinstance(required, list) else []
    if isinstance(properties, Mapping):
        for key, value in properties.items():
            lines += _property_lines(f"{key}{'' if key in names else '?'}", value, indent, depth)
    return "".join([*lines, f"{indent}}}"])


def _property_lines(key: str, schema: Any, indent: str, depth: int) -> list[str]:
    """key: with a question mark if the property is optional"""
    fields = schema if isinstance(schema, Mapping) else {}
    lines = []
    if (title := _text(fields, "title")) is not None:
        lines.append(f"{indent}// {title}\n{indent}//\n")
    description = _text(fields, "description")
    if description is not None and "oneOf" not in fields:
        lines.append(f"{indent}// {description}\n")
    examples = fields.get("examples")
    if isinstance(examples, list) and examples:
        lines.append(f"{indent}// Examples:\n")
        lines += [f'{indent}// - "{example}"\n' for example in examples if isinstance(example, str)]
    if isinstance(fields.get("oneOf"), list):
        return lines + _choice_lines(key, fields, description, indent, depth)
    default = _default(fields) if "oneOf" not in fields else None
    comment = "" if default is None else f" // {default}"
    return [*lines, f"{indent}{key}: {_nullable(fields, f'{indent}    ', depth)},{comment}\n"]


def _choice_lines(key: str, schema: Mapping[str, Any], description: str | None, indent: str, depth: int) -> list[str]:
    """A property with several alternative types, one a line. Its description is above, unless the first type has the
    same."""
    variants: list[Any] = schema["oneOf"]
    is_above = description is not None and not (variants and _text(variants[0], "description") == description)
    lines = [f"{indent}// {description}\n"] if is_above else []
    if (default := _default(schema)) is not None:
        lines.append(f"{indent}// {default}\n")
    lines.append(f"{indent}{key}:\n")
    for i, variant in enumerate(variants):
        own = _text(variant, "description")
        has_own = own is not None and own != description and not (i == 0 and is_above)
        comments = [each for each in (own if has_own else None, _default(variant)) if each is not None]
        behind = f" // {' '.join(comments)}" if comments else ""
        lines.append(f"{indent} | {_nullable(variant, f'{indent}   ', depth)}{behind}\n")
    return [*lines, f"{indent},\n"]


def _variant_line(variant: Any, indent: str, depth: int) -> str:
    """One of several types outside a property, such as an array's items."""
    default = _default(variant, is_quoted=True)
    comments = [each for each in (_text(variant, "description"), default) if each is not None]
    behind = f" // {' '.join(comments)}" if comments else ""
    return f"\n{indent} | {_nullable(variant, f'{indent}   ', depth)}{behind}"


def _nullable(schema: Any, indent: str, depth: int) -> str:
    text = typescript_type(schema, indent, depth + 1)
    is_nullable = isinstance(schema, Mapping) and schema.get("nullable") is True
    return f"{text} | null" if is_nullable and "null" not in text else text


def _default(schema: Any, *, is_quoted: bool = False) -> str | None:
    """The comment on a default. Strings are quoted, but not those of an enum; with `is_quoted` these are JSON."""
    if not isinstance(schema, Mapping) or "default" not in schema:
        return None
    default, values = schema["default"], schema.get("enum")
    if not isinstance(default, str):
        return f"default: {_json(default)}"
    if not (isinstance(values, list) and values):
        return f'default: "{default}"'
    return f"default: {_json(default) if is_quoted else default}"


def _text(schema: Any, name: str) -> str | None:
    value = schema.get(name) if isinstance(schema, Mapping) else None
    return value if isinstance(value, str) else None


def _json(value: Any) -> str:
    """JSON without white space, numbers as serde writes them."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_json(str(key))}:{_json(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_json, value)) + "]"
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 64:
        value = float(value) if abs(value) < 1 << 1023 else math.inf
    if isinstance(value, float):
        return _number(value)
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    """The shortest digits; an exponent below 1e-5 and from 1e16 on, without a plus sign or leading zeros."""
    if not math.isfinite(value):
        return "null"
    text = repr(value)
    if "e" in text:
        digits, exponent = text.split("e")
        if int(exponent) == -5:
            sign, digits = ("-", digits[1:]) if digits[0] == "-" else ("", digits)
            return f"{sign}0.0000{digits.replace('.', '')}"
        return f"{digits}e{int(exponent)}"
    return text
