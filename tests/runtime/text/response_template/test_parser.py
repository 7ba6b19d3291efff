"""Answers parsed by a response template: equal to what transformers makes of them, however they are cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from runtime.engine.sampling_params import SamplingParams
from runtime.text.formats import AnswerFormat
from runtime.text.pipeline import TextPipeline
from runtime.text.response_template.parser import AnswerTemplate, ResponseTemplateParser
from runtime.text.response_template.template import ResponseTemplateError, read_response_template
from runtime.text.tools.table import ToolReading
from tests.runtime.text.answers import Message, cut, message_of, message_of_parts, parts_of
from tests.runtime.text.response_template.cases import GOLDENS, TEMPLATES, TOOLS
from tests.runtime.text.test_pipeline import outputs_of, run
from tests.runtime.text.tokenizers import with_special
from tokenizer.patterns.linear_pattern import StepsError

READ = {name: read_response_template(given) for name, given in TEMPLATES.items()}
FUNCTIONS: dict[str, Any] = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
KINDS = {"content": "content", "thinking": "reasoning", "reasoning_content": "reasoning"}


def prefix_of(name: str, prompt: str) -> str:
    ends = [match.end for match in READ[name].anchor.pattern.matches(prompt)]
    return prompt[ends[-1] :] if ends else ""


def parsed(case: dict[str, Any], pieces: list[str], **fields: Any) -> Message:
    functions = FUNCTIONS if case["tools"] else {}
    name = case["template"]
    parser = ResponseTemplateParser(READ[name], prefix_of(name, case["prompt"]), functions=functions, **fields)
    parts = parts_of(parser, pieces)
    message = message_of_parts(parts)
    message.content = "".join(part.lead + part.text for part in parts if part.kind == "content")
    message.reasoning = "".join(part.lead + part.text for part in parts if part.kind == "reasoning")
    return message


def expected(case: dict[str, Any]) -> tuple[str, str, list[Any]] | None:
    """What transformers' regions are for a client; None if one is no call, which we leave in the content."""
    texts, calls, seen = {"content": "", "reasoning": ""}, list[Any](), set[str]()
    fields = TEMPLATES[case["template"]]["fields"]
    for name, value in case["regions"]:
        if name in KINDS:
            lead = fields[name].get("join", "\n") if name in seen else ""
            texts[KINDS[name]] += lead + value if value else ""
            seen |= {name} if value else set()
            continue
        for each in value if isinstance(value, list) else [value]:
            function = each["function"]
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return None
            if not isinstance(function.get("arguments"), dict):
                return None
            calls.append((function["name"], function["arguments"]))
    return texts["content"], texts["reasoning"], calls


def check(cases: list[dict[str, Any]]) -> int:
    draw, num_equal = random.Random(5), 0
    for case in cases:
        text = case["text"]
        whole = parsed(case, [text])
        for pieces in (list(text), cut(text, [draw.randrange(99) for _ in range(3)])):
            assert parsed(case, pieces) == whole, case
        if case["regions"] is not None and (told := expected(case)) is not None:
            calls = [(name, json.loads(arguments)) for name, arguments in whole.tool_calls]
            assert (whole.content, whole.reasoning, calls) == told, case
            num_equal += 1
    return num_equal


def test_answers_are_parsed_as_by_transformers() -> None:
    cases = json.loads(GOLDENS.read_text(encoding="utf-8"))["cases"]
    assert {case["template"] for case in cases} == set(TEMPLATES)
    assert check(cases) > 0.85 * len(cases)


def test_what_is_no_call_is_content() -> None:
    for body in ('{"name": "f"', "5", '{"name": 5, "arguments": {}}', "", '"f"', "[" * 5000):
        case = {"template": "objects", "prompt": "", "tools": False}
        text = f"Well. <tool_call>{body}</tool_call> So."
        assert parsed(case, list(text)) == Message(f"Well. <tool_call>{body}</tool_call>\nSo.", "", [])


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def test_calls_that_are_not_permitted_and_further_ones() -> None:
    case = {"template": "objects", "prompt": "", "tools": False}
    assert parsed(case, [CALL * 2], parallel=False).tool_calls == [("f", '{"a": 1}')]
    assert parsed(case, [CALL], only=frozenset("g")) == Message(CALL)


def test_a_long_answer_takes_linear_time() -> None:
    """Minutes, if each character cost as much as those before it."""
    for name in TEMPLATES:
        case = {"template": name, "prompt": "", "tools": True}
        for text in ("<tool_call>" * 3_000, " " * 60_000, '{"a' * 10_000, CALL * 300, "<|channel|>final" * 2_000):
            parsed(case, cut(text, range(0, len(text), 40)))


def test_a_pattern_that_reads_far_ahead_again_and_again_is_given_up() -> None:
    """It would read each character of the answer a thousand times."""
    fields: Any = {"content": {}, "thinking": {"open_pattern": "a(?:[^b]*b)?", "close": "c"}}
    template = read_response_template({"start_anchor": "A", "fields": fields})
    text = "ac" * 20_000
    found = [parts_of(ResponseTemplateParser(template), cut(text, range(0, len(text), step))) for step in (7, 40_000)]
    first, second = (message_of_parts(parts) for parts in found)
    assert first == second


def test_an_anchor_that_takes_too_many_steps_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenizer.patterns.linear_pattern.MOST_STEPS", 50_000)
    tokenizer = with_special("<|other|>")
    tokenizer.response_template = {"start_anchor_pattern": "a(?:[^b]*b)?", "fields": {"content": {}}}
    template = AnswerTemplate.of(tokenizer)
    assert template is not None
    text = "a" * 900 + "c" * 300
    with pytest.raises(StepsError):
        list(template.template.anchor.pattern.matches(text))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert message_of_parts(parts_of(template.parser(tokenizer, ids, None), ["Yes."])) == Message("Yes.")


_NESTED = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"fields": {}}, "fields must be an object with at least one field"),
        ({"version": 2}, "version 2 is not known"),
        ({"extra": 1}, "unknown keys: extra"),
        ({"start_anchor": ""}, "start_anchor must be a text"),
        ({"fields": {"a": {}, "b": {}}}, "more than one field has no opening: a, b"),
        ({"fields": {"content": {"open_pattern": "a(?=b)"}}}, r"field 'content': .*a lookahead \(\?=\.\.\.\)"),
        ({"fields": {"content": {"open_pattern": "a++"}}}, "a possessive repetition"),
        ({"fields": {"content": {"open_pattern": r"(a)\1"}}}, "a backreference"),
        ({"fields": {"content": {"open_pattern": "a*"}}}, "matches the empty text"),
        ({"fields": {"content": {"open_pattern": "(?:a{200}){200}"}}}, "it needs more than 256 places"),
        ({"fields": {"content": {"open_pattern": "(?P<x>a)"}}}, "the group 'x' of its pattern has no use"),
        ({"fields": {"content": {"content": "json"}}}, "only plain text can be streamed"),
        ({"fields": {"tool_calls": {"content": "xml"}}}, "content must be one of"),
        ({"fields": {"tool_calls": {"content": "xml-inline", "content_args": {"tag_pattern": "a"}}}}, "group named"),
        ({"fields": {"tool_calls": {"transform": "x{content}"}}}, "mixes a placeholder"),
        ({"fields": {"tool_calls": {"transform": _NESTED}}}, "transform is nested deeper than 50"),
        ({"fields": {"content": {"join": "a"}}}, "join must be a text, beside repeats: true"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ResponseTemplateError, match=problem):
        read_response_template({"start_anchor": "A", "fields": {"content": {}}, **change})


def test_a_model_s_answers_are_parsed_by_its_template() -> None:
    tokenizer = with_special("<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|start|>", "<|constrain|>")
    tokenizer.response_template = TEMPLATES["messages"]
    found = AnswerFormat.of(tokenizer)
    assert found.template is not None
    assert found.origin.startswith("response_template of tokenizer_config.json")
    assert "<|end|>" in found.template.shown
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
    prompt = tokenizer.encode("<|start|>assistant", add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for edges in ([], list(range(len(ids)))):
        pipeline = TextPipeline(tokenizer, SamplingParams(), prompt, template=found.template)
        _, deltas = run(pipeline, outputs_of(ids, edges, "length"))
        assert message_of(deltas) == Message("Yes.", "Hm.")
    assert AnswerFormat.of(tokenizer, tool_call_parser="hermes").template is None
    assert AnswerFormat.of(tokenizer, reasoning_parser="none").template is None
    tokenizer.response_template = {"fields": {}}
    refused = AnswerFormat.of(tokenizer)
    assert refused.template is None
    assert "is not followed: fields must be an object" in refused.origin


def test_the_prompt_s_end_belongs_to_the_answer() -> None:
    tokenizer = with_special("<|im_start|>", "<|im_end|>")
    tokenizer.response_template = TEMPLATES["objects"]
    template = AnswerTemplate.of(tokenizer)
    assert template is not None
    reading = ToolReading.of(AnswerFormat.of(tokenizer).forced_tools, TOOLS)  # type: ignore[arg-type]
    for prompt, answer in (
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n<think>\n", Message("b", "a")),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Message("a</think>b", "")),
        ("Hello <think>", Message("a</think>b", "")),
        ("<|im_start|>assistant\n<think>" + "x" * 2000, Message("b", "a")),
    ):
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        assert message_of_parts(parts_of(template.parser(tokenizer, ids, reading), ["a</think>b"])) == answer
