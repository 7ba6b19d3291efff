"""The chunks of a streamed chat, in OpenAI's order: each choice's role; then deltas, each kind in a chunk of its own;
each choice's end; the usage.

Most chunks differ only in their text: the JSON around it is encoded once per choice."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from runtime.text.parts import ToolCallDelta
from runtime.text.pipeline import TextDelta
from server.openai_api.admitted_chat import Chat
from server.openai_api.answers import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatFunctionDelta,
    ChatToolCallDelta,
)
from server.requests.generation import Piece
from server.transport.sse import frame

_encode = msgspec.json.Encoder().encode
_PLACE = "TEXT"


class ChatChunks:
    """Frames of events. `of` takes the pieces in order."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._has_role = [not chat.generation.has_parts] * chat.params.n
        self._has_content = [bool(chat.echo)] * chat.params.n
        self._has_calls = [False] * chat.params.n
        self._is_plain = not (chat.has_token_ids or chat.has_running_usage or chat.params.logprobs is not None)
        self._around_text = [self._around(index) for index in range(chat.params.n)]

    def opening(self) -> bytes:
        """The roles, at once, unless an answer may begin with something other than content: then they wait for it."""
        return b"".join(
            self._frame(ChatChunkChoice(index, ChatDelta("assistant", content=self._chat.echo, refusal=None)))
            for index, has_role in enumerate(self._has_role)
            if has_role
        )

    def of(self, piece: Piece) -> bytes:
        """A piece's chunks, if it has any text, calls or end."""
        delta = piece.delta
        is_text = not (delta.reasoning or delta.tool_calls) and delta.finish_reason is None
        if is_text and self._is_plain and self._has_content[piece.choice]:
            before, after = self._around_text[piece.choice]
            return before + _encode(delta.text) + after if delta.text else b""
        return b"".join(map(self._frame, self._choices(piece)))

    def usage(self) -> bytes:
        """The last chunk, which has no choices."""
        return frame(self._chunk([], has_usage=True))

    def _choices(self, piece: Piece) -> list[ChatChunkChoice]:
        delta, index = piece.delta, piece.choice
        choices = list(self._said(piece))
        if self._chat.has_token_ids and delta.token_ids:
            if not choices:  # their text is formatting, or comes with later ones
                choices.append(ChatChunkChoice(index, ChatDelta()))
            choices[0].token_ids = delta.token_ids
        if choices and not self._has_role[index]:
            self._give_role(choices)
        if delta.finish_reason is not None:
            choices += self._end(index, delta)
        return choices

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

    def _give_role(self, choices: list[ChatChunkChoice]) -> None:
        """Sends the role, in a chunk of its own or with a leading call. Content that may never come is null."""
        index, first = choices[0].index, choices[0].delta
        self._has_role[index] = True
        content = self._chat.echo or ("" if first.content is not UNSET else None)
        if first.tool_calls is not UNSET:
            first.role, first.content, first.refusal = "assistant", content, None
        else:
            choices.insert(0, ChatChunkChoice(index, ChatDelta("assistant", content=content, refusal=None)))

    def _end(self, index: int, delta: TextDelta) -> list[ChatChunkChoice]:
        """Ends a choice; without content and calls, its content is empty, not null."""
        choices = []
        if not self._has_content[index] and not self._has_calls[index]:
            if self._has_role[index]:
                choices.append(ChatChunkChoice(index, ChatDelta(content="")))
            else:
                choices.append(ChatChunkChoice(index, ChatDelta("assistant", content="", refusal=None)))
        end = ChatChunkChoice(
            index, ChatDelta(), finish_reason=self._chat.finish_reason(delta, has_calls=self._has_calls[index])
        )
        if delta.stop_reason is not None:
            end.stop_reason = delta.stop_reason
        return [*choices, end]

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
        """The JSON before and after the text of a choice's chunk."""
        chunk = self._chunk([ChatChunkChoice(index, ChatDelta(content=_PLACE))], has_usage=False)
        before, _, after = frame(chunk).rpartition(_encode(_PLACE))
        return before, after


def _call(call: ToolCallDelta) -> ChatToolCallDelta:
    if call.id is None or call.name is None:
        return ChatToolCallDelta(call.index, UNSET, UNSET, ChatFunctionDelta(UNSET, call.arguments))
    return ChatToolCallDelta(call.index, call.id, "function", ChatFunctionDelta(call.name, call.arguments))
