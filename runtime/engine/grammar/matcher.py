"""The state of a choice in its grammar."""

from __future__ import annotations

import re
from typing import Protocol

from runtime.engine.grammar.vocabulary import Vocabulary

MAX_MESSAGE_LENGTH = 400
"""Characters of an llguidance error that are passed on."""


class LLMatcher(Protocol):
    """llguidance's matcher, as far as its library is not needed for it."""

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...

    def is_stopped(self) -> bool: ...

    def validate_tokens(self, tokens: list[int]) -> int: ...

    def compute_ff_tokens(self) -> list[int]: ...

    def consume_token(self, token: int) -> bool: ...


class GrammarMatcher:
    """One choice's state in its grammar. Its failures stay local: see ``error``."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self.ll_matcher = matcher
        self.vocabulary = vocabulary

    @property
    def error(self) -> str | None:
        """The failure, for the log, after which nothing can be sampled; None if there is none."""
        return self.ll_matcher.get_error() if self.ll_matcher.is_error() else None

    @property
    def is_complete(self) -> bool:
        """Whether the text is complete and only an end can follow."""
        return self.ll_matcher.is_stopped() and not self.ll_matcher.is_error()

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these ids, in order, the grammar accepts. The state does not change."""
        return 0 if self.ll_matcher.is_error() else self.ll_matcher.validate_tokens(token_ids)

    def forced(self) -> list[int]:
        """The ids that have to come next, as the tokenizer would cut them; sampled ids may be cut differently."""
        return [] if self.ll_matcher.is_error() else self.ll_matcher.compute_ff_tokens()

    def consume(self, token_id: int) -> bool:
        """Advance by a sampled token; False if the grammar does not accept it."""
        return self.ll_matcher.consume_token(token_id)


def readable(message: str) -> str:
    """llguidance's error in one line: the reason, without the position in a text that is not the user's."""
    lines = message.removeprefix("at 1(8): ").split("\n")
    kept = [line.strip() for line in lines if not _OF_PLACES.match(line)]
    text = " ".join(kept).removeprefix("failed to compile JSON schema: ").strip()
    return _UNTOLD.get(text, text)[:MAX_MESSAGE_LENGTH] or "no text matches it"


_OF_PLACES = re.compile(r"\s*(\d+ \||\^+\s*$)")
_UNTOLD = {"NoExtensionBias": "no text matches it"}
