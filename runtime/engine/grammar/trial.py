"""Tries out a grammar before a request is admitted, by drawing some texts of it. One whose masks take too much work is
refused with the reason, instead of ending an answer half-way."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from runtime.engine.grammar.vocabulary import Vocabulary

NUM_TEXTS = 2
NUM_CHOICES = 24
"""Tokens of each trial text that are chosen among more than `MANY`; others are not counted."""
MANY = 16
MAX_TOKENS = 400
TIME_LIMIT_S = 0.3
"""Seconds after which a trial ends; the engine's own limits are wider."""
_SHORT = 100
"""The first ids of the vocabulary, which include the characters that end strings and objects."""


def fails(matcher: LLMatcher, vocabulary: Vocabulary) -> str | None:
    """llguidance's error if it cannot follow a text, None if it can. Deterministic for a grammar, unless time ran
    out."""
    deadline_s = time.monotonic() + TIME_LIMIT_S
    for seed in range(NUM_TEXTS):
        error = _text_fails(matcher.deep_copy(), vocabulary, random.Random(seed), deadline_s)
        if error is not None:
            return error
    return None


def _text_fails(matcher: LLMatcher, vocabulary: Vocabulary, draw: random.Random, deadline_s: float) -> str | None:
    num_choices = 0
    for _ in range(MAX_TOKENS):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return matcher.get_error()
        is_allowed = np.unpackbits(mask, count=vocabulary.vocab_size, bitorder="little").view(np.bool_)
        is_allowed[list(vocabulary.eos_token_ids)] = False
        allowed = np.flatnonzero(is_allowed)
        if not allowed.size or matcher.is_stopped():
            return None
        some = allowed[:_SHORT] if draw.random() < 0.5 else allowed
        if not matcher.consume_token(int(some[draw.randrange(some.size)])):
            return matcher.get_error() if matcher.is_error() else None
        num_choices += allowed.size > MANY
        if num_choices == NUM_CHOICES or time.monotonic() > deadline_s:
            return None
    return None
