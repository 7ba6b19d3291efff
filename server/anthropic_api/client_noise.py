"""Lines that clients add to a prompt for their own servers and that differ between requests of one conversation: with
such a line in front, no prefix of the last request is found in the cache. They are dropped before the prompt is
rendered (`--keep-client-noise` keeps them)."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Noise:
    """
    name    in the answer's header `X-Xserv-Normalized`
    line    matches the whole line
    reason  why it changes, and why the model does not need it
    """

    name: str
    line: re.Pattern[str]
    reason: str


_FIELD = r" (?:cch=[0-9a-f]{5}|(?!cch=)[a-z_]{1,32}=[^;\s]{1,64});"

CLIENT_NOISE = (
    Noise(
        "x-anthropic-billing-header",
        re.compile(rf"x-anthropic-billing-header:(?:{_FIELD}){{1,16}}"),
        "Claude Code names its version, with digits that differ in each conversation, and often a checksum that "
        "differs in each request, for Anthropic's accounts",
    ),
)
"""Lines of the first block of `system` in `/v1/messages`. Every other text stays."""


def without_noise(text: str) -> tuple[str, list[str]]:
    """The text without such lines, and the names of those that it had."""
    kept, found = [], []
    for line in text.split("\n"):
        noise = next((each for each in CLIENT_NOISE if each.line.fullmatch(line.removesuffix("\r"))), None)
        if noise is None:
            kept.append(line)
        else:
            found.append(noise.name)
    return "\n".join(kept), found
