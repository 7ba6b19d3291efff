"""What is refused before it runs: too much, too deep, wrong, or what a grammar cannot promise; each by its name."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from runtime.engine.errors import RequestError
from runtime.engine.grammar.compiler import check_grammar, compile_grammar, on_deep_stack
from runtime.engine.grammar.compiling import GrammarChecker
from runtime.engine.grammar.grammar import (
    MAX_CHOICES,
    MAX_ENUM_VALUES,
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_DEPTH,
    MAX_LARK_BYTES,
    MAX_REGEX_BYTES,
    MAX_REPEATS,
    MAX_SCHEMA_NODES,
    Grammar,
)
from runtime.engine.grammar.matcher import LazyVocabulary, Vocabulary
from runtime.engine.sampling_params import SamplingParams
from tokenizer import Tokenizer


def of(schema: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(schema))


def lark(*lines: str) -> Grammar:
    return Grammar(kind="lark", text="\n".join(lines))


def nested(depth: int) -> dict[str, Any]:
    """A schema of that many levels; each property is two."""
    schema: dict[str, Any] = {"type": "null"}
    for _ in range((depth - 2) // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def refusal(grammar: Grammar, vocabulary: Vocabulary) -> str:
    with pytest.raises(RequestError) as error:
        check_grammar(grammar, vocabulary)
    assert (error.value.param or "").partition(".")[0] == "grammar"
    assert str(error.value).startswith(f"{error.value.param}: ")
    assert error.value.code == "invalid_grammar"
    return str(error.value)


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        ("not", {"not": {"minLength": 1}}),
        ("if", {"if": {"type": "string"}, "then": {"maxLength": 3}}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
        ("propertyNames", {"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 3}}),
        ("contains", {"type": "array", "contains": {"const": 1}}),
        ("unevaluatedProperties", {"anyOf": [{"required": ["a"]}, {}], "unevaluatedProperties": False}),
        ("minProperties", {"type": "object", "minProperties": 5}),
        ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ],
)
def test_what_cannot_be_promised_is_refused_by_name(keyword: str, schema: Any, vocabulary: Vocabulary) -> None:
    assert keyword in refusal(of({"properties": {"a b": {"items": schema}}}), vocabulary)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "banana"},
        {"type": "object", "properties": []},
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "file:///etc/passwd"},
        {"enum": []},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "(?=a)b"},
        {"required": "a", "type": "object"},
        {"anyOf": []},
    ],
)
def test_a_wrong_schema_is_refused(schema: Any, vocabulary: Vocabulary) -> None:
    assert len(refusal(of(schema), vocabulary)) > 20


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"type": NaN}', '{"type": "object"} x', "{'a': 1}"])
def test_what_is_no_schema_is_refused(text: str, vocabulary: Vocabulary) -> None:
    refusal(Grammar(kind="json_schema", text=text), vocabulary)


@pytest.mark.parametrize("text", ["[]", '[""]', "[1]", '{"a": 1}', '"a"', "[null]"])
def test_what_is_no_choice_is_refused(text: str, vocabulary: Vocabulary) -> None:
    refusal(Grammar(kind="choice", text=text), vocabulary)


@pytest.mark.parametrize("text", ["(", "a{5,2}", r"\p{NoSuchClass}", "(?=a)", "[z-a]"])
def test_a_wrong_regular_expression_is_refused(text: str, vocabulary: Vocabulary) -> None:
    refusal(Grammar(kind="regex", text=text), vocabulary)


@pytest.mark.parametrize(
    "text",
    [
        "", "begin: \"a\"", 'start: "a', "start: missing", "start: %json [1]", 'start: %json {"not": {}}',
        'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}', "start: <|no_such_token|>",
        "start: @nowhere", 'start[temperature=0.5]: /a+/', 'start: a "b"\na[stop="x"]: /.*/',
    ],
)  # fmt: skip
def test_a_wrong_grammar_is_refused(text: str, vocabulary: Vocabulary) -> None:
    refusal(Grammar(kind="lark", text=text), vocabulary)


def test_limits_name_the_value_and_the_limit(vocabulary: Vocabulary) -> None:
    values = [str(i) for i in range(MAX_ENUM_VALUES + 1)]
    assert f"{MAX_ENUM_VALUES} values, got {MAX_ENUM_VALUES + 1}" in refusal(of({"enum": values}), vocabulary)
    check_grammar(of({"enum": values[:-1]}), vocabulary)
    choices = [f"choice {i}" for i in range(MAX_CHOICES + 1)]
    text = refusal(Grammar(kind="choice", text=json.dumps(choices)), vocabulary)
    assert f"1 to {MAX_CHOICES} strings, got {MAX_CHOICES + 1}" in text
    check_grammar(Grammar(kind="choice", text=json.dumps(choices[:-1])), vocabulary)
    check_grammar(of({"type": "string", "maxLength": MAX_REPEATS + 1}), vocabulary)
    text = refusal(of({"type": "string", "minLength": MAX_REPEATS + 1}), vocabulary)
    assert f"at most {MAX_REPEATS}, got {MAX_REPEATS + 1}" in text
    assert f"at most {MAX_GRAMMAR_DEPTH} levels" in refusal(of(nested(MAX_GRAMMAR_DEPTH + 2)), vocabulary)
    check_grammar(of(nested(MAX_GRAMMAR_DEPTH)), vocabulary)
    assert f"{MAX_SCHEMA_NODES} values" in refusal(of({"default": [0] * (MAX_SCHEMA_NODES + 1)}), vocabulary)
    brackets = "(" * (MAX_GRAMMAR_DEPTH + 1) + "a" + ")" * (MAX_GRAMMAR_DEPTH + 1)
    assert f"at most {MAX_GRAMMAR_DEPTH} levels" in refusal(Grammar(kind="regex", text=brackets), vocabulary)
    lark = Grammar(kind="lark", text=f'start: "{brackets}"')
    assert f"at most {MAX_GRAMMAR_DEPTH} levels" in refusal(lark, vocabulary)


@pytest.mark.parametrize(
    ("kind", "text", "limit"),
    [
        ("regex", "a" * (MAX_REGEX_BYTES + 1), MAX_REGEX_BYTES),
        ("lark", "é" * (MAX_LARK_BYTES // 2 + 1), MAX_LARK_BYTES),
        ("json_schema", "{}" + " " * MAX_GRAMMAR_BYTES, MAX_GRAMMAR_BYTES),
        ("json_object", "{}", 0),
    ],
)
def test_a_text_that_is_too_long_is_no_grammar(kind: Any, text: str, limit: int) -> None:
    with pytest.raises(RequestError, match=f"at most {limit} bytes, got {len(text.encode())}"):
        Grammar(kind=kind, text=text)


def test_grammars_are_checked_where_they_are_made() -> None:
    with pytest.raises(RequestError, match="json_schema, json_object"):
        Grammar(kind="yaml", text="")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must be a string"):
        Grammar(kind="regex", text=b"a")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="surrogate"):
        Grammar(kind="regex", text="\ud800")
    with pytest.raises(RequestError, match="must be a Grammar"):
        SamplingParams(grammar="a+")  # type: ignore[arg-type]


DEEP_CHAIN = {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="regex", text="(((a{1,100}){1,100}){1,100}){1,100}"),
        Grammar(kind="regex", text="(.*a.{60})*"),
        Grammar(kind="regex", text="a?" * 1500),
        Grammar(kind="regex", text="a" * MAX_REGEX_BYTES),
        Grammar(kind="regex", text=r"\w{1,1000}" * 20),
        of({"type": "string", "minLength": MAX_REPEATS, "pattern": "^(a|b)*a(a|b){12}$"}),
        of({**DEEP_CHAIN, "$defs": {**DEEP_CHAIN["$defs"], "d3000": {"type": "null"}}}),
        of({"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": 100 + i}]} for i in range(40)]}),
        of({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}),
        lark("start: r0", *(f"r{i}: r{i + 1}" for i in range(8000)), 'r8000: "a"'),
        lark("start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)), 'r60: "a"'),
        lark("start: R0", *(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)), 'R60: "a"'),
        Grammar(kind="lark", text='start: "a" ' + '| "b" ' * 5_000),
        Grammar(kind="lark", text='start: "a" ' + '"b" ' * 5_000),
        Grammar(kind="lark", text='start: s\ns: s s | "a" |'),
        Grammar(kind="lark", text="start: A\nA: " + "~" * 5000 + '"a"'),
        Grammar(kind="lark", text="start: %lark {" * 40 + 'start: "a"' + "}" * 40),
    ],
    ids=lambda grammar: repr(grammar.text[:24]),
)
def test_nothing_hangs_or_ends_the_process(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Each is compiled or refused; on a usual stack some of them would overflow it."""
    matchers, refusals = [], []
    try:
        matchers = compile_grammar(grammar, vocabulary, 1)
    except RequestError as error:
        refusals = [error]
    assert all(error.param == "grammar" and len(str(error)) < 500 for error in refusals)
    for matcher in matchers:
        for _ in range(20):  # and what it allows can be followed, or it says that it cannot
            mask = np.frombuffer(matcher.ll_matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, bitorder="little").nonzero()[0]
            if matcher.is_complete or matcher.error is not None:
                break
            matcher.consume(int(allowed[0]))


def test_errors_and_results_come_back_from_a_deep_stack() -> None:
    def depth(levels: int) -> int:
        return 0 if levels == 0 else 1 + depth(levels - 1)

    size = threading.stack_size()
    assert on_deep_stack(lambda: depth(500)) == 500
    with pytest.raises(KeyError, match="gone"):
        on_deep_stack(lambda: {}["gone"])
    assert threading.stack_size() == size


def test_a_checker_checks_once(tokenizer: Tokenizer) -> None:
    loads = []

    def load() -> Tokenizer:
        loads.append(1)
        return tokenizer

    checker = GrammarChecker(LazyVocabulary(load, tokenizer.vocab_size, (635,)))
    checker.check(None)
    assert not loads
    good, bad = Grammar(kind="regex", text="a+"), Grammar(kind="regex", text="(")
    for _ in range(2):
        checker.check(good)
        with pytest.raises(RequestError):
            checker.check(bad)
    assert checker.is_known(good)
    assert not checker.is_known(bad)
    assert len(loads) == 1
