"""Parses reasoning: text between two tags before the answer. Also extends an answer's grammar by reasoning before it,
or by calls as an alternative.

The opening tag counts only at the beginning of the answer, since a text about tags may have it anywhere else; many
templates write it themselves, at the end of the prompt (`reasoning_start`). Unclosed reasoning extends to the end.
Newlines beside the tags belong to them, as in the templates that write past reasoning back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.engine.grammar.grammar import Grammar, parse_json
from runtime.engine.reasoning_budget import ReasoningBudget
from runtime.later import later
from runtime.text.parts import ContentParser, Part, PartParser, held_back
from tokenizer import Tokenizer

_llguidance = later("llguidance")


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The texts around reasoning. `label`: the end of the opening one that is no part of its token."""

    opening: str
    closing: str
    label: str = ""

    @property
    def tokens(self) -> tuple[str, str]:
        """The tags as a vocabulary may have them."""
        return self.opening.removesuffix(self.label), self.closing


THINK = ReasoningTags("<think>", "</think>")
GEMMA4 = ReasoningTags("<|channel>thought", "<channel|>", "thought")


def vocabulary_tags(tokenizer: Tokenizer) -> ReasoningTags:
    """The tags that the model was taught, by its vocabulary."""
    return GEMMA4 if all(tokenizer.token_to_id(token) is not None for token in GEMMA4.tokens) else THINK


_MESSAGES = {
    "Qwen3": "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly "
    "now.",
}
"""Words that a model's maker ends cut reasoning with, by the beginning of the architecture's name."""


@dataclass(frozen=True, slots=True)
class ReasoningEnd:
    """How reasoning is closed when its budget is spent.

    opening_id, closing_id  the tags' tokens
    label_ids    those of the opening tag that follow its token
    closing_ids  a message, the closing tag and the white space after it
    """

    opening_id: int
    closing_id: int
    label_ids: tuple[int, ...]
    closing_ids: tuple[int, ...]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, architecture: str, message: str | None = None, tags: ReasoningTags = THINK
    ) -> ReasoningEnd | None:
        """With this message instead of the model's own, if one is given. None if the tags are no tokens: then the
        reasoning's end cannot be told by ids."""
        opening_id, closing_id = map(tokenizer.token_to_id, tags.tokens)
        if opening_id is None or closing_id is None:
            return None
        if message is None:
            message = next((text for name, text in _MESSAGES.items() if architecture.startswith(name)), "")
        encode = tokenizer.encode_ordinary
        after = encode("\n\n") if tags == THINK else []
        return cls(opening_id, closing_id, tuple(encode(tags.label)), (*encode(f"{message}\n"), closing_id, *after))

    def after(self, num_tokens: int, start: ReasoningStart) -> ReasoningBudget | None:
        """Closes the reasoning after so many tokens; None if the prompt has closed it."""
        if start == "closed":
            return None
        is_open = start == "open"
        return ReasoningBudget(
            num_tokens=num_tokens, closing_id=self.closing_id, closing_ids=self.closing_ids,
            opening_id=None if is_open else self.opening_id, num_label=0 if is_open else len(self.label_ids),
        )  # fmt: skip


_TAIL = 32
"""Tokens that hold a tag and the white space after it."""

ReasoningStart = Literal["may_open", "open", "closed"]
"""The state at the prompt's end: the model may open its reasoning, is within it, or has had it."""


def reasoning_start(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], tags: ReasoningTags = THINK
) -> ReasoningStart:
    """The state by the answer's turn in the prompt: the text after the last special token that is no tag of reasoning.

    If no special token marks the turns, only the prompt's last characters count, since earlier ones may belong to other
    speakers.
    """
    special = tokenizer.all_special_ids.difference(tokenizer.token_to_id(tag) for tag in tags.tokens)
    begin = len(prompt_token_ids)
    while begin and prompt_token_ids[begin - 1] not in special:
        begin -= 1
    turn = tokenizer.decode(prompt_token_ids[begin or -_TAIL :]).rstrip()
    if not begin:
        turn = turn[-max(len(tags.opening), len(tags.closing)) :]
        if not turn.endswith((tags.opening, tags.closing)):
            return "may_open"
    opened, closed = turn.rfind(tags.opening), turn.rfind(tags.closing)
    if opened == closed:  # neither
        return "may_open"
    return "open" if opened > closed else "closed"


class ReasoningParser:
    """Parts of an answer: "reasoning", its tags as "layout", and the remaining text as classified by `rest`, by default
    "content"."""

    def __init__(self, start: ReasoningStart, rest: PartParser | None = None, tags: ReasoningTags = THINK) -> None:
        self._tags = tags
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
        if self._state == "inside" and not self._held and self._tags.closing[0] not in text and not text.endswith("\n"):
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
        opening = self._tags.opening
        if rest.startswith(opening):
            self._take(parts, "layout", len(self._held) - len(rest) + len(opening))
            self._is_open = True
        elif opening.startswith(rest):
            return
        self._state = "before" if self._is_open else "outside"

    def _read_inside(self, parts: list[Part]) -> None:
        closing = self._tags.closing
        close = self._held.find(closing)
        end = close if close >= 0 else len(self._held) - held_back(self._held, closing)
        self._take(parts, "reasoning", len(self._held[:end].rstrip("\n")))
        if close >= 0:
            self._take(parts, "layout", self._held.find(closing) + len(closing))
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


def after_reasoning(
    grammar: Grammar,
    start: ReasoningStart,
    tokenizer: Tokenizer | None = None,
    *,
    tags: ReasoningTags = THINK,
    is_bounded: bool = False,
) -> Grammar:
    """The grammar with optional reasoning before it, if the prompt's end permits it. If it `is_bounded` by a budget,
    which may close it within a character, it is any ids up to the closing one; else a text.

    In Lark's notation the first line of the grammar is the rule `start`, which no other rule may use. Raises
    ``RequestError`` if the text is then too long.
    """
    if start == "closed":
        return grammar
    ids = [None if tokenizer is None else tokenizer.token_to_id(token) for token in tags.tokens]
    special = frozenset[int | None]() if tokenizer is None else tokenizer.all_special_ids
    first, last = (f"<[{i}]>" if i in special else json.dumps(tag) for i, tag in zip(ids, tags.tokens, strict=True))
    opening = "" if start == "open" else f"{first} {json.dumps(tags.label)} " if tags.label else f"{first} "
    is_special = ids[1] in special or is_bounded
    thought = r"thought: /(?s:.*)/"
    if is_bounded:
        last = f"<[{ids[1]}]>"
        thought = f"any_id: <[^{_ranges({*special, ids[1]})}]>\nthought: any_id*"
    lines = [
        f"start: thinking{'?' if start == 'may_open' else ''} answer",
        f"thinking: {opening}thought line_ends",
        f"{thought} {last}" if is_special else f"thought[suffix={last}]: /(?s:.*)/",
        r"line_ends: /\n{0,2}/",
        f"answer: {rule_body(grammar)}",
    ]
    return Grammar(kind="lark", text="\n".join(lines))


def _ranges(ids: set[int | None]) -> str:
    """The ids as llguidance writes a set of them."""
    texts: list[str] = []
    start = end = -2
    for i in [*sorted(each for each in ids if each is not None), -2]:
        if i == end + 1:
            end = i
            continue
        if start >= 0:
            texts.append(str(start) if start == end else f"{start}-{end}")
        start = end = i
    return ",".join(texts)


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
