"""Answers in harmony, whole, broken and cut anywhere, in a small vocabulary."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text.harmony.message import SPECIAL_TOKENS, HarmonyMessage
from runtime.text.harmony.reader import MAX_HEADER, MessageParser
from tests.runtime.text.harmony.small_model import ids_of, small_ids, small_tokenizer

WORDS = ("assistant", "analysis", "final", " to=functions.f", "json", " ", "\n", "Hello", "é", "x" * 90)
PIECES = (*SPECIAL_TOKENS, *WORDS)


def parsed(text: str) -> tuple[list[HarmonyMessage], int]:
    parser = MessageParser(small_tokenizer(), small_ids())
    parser.push(ids_of(text))
    return parser.finish(), parser.num_malformed


def said(text: str) -> list[tuple[str | None, str | None, str]]:
    return [(message.channel, message.recipient, message.content) for message in parsed(text)[0]]


def test_a_whole_answer() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    messages, num_malformed = parsed(text)
    assert num_malformed == 0
    assert messages == [
        HarmonyMessage("assistant", "Hm.", channel="analysis"),
        HarmonyMessage("assistant", '{"a": 1}', None, "commentary", "functions.f", "<|constrain|>json"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 4.<|return|>", (None, "The answer is 4.")),
        ("The answer is 4.", (None, "The answer is 4.")),
        ("<|channel|>final The answer is 4.<|return|>", ("final", "The answer is 4.")),
        ("<|channel|>analysis to=a b c d<|message|>4<|end|>", ("analysis", "4")),
        ("<|channel|><|message|>4<|end|>", (None, "4")),
        ("<|channel|>thoughts<|message|>4<|end|>", ("thoughts", "4")),
        ("x " * MAX_HEADER, (None, "x " * MAX_HEADER)),
    ],
)
def test_a_broken_header_keeps_its_text_and_is_counted(text: str, expected: tuple[str | None, str]) -> None:
    (message,), num_malformed = parsed(text)
    assert ((message.channel, message.content), num_malformed) == (expected, 1)


def test_what_comes_without_a_start() -> None:
    first = "<|channel|>analysis<|message|>Hm.<|end|>"
    for rest in ("<|channel|>final<|message|>4<|return|>", "assistant<|channel|>final<|message|>4<|return|>"):
        assert said(first + rest) == [("analysis", None, "Hm."), ("final", None, "4")]
    assert said(f"{first}It is 4.") == [("analysis", None, "Hm."), (None, None, "It is 4.")]
    assert said(f"{first}<|start|>assistantfinal<|message|>4") == [("analysis", None, "Hm."), ("final", None, "4")]


@pytest.mark.parametrize("end", ["", "<|channel|>", "<|channel|>fin", " to=functions.f<|channel|>commentary"])
def test_a_header_that_was_cut_off_is_no_text(end: str) -> None:
    assert parsed(end) == ([], 0)
    assert parsed(f"<|channel|>final<|message|>4<|end|><|start|>assistant{end}")[1] == 0


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.lists(st.integers(0, 400), max_size=6), st.booleans())
def test_any_tokens_in_any_pieces(pieces: list[str], cuts: list[int], has_begun: bool) -> None:
    ids = ids_of("".join(pieces))
    role = "assistant" if has_begun else None
    whole, cut = (MessageParser(small_tokenizer(), small_ids(), role) for _ in range(2))
    whole.push(ids)
    edges = sorted({0, len(ids), *(at % (len(ids) + 1) for at in cuts)})
    for start, end in pairwise(edges):
        cut.push(ids[start:end])
    assert whole.finish() == cut.finish()
    assert whole.num_malformed == cut.num_malformed
