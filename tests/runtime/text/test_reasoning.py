"""Reasoning: told from the answer however the text is cut, and whoever opened it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.grammar.compiler import compile_grammar
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.matcher import Vocabulary
from runtime.engine.sampling_params import SamplingParams
from runtime.text.pipeline import TextPipeline
from runtime.text.reasoning import GEMMA4, ReasoningParser, ReasoningStart, after_reasoning, reasoning_start
from tests.runtime.text.answers import Message, cut, message_of, parse, texts
from tests.runtime.text.test_pipeline import outputs_of, run
from tests.runtime.text.tokenizers import SPECIAL, byte_level_tokenizer, with_plain, with_special


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        ("may_open", "<think>\nWell.\n\nSo.\n</think>\n\nYes.", "Well.\n\nSo.", "Yes."),
        ("may_open", "\n <think>a</think>b", "a", "b"),
        ("may_open", "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
        ("may_open", "  Yes.", "", "  Yes."),
        ("may_open", "a</think>b", "", "a</think>b"),
        ("may_open", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("may_open", "<think>never closed </thin", "never closed </thin", ""),
        ("may_open", "<think>one</think>two</think>", "one", "two</think>"),
        ("may_open", "<thin", "", "<thin"),
        ("may_open", " ", "", " "),
        ("open", "\nWell.\n</think>\n\nYes.", "Well.", "Yes."),
        ("open", "<think>\nagain</think>Yes.", "again", "Yes."),
        ("open", "never closed\n", "never closed\n", ""),
        ("open", "</think>Yes.", "", "Yes."),
        ("open", "a <think> b < c </thin </think>\nd", "a <think> b < c </thin ", "d"),
        ("closed", "<think>text</think>", "", "<think>text</think>"),
    ],
)
def test_what_is_reasoning(start: ReasoningStart, text: str, reasoning: str, content: str) -> None:
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert parse(ReasoningParser(start), pieces) == Message(content, reasoning)


@settings(max_examples=150, deadline=None)
@given(text=texts, start=st.sampled_from(["may_open", "open", "closed"]), places=st.lists(st.integers(0, 200)))
def test_any_cut_gives_the_same(text: str, start: ReasoningStart, places: list[int]) -> None:
    assert parse(ReasoningParser(start), cut(text, places)) == parse(ReasoningParser(start), [text])


def test_nothing_waits_that_need_not() -> None:
    parser = ReasoningParser("may_open")
    pieces = ("<think>", "\n", "We", "ll <", "b")
    kinds = ("layout", "layout", "reasoning", "reasoning", "reasoning")
    shown = [(part.kind, part.text) for piece in pieces for part in parser.push(piece)]
    assert shown == list(zip(kinds, ("<think>", "\n", "We", "ll ", "<b"), strict=True))


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        (f"Hi{SPECIAL}assistant\n", "may_open"),
        (f"Hi{SPECIAL}assistant\n<think>\n", "open"),
        (f"Hi{SPECIAL}assistant\n<think>\n\n</think>\n\n", "closed"),
        (f"Hi{SPECIAL}assistant\n<think>\nI have thought so far", "open"),
        (f"<think>{SPECIAL}assistant\n", "may_open"),
        (f"</think> <think>{SPECIAL}", "may_open"),
        ("Question: <think> Answer:", "may_open"),
        ("Question: what? <think>\n", "open"),
        ("<think></think>", "closed"),
    ],
)
def test_the_prompt_tells_how_the_answer_begins(prompt: str, start: ReasoningStart) -> None:
    tokenizer = byte_level_tokenizer()
    assert reasoning_start(tokenizer, tokenizer.encode(prompt, add_special_tokens=False)) == start
    if SPECIAL in prompt:  # tags may be special tokens, too, as Nemotron 3's
        tokenizer = with_special(SPECIAL, "<think>", "</think>")
        assert reasoning_start(tokenizer, tokenizer.encode(prompt, add_special_tokens=False)) == start


CHANNEL = ("<|channel>", "<channel|>")


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        ("may_open", "<|channel>thought\nWell <b>.\n<channel|>Yes.", "Well <b>.", "Yes."),
        ("may_open", "<|channel>thought\n<channel|>Yes.", "", "Yes."),
        ("may_open", "<|channel>other", "", "<|channel>other"),
        ("open", "Well <chan", "Well <chan", ""),
        ("closed", "Yes.<channel|>", "", "Yes.<channel|>"),
    ],
)
def test_reasoning_in_a_channel(start: ReasoningStart, text: str, reasoning: str, content: str) -> None:
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert parse(ReasoningParser(start, tags=GEMMA4), pieces) == Message(content, reasoning)


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|turn>model\n", "may_open"),
        ("<|channel>thought\nx<channel|><|turn>model\n", "may_open"),
        ("<|turn>model\n<|channel>thought\n<channel|>", "closed"),
        ("<|turn>model\n<|channel>thought\nSo", "open"),
    ],
)
def test_the_prompt_tells_how_an_answer_with_channels_begins(prompt: str, start: ReasoningStart) -> None:
    tokenizer = with_special("<|turn>", *CHANNEL)
    assert reasoning_start(tokenizer, tokenizer.encode(prompt, add_special_tokens=False), GEMMA4) == start


def test_an_answer_with_channels_is_told_from_its_tokens() -> None:
    tokenizer = with_special("<|turn>", *CHANNEL)
    ids = tokenizer.encode("<|channel>thought\nWell.<channel|>Yes.", add_special_tokens=False)
    for edges in ([], list(range(len(ids)))):
        pipeline = TextPipeline(tokenizer, SamplingParams(), [], reasoning="may_open", tags=GEMMA4)
        message = message_of(run(pipeline, outputs_of(ids, edges, "length"))[1])
        assert (message.reasoning, message.content) == ("Well.", "Yes.")


@pytest.mark.parametrize("is_special", [True, False])
def test_a_grammar_after_a_channel(is_special: bool) -> None:
    tokenizer = with_special("<|turn>", *CHANNEL) if is_special else with_plain(*CHANNEL)
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, ())
    grammar = after_reasoning(Grammar(kind="choice", text='["yes"]'), "may_open", tokenizer, tags=GEMMA4)
    for text, is_right in (("<|channel>thought\nWell <.\n<channel|>yes", True), ("yes", True), ("Well", False)):
        (matcher,) = compile_grammar(grammar, vocabulary, 1)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert all(map(matcher.consume, ids)) is is_right, text
