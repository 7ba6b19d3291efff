"""The chunks of a streamed chat, in OpenAI's order: each choice's role; then what comes, each thing in a chunk of its
own; each choice's end; the usage.

Most chunks differ from each other in their text alone: what stands around it is encoded once for each choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from runtime.text.parts import ToolCallDelta
from server.generation import Piece
from server.responses import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatFunctionDelta,
    ChatToolCallDelta,
)
from server.sse import frame

if TYPE_CHECKING:
    from server.chat import Chat

_encode = msgspec.json.Encoder().encode
_PLACE = "TEXT"


class ChatChunks:
    """Frames of events. `of` takes the pieces in order."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._has_content = [bool(chat.echo)] * chat.params.n
        self._has_calls = [False] * chat.params.n
        self._is_plain = not (chat.has_token_ids or chat.has_running_usage or chat.params.logprobs is not None)
        self._around_text = [self._around(index) for index in range(chat.params.n)]

    def opening(self) -> bytes:
        """The roles. Where there may be an answer without content, that begins as null, as OpenAI's does."""
        chat = self._chat
        content = chat.echo or (None if chat.generation.has_parts else "")
        return b"".join(
            self._frame(ChatChunkChoice(index, ChatDelta("assistant", content=content, refusal=None)))
            for index in range(chat.params.n)
        )

    def of(self, piece: Piece) -> bytes:
        """What a piece says; nothing where it says nothing."""
        delta = piece.delta
        if self._is_plain and delta.finish_reason is None and not delta.reasoning and not delta.tool_calls:
            if not delta.text:
                return b""
            self._has_content[piece.choice] = True
            before, after = self._around_text[piece.choice]
            return before + _encode(delta.text) + after
        return b"".join(self._frame(choice) for choice in self._choices(piece))

    def usage(self) -> bytes:
        """The last chunk, which has no choices."""
        return frame(self._chunk([], has_usage=True))

    def _choices(self, piece: Piece) -> Iterator[ChatChunkChoice]:
        delta, index = piece.delta, piece.choice
        token_ids = delta.token_ids if self._chat.has_token_ids else []
        for choice in self._said(piece):
            if token_ids:
                choice.token_ids, token_ids = token_ids, []
            yield choice
        if token_ids:  # whose text is layout, or will come with later ones
            yield ChatChunkChoice(index, ChatDelta(), token_ids=token_ids)
        if delta.finish_reason is not None:
            if not self._has_content[index] and not self._has_calls[index] and self._chat.generation.has_parts:
                yield ChatChunkChoice(index, ChatDelta(content=""))
            reason = self._chat.finish_reason(delta, has_calls=self._has_calls[index])
            end = ChatChunkChoice(index, ChatDelta(), finish_reason=reason)
            if delta.stop_reason is not None:
                end.stop_reason = delta.stop_reason
            yield end

    def _said(self, piece: Piece) -> Iterator[ChatChunkChoice]:
        delta, index = piece.delta, piece.choice
        if delta.reasoning:
            yield ChatChunkChoice(index, ChatDelta(reasoning_content=delta.reasoning))
        logprobs = self._chat.token_logprobs(delta)
        if delta.text or logprobs:
            self._has_content[index] = True
            yield ChatChunkChoice(index, ChatDelta(content=delta.text), self._chat.logprobs(logprobs))
        for call in delta.tool_calls:
            self._has_calls[index] = True
            yield ChatChunkChoice(index, ChatDelta(tool_calls=[_call(call)]))

    def _chunk(self, choices: list[ChatChunkChoice], *, has_usage: bool) -> ChatChunk:
        chat = self._chat
        return ChatChunk(
            id=chat.request_id,
            created=chat.created,
            model=chat.service.model_name,
            system_fingerprint=chat.service.system_fingerprint,
            choices=choices,
            usage=chat.usage() if has_usage else UNSET,
        )

    def _frame(self, choice: ChatChunkChoice) -> bytes:
        return frame(self._chunk([choice], has_usage=self._chat.has_running_usage))

    def _around(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text of a choice's chunk."""
        chunk = self._chunk([ChatChunkChoice(index, ChatDelta(content=_PLACE))], has_usage=False)
        before, _, after = frame(chunk).rpartition(_encode(_PLACE))
        return before, after


def _call(call: ToolCallDelta) -> ChatToolCallDelta:
    if call.id is None or call.name is None:
        return ChatToolCallDelta(call.index, UNSET, UNSET, ChatFunctionDelta(UNSET, call.arguments))
    return ChatToolCallDelta(call.index, call.id, "function", ChatFunctionDelta(call.name, call.arguments))
