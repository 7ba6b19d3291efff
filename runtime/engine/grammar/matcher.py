"""A tokenizer's ids in llguidance's form, and the state of a choice in its grammar.

Building a vocabulary takes about a second for 150,000 ids, so it is done once an engine, for the first grammar.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from runtime.engine.grammar.grammar import grammar_error
from runtime.later import later
from tokenizer import Tokenizer

_llguidance = later("llguidance")


class Vocabulary:
    """The ids ``[0, vocab_size)`` of a model.

    ll_tokenizer   for llguidance's matchers
    num_mask_words of 32 bits in a mask of its ids; a model without an end of sequence has one id more
    is_canonical   whether the tokenizer's tokenization of forced bytes is the only one; else the model chooses
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self.is_canonical = tokenizer.decoder.is_byte_level
        adapter = _Adapter(tokenizer, vocab_size, self.eos_token_ids)
        self.ll_tokenizer: Any = _llguidance.LLTokenizer(adapter, eos_token=list(self.eos_token_ids) or None)
        adapter.tokens = []  # it was copied
        self.num_mask_words = -(-self.ll_tokenizer.vocab_size // 32)


class LazyVocabulary:
    """A vocabulary that is built on first use, on the thread that uses it.

    load  returns the tokenizer, or None if the model has none
    """

    def __init__(self, load: Callable[[], Tokenizer | None], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def get(self) -> Vocabulary:
        """Raises ``RequestError`` if the model has no tokenizer, ``TokenizerFileError``."""
        with self._lock:
            if self._vocabulary is None:
                tokenizer = self._load()
                if tokenizer is None:
                    raise grammar_error("the model has no tokenizer, so that its ids have no text")
                self._vocabulary = Vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary


class _Adapter:
    """A tokenizer with the attributes that llguidance reads."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        token_bytes = tokenizer.decoder.token_bytes
        texts = (tokenizer.id_to_token(token_id) for token_id in range(vocab_size))
        self.tokens = [b"" if text is None else token_bytes(text) for text in texts]
        self.special_token_ids = [i for i in tokenizer.all_special_ids if i < vocab_size]
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None  # without one llguidance adds an id of its own
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """The ids of bytes that a grammar forces. A special token's text counts as ordinary text here."""
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


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
    text = " ".join(kept).removeprefix("failed to compile JSON schema: ").removesuffix("<non-verbose/>").strip()
    return _UNTOLD.get(text, text)[:MAX_MESSAGE_LENGTH] or "no text matches it"


_OF_PLACES = re.compile(r"\s*(\d+ \||\^+\s*$)")
_UNTOLD = {"NoExtensionBias": "no text matches it"}
