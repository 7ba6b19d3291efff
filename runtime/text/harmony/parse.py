"""Parses an answer's token ids to whole messages."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.text.harmony.header import Header
from runtime.text.harmony.message import HarmonyMessage, SpecialIds
from runtime.text.harmony.prompt import AnswerStart
from runtime.text.harmony.reader import Event, HarmonyReader
from tokenizer import IncrementalDecoder, Tokenizer


class MessageParser:
    """Takes ids as they come. Any ids give messages; errors are never raised.

    role      of the first message, whose header has begun; None if the ids begin with "<|start|>"
    messages  finished ones
    """

    def __init__(self, tokenizer: Tokenizer, ids: SpecialIds, role: str | None = "assistant") -> None:
        self.messages: list[HarmonyMessage] = []
        self._reader = HarmonyReader(AnswerStart(role, "", "start" if role is None else "header"))
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
        self._tokens = ids.by_id
        self._header: Header | None = None
        self._texts: list[str] = []

    @property
    def num_malformed(self) -> int:
        return self._reader.num_malformed

    def push(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            text, token = self._decoder.push((token_id,)), self._tokens.get(token_id)
            self._take(self._reader.push(text, () if token is None else (len(text) - len(token),)))

    def finish(self) -> list[HarmonyMessage]:
        """All messages, at the end of the ids."""
        self._take(self._reader.push(self._decoder.flush()))
        self._take(self._reader.finish())
        return self.messages

    def _take(self, events: Iterable[Event]) -> None:
        for kind, text, header in events:
            if kind == "begin":
                self._header, self._texts = header, []
            elif kind == "text":
                self._texts.append(text)
            elif kind == "end" and self._header is not None:
                role, name, channel, recipient, content_type, *_ = self._header
                content = "".join(self._texts)
                self.messages.append(HarmonyMessage(role, content, name, channel, recipient, content_type))
