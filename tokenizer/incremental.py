"""Incremental decoding: token ids in, text out, never half a character and never a piece twice."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tokenizer.components.decoders import Events
from tokenizer.errors import TokenizerError
from tokenizer.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes one continuation, piece by piece.

    The concatenated texts of all pushes and of `flush` are the text that `Tokenizer.decode` gives for all ids at once;
    each id costs O(1) amortised. With `prompt_ids` it is what the ids add to the decoded prompt: the leading space that
    SentencePiece tokenizers strip at the beginning of a text stays. Bytes that cannot begin or end a character become
    U+FFFD, incomplete characters wait; tokenizers with byte fallback hold a run of byte tokens until it ends, since one
    bad byte spoils the run. A character that the prompt began and the continuation completes comes out whole. The
    special tokens `kept_ids` are never skipped.

    Ids outside the vocabulary add nothing (a model's embedding may be padded beyond it), as in the
    `tokenizers` library.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Iterable[int] = (),
        kept_ids: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.all_special_ids - frozenset(kept_ids) if skip_special_tokens else frozenset()
        self._is_finished = False
        chain = tokenizer.decoder
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if chain.is_byte_level else None
        self._stages = [] if chain.is_byte_level else chain.start()
        self._whole_ids: list[int] | None = None if chain.is_streaming else []
        self._prompt_length = 0  # in characters, for decoders that cannot stream
        prompt = list(prompt_ids)
        if prompt:
            self.push(prompt)
            events: Events = []
            for stage in self._stages:
                events = stage.feed(events) + stage.end_prompt()
            if self._whole_ids is not None:
                self._prompt_length = len(tokenizer.decode_but(prompt, self._skipped))

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain after these ids.

        Raises `TokenIdError` for an id that is negative or not below 2**32, and `TokenizerError` after
        `flush`.
        """
        if self._is_finished:
            raise TokenizerError("the incremental decoder was flushed: its text has ended")
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.bytes_of(ids, self._skipped))
        if self._whole_ids is not None:
            self._whole_ids += ids
            return ""
        events: Events = []
        for token in self._tokenizer.tokens_of(ids, self._skipped):
            events += (token, None)
        for stage in self._stages:
            events = stage.feed(events)
        return _text(events)

    def flush(self) -> str:
        """Ends the stream and returns the rest of the text."""
        if self._is_finished:
            return ""
        self._is_finished = True
        if self._utf8 is not None:
            return self._utf8.decode(b"", True)
        if self._whole_ids is not None:
            return self._tokenizer.decode_but(self._whole_ids, self._skipped)[self._prompt_length :]
        events: Events = []
        for stage in self._stages:
            events = stage.feed(events) + stage.finish()
        return _text(events)


def _text(events: Events) -> str:
    return "".join([event for event in events if event is not None])
