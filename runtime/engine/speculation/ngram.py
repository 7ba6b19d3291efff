"""N-gram drafts: the tokens after the latest earlier occurrence of the sequence's end.

Code that is edited, texts that are summarised and answers that quote repeat long stretches of their prompts (prompt
lookup decoding, Saxena 2023). An incremental index of each text finds the latest positions of the last token.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

import numpy as np

from numba_kernels.cpu.ngram_lookup import LEAST_MATCH
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import Ids
from runtime.engine.speculation.ngram_lookup import BREAK, Lookup, Text, follow, load


class _Own(NamedTuple):
    """A sequence's text, and its lookup."""

    text: Text
    lookup: Lookup


class NgramDrafter:
    """Drafts from the sequence's own prompt and output."""

    name = "ngram"

    def __init__(self) -> None:
        load()
        self._texts: dict[Sequence, _Own] = {}

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        return self._lookup(sequence)(most)

    def end(self, sequence: Sequence) -> None:
        self._texts.pop(sequence, None)

    def _lookup(self, sequence: Sequence) -> Lookup:
        """The lookup over the text, brought up to date with the sequence."""
        own = self._texts.get(sequence)
        if own is None:
            text = Text(sequence.token_ids(0, sequence.num_tokens))
            own = self._texts[sequence] = _Own(text, Lookup(text, text))
        else:
            follow(own.text, sequence)
        return own.lookup


MOST_KEPT_TOKENS = 32_768
"""Tokens of a tenant's ended sequences; the oldest are dropped first."""

_SLACK = 4096
"""Dropped tokens that stay in the array before the others are moved."""

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
    """Drafts from the sequence's own tokens, or from answers to other requests of the same tenant (``cache_salt``) if
    those match for longer."""

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
