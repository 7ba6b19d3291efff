"""Harmony's messages, and the special tokens that delimit them, found by name in a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
