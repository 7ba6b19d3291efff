"""Tool calls: what is one, what is not, and that no cut of the text changes either."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text.tools.table import HERMES, ToolCallParser, ToolReading
from tests.runtime.text.answers import Message, cut, parse, texts
from tests.runtime.text.tools.test_json_scanner import values

OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"


def call(body: str) -> str:
    return OPEN + body + CLOSE


F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "arguments": {}}'
ESCAPED = '{"name": "f", "arguments": {"t": "</tool_call><tool_call>\\n \\"}{"}}'

READ: list[tuple[str, str, list[tuple[str, str]]]] = [
    # as the models' templates have it
    (call(F), "", [("f", '{"a": 1}')]),
    ("Sure.\n" + call(F) + "\n" + call(G), "Sure.", [("f", '{"a": 1}'), ("g", "{}")]),
    (call(F) + "\nDone.", "\nDone.", [("f", '{"a": 1}')]),
    ("\n\n" + call(F) + "\n", "", [("f", '{"a": 1}')]),
    ("<tool_call>" + F + "</tool_call><tool_call>" + G + "</tool_call>", "", [("f", '{"a": 1}'), ("g", "{}")]),
    (call(ESCAPED), "", [("f", '{"t": "</tool_call><tool_call>\\n \\"}{"}')]),
    (call('{"name": "f", "arguments": {"ü": "日😀"}}'), "", [("f", '{"ü": "日😀"}')]),
    (call('{"name":"\\u0066","arguments":{ "a" : [ 1 , {} ] } }'), "", [("f", '{ "a" : [ 1 , {} ] }')]),
    # other orders, other keys, other types
    (call('{"arguments": {"a": 1}, "name": "f"}'), "", [("f", '{"a": 1}')]),
    (call('{"id": 7, "name": "f", "arguments": {"a": 1}, "type": "function"}'), "", [("f", '{"a": 1}')]),
    (call('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [("f", '{"a": 1}')]),
    (call('{"name": "f", "arguments": null}'), "", [("f", "{}")]),
    (call('{"name": "f", "arguments": [1]}'), "", [("f", "[1]")]),
    (call('{"name": "f"}'), "", [("f", "{}")]),
    (call('{"name": "f", "arguments": {},}'), "", [("f", "{}")]),
    # tags and braces that are missing
    (OPEN + F, "", [("f", '{"a": 1}')]),
    (OPEN + F + "\n" + OPEN + G, "", [("f", '{"a": 1}'), ("g", "{}")]),
    (OPEN + F + " And now?", " And now?", [("f", '{"a": 1}')]),
    (call(F[:-1]), "", [("f", '{"a": 1}')]),
    (call(F + "}"), "}" + CLOSE, [("f", '{"a": 1}')]),
    # cut off
    (OPEN + F + "\n</tool_c", "", [("f", '{"a": 1}')]),
    (OPEN + F[:-1], "", [("f", '{"a": 1}')]),
    (OPEN + F[:-4], "", [("f", '{"a":')]),
    (OPEN + F[:-8], "", [("f", "{")]),
    (OPEN + F[:-9], OPEN + F[:-9], []),
    (OPEN + '{"name": "f", "argu', OPEN + '{"name": "f", "argu', []),
    (OPEN, OPEN, []),
    ("a <tool_ca", "a <tool_ca", []),
    # arguments that are nearly JSON become it
    (call('{"name": "f", "arguments": {\'a\': 1}}'), "", [("f", '{"a": 1}')]),
    (call('{"name": "f", "arguments": {"a": 1,}}'), "", [("f", '{"a": 1}')]),
    (call('{"name": "f", "arguments": {"a": "x\ny"}}'), "", [("f", '{"a": "x\\ny"}')]),
    (OPEN + '{"name": "f", "arguments": {"a": 1, "b": Tru', "", [("f", '{"a": 1, "b": Tru')]),
    (OPEN + '{"name": "f", "arguments": {"a": "x\\u00', "", [("f", '{"a": "x\\u00')]),
    # others stay what they are
    (call('{"name": "f", "arguments": {"a": "say "hi" }"}}') + "!", "!", [("f", '{"a": "say "hi" }"}')]),
    (OPEN + '{"name": "f", "arguments": {x}}', "", [("f", "{x}}")]),
    # what is no call stays content
    ("<tool_call>text</tool_call>", "<tool_call>text</tool_call>", []),
    ("a < b <tool> </tool_call>", "a < b <tool> </tool_call>", []),
    (call("[" + F + "]"), "", [("f", '{"a": 1}')]),
    (call("[" + F), "", [("f", '{"a": 1}')]),
    (call("[5, " + F + "]"), call("[5, " + F + "]"), []),
    (call("{}"), call("{}"), []),
    (call('{"name": 5, "arguments": {}}'), call('{"name": 5, "arguments": {}}'), []),
    (call('{"name": "", "arguments": {}}'), call('{"name": "", "arguments": {}}'), []),
    (call('{"name": "\\ud800", "arguments": {}}'), call('{"name": "\\ud800", "arguments": {}}'), []),
    (call('{"name": "f", "parameters": {}}'), "", [("f", "{}")]),
    (call('{"name": "f", "params": {}}'), call('{"name": "f", "params": {}}'), []),
    (call('{"arguments": {}}'), call('{"arguments": {}}'), []),
    (call('{"name": f}') + call(G), call('{"name": f}'), [("g", "{}")]),
    ("<tool_call><tool_call>" + G + "</tool_call>", "<tool_call>", [("g", "{}")]),
    (" \n", " \n", []),
    ("", "", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), READ)
def test_what_is_a_call(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert parse(ToolCallParser(ToolReading(HERMES)), pieces) == Message(content, "", calls)


@settings(max_examples=200, deadline=None)
@given(text=texts, places=st.lists(st.integers(0, 200)), parallel=st.booleans())
def test_any_cut_gives_the_same(text: str, places: list[int], parallel: bool) -> None:
    whole = parse(ToolCallParser(ToolReading(HERMES, parallel=parallel)), [text])
    assert parse(ToolCallParser(ToolReading(HERMES, parallel=parallel)), cut(text, places)) == whole
    assert parse(ToolCallParser(ToolReading(HERMES, parallel=parallel)), list(text)) == whole
    both = parse(ToolCallParser(ToolReading(HERMES)), [text])
    assert (whole.content, whole.tool_calls) == (both.content, both.tool_calls if parallel else both.tool_calls[:1])


written = st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=4), values))


@settings(max_examples=25, deadline=None)
@given(
    calls=st.lists(written, max_size=3),
    content=st.sampled_from(["", "Let me see. <b>", "{}"]),
    is_ascii=st.booleans(),
    places=st.lists(st.integers(0, 500)),
)
def test_what_a_template_writes_is_read_back(
    calls: list[tuple[str, dict[str, object]]], content: str, is_ascii: bool, places: list[int]
) -> None:
    bodies = [json.dumps({"name": n, "arguments": a}, ensure_ascii=is_ascii) for n, a in calls]
    text = "\n".join([*([content] if content else []), *map(call, bodies)])
    message = parse(ToolCallParser(ToolReading(HERMES)), cut(text, places))
    assert message.content == content
    assert [(name, json.loads(arguments)) for name, arguments in message.tool_calls] == calls


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser(ToolReading(HERMES))
    pieces = ["<tool_call>", '\n{"name": "f', '", "arguments": {"ci', 'ty": "', "Rome", '"}', "}\n", "</tool_call>"]
    shown = [[(c.name, c.arguments) for part in parser.push(piece) for c in part.calls] for piece in pieces]
    assert shown == [[], [], [("f", ""), (None, '{"ci')], [(None, 'ty": "')], [(None, "Rome")], [(None, '"}')], [], []]


def test_ids_are_the_calls_own() -> None:
    parts = ToolCallParser(ToolReading(HERMES)).push(call(F) + call(G))
    ids = [c.id for part in parts for c in part.calls if c.id is not None]
    assert len(set(ids)) == 2
    assert all(i.startswith("call_") for i in ids)


def test_a_long_answer_takes_linear_time() -> None:
    """A quadratic parser would take minutes for each."""
    for text in ("<tool_call>" * 20_000, OPEN + '{"name": "' + "x" * 200_000, call(F) * 3_000, " <" * 100_000):
        parse(ToolCallParser(ToolReading(HERMES)), cut(text, range(0, len(text), 40)))
