"""The texts of the system message and the developer message.

The system message is a fixed form, and not the API's: instructions of the API's system and developer messages go to
harmony's developer message, with the tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.text.harmony.message import CHANNELS, FUNCTIONS
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
