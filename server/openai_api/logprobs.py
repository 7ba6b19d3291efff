"""Log probabilities in three forms: chat's, the legacy completions', and vLLM's for prompts."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from runtime.engine.messages import TokenLogprobs
from runtime.text.pipeline import TextDelta
from server.openai_api.answers import ChatTokenLogprob, CompletionLogprobs, PromptLogprobs, TopLogprob
from server.transport.json_answer import EncodedList
from tokenizer import IncrementalDecoder, Tokenizer

LEAST_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON lacks."""

_AT_ONCE = 16
"""Tokens of a prompt whose log probabilities are written in one go: a millisecond with twenty alternatives."""


def chat_logprobs(delta: TextDelta, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> list[ChatTokenLogprob]:
    """One entry for each token of the delta with some of its content; empty if not requested. ``as_ids``: one for each
    of its tokens, which are named by their ids."""
    names = None if as_ids else tokenizer
    return [
        ChatTokenLogprob(
            token=token_text(entry.token_id, names),
            logprob=finite(entry.logprob),
            bytes=list(_token_bytes(entry.token_id, tokenizer)),
            top_logprobs=[
                TopLogprob(token_text(token_id, names), finite(value), list(_token_bytes(token_id, tokenizer)))
                for token_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        )
        for entry in (delta.logprobs if as_ids else delta.content_logprobs) or ()
    ]


async def prompt_logprobs(entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer | None) -> PromptLogprobs:
    """vLLM's form; the prompt's token comes first, then the alternatives. It yields to other tasks."""
    encoded: EncodedList[dict[str, dict[str, Any]] | None] = EncodedList()
    for start in range(0, len(entries), _AT_ONCE):
        piece = entries[start : start + _AT_ONCE]
        encoded.extend([None if entry is None else _ranked(entry, tokenizer) for entry in piece])
        await asyncio.sleep(0)
    return encoded.as_list()


def _ranked(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, dict[str, float | int | str]]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += zip(entry.top_ids, entry.top_logprobs, range(1, len(entry.top_ids) + 1), strict=True)
    return {
        str(token_id): {"logprob": finite(value), "rank": rank, "decoded_token": token_text(token_id, tokenizer)}
        for token_id, value, rank in reversed(ranked)  # the token's own rank wins
    }


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as returned by `echo`.

    token_offsets   where each token begins in `text`; empty unless logprobs are wanted
    """

    text: str
    token_ids: list[int]
    token_offsets: list[int]

    @classmethod
    def of(cls, token_ids: list[int], text: str | None, tokenizer: Tokenizer, *, has_offsets: bool) -> Echo:
        """`text` is None for a prompt given as ids: it is then decoded without special tokens. A text shows the special
        tokens that it spells, not those that the tokenizer adds."""
        is_given = text is not None
        if text is None:
            text = tokenizer.decode(token_ids, skip_special_tokens=True)
        offsets: list[int] = []
        if has_offsets:
            added = _num_added(token_ids, text, tokenizer) if is_given else 0
            decoder = IncrementalDecoder(tokenizer, skip_special_tokens=not is_given)
            ends = accumulate(
                len(decoder.push([token_id])) if place >= added else 0 for place, token_id in enumerate(token_ids)
            )
            places = TokenPlaces(tokenizer)
            offsets = [min(places.next(*each), len(text)) for each in zip(token_ids, ends, strict=True)]
        return cls(text, token_ids, offsets)

    def parts(
        self, entries: Sequence[TokenLogprobs | None], names: Tokenizer | None
    ) -> Iterator[tuple[str, CompletionLogprobs]]:
        """The text and the legacy form of its log probabilities, of a few tokens each, which ``names`` names; the first
        token has none. At least one part."""
        for start in range(0, max(1, len(self.token_ids)), _AT_ONCE):
            end = start + _AT_ONCE
            ids, offsets = self.token_ids[start:end], self.token_offsets[start:end]
            result = CompletionLogprobs()
            for token_id, offset, entry in zip(ids, offsets, entries[start:end], strict=True):
                _append(result, token_id, entry, offset, names)
            text_start = offsets[0] if start else 0
            text_end = self.token_offsets[end] if end < len(self.token_ids) else len(self.text)
            yield self.text[text_start:text_end], result


def _num_added(token_ids: list[int], text: str, tokenizer: Tokenizer) -> int:
    """The number of special tokens that the tokenizer added before the text."""
    for place, token_id in enumerate(token_ids):
        if token_id not in tokenizer.all_special_ids or text.startswith(tokenizer.id_to_token(token_id) or "\0"):
            return place
    return len(token_ids)


_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token of byte fallback, whose text waits for the next."""


def _utf8() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


class TokenPlaces:
    """The offset of each token in a text, in order, given the end of the text so far.

    A token that continues a character has that character's offset. Decoders with byte fallback show a run of bytes only
    after the next token: that token's text is then the rest of the end."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._next = 0  # the next token's offset, if it shows its own text
        self._end = 0
        self._run = _utf8()  # of bytes that are not shown yet

    def next(self, token_id: int, end: int) -> int:
        """The next token's place."""
        is_shown = end > self._end
        length = self._length(token_id, is_shown=is_shown)
        offset = max(self._next, self._end if length is None else end - length)
        self._next = end if is_shown else offset + (length or 0)
        self._end = end
        return offset

    def _length(self, token_id: int, *, is_shown: bool) -> int | None:
        """The length of the token's own text, or the number of characters that it completes; None if unknown."""
        if self._tokenizer is None:
            return 0
        data = self._tokenizer.token_bytes(token_id)
        if is_shown:
            self._run.reset()
            try:
                return len(data.decode("utf-8"))
            except UnicodeDecodeError:
                return None
        is_byte = _BYTE.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None
        return len(self._run.decode(data)) if is_byte else None


def legacy_logprobs(
    delta: TextDelta, places: TokenPlaces, text_start: int, text_end: int, names: Tokenizer | None
) -> CompletionLogprobs:
    """The legacy form; the answer begins at `text_start` of the choice's text, which now ends at `text_end`. Without
    ``names`` tokens are named by their ids."""
    result = CompletionLogprobs()
    for entry, end in zip(delta.logprobs or (), delta.token_ends or (), strict=True):
        offset = text_start + places.next(entry.token_id, end)
        _append(result, entry.token_id, entry, min(offset, text_end), names)
    return result


class EncodedLogprobs:
    """The legacy form, kept as encoded JSON."""

    def __init__(self) -> None:
        self._lists: list[EncodedList[Any]] = [EncodedList() for _ in CompletionLogprobs.__struct_fields__]

    def extend(self, part: CompletionLogprobs) -> None:
        for kept, items in zip(self._lists, msgspec.structs.astuple(part), strict=True):
            kept.extend(items)

    def whole(self) -> CompletionLogprobs:
        """All stretches joined."""
        return CompletionLogprobs(*(kept.as_list() for kept in self._lists))


def join_logprobs(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Joins several stretches into one."""
    whole = CompletionLogprobs()
    for part in parts:
        for joined, items in zip(msgspec.structs.astuple(whole), msgspec.structs.astuple(part), strict=True):
            joined.extend(items)
    return whole


def _append(
    result: CompletionLogprobs, token_id: int, entry: TokenLogprobs | None, offset: int, tokenizer: Tokenizer | None
) -> None:
    result.tokens.append(legacy_token_text(token_id, tokenizer))
    result.text_offset.append(offset)
    if entry is None:
        result.token_logprobs.append(None)
        result.top_logprobs.append(None)
        return
    result.token_logprobs.append(finite(entry.logprob))
    top: dict[str, float] = {}
    for other_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True):
        top.setdefault(legacy_token_text(other_id, tokenizer), finite(value))
    top.setdefault(legacy_token_text(token_id, tokenizer), finite(entry.logprob))
    result.top_logprobs.append(top)


def token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """One token as text; bytes of partial characters become U+FFFD, as in the answer's `bytes`."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def legacy_token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """The same, but part of a character is written as OpenAI's completions write it, "bytes:\\xe4\\xb8": the legacy
    form has no bytes, and its alternatives are distinguished by their text."""
    if tokenizer is None:
        return token_text(token_id, None)
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _token_bytes(token_id: int, tokenizer: Tokenizer | None) -> bytes:
    return b"" if tokenizer is None else tokenizer.token_bytes(token_id)


def finite(logprob: float) -> float:
    """The log probability, at least ``LEAST_LOGPROB``: JSON has no infinities."""
    return max(logprob, LEAST_LOGPROB)
