"""Reasoning: told from the answer however the text is cut, and whoever opened it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text.reasoning import ReasoningParser, ReasoningStart, reasoning_start
from tests.runtime.text.answers import Message, cut, parse, texts
from tests.runtime.text.tokenizers import SPECIAL, byte_level_tokenizer, with_special


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
