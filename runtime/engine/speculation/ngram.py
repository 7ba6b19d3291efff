"""Proposals out of what was said before: the tokens behind the latest place that ends as the sequence does now.

Code that is edited, texts that are summarised and answers that quote repeat long stretches of their prompts (prompt
lookup decoding, Saxena 2023). An index of each text, which grows with it, leads to the latest places of the last token.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

import numpy as np

from numba_kernels.cpu.repeats import LEAST_MATCH
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import Ids
from runtime.engine.speculation.repeats import BREAK, Lookup, Text, follow, load


class _Own(NamedTuple):
    """A sequence's text, and who looks in it."""

    text: Text
    lookup: Lookup


class NgramDrafter:
    """The sequence's own prompt and output."""

    name = "ngram"

    def __init__(self) -> None:
        load()
        self._texts: dict[Sequence, _Own] = {}

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        return self._lookup(sequence)(most)

    def end(self, sequence: Sequence) -> None:
        self._texts.pop(sequence, None)

    def _lookup(self, sequence: Sequence) -> Lookup:
        """Of the text, which has all of the sequence's tokens."""
        own = self._texts.get(sequence)
        if own is None:
            text = Text(sequence.token_ids(0, sequence.num_tokens))
            own = self._texts[sequence] = _Own(text, Lookup(text, text))
        else:
            follow(own.text, sequence)
        return own.lookup


MOST_KEPT_TOKENS = 32_768
"""Of a tenant's ended sequences; the oldest are forgotten first."""

_SLACK = 4096
"""Forgotten tokens that stay in the array, until those behind them move."""

MOST_TENANTS = 256


class _History:
    """The outputs of a tenant's ended sequences, in one text, with breaks between."""

    def __init__(self) -> None:
        self.text = Text(np.empty(0, np.int32), capacity=MOST_KEPT_TOKENS + _SLACK)

    def add(self, tokens: Ids) -> None:
        text = self.text
        tokens = tokens[-(MOST_KEPT_TOKENS - 1) :]
        if len(text) + len(tokens) + 1 > MOST_KEPT_TOKENS + _SLACK:
            text.forget(len(text) + len(tokens) + 1 - MOST_KEPT_TOKENS)
        text.extend(tokens)
        text.append(BREAK)
        text.keep(max(0, len(text) - MOST_KEPT_TOKENS))


class SuffixDrafter(NgramDrafter):
    """The sequence's own tokens, and, where these do not agree for as long, what other requests of the same tenant
    (its ``cache_salt``) have got as answers."""

    name = "suffix"

    def __init__(self) -> None:
        super().__init__()
        self._histories: OrderedDict[str | None, _History] = OrderedDict()

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        history = self._histories.get(sequence.request.cache_salt)
        return self._lookup(sequence)(most, None if history is None else history.text)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        salt = sequence.request.cache_salt
        if sequence.num_output_tokens > LEAST_MATCH:
            history = self._histories.setdefault(salt, _History())
            self._histories.move_to_end(salt)
            history.add(sequence.output_ids)
            for oldest in list(islice(self._histories, max(0, len(self._histories) - MOST_TENANTS))):
                del self._histories[oldest]
