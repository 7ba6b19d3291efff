"""Real models' chat templates: which notation each shows, and that the calls it writes into a conversation are read
back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.text.tools.table import (
    BY_NAME,
    HERMES,
    LLAMA3,
    MISTRAL,
    NOTATIONS,
    QWEN3_CODER,
    ToolCallParser,
    ToolReading,
    notation_in,
)
from runtime.text.tools.tool_prompt import ignores_tools, written
from tests.runtime.text.answers import parse
from tests.runtime.text.tools.test_notations import TOOLS
from tests.server.byte_tokenizer import make_byte_tokenizer
from tokenizer import Tokenizer
from tokenizer.templates.chat_template import render_chat

TEMPLATES = Path(__file__).resolve().parents[5] / "shared" / "data" / "chat_templates"
needs_templates = pytest.mark.skipif(not TEMPLATES.is_dir(), reason="needs ../shared/data")

KNOWN = {
    "Qwen-Qwen2.5-7B-Instruct": HERMES,
    "Qwen-Qwen3-0.6B": HERMES,
    "Qwen3-Coder": QWEN3_CODER,
    "meta-llama-Llama-3.2-3B-Instruct": LLAMA3,
    "mistralai-Mistral-Nemo-Instruct-2407": MISTRAL,
}
ENDS = ("<|im_end|>", "<|eot_id|>", "</s>")
USER = {"role": "user", "content": "How is the weather?"}
ROME: tuple[str, Any] = (
    "get_weather",
    {"city": 'Rome "I"\nZürich 😀 <b>', "days": 2, "tags": ["a", "b"], "ratio": 0.5, "more": {"k": None}},
)
BOTH = [ROME, ("get_weather", {"city": "", "days": -1})]


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def turn(text: str, calls: list[tuple[str, Any]], content: str) -> str:
    """The assistant's turn as the template writes it."""
    made = [
        {"type": "function", "id": f"call{i:05}", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    said = {"role": "assistant", "content": content, "tool_calls": made}
    fields: Any = {"tools": TOOLS, "documents": None, "continue_final_message": False, "now": None}
    fields["variables"] = {"bos_token": "<s>", "eos_token": "</s>"}
    before = render_chat(text, [USER], add_generation_prompt=True, **fields)
    after = render_chat(text, [USER, said], add_generation_prompt=False, **fields)
    assert after.startswith(before.rstrip("\n"))
    rest = after[len(before) :] if after.startswith(before) else after[len(before.rstrip("\n")) :]
    rest = rest.rstrip("\n").removeprefix("<think>\n\n</think>\n\n")
    return next((rest.removesuffix(end) for end in ENDS if rest.endswith(end)), rest)


@needs_templates
@pytest.mark.parametrize("name", KNOWN)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    text, notation = template(name), KNOWN[name]
    assert notation_in([text]) is notation
    for calls in ([ROME], BOTH) if notation is not LLAMA3 else ([ROME],):
        said = turn(text, calls, "")
        message = parse(ToolCallParser(ToolReading.of(notation, TOOLS)), [said])
        assert (message.content.strip(), [(n, json.loads(a)) for n, a in message.tool_calls]) == ("", calls)
    if notation in (HERMES, QWEN3_CODER):  # the others write no content beside calls
        message = parse(ToolCallParser(ToolReading.of(notation, TOOLS)), [turn(text, [ROME], "I look.")])
        assert (message.content.strip(), len(message.tool_calls)) == ("I look.", 1)


@needs_templates
@pytest.mark.parametrize("name", KNOWN)
def test_our_own_writing_is_the_template_s(name: str) -> None:
    """What a forced call looks like is what the model was taught, but for white space and ids."""
    notation = KNOWN[name]
    calls = [("get_weather", {"city": "Rome", "days": 2})]
    said = turn(template(name), calls, "").strip().replace(', "id": "call00000"', "")
    assert said == written(notation, calls)


@needs_templates
def test_templates_that_know_no_tools(tmp_path: Path) -> None:
    tokenizer: Tokenizer = make_byte_tokenizer(tmp_path)
    found = {}
    for file in sorted(TEMPLATES.glob("*.jinja")):
        tokenizer.chat_templates = {"default": file.read_text(encoding="utf-8")}
        found[file.stem] = ignores_tools(tokenizer)
    assert {name for name, ignores in found.items() if ignores} == {"google-gemma-2-2b-it"}


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ("<tool_call>\n{...}\n</tool_call>", "hermes"),
        ("<tool_call>\n<function=f>", "qwen3_coder"),
        ("<tool_call>{f}\n<arg_key>a</arg_key>\n<arg_value>", "glm45"),
        ("<tool_call>{f}<arg_key>a</arg_key><arg_value>", "glm47"),
        ("<|observation|>\n", "glm4"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]name[ARGS]", "mistral_v11"),
        ("<|start_header_id|> <|python_tag|>", "llama3_json"),
        ("<|tool_call|>", "granite"),
        ("<|tool|> <|tool_call|>[] <|/tool_call|>", "phi4_mini_json"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json", "deepseek_v3"),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "deepseek_v31"),
        ("<|tool_call>call:f{}<tool_call|>", "gemma4"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("List of tools: [", "lfm2"),
        ("<AVAILABLE_TOOLS>[ <TOOLCALL>[", "nemotron_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ tools }}", None),
    ],
)
def test_the_notation_is_found_in_the_template(shown: str, name: str | None) -> None:
    assert notation_in([shown]) is (None if name is None else BY_NAME[name])
    assert len({each.name for each in NOTATIONS}) == len(NOTATIONS)
