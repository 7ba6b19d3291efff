"""Every notation: what its family's publications show is read, what our own writing and grammar make is read back,
and no text raises or depends on how it was cut."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models.demo
from runtime.engine.grammar.compiler import check_grammar, compile_grammar
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.matcher import Vocabulary
from runtime.engine.sampling_params import SamplingParams
from runtime.text.harmony.message import HARMONY
from runtime.text.parser_names import TOOL_CALL_PARSERS
from runtime.text.pipeline import TextPipeline
from runtime.text.tools.grammar import marker_ids, tool_grammar
from runtime.text.tools.table import (
    BY_NAME,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GLM4,
    GLM45,
    GLM47,
    GRANITE,
    HERMES,
    JSON,
    LFM2,
    LLAMA3,
    MISTRAL,
    MISTRAL_V11,
    NEMOTRON,
    NOTATIONS,
    PHI4,
    PYTHONIC,
    QWEN3_CODER,
    Notation,
    ToolCallParser,
    ToolReading,
)
from runtime.text.tools.tool_prompt import written
from tests.runtime.text.answers import FRAGMENTS, Message, cut, message_of, parse
from tests.runtime.text.test_pipeline import outputs_of, run
from tests.runtime.text.tokenizers import with_special
from tokenizer import Tokenizer

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ok": {"type": "boolean"},
        "ratio": {"type": "number"},
        "unit": {"enum": ["c", "f"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}},
        "more": {"type": "object"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Tag": {"type": "string", "maxLength": 3}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "It rains?", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now.utc-0"}},
]
ROME = [("get_weather", {"city": "Rome", "days": 2})]
BOTH = [*ROME, ("now.utc-0", {})]
DSML = "｜tool▁call"
NOW = BOTH[1:]
NONE = ("", ', "arguments": ""', ', "arguments": " "', ', "arguments": null', ', "arguments": {}', ', "id": "1"')
IN_ROME = '{"city": "Rome", "days": 2}'
ROME_TEXT = '{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}'
NOW_TEXT = '{"name": "now.utc-0", "parameters": {}}'

READ: list[tuple[Notation, str, str, list[tuple[str, Any]]]] = [
    # Llama 3: the model card's JSON, behind the tag or not; several; calls of built-in tools
    (LLAMA3, '{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}', "", ROME),
    (LLAMA3, '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}', "", ROME),
    (LLAMA3, '\n{"type": "function", "name": "get_weather", "parameters": {"city": "Rome", "days": 2}}\n', "", ROME),
    (
        LLAMA3,
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}; '
        '{"name": "now.utc-0", "parameters": {}}',
        "",
        BOTH,
    ),
    (LLAMA3, '<|python_tag|>brave_search.call(query="Who?")', "", [("brave_search", {"query": "Who?"})]),
    (LLAMA3, 'Hi {"name": "f", "parameters": {}}', 'Hi {"name": "f", "parameters": {}}', []),
    (LLAMA3, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    # Mistral: v3's list, with and without ids; v11's name and arguments; v7's id between them
    (MISTRAL, '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]', "", ROME),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}, "id": "D681PevKs"}, '
        '{"name": "now.utc-0", "arguments": {}, "id": "D681PevKt"}]',
        "",
        BOTH,
    ),
    (MISTRAL_V11, 'Hm.[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 2}', "Hm.", ROME),
    (MISTRAL_V11, '[TOOL_CALLS]get_weather{"city": "Rome", "days": 2}[TOOL_CALLS]now.utc-0[ARGS]{}', "", BOTH),
    (MISTRAL_V11, '[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{"city": "Rome", "days": 2}', "", ROME),
    (MISTRAL_V11, "[TOOL_CALLS] what?", "[TOOL_CALLS] what?", []),
    # Qwen3-Coder: as its card; without the outer tags; an unclosed value; Python's words
    (
        QWEN3_CODER,
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now.utc-0>\n</function>\n</tool_call>",
        "I look.",
        BOTH,
    ),
    (
        QWEN3_CODER,
        "<function=get_weather><parameter=city>Rome</parameter><parameter=days>2</parameter></function>",
        "",
        ROME,
    ),
    (
        QWEN3_CODER,
        "<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n2\n</function>\n</tool_call>",
        "",
        ROME,
    ),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n a\n\n</parameter>\n<parameter=ok>\nTrue\n</parameter>"
        "\n<parameter=either>\nNone\n</parameter>\n<parameter=days>\nmany\n</parameter>\n<parameter=other>\n[1]\n"
        "</parameter>\n</function>\n</tool_call>!",
        "!",
        [("get_weather", {"city": " a\n", "ok": True, "either": None, "days": "many", "other": [1]})],
    ),
    (  # line ends are as the first one; another is the value's own
        QWEN3_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n\r\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("get_weather", {"city": "\r", "days": 2})],
    ),
    (
        QWEN3_CODER,
        "<tool_call>\r\n<function=get_weather>\r\n<parameter=city>\r\nRome\r\n</parameter>\r\n<parameter=days>\r\n2"
        "\r\n</parameter>\r\n</function>\r\n</tool_call>",
        "",
        ROME,
    ),
    (QWEN3_CODER, "<tool_call>\n<function=f g>", "<tool_call>\n<function=f g>", []),
    # GLM-4.5 to 4.7, with line ends and without
    (
        GLM45,
        "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now.utc-0\n</tool_call>",
        "",
        BOTH,
    ),
    (
        GLM47,
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key>"
        "<arg_value>2</arg_value></tool_call><tool_call>now.utc-0</tool_call>",
        "",
        BOTH,
    ),
    (GLM45, "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
    # GLM-4
    (GLM4, 'get_weather\n{"city": "Rome", "days": 2}', "", ROME),
    (GLM4, '\nget_weather\n{"city": "Rome", "days": 2}\nnow.utc-0\n{}', "", BOTH),
    (GLM4, 'weather\n{"city": "Rome"}', 'weather\n{"city": "Rome"}', []),
    # Granite 3, Phi-4-mini
    (GRANITE, '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]', "", ROME),
    (GRANITE, '<tool_call>[{"arguments": {"city": "Rome", "days": 2}, "name": "get_weather"}]', "", ROME),
    (PHI4, 'functools[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]', "", ROME),
    (
        PHI4,
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}, {"name": "now.utc-0", '
        '"arguments": {}}]<|/tool_call|>',
        "",
        BOTH,
    ),
    (PHI4, '<|tool_call|>{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}<|/tool_call|>', "", ROME),
    (PHI4, "functools is a module", "functools is a module", []),
    # DeepSeek V3, R1 (its first call without what opens all), V3.1
    (
        DEEPSEEK_V3,
        f"So.<{DSML}s▁begin｜><{DSML}▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f'{{"city": "Rome", "days": 2}}\n```<{DSML}▁end｜>\n<{DSML}▁begin｜>function<｜tool▁sep｜>now.utc-0\n```json\n'
        f"{{}}\n```<{DSML}▁end｜><{DSML}s▁end｜>",
        "So.",
        BOTH,
    ),
    (
        DEEPSEEK_V31,
        f'<{DSML}s▁begin｜><{DSML}▁begin｜>get_weather<｜tool▁sep｜>{{"city": "Rome", "days": 2}}<{DSML}▁end｜>'
        f"<{DSML}▁begin｜>now.utc-0<｜tool▁sep｜>{{}}<{DSML}▁end｜><{DSML}s▁end｜>",
        "",
        BOTH,
    ),
    (DEEPSEEK_V31, f"<{DSML}▁begin｜>now.utc-0<｜tool▁sep｜>{{}}", "", [("now.utc-0", {})]),
    (
        DEEPSEEK_V3,
        f"<{DSML}▁begin｜>function<｜tool▁sep｜>f\n```json\n{{a}} \n`\n```<{DSML}▁end｜>!",
        "!",
        [("f", "{a} \n`")],
    ),
    (DEEPSEEK_V31, f"<{DSML}s▁begin｜> none", f"<{DSML}s▁begin｜> none", []),
    # Gemma 3 and Llama 4: Python, bare, fenced, between tags
    (PYTHONIC, "[get_weather(city='Rome', days=2), now.utc-0()]", "", BOTH),
    (PYTHONIC, '```tool_code\nget_weather(city="Rome", days=2)\n```', "", ROME),
    (PYTHONIC, "Sure:\n<|python_start|>[get_weather(city='Rome', days=2)]<|python_end|>", "Sure:", ROME),
    (
        PYTHONIC,
        "[f(a={'x': [True, None, -1.5, (1,)], \"y\": 'it\\'s \\u00e9'}, b=\"\\ud83d\\ude00\")]",
        "",
        [("f", {"a": {"x": [True, None, -1.5, [1]], "y": "it's é"}, "b": "😀"})],
    ),
    (PYTHONIC, "[f(x=g())]", "[f(x=g())]", []),
    (PYTHONIC, "[1, 2]", "[1, 2]", []),
    # LFM2: Python's notation between its tags, or JSON if the system message asks for that
    (LFM2, "Sure.<|tool_call_start|>[get_weather(city='Rome', days=2), now.utc-0()]<|tool_call_end|>", "Sure.", BOTH),
    (
        LFM2,
        f'<|tool_call_start|>[{{"name": "get_weather", "arguments": {IN_ROME}}}]<|tool_call_end|>Wait.',
        "Wait.",
        ROME,
    ),
    (LFM2, '<|tool_call_start|>[f(a={"b": [true, null]})]<|tool_call_end|>', "", [("f", {"a": {"b": [True, None]}})]),
    (LFM2, "<|tool_call_start|>[1, 2]<|tool_call_end|>", "<|tool_call_start|>[1, 2]<|tool_call_end|>", []),
    (LFM2, "[get_weather(city='Rome', days=2)]", "[get_weather(city='Rome', days=2)]", []),
    # Nemotron Nano 2
    (NEMOTRON, f'<TOOLCALL>[{{"name": "get_weather", "arguments": {IN_ROME}}}]</TOOLCALL>', "", ROME),
    # Gemma 4
    (GEMMA4, '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>', "", ROME),
    (
        GEMMA4,
        '<|tool_call>call:f{a:[<|"|>}<tool_call|><|"|>,null],b:{c:true}}<tool_call|><|tool_call>call:now.utc-0{}<tool_call|>',
        "",
        [("f", {"a": ["}<tool_call|>", None], "b": {"c": True}}), ("now.utc-0", {})],
    ),
    (
        GEMMA4,
        '<|tool_call>call:f{a: b c ,\n"d\\n":[True, -1.5e3,[],{}, ],<|"|>e"<|"|>:'
        '{f:<|"|>"\\\n🦙<|"|>,g:0x1}}<tool_call|> So.',
        " So.",
        [("f", {"a": "b c", "d\n": [True, -1500.0, [], {}], 'e"': {"f": '"\\\n🦙', "g": "0x1"}})],
    ),
    (GEMMA4, "<|tool_call>call: f{a:1}<tool_call|>", "<|tool_call>call: f{a:1}<tool_call|>", []),
    (JSON, '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}', "", ROME),
    # Arguments that are none
    *((HERMES, f'<tool_call>\n{{"name": "now.utc-0"{none}}}\n</tool_call>', "", NOW) for none in NONE),
    *((LLAMA3, f'<|python_tag|>{{"name": "now.utc-0"{none}}}', "", NOW) for none in NONE),
    *((MISTRAL, f'[TOOL_CALLS][{{"name": "now.utc-0"{none}}}]', "", NOW) for none in NONE),
    *((MISTRAL_V11, f"[TOOL_CALLS]now.utc-0[ARGS]{none}", "", NOW) for none in ("null", '""', "None")),
    (MISTRAL_V11, f"[TOOL_CALLS]now.utc-0[ARGS][TOOL_CALLS]get_weather[ARGS]{IN_ROME}", "", NOW + ROME),
    *(
        (DEEPSEEK_V3, f"<{DSML}▁begin｜>function<｜tool▁sep｜>now.utc-0\n```json\n{none}\n```<{DSML}▁end｜>", "", NOW)
        for none in ("", "null", '""')
    ),
    *(
        (DEEPSEEK_V31, f"<{DSML}▁begin｜>now.utc-0<｜tool▁sep｜>{none}<{DSML}▁end｜>", "", NOW)
        for none in ("", "null", '""')
    ),
    (HERMES, '<tool_call>{"name": "Bob", "age": 3}', '<tool_call>{"name": "Bob", "age": 3}', []),
    # Several calls in one tag: one after another, with a comma between them, in a list
    *(
        (HERMES, f"<tool_call>{text}</tool_call>", "", BOTH)
        for text in (f"{ROME_TEXT}\n{NOW_TEXT}", f"{ROME_TEXT}, {NOW_TEXT}", f"[{ROME_TEXT}, {NOW_TEXT},]\n")
    ),
    (HERMES, f"<tool_call>\n{ROME_TEXT}\n{{}}\n</tool_call>", "\n{}\n</tool_call>", ROME),
    (HERMES, f"<tool_call>[{NOW_TEXT}, 1]</tool_call>!", ", 1]</tool_call>!", NOW),
    (HERMES, "<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    (LLAMA3, f"{ROME_TEXT}, {NOW_TEXT}", "", BOTH),
    (LLAMA3, f"[{ROME_TEXT}, {NOW_TEXT}]", "", BOTH),
    (LLAMA3, f"{NOW_TEXT}, and so on", ", and so on", NOW),
    (PHI4, f"<|tool_call|>{ROME_TEXT}{NOW_TEXT}<|/tool_call|>", "", BOTH),
    (GRANITE, f"<|tool_call|>{ROME_TEXT}\n{NOW_TEXT}", "", BOTH),
    # Raw control characters in strings, literals of Python's
    *(
        (notation, before + '{"city": "a\n\tb"}' + after, "", [("get_weather", {"city": "a\n\tb"})])
        for notation, before, after in (
            (HERMES, '<tool_call>{"name": "get_weather", "arguments": ', "}</tool_call>"),
            (HERMES, '<tool_call>{"arguments": ', ', "name": "get_weather"}</tool_call>'),
            (LLAMA3, '{"name": "get_weather", "parameters": ', "}"),
            (MISTRAL, '[TOOL_CALLS][{"name": "get_weather", "arguments": ', "}]"),
            (MISTRAL_V11, "[TOOL_CALLS]get_weather[ARGS]", ""),
            (DEEPSEEK_V31, f"<{DSML}▁begin｜>get_weather<｜tool▁sep｜>", f"<{DSML}▁end｜>"),
            (GLM4, "get_weather\n", ""),
        )
    ),
    *(
        (HERMES, f"<tool_call>{text}</tool_call>", "", [("f", {"a": True, "b": [None, "it's"]})])
        for text in (
            """{'name': 'f', 'arguments': {'a': True, 'b': [None, "it's"]}}""",
            """{"name": "f", "arguments": {'a': True, 'b': [None, 'it\\'s'],},}""",
            """{'arguments': {"a": true, 'b': [None, "it's"]}, 'name': 'f'}""",
            """{"name": "f", "arguments": "{'a': True, 'b': [None, \\"it's\\"]}"}""",
        )
    ),
    (
        QWEN3_CODER,
        "<function=get_weather><parameter=more>{'a': True, 'b': [None, \"it's\"]}</parameter><parameter=other>['a\nb']"
        "</parameter><parameter=city>{'a': 1}</parameter></function>",
        "",
        [("get_weather", {"more": {"a": True, "b": [None, "it's"]}, "other": ["a\nb"], "city": "{'a': 1}"})],
    ),
    (
        GLM45,
        "<tool_call>f<arg_key>a</arg_key><arg_value>{'b': False}</arg_value></tool_call>",
        "",
        [("f", {"a": {"b": False}})],
    ),
]


def parser(notation: Notation, **fields: Any) -> ToolCallParser:
    return ToolCallParser(ToolReading.of(notation, TOOLS, **fields))


def loaded(message: Message) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in message.tool_calls]


@pytest.mark.parametrize(("notation", "text", "content", "calls"), READ)
def test_what_is_read(notation: Notation, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    for size in {1, 2, 3, 7, len(text)}:
        message = parse(parser(notation), [text[i : i + size] for i in range(0, len(text), size)])
        assert message.content == content
        assert [(n, a if a == "{a} \n`" else json.loads(a)) for n, a in message.tool_calls] == calls


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "city": st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
        lambda text: not any(mark in text for mark in ("</", "<|", "<a", "<p"))
    ),
    "days": st.integers(-(10**18), 10**18),
    "ok": st.booleans(),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "unit": st.sampled_from(["c", "f"]),
    "tags": st.lists(st.sampled_from(["a", "b'", 'c"', "True"]), max_size=3),
    "more": st.dictionaries(st.sampled_from(["k", "l"]), st.sampled_from([None, 1, "x", [False], {"m": {}}])),
    "either": st.sampled_from([None, 5]),
}
CALLS = st.lists(
    st.one_of(
        st.just(("now.utc-0", {})),
        st.tuples(st.just("get_weather"), st.fixed_dictionaries({}, optional=VALUES)),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("notation", NOTATIONS, ids=lambda each: each.name)
@settings(max_examples=40, deadline=None)
@given(calls=CALLS, places=st.lists(st.integers(0, 500), max_size=6))
def test_what_is_written_is_read_back(notation: Notation, calls: list[tuple[str, Any]], places: list[int]) -> None:
    text = written(notation, calls)
    message = parse(parser(notation), cut(text, places))
    assert (message.content, loaded(message)) == ("", calls)
    first = parse(parser(notation, parallel=False), cut(text, places))
    assert loaded(first) == calls[:1]


def pieces_of(notation: Notation) -> list[str]:
    """Whole answers of the notation, and what their texts consist of."""
    form = notation.form
    shown = [text for each, text, _, _ in READ if each is notation]
    parts = [*notation.markers, *form.head.split("NAME"), form.tail, form.before, form.after, "get_weather", "(", ")"]
    return [*shown, written(notation, BOTH), *filter(None, parts)]


@pytest.mark.parametrize("notation", NOTATIONS, ids=lambda each: each.name)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), places=st.lists(st.integers(0, 500)), parallel=st.booleans(), is_closed=st.booleans())
def test_any_cut_of_any_text_gives_the_same(
    notation: Notation, data: st.DataObject, places: list[int], parallel: bool, is_closed: bool
) -> None:
    pieces = pieces_of(notation)
    piece = st.sampled_from(pieces)
    cut_short = st.builds(lambda text, start, end: text[start:end], piece, st.integers(0, 40), st.integers(0, 120))
    text = "".join(data.draw(st.lists(st.one_of(piece, cut_short, st.sampled_from(FRAGMENTS)), max_size=6)))
    found = [
        parse(parser(notation, parallel=parallel, is_closed=is_closed), each)
        for each in ([text], cut(text, places), list(text))
    ]
    assert found[0] == found[1] == found[2]
    if is_closed:
        assert all(name in ("get_weather", "now.utc-0") for name, _ in found[0].tool_calls)


@pytest.mark.parametrize("notation", NOTATIONS, ids=lambda each: each.name)
def test_a_long_answer_takes_linear_time(notation: Notation) -> None:
    """A quadratic parser would take minutes."""
    for text in (written(notation, BOTH) * 500, *(piece * 5_000 for piece in pieces_of(notation)[-6:]), " <[" * 20_000):
        parse(parser(notation), cut(text, range(0, len(text), 40)))


# The grammar


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_pretrained(models.demo.__path__[0])


def sampled(grammar: Grammar, vocabulary: Vocabulary, tokenizer: Tokenizer, seed: int) -> str | None:
    """A text of the grammar, drawn at random with a liking for ends; None: it did not come to one."""
    (matcher,) = compile_grammar(grammar, vocabulary, 1)
    draw, ids = random.Random(seed), list[int]()
    short = ('"', "}", "]", "</", "\n", ")", "<|")
    closing = {i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) in short}
    for _ in range(400):
        words = np.frombuffer(matcher.ll_matcher.compute_bitmask(), np.uint32)
        allowed = set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
        others = sorted(allowed.difference(vocabulary.eos_token_ids))
        if len(others) < len(allowed) and (not others or draw.random() < 0.7):
            return tokenizer.decode(ids)
        ends = sorted(closing.intersection(others))
        chosen = draw.choice(ends if ends and draw.random() < 0.6 else others)
        ids.append(chosen)
        assert matcher.consume(chosen)
        if matcher.is_complete:
            return tokenizer.decode(ids)
    return None


@pytest.mark.parametrize("notation", NOTATIONS, ids=lambda each: each.name)
def test_what_the_grammar_lets_through_is_a_call(notation: Notation, demo: Tokenizer) -> None:
    vocabulary = Vocabulary(demo, demo.vocab_size, (635,))
    grammar = Grammar(kind="lark", text=tool_grammar(notation, TOOLS))
    check_grammar(grammar, vocabulary)
    (matcher,) = compile_grammar(grammar, vocabulary, 1)
    ids = demo.encode(written(notation, BOTH), add_special_tokens=False)
    assert all(map(matcher.consume, ids))
    assert matcher.ll_matcher.is_accepting()
    num_read = 0
    for seed in range(20):
        text = sampled(grammar, vocabulary, demo, seed)
        if text is not None:
            message = parse(parser(notation), [text])
            assert message.content == ""
            for name, arguments in loaded(message):
                jsonschema_rs.validate(PARAMETERS if name == "get_weather" else {"maxProperties": 0}, arguments)
                num_read += 1
    assert num_read >= 4


@pytest.mark.parametrize("notation", [each for each in NOTATIONS if each.markers], ids=lambda each: each.name)
def test_markers_that_are_special_tokens_count_as_tokens_alone(notation: Notation) -> None:
    tokenizer = with_special(*notation.markers)
    opening = {LLAMA3: "<|python_tag|>", PYTHONIC: "<|python_start|>"}.get(notation, "")
    text = f"Well. {opening}{written(notation, BOTH)}"
    spelt = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    marked = tokenizer.encode(text, add_special_tokens=False)
    is_optional = notation is QWEN3_CODER  # what stands between the markers is a mark of its own
    for ids, is_call in ((marked, True), (spelt, is_optional)):
        for edges in ([], list(range(len(ids)))):
            pipeline = TextPipeline(tokenizer, SamplingParams(), [], tools=ToolReading.of(notation, TOOLS))
            _, deltas = run(pipeline, outputs_of(ids, edges, "length"))
            message = message_of(deltas)
            assert loaded(message) == (BOTH if is_call else [])
            if ids is marked or not is_call:
                assert message.content == ("Well." if is_call else text)


@pytest.mark.parametrize("notation", [each for each in NOTATIONS if each.markers], ids=lambda each: each.name)
def test_a_forced_call_draws_the_special_tokens(notation: Notation) -> None:
    tokenizer = with_special(*notation.markers)
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, ())
    markers = marker_ids(notation, tokenizer)
    assert set(markers) == set(notation.markers)
    (matcher,) = compile_grammar(
        Grammar(kind="lark", text=tool_grammar(notation, TOOLS, markers=markers)), vocabulary, 1
    )
    assert all(map(matcher.consume, tokenizer.encode(written(notation, BOTH), add_special_tokens=False)))
    assert matcher.ll_matcher.is_accepting()


def test_the_names_are_the_table_s() -> None:
    assert set(TOOL_CALL_PARSERS) == {"auto", "none", *BY_NAME, HARMONY.name, *HARMONY.names}
    assert HERMES is BY_NAME["hermes"]


def test_mistral_s_ids_are_short() -> None:
    parts = parser(MISTRAL).push(written(MISTRAL, BOTH))
    ids = [call.id for part in parts for call in part.calls if call.id is not None]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)
