"""Parses reasoning: text between `<think>` and `</think>` before the answer. Also extends an answer's grammar
by reasoning before it, or by calls as an alternative.

The opening tag counts only at the beginning of the answer, since a text about tags may have it anywhere else; many
templates write it themselves, at the end of the prompt (`reasoning_start`). Unclosed reasoning extends to the end.
Newlines beside the tags belong to them, as in the templates that write past reasoning back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from runtime.engine.grammar.grammar import Grammar, parse_json
from runtime.later import later
from runtime.text.parts import ContentParser, Part, PartParser, held_back
from tokenizer import Tokenizer

_llguidance = later("llguidance")

TAGS = OPEN_TAG, CLOSE_TAG = "<think>", "</think>"

_TAIL = 32
"""Tokens that hold a tag and the white space after it."""

ReasoningStart = Literal["may_open", "open", "closed"]
"""The state at the prompt's end: the model may open its reasoning, is within it, or has had it."""


def reasoning_start(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> ReasoningStart:
    """The state by the answer's turn in the prompt: the text after the last special token that is no tag of reasoning.

    If no special token marks the turns, only the prompt's last characters count, since earlier ones may belong to other
    speakers.
    """
    special = tokenizer.all_special_ids.difference(tokenizer.token_to_id(tag) for tag in TAGS)
    begin = len(prompt_token_ids)
    while begin and prompt_token_ids[begin - 1] not in special:
        begin -= 1
    turn = tokenizer.decode(prompt_token_ids[begin or -_TAIL :]).rstrip()
    if not begin:
        turn = turn[-len(CLOSE_TAG) :]
        if not turn.endswith((OPEN_TAG, CLOSE_TAG)):
            return "may_open"
    opened, closed = turn.rfind(OPEN_TAG), turn.rfind(CLOSE_TAG)
    if opened == closed:  # neither
        return "may_open"
    return "open" if opened > closed else "closed"


class ReasoningParser:
    """Parts of an answer: "reasoning", its tags as "layout", and the remaining text as classified by `rest`, by default
    "content"."""

    def __init__(self, start: ReasoningStart, rest: PartParser | None = None) -> None:
        self._rest = rest or ContentParser()
        self._state: Literal["start", "before", "inside", "after", "outside"]
        self._state = "outside" if start == "closed" else "start"
        self._is_open = start == "open"
        self._held = ""
        self._places: list[int] = []  # of special tokens in the held text

    def push(self, text: str, places: Sequence[int] = ()) -> list[Part]:
        if self._state == "outside":
            return self._rest.push(text, places)
        self._places += [len(self._held) + place for place in places]
        if self._state == "inside" and not self._held and "<" not in text and not text.endswith("\n"):
            self._places.clear()
            return [Part("reasoning", text)] if text else []
        parts: list[Part] = []
        self._held += text
        if self._state == "start":
            self._read_start(parts)
        if self._state == "before" and self._take_line_ends(parts):
            self._state = "inside"
        if self._state == "inside":
            self._read_inside(parts)
        if self._state == "after" and self._take_line_ends(parts):
            self._state = "outside"
        if self._state == "outside":
            parts += self._end()
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._is_open and self._state != "outside":
            self._take(parts, "reasoning", len(self._held))
        return parts + self._end() + self._rest.finish()

    def _read_start(self, parts: list[Part]) -> None:
        """White space and the tag, or something else. (A model may repeat the tag that ends the prompt.)"""
        rest = self._held.lstrip()
        if rest.startswith(OPEN_TAG):
            self._take(parts, "layout", len(self._held) - len(rest) + len(OPEN_TAG))
            self._is_open = True
        elif OPEN_TAG.startswith(rest):
            return
        self._state = "before" if self._is_open else "outside"

    def _read_inside(self, parts: list[Part]) -> None:
        close = self._held.find(CLOSE_TAG)
        end = close if close >= 0 else len(self._held) - held_back(self._held, CLOSE_TAG)
        self._take(parts, "reasoning", len(self._held[:end].rstrip("\n")))
        if close >= 0:
            self._take(parts, "layout", self._held.find(CLOSE_TAG) + len(CLOSE_TAG))
            self._state = "after"

    def _take_line_ends(self, parts: list[Part]) -> bool:
        """Whether something else follows."""
        self._take(parts, "layout", len(self._held) - len(self._held.lstrip("\n")))
        return bool(self._held)

    def _end(self) -> list[Part]:
        """Hands the remaining text to `rest`."""
        text, self._held = self._held, ""
        return self._rest.push(text, self._places)

    def _take(self, parts: list[Part], kind: Literal["reasoning", "layout"], length: int) -> None:
        if length:
            parts.append(Part(kind, self._held[:length]))
            self._held = self._held[length:]
            self._places = [place - length for place in self._places if place >= length]


def after_reasoning(grammar: Grammar, start: ReasoningStart) -> Grammar:
    """The grammar with optional reasoning before it, if the prompt's end permits it.

    In Lark's notation the first line of the grammar is the rule `start`, which no other rule may use. Raises
    ``RequestError`` if the text is then too long.
    """
    if start == "closed":
        return grammar
    opening = "" if start == "open" else f"{json.dumps(OPEN_TAG)} "
    lines = [
        f"start: thinking{'?' if start == 'may_open' else ''} answer",
        f"thinking: {opening}thought line_ends",
        f"thought[suffix={json.dumps(CLOSE_TAG)}]: /(?s:.*)/",
        r"line_ends: /\n{0,2}/",
        f"answer: {rule_body(grammar)}",
    ]
    return Grammar(kind="lark", text="\n".join(lines))


def or_calls(grammar: Grammar, calls: str) -> Grammar:
    """A text of the grammar, or tool calls, whose grammar in Lark's notation begins with the rule `start`. Raises
    ``RequestError`` if both together are too long."""
    lines = ["start: content | calls", f"content: {rule_body(grammar)}", f"calls: {calls.removeprefix('start:')}"]
    return Grammar(kind="lark", text="\n".join(lines))


def rule_body(grammar: Grammar) -> str:
    """The body of the grammar's first rule, and its further rules."""
    if grammar.kind == "json_schema":
        return f"%json {grammar.text}"
    if grammar.kind == "json_object":
        return '%json {"type": "object"}'
    if grammar.kind == "choice":
        return " | ".join(json.dumps(text) for text in parse_json(grammar))
    if grammar.kind == "regex":
        return f"/{_llguidance.regex_to_lark(grammar.text)}/"
    return grammar.text.removeprefix("start: ")
