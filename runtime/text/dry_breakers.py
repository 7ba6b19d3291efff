"""DRY's sequence breakers as token ids: every token that holds one, and every way to begin one in a token and to go on
with others, as llama.cpp finds them."""

from __future__ import annotations

import functools

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.engine.dry import DryBreakers
from runtime.engine.errors import RequestError
from runtime.engine.samplers import DEFAULT_BREAKERS
from runtime.engine.sampling_params import SamplingParams
from tokenizer import Tokenizer

_SEPARATOR = 0xFF  # no byte of UTF-8
_MOST_AFTER = 20
"""Most tokens after the first that are compared."""


def with_dry_breakers(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """The parameters with ids instead of texts; without either, and with DRY, those of the default texts.

    Raises ``RequestError`` for texts without a tokenizer.
    """
    texts = params.dry_sequence_breakers
    if texts and tokenizer is None:
        problem = "the model has no tokenizer: dry_sequence_breakers must be []"
        raise RequestError(problem, param="dry_sequence_breakers")
    if not params.has_dry or tokenizer is None:
        return params if texts is None else msgspec.structs.replace(params, dry_sequence_breakers=None)
    if texts is None and params.dry_breakers is not None:
        return params
    breakers = dry_breakers(tuple(DEFAULT_BREAKERS if texts is None else texts), tokenizer)
    return msgspec.structs.replace(params, dry_sequence_breakers=None, dry_breakers=breakers)


@functools.lru_cache(maxsize=32)
def dry_breakers(texts: tuple[str, ...], tokenizer: Tokenizer) -> DryBreakers:
    """The texts as token ids."""
    words, starts = _words(tokenizer)
    ends = np.append(starts[1:], len(words) + 1) - 1  # of words: where their separators are
    singles: set[int] = set()
    sequences: list[list[int]] = []
    for text in texts:
        data = text.encode(errors="surrogatepass")
        places = (words[: len(words) - len(data) + 1] == data[0]).nonzero()[0]
        for i, byte in enumerate(data[1:], 1):
            places = places[words[places + i] == byte]
        holders = set((np.searchsorted(starts, places, side="right") - 1).tolist())
        singles |= holders
        for count in range(1, len(data)):
            rest = data[count:]
            if rest[0] & 0xC0 == 0x80:  # inside a character: its bytes are no text
                continue
            (heads,) = (ends - starts >= count).nonzero()
            for i, byte in enumerate(data[:count]):
                heads = heads[words[ends[heads] - count + i] == byte]
            after = tokenizer.encode(rest.decode(errors="surrogatepass"), add_special_tokens=False)[:_MOST_AFTER]
            sequences += [[head, *after] for head in heads.tolist() if head not in holders and after]
    return DryBreakers(token_ids=sorted(singles), sequences=sequences)


@functools.lru_cache(maxsize=1)
def _words(tokenizer: Tokenizer) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of all tokens, each followed by a separator, and where each begins."""
    words = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    data = bytes([_SEPARATOR]).join(words) + bytes([_SEPARATOR])
    lengths = np.array([len(word) + 1 for word in words])
    return np.frombuffer(data, np.uint8), np.cumsum(lengths) - lengths
