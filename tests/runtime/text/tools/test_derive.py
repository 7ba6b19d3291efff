"""The notation that a template shows: equal to the table's for the families that it has, read and written for others,
and a reason where a template shows none."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from runtime.engine.grammar.compiler import check_grammar, compile_grammar
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.matcher import Vocabulary
from runtime.engine.sampling_params import SamplingParams
from runtime.text.formats import AnswerFormat, end_ids
from runtime.text.pipeline import TextPipeline
from runtime.text.reasoning import GEMMA4 as GEMMA4_TAGS
from runtime.text.reasoning import THINK
from runtime.text.tools.derive import shown_in
from runtime.text.tools.grammar import marker_ids, tool_grammar
from runtime.text.tools.table import BY_NAME, GEMMA4, LLAMA3, Notation, ToolCallParser, ToolReading
from runtime.text.tools.tool_prompt import written
from tests.runtime.text.answers import FRAGMENTS, Message, cut, message_of, parse
from tests.runtime.text.test_pipeline import outputs_of, run
from tests.runtime.text.tokenizers import with_special
from tests.runtime.text.tools.families import FAMILIES, template
from tests.runtime.text.tools.test_notations import BOTH, TOOLS, loaded, pieces_of
from tests.runtime.text.tools.test_templates import KNOWN, needs_templates
from tests.runtime.text.tools.test_templates import template as shared

VARIABLES = (("bos_token", "<s>"), ("eos_token", "</s>"))


def notation_of(text: str) -> Notation:
    shown = shown_in(text, VARIABLES)
    assert shown.notation is not None, shown.why
    return shown.notation


def read(notation: Notation, pieces: list[str], **fields: Any) -> Message:
    return parse(ToolCallParser(ToolReading.of(notation, TOOLS, **fields)), pieces)


def answers(notation: Notation, seed: int, count: int) -> list[str]:
    """Whole and damaged calls, and anything around them."""
    draw, pieces = random.Random(seed), pieces_of(notation)
    found = []
    for _ in range(count):
        text = ""
        for _ in range(draw.randrange(7)):
            piece = draw.choice(pieces if draw.random() < 0.7 else FRAGMENTS)
            start = draw.randrange(40) if draw.random() < 0.2 else 0
            text += piece[start : start + draw.randrange(120)] if draw.random() < 0.3 else piece
        found.append(text)
    return found


def check_equal(ours: Notation, table: Notation, count: int) -> None:
    draw = random.Random(4)
    for text in answers(table, 3, count):
        pieces = cut(text, [draw.randrange(400) for _ in range(draw.randrange(6))])
        is_closed, parallel = draw.random() < 0.2, draw.random() < 0.8
        options: dict[str, Any] = {"is_closed": is_closed, "parallel": parallel}
        assert read(ours, pieces, **options) == read(table, [text], **options), text


SHARED = [name for name in KNOWN if KNOWN[name] is not LLAMA3]
SAME = [name for name, (_, entry) in FAMILIES.items() if entry is not None]


@needs_templates
@pytest.mark.parametrize("name", SHARED)
def test_a_real_template_shows_what_the_table_has(name: str) -> None:
    check_equal(notation_of(shared(name)), KNOWN[name], 200)


@needs_templates
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHARED)
def test_a_real_template_shows_what_the_table_has_in_many_answers(name: str) -> None:
    check_equal(notation_of(shared(name)), KNOWN[name], 10_000)


@needs_templates
def test_real_templates_that_show_nothing_are_told_apart_by_their_words() -> None:
    shown = shown_in(shared("meta-llama-Llama-3.2-3B-Instruct"), VARIABLES)
    assert (shown.notation, shown.why) == (None, "nothing marks where a call begins")
    assert shown_in(shared("google-gemma-2-2b-it"), VARIABLES).why == "the chat template writes no calls"
    assert shown_in(shared("Qwen-Qwen3-0.6B"), VARIABLES).tags == THINK


@pytest.mark.parametrize("name", SAME)
def test_a_family_shows_what_the_table_has(name: str) -> None:
    text, entry = FAMILIES[name]
    check_equal(notation_of(text), BY_NAME[str(entry)], 60)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAME)
def test_a_family_shows_what_the_table_has_in_many_answers(name: str) -> None:
    text, entry = FAMILIES[name]
    check_equal(notation_of(text), BY_NAME[str(entry)], 10_000)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_answer_in_any_pieces_keeps_its_text(name: str) -> None:
    notation, draw = notation_of(FAMILIES[name][0]), random.Random(9)
    for text in answers(notation, 8, 60):
        whole = read(notation, [text])  # `parse` holds the parts' texts to the answer's
        assert read(notation, list(text)) == whole
        assert read(notation, cut(text, [draw.randrange(400) for _ in range(4)])) == whole
    for text in ("Nothing.", "<tool", "{", "a < b [T] </x>\n"):
        assert read(notation, list(text)) == Message(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_written_forced_and_read_back(name: str) -> None:
    notation = notation_of(FAMILIES[name][0])
    text = written(notation, BOTH)
    for pieces in ([text], list(text)):
        message = read(notation, pieces)
        assert (message.content, loaded(message)) == ("", BOTH)
    assert read(notation, [f"Well.\n{text}"]).content == "Well."
    for tokenizer in (with_special(*notation.markers), with_special("<|other|>")):
        vocabulary, markers = Vocabulary(tokenizer, tokenizer.vocab_size, ()), marker_ids(notation, tokenizer)
        grammar = Grammar(kind="lark", text=tool_grammar(notation, TOOLS, markers=markers))
        check_grammar(grammar, vocabulary)
        (matcher,) = compile_grammar(grammar, vocabulary, 1)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert all(map(matcher.consume, ids))
        assert matcher.ll_matcher.is_accepting()
        pipeline = TextPipeline(tokenizer, SamplingParams(), [], tools=ToolReading.of(notation, TOOLS))
        _, deltas = run(pipeline, outputs_of(ids, list(range(len(ids))), "length"))
        assert loaded(message_of(deltas)) == BOTH


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_values_may_be_the_words_that_stand_for_others(name: str) -> None:
    notation, words = notation_of(FAMILIES[name][0]), ("NAME", "KEY", "CALLID", "CALLNUMBER")
    string = {"type": "string"}
    for word in words:
        parameters = {"type": "object", "properties": dict.fromkeys(words, string), "required": list(words)}
        tool = {"type": "function", "function": {"name": word, "parameters": parameters}}
        arguments = {key: " ".join(words) for key in words}
        text = written(notation, [(word, arguments)])
        message = parse(ToolCallParser(ToolReading.of(notation, [tool])), [text])
        assert loaded(message) == [(word, arguments)]
        tokenizer = with_special(*notation.markers)
        vocabulary, markers = Vocabulary(tokenizer, tokenizer.vocab_size, ()), marker_ids(notation, tokenizer)
        grammar = Grammar(kind="lark", text=tool_grammar(notation, [tool], markers=markers))
        (matcher,) = compile_grammar(grammar, vocabulary, 1)
        assert all(map(matcher.consume, tokenizer.encode(text, add_special_tokens=False)))


@pytest.mark.parametrize("name", FAMILIES)
def test_tags_of_reasoning(name: str) -> None:
    tags = shown_in(FAMILIES[name][0], VARIABLES).tags
    expected = {
        "gemma4": GEMMA4_TAGS.opening, "seed": "<seed:think>", "mistral": "[THINK]", "cohere": "<|START_THINKING|>"
    }  # fmt: skip
    assert tags is not None
    assert tags.opening == expected.get(name, "<think>")
    if name == "gemma4":
        assert tags == GEMMA4_TAGS


def test_the_model_s_format_is_what_its_template_shows() -> None:
    text = FAMILIES["seed"][0]
    tokenizer = with_special(
        "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>", "<|end|>", "<|turn|>"
    )
    tokenizer.chat_templates = {"default": text}
    found = AnswerFormat.of(tokenizer)
    assert found.tools is not None
    assert found.tags.opening == "<seed:think>"
    assert "as the chat template writes them: <seed:tool_call>\\n<function=NAME>" in found.origin
    answer = "<seed:think>Hm.</seed:think>" + written(found.tools, BOTH)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    reading = ToolReading.of(found.tools, TOOLS)
    pipeline = TextPipeline(tokenizer, SamplingParams(), [], reasoning="may_open", tags=found.tags, tools=reading)
    message = message_of(run(pipeline, outputs_of(ids, list(range(len(ids))), "length"))[1])
    assert (message.content, message.reasoning, loaded(message)) == ("", "Hm.", BOTH)
    named = AnswerFormat.of(tokenizer, tool_call_parser="hermes", reasoning_parser="think")
    assert (named.tools, named.tags) == (BY_NAME["hermes"], THINK)
    assert "--tool-call-parser hermes" in named.origin


@pytest.mark.parametrize("name", FAMILIES)
def test_stop_strings_count_in_content_alone(name: str) -> None:
    shown = shown_in(FAMILIES[name][0], VARIABLES)
    assert shown.notation is not None
    assert shown.tags is not None
    tokenizer = with_special(*shown.notation.markers, *shown.tags.tokens)
    call = written(shown.notation, BOTH)
    text = f"{shown.tags.opening}\nRome, days.{shown.tags.closing}\nSo: {call}"
    for tail, reason, content in (("", "length", "So:"), ("\nIn Rome it", "stop", "So:\nIn ")):
        ids = tokenizer.encode(text + tail, add_special_tokens=False)
        params = SamplingParams(max_tokens=None, stop=["Rome", "days", "}", "get_", "<"])
        reading = ToolReading.of(shown.notation, TOOLS)
        pipeline = TextPipeline(tokenizer, params, [], reasoning="may_open", tags=shown.tags, tools=reading)
        _, deltas = run(pipeline, outputs_of(ids, list(range(len(ids))), "length"))
        message = message_of(deltas)
        assert (message.content, message.reasoning, loaded(message)) == (content, "Rome, days.", BOTH)
        assert next(delta.finish_reason for delta in deltas if delta.finish_reason) == reason


def test_a_token_that_ends_the_turn_after_calls_ends_the_answer() -> None:
    tokenizer = with_special("<|tool_response>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|end|>")
    tokenizer.chat_templates = {"default": FAMILIES["gemma4"][0]}
    found = AnswerFormat.of(tokenizer)
    assert found.tools is not None
    assert found.tools.read is GEMMA4.read
    assert end_ids(found, tokenizer, (1,)) == (1, tokenizer.token_to_id("<|tool_response>"))


_LONG = "{# " + "x" * 100_000 + " #}"
_HERMES = FAMILIES["hermes"][0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{{ raise_exception('no tools') }}", "the chat template writes no calls"),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + _HERMES, None),
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", "the chat template writes no calls"),
        ("{% set _ = messages.append(1) %}" + _HERMES, "the chat template writes no calls"),
        ("{{ strftime_now('%Y-%m-%d') }}" + _HERMES, None),
        (_LONG + _HERMES, None),
        (_LONG * 3, "the chat template has more than 262,144 characters"),
        ("{% if %}", "the chat template writes no calls"),
        (template("<t>{{ f.name }}({{ f.arguments }})</t>"), None),  # given as text
        (template('{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'), "nothing marks where a call"),
        (template("<t>{{ f.arguments | tojson }}{{ f.name }}</t>"), "the arguments are before the name"),
        (template("<t>{{ f.name }}{{ f.name }}{{ f.arguments | tojson }}</t>"), "a call has its name twice"),
        (template("<t>{{ f.name | upper }}{{ f.arguments | tojson }}</t>"), "the chat template writes no calls"),
        (template("<t>{{ f.name }}:{{ f.arguments | tojson }}</t><n{{ f.arguments | length }}>"), "its calls differ"),
        (template("<t NAME>{{ f.name }}>{{ f.arguments | tojson }}</t>"), "the texts around calls have words"),
        (template("<|end|><t>{{ f.name }}:{{ f.arguments | tojson }}</t>"), "its calls are messages of their own"),
        ("{{ messages | tojson }}", "nothing marks where a call begins"),
    ],
)  # fmt: skip
def test_templates_that_are_not_followed(text: str, why: str | None) -> None:
    shown = shown_in(text, VARIABLES)
    assert (shown.notation is None) == (why is not None), shown.why
    assert why is None or shown.why.startswith(why), shown.why


def test_no_damaged_template_raises() -> None:
    draw = random.Random(6)
    texts = [text for text, _ in FAMILIES.values()]
    num_shown = 0
    for _ in range(60):
        text = draw.choice(texts)
        for _ in range(draw.randrange(1, 4)):
            place, length = draw.randrange(len(text)), draw.randrange(12)
            text = text[:place] + draw.choice(["", "<", ">", "{", "x", '"', "[A]", "</t>"]) + text[place + length :]
        num_shown += shown_in(text, VARIABLES).notation is not None
    assert num_shown < 60


def test_arguments_given_as_text() -> None:
    text = "{% if tools %}{{ tools | tojson }}{% endif %}" + template("<f>{{ f.name }}:{{ '' ~ f.arguments }}</f>")
    notation = notation_of(text.replace("{{ '' ~ f.arguments }}", "{{ '' + f.arguments }}"))
    assert json.loads(read(notation, ['<f>g:{"a": 1}</f>']).tool_calls[0][1]) == {"a": 1}
