"""`POST /v1/chat/completions`: a chat's answer in OpenAI's shape, as chunks or whole.

A stream begins with each choice's role; then the pieces' chunks, of reasoning, text, calls and ends; the usage. Most
chunks differ only in their text: the JSON around it is encoded once per choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from runtime.text.parts import ToolCallDelta
from runtime.text.pipeline import TextDelta
from server.openai_api.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinishReason,
    ChatFunction,
    ChatFunctionDelta,
    ChatMessage,
    ChatTokenLogprob,
    ChatToolCall,
    ChatToolCallDelta,
)
from server.openai_api.chat import Chat, prepare_chat
from server.openai_api.logprobs import prompt_logprobs
from server.openai_api.schema import ChatCompletionRequest
from server.requests.answering import Answer, answered
from server.requests.generation import Piece
from server.requests.thinking import settle_thinking
from server.requests.transfer import answer_of
from server.service import Service, new_id
from server.transport.body import Body, decode_body
from server.transport.json_answer import EncodedList
from server.transport.sse import DONE, frame

_encode = msgspec.json.Encoder().encode
_PLACE = "TEXT"


def _prepare(service: Service, body: Body) -> ChatAnswer:
    exchange = body.exchange
    asked = decode_body(body, ChatCompletionRequest, service.config)
    settle_thinking(service, asked, exchange.ignored, exchange.sent)
    chat = prepare_chat(service, exchange, asked, new_id("chatcmpl"))
    exchange.ignored += chat.left_out
    choices = [Choice([chat.echo]) for _ in range(chat.params.n)]
    return ChatAnswer(asked=chat, chunks=ChatChunks(chat), choices=choices)


create_chat_completion = answered(_prepare)


@dataclass(slots=True, kw_only=True)
class ChatAnswer(Answer):
    gives_aborted = True
    asked: Chat
    chunks: ChatChunks
    choices: list[Choice]

    def opening(self) -> bytes:
        return self.chunks.opening()

    def push(self, piece: Piece) -> bytes:
        return self.chunks.of(piece)

    def closing(self) -> bytes:
        return (self.chunks.usage() if self.asked.has_usage else b"") + DONE

    def take(self, piece: Piece) -> None:
        self.choices[piece.choice].add(self.asked, piece.delta)

    async def whole(self) -> ChatCompletion:
        chat, service = self.asked, self.service
        return ChatCompletion(
            id=chat.generation.request_id,
            created=chat.created,
            model=chat.model_name,
            system_fingerprint=service.system_fingerprint,
            choices=[
                ChatChoice(
                    index=index,
                    message=choice.message(),
                    logprobs=chat.logprobs(choice.logprobs.as_list()),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if chat.has_token_ids else UNSET,
                    weight_version=self.generation.version_of(index),
                )
                for index, choice in enumerate(self.choices)
            ],
            usage=chat.usage(),
            prompt_token_ids=chat.prompt_token_ids if chat.has_token_ids else UNSET,
            prompt_logprobs=(
                UNSET
                if chat.params.prompt_logprobs is None
                else await prompt_logprobs(self.generation.prompt_logprobs(0), service.tokenizer)
            ),
            kv_transfer_params=UNSET if self.generation.offered is None else answer_of(self.generation.offered),
        )


@dataclass(slots=True)
class Choice:
    """A choice of an answer that is not streamed, as it grows."""

    texts: list[str]
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ChatToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: EncodedList[ChatTokenLogprob] = field(default_factory=EncodedList)
    finish_reason: ChatFinishReason = "stop"
    stop_reason: int | str | None = None

    def add(self, chat: Chat, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.id is not None and call.name is not None:
                self.tool_calls.append(ChatToolCall(call.id, ChatFunction(call.name, "")))
            self.tool_calls[call.index].function.arguments += call.arguments
        self.token_ids += delta.token_ids
        self.logprobs.extend(chat.token_logprobs(delta))
        if delta.finish_reason is not None:
            self.finish_reason = chat.finish_reason(delta, has_calls=bool(self.tool_calls))
            self.stop_reason = delta.stop_reason

    def message(self) -> ChatMessage:
        content = "".join(self.texts)
        return ChatMessage(
            content if content or not self.tool_calls else None,
            reasoning_content="".join(self.reasoning) or UNSET,
            tool_calls=self.tool_calls or UNSET,
        )


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
        end.weight_version = self._chat.generation.version_of(index)
        return [*choices, end]

    def _chunk(self, choices: list[ChatChunkChoice], *, has_usage: bool) -> ChatChunk:
        chat = self._chat
        return ChatChunk(
            id=chat.generation.request_id,
            created=chat.created,
            model=chat.model_name,
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
