"""Parses a message's header, the text between "<|start|>" and "<|message|>": role, channel, recipient, content type.

    assistant to=functions.f<|channel|>commentary <|constrain|>json

The rules are those of the package `openai-harmony`; a header that it refuses is parsed as far as possible and marked as
malformed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from runtime.text.harmony.message import CHANNEL, CHANNELS, CONSTRAIN, FUNCTIONS, ROLES

_SPACES = "".join(map(chr, range(0x2000, 0x200B)))
WHITE_SPACE = f"\t\n\x0b\x0c\r \x85\xa0\u1680{_SPACES}\u2028\u2029\u202f\u205f\u3000"
"""Unicode white space, which is not that of Python's `str.strip`."""

_CHANNEL = re.compile(f"{re.escape(CHANNEL)}([^<{WHITE_SPACE}]*)")
_PART = re.compile(r"[^ \t\n\x0c\r]+")


class Header(NamedTuple):
    """
    role, name    of the author; only a tool has a name
    recipient     as written, after "to=" if `has_to`
    is_malformed  `openai-harmony` would refuse the header
    """

    role: str
    name: str | None = None
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    has_to: bool = False
    is_malformed: bool = False

    @property
    def function(self) -> str | None:
        """The name of the function that the message calls, or None."""
        recipient = self.recipient
        if self.role != "assistant" or recipient is None or "<|" in recipient:
            return None
        if recipient.startswith(f"{FUNCTIONS}."):
            return recipient[len(FUNCTIONS) + 1 :] or None
        return recipient if self.has_to and recipient not in ("all", *ROLES) else None


def parse_header(text: str, role: str | None) -> Header:
    """role: the author's, if the text does not begin with it"""
    channel, text = _take_channel(text)
    is_malformed = channel == ""
    parts = _PART.findall(text.strip(WHITE_SPACE).replace(CONSTRAIN, f" {CONSTRAIN}"))
    name = None
    if role is None:
        first = parts[0] if parts else ""
        if first in ROLES:
            role = first
        elif len(parts) > 1 or first.startswith("to="):
            role = "tool"
            parts.pop(0)
        else:  # not a role: perhaps the channel, without its token
            role, parts, is_malformed = "assistant", [], True
            written = first.removeprefix("assistant")
            channel = channel or (written if written in CHANNELS else None)
        if role == "tool":
            name = first
    if parts and parts[0] == role:
        parts.pop(0)
    recipient, content_type, leftovers = _recipient_and_type(parts)
    if leftovers:
        is_malformed = True
        recipient = next((part for part in (*leftovers, recipient or "") if part.startswith("to=")), recipient)
    has_to = recipient is not None and recipient.startswith("to=")
    if has_to and recipient is not None:
        recipient = recipient[3:]
    return Header(role, name, channel or None, recipient, content_type, has_to, is_malformed)


def _take_channel(text: str) -> tuple[str | None, str]:
    """The channel, "" if nothing follows its token, and the text without both."""
    found = _CHANNEL.search(text)
    return (None, text) if found is None else (found[1], text[: found.start()] + text[found.end() :])


def _recipient_and_type(parts: list[str]) -> tuple[str | None, str | None, list[str]]:
    """The recipient as written, the content type, and the superfluous parts."""
    if not parts:
        return None, None, []
    if len(parts) == 1 or parts[-1].startswith("to="):
        return parts[-1], None, parts[:-1]
    return parts[-2], parts[-1], parts[:-2]


class Recovered(NamedTuple):
    """A header without its "<|message|>", read as a message: its text, and its channel.

    pieces  all of it, in order, each with whether it is the message's text
    """

    channel: str | None
    pieces: list[tuple[str, bool]]


def recover(text: str, role: str | None, *, keeps_end: bool = False) -> Recovered:
    """Everything but role and channel is text. keeps_end: the text continues, so trailing white space counts"""
    found = _CHANNEL.search(text)
    start, end = (len(text), len(text)) if found is None else found.span()
    front, behind = text[:start], text[end:]
    is_behind = not front.strip(WHITE_SPACE)  # after the role, if there is one
    first = _PART.match(behind.lstrip(WHITE_SPACE)) if is_behind else _PART.search(front)
    word, role_end = ("", 0) if first is None else (first[0], first.end())
    channel = None if found is None else found[1]
    if role is None and word in CHANNELS:
        channel = channel or word
    elif word != (role or "assistant"):
        role_end = 0
    if is_behind and role_end:
        role_end += len(behind) - len(behind.lstrip(WHITE_SPACE))
        front_pieces, behind_pieces = [(front, False)], [(behind[:role_end], False), (behind[role_end:], True)]
    else:
        front_pieces, behind_pieces = [(front[:role_end], False), (front[role_end:], True)], [(behind, True)]
    pieces = [*front_pieces, (text[start:end], False), *behind_pieces]
    return Recovered(channel or None, _trimmed(pieces, keeps_end=keeps_end))


def _trimmed(pieces: list[tuple[str, bool]], *, keeps_end: bool) -> list[tuple[str, bool]]:
    """Marks white space around the text as not part of it."""
    kept = [i for i, (text, is_text) in enumerate(pieces) if is_text and text.strip(WHITE_SPACE)]
    if not kept:
        return [(text, False) for text, _ in pieces if text]
    trimmed: list[tuple[str, bool]] = []
    for i, (text, is_text) in enumerate(pieces):
        before = len(text) - len(text.lstrip(WHITE_SPACE)) if is_text and i <= kept[0] else 0
        after = len(text.rstrip(WHITE_SPACE)) if is_text and i >= kept[-1] and not keeps_end else len(text)
        after = max(before, after)
        trimmed += [(text[:before], False), (text[before:after], is_text), (text[after:], False)]
    return [piece for piece in trimmed if piece[0]]
