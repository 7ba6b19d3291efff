"""The grammar of forced calls: what it lets through is read back as the calls that were asked for."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

import models.demo
from runtime.engine.grammar.compiler import check_grammar, compile_grammar
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.matcher import Vocabulary
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM
from runtime.text.reasoning import after_reasoning
from runtime.text.tools.grammar import tool_grammar
from runtime.text.tools.table import HERMES, ToolCallParser, ToolReading
from tests.runtime.text.answers import parse
from tokenizer import Tokenizer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now.utc-0"}},
    {"type": "function", "function": {"name": "note", "parameters": {"properties": {"text": {"maxLength": 5}}}}},
]
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now.utc-0", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(models.demo.__path__[0])


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, tokenizer.vocab_size, (635,))


def accepts(text: str, grammar: Grammar, tokenizer: Tokenizer, vocabulary: Vocabulary) -> bool:
    """Whether the whole text may be an answer."""
    (matcher,) = compile_grammar(grammar, vocabulary, 1)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(map(matcher.consume, ids)) and matcher.ll_matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "is_any", "is_one", "is_weather"),
    [
        (ROME, True, True, True),
        (NOW, True, True, False),
        (ROME + "\n" + NOW, True, False, False),
        ("Sure. " + ROME, False, False, False),
        (ROME + " ", False, False, False),
        (ROME.replace("get_weather", "get_time"), False, False, False),
        (ROME.replace('"Rome"', "7"), False, False, False),
        (NOW.replace("{}", '{"zone": 1}'), False, False, False),
        (NOW.replace("{}", "[]"), False, False, False),
        ("", False, False, False),
    ],
)
def test_what_may_be_said(
    text: str, is_any: bool, is_one: bool, is_weather: bool, tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    grammars = (
        tool_grammar(HERMES, TOOLS),
        tool_grammar(HERMES, TOOLS, parallel=False),
        tool_grammar(HERMES, TOOLS, "get_weather"),
    )
    found = [accepts(text, Grammar(kind="lark", text=each), tokenizer, vocabulary) for each in grammars]
    assert found == [is_any, is_one, is_weather]


def test_the_checks_pass_it(vocabulary: Vocabulary) -> None:
    for name in (None, "note"):
        check_grammar(Grammar(kind="lark", text=tool_grammar(HERMES, TOOLS, name)), vocabulary)


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        (Grammar(kind="json_object"), '{"a": 1}'),
        (Grammar(kind="json_schema", text='{"type": "integer"}'), "12"),
        (Grammar(kind="choice", text='["yes", "/n\\"o"]'), '/n"o'),
        (Grammar(kind="regex", text="a/b+"), "a/bb"),
        (Grammar(kind="lark", text=tool_grammar(HERMES, TOOLS)), ROME + "\n" + NOW),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_a_grammar_behind_reasoning(
    grammar: Grammar, answer: str, tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    for start, beginnings in (
        ("may_open", {"": True, "<think>\nWell <b>.\n</think>\n\n": True, "</think>": False, "Well": False}),
        ("open", {"": False, "Well <b>.\n</think>\n\n": True, "</think>": True, "Well": False}),
        ("closed", {"": True, "<think>x</think>": False}),
    ):
        behind = after_reasoning(grammar, start)
        check_grammar(behind, vocabulary)
        for beginning, is_right in beginnings.items():
            assert accepts(beginning + answer, behind, tokenizer, vocabulary) is is_right, (start, beginning)
            assert not accepts(beginning + "~", behind, tokenizer, vocabulary)


def test_a_model_that_was_never_taught_calls_makes_some() -> None:
    with LLM(max_num_seqs=8, num_blocks=256) as llm:
        grammar = Grammar(kind="lark", text=tool_grammar(HERMES, TOOLS[:2], parallel=False))
        (output,) = llm.generate("Once", SamplingParams(grammar=grammar, max_tokens=250, seed=1, n=6, temperature=1.5))
    finished = [choice for choice in output.outputs if choice.finish_reason == "stop"]
    assert len(finished) >= 4
    for choice in finished:
        message = parse(ToolCallParser(ToolReading(HERMES)), [choice.text])
        assert (message.content, len(message.tool_calls)) == ("", 1)
        name, arguments = message.tool_calls[0]
        assert name in ("get_weather", "now.utc-0")
        jsonschema.validate(json.loads(arguments), WEATHER if name == "get_weather" else {"maxProperties": 0})
