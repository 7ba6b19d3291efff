"""Harmony's messages, the special tokens that delimit them, and their rendering to ids, each piece of a header
separately, as in `openai-harmony`. Also grammars for answers: a forced call, or a constrained answer in the final
channel, with optional analysis before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.engine.grammar.grammar import Grammar
from runtime.text.reasoning import rule_body
from runtime.text.tools.forms import CallForm
from runtime.text.tools.table import Notation
from tokenizer import Tokenizer

START, MESSAGE, END = "<|start|>", "<|message|>", "<|end|>"
CHANNEL, CONSTRAIN, RETURN, CALL = "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"
SPECIAL_TOKENS = (START, MESSAGE, END, CHANNEL, CONSTRAIN, RETURN, CALL)

STOPS = (END, RETURN, CALL)
"""Each ends a message; the last two end the answer."""

ROLES = ("system", "developer", "user", "assistant", "tool")
CHANNELS = ("analysis", "commentary", "final")
FUNCTIONS = "functions"
"""The namespace of a request's tools."""


@dataclass(frozen=True, slots=True)
class HarmonyMessage:
    """
    role          one of ROLES
    content       the text
    name          of a tool, which replaces the role in the header; of others, after the role
    channel       one of CHANNELS in the assistant's messages and a tool's
    recipient     of a call, or of an answer
    content_type  of the content, as in the header: "<|constrain|>json"
    """

    role: str
    content: str
    name: str | None = None
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None


class SpecialIds(NamedTuple):
    """The ids of SPECIAL_TOKENS, in order."""

    start: int
    message: int
    end: int
    channel: int
    constrain: int
    return_: int
    call: int

    @property
    def by_id(self) -> dict[int, str]:
        """The tokens' texts."""
        return dict(zip(self, SPECIAL_TOKENS, strict=True))


def special_ids(tokenizer: Tokenizer) -> SpecialIds | None:
    """None if the vocabulary lacks one, or has it as an ordinary token."""
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    found = [i for i in ids if i is not None and i in tokenizer.all_special_ids]
    return SpecialIds(*found) if len(found) == len(SPECIAL_TOKENS) else None


Encode = Callable[[str], list[int]]


class Renderer:
    """
    ids             the tokenizer's special tokens
    parses_content  a special token's text in a message's content becomes the token; else it stays text
    """

    def __init__(self, tokenizer: Tokenizer, ids: SpecialIds, *, parses_content: bool = False) -> None:
        self._ids = ids
        self._text = tokenizer.encode_ordinary
        self._content: Encode = self._text
        if parses_content:
            self._content = lambda text: tokenizer.encode(text, add_special_tokens=False)

    def conversation(self, messages: Sequence[HarmonyMessage], next_role: str | None = None) -> list[int]:
        """With `next_role`, up to where a message of that role begins."""
        rendered = [token_id for message in messages for token_id in self.message(message)]
        return rendered if next_role is None else [*rendered, self._ids.start, *self._text(next_role)]

    def message(self, message: HarmonyMessage) -> list[int]:
        """With the token that ends it: "call" for the assistant's calls, else "end"."""
        is_call = message.role == "assistant" and message.recipient is not None
        return [*self.open_message(message), self._ids.call if is_call else self._ids.end]

    def open_message(self, message: HarmonyMessage) -> list[int]:
        """Without the token that ends it."""
        ids = self._ids
        rendered = [ids.start]
        if message.role == "tool":
            assert message.name is not None, "a tool's message has the tool's name"
            rendered += self._text(message.name)
        else:
            rendered += self._text(message.role)
            if message.name is not None:
                rendered += self._text(f":{message.name}")
        if message.recipient is not None and message.recipient != "all":
            rendered += self._text(f" to={message.recipient}")
        if message.channel is not None:
            rendered += [ids.channel, *self._text(message.channel)]
        if message.content_type is not None:
            if message.content_type.startswith(CONSTRAIN):
                rendered += [*self._text(" "), ids.constrain, *self._text(message.content_type[len(CONSTRAIN) :])]
            else:
                rendered += self._text(f" {message.content_type}")
        return [*rendered, ids.message, *self._content(message.content)]


HARMONY = Notation(
    "harmony",
    None,
    CallForm(f"{CHANNEL}commentary to={FUNCTIONS}.NAME {CONSTRAIN}json{MESSAGE}", "", between=f"{END}{START}assistant"),
    markers=SPECIAL_TOKENS,
    names=("openai",),
)
"""The notation of a forced call: gpt-oss's own."""


def in_final_channel(grammar: Grammar, ids: SpecialIds) -> Grammar:
    """A message on the final channel whose content is the grammar's. Raises ``RequestError`` if that is too long."""
    lines = [f'start: <[{ids.channel}]> "final" <[{ids.message}]> final_text', f"final_text: {rule_body(grammar)}"]
    return Grammar(kind="lark", text="\n".join(lines))


def after_analysis(grammar: Grammar, ids: SpecialIds) -> Grammar:
    """Messages on the analysis channel, then one of the grammar's. Raises ``RequestError`` if that is too long."""
    lines = [
        "start: analysis* message",
        f'analysis: <[{ids.channel}]> "analysis" <[{ids.message}]> thought <[{ids.end}]> <[{ids.start}]> "assistant"',
        "thought: /(?s:.*)/",
        f"message: {rule_body(grammar)}",
    ]
    return Grammar(kind="lark", text="\n".join(lines))
