"""A grammar tried out before a request is admitted: some texts of it are drawn, so that one whose masks are too much
work is refused with the reason, and does not end an answer in its midst."""

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
"""Tokens of each text among many that there may be; those that the grammar all but says come beside them."""
MANY = 16
MAX_TOKENS = 400
TIME_LIMIT_S = 0.3
"""The trial ends then, whatever it has seen: the engine's own limits are wider than the trial's."""
_SHORT = 100
"""Ids in front of the vocabulary, among them the characters that end strings and objects."""


def fails(matcher: LLMatcher, vocabulary: Vocabulary) -> str | None:
    """What llguidance says where it cannot follow a text; None: all went well. The same for the same grammar, unless
    time ran out."""
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
