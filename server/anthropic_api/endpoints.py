"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's chat API. A request is converted to a chat's
request, and handled as one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from uuid import uuid4

from server.anthropic_api import objects
from server.anthropic_api.conversation import NAMES_OF_TOOLS, RENAMED, Conversation, chat_request
from server.anthropic_api.objects import MessageAnswer, MessageContent, MessageEvent, MessageUsage
from server.anthropic_api.schema import ConversationFields, CountTokensRequest, MessagesRequest
from server.errors import in_own_names, own_name
from server.openai_api.chat import Chat, prepare_chat
from server.requests.answering import Answer, answered
from server.requests.generation import GenerationError, Piece
from server.requests.prompt import whole_conversation
from server.service import Service
from server.transport.body import Body, decode_body
from server.transport.sse import EventStreamResponse, event_frame, named_frame


class _MessageStream(EventStreamResponse):
    ping = named_frame(objects.Ping())


@dataclass(slots=True, kw_only=True)
class RunningMessage(Answer):
    """A message while it is generated, in Anthropic's order: the message's start, each block with its deltas, the
    message's delta and stop."""

    stream_type = _MessageStream
    asked: Chat
    answer: MessageAnswer
    content: MessageContent

    def begins(self) -> Iterable[objects.MessageStart | objects.Ping]:
        return objects.MessageStart(self.answer), objects.Ping()

    def events(self, piece: Piece) -> Iterator[MessageEvent]:
        delta = piece.delta
        yield from self.content.push(delta)
        if delta.finish_reason is not None:
            is_stopped = delta.finish_reason == "stop"
            if is_stopped and isinstance(delta.stop_reason, str):
                self.answer.stop_sequence = delta.stop_reason
            self.answer.stop_reason = self._stop_reason(is_stopped=is_stopped)

    async def whole(self) -> MessageAnswer:
        deque(self.ends(), maxlen=0)
        return self.answer

    def failed_stream(self, error: GenerationError) -> bytes:
        return event_frame("error", self.failed(error).body("anthropic"))

    def _stop_reason(self, *, is_stopped: bool) -> objects.StopReason:
        if not is_stopped:
            most = self.asked.params.max_tokens
            is_full = most is None or self.generation.num_completion_tokens < most
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if self.answer.stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self.content.has_calls else "end_turn"

    def ends(self) -> Iterator[MessageEvent]:
        yield from self.content.finish()
        answer, generation = self.answer, self.generation
        answer.content = self.content.items
        answer.usage = MessageUsage(
            input_tokens=generation.num_prompt_tokens - generation.num_cached_tokens,
            output_tokens=generation.num_completion_tokens,
            cache_read_input_tokens=generation.num_cached_tokens,
            output_tokens_details=objects.OutputTokensDetails(generation.num_reasoning_tokens),
        )
        if generation.missed:
            answer.usage.miss_reason, answer.usage.first_difference = generation.missed
        assert answer.stop_reason is not None
        answer.weight_version = generation.weight_version
        stop = objects.StopDelta(answer.stop_reason, answer.stop_sequence)
        yield objects.MessageDelta(stop, answer.usage, answer.weight_version)
        yield objects.MessageStop()


def _prepare(service: Service, body: Body) -> RunningMessage:
    asked, ignored = decode_body(body, MessagesRequest, service.config), body.exchange.ignored
    conversation = _conversation(service, body, asked)
    answer_id = f"msg_{uuid4().hex}"
    with in_own_names({**RENAMED, **NAMES_OF_TOOLS, **conversation.names()}):
        chat = prepare_chat(service, body.exchange, chat_request(service, asked, conversation, ignored), answer_id)
    ignored += [own_name(name, conversation.names()) for name in chat.left_out]
    usage = MessageUsage(input_tokens=chat.generation.num_prompt_tokens, output_tokens=0)
    return RunningMessage(
        asked=chat,
        names={**RENAMED, **NAMES_OF_TOOLS},
        answer=MessageAnswer(id=answer_id, model=chat.model_name, usage=usage),
        content=MessageContent(omits_thinking=asked.thinking is not None and asked.thinking.display == "omitted"),
    )


def _conversation(service: Service, body: Body, asked: ConversationFields) -> Conversation:
    exchange = body.exchange
    keeps_noise = service.config.keep_client_noise
    return Conversation(asked, exchange.ignored, keeps_noise=keeps_noise, dropped=exchange.normalized)


def _count(service: Service, body: Body) -> objects.TokensCount:
    """The number of tokens of the request, without a limit."""
    asked, ignored = decode_body(body, CountTokensRequest, service.config), body.exchange.ignored
    service.adapter_of(asked.model)
    conversation = _conversation(service, body, asked)
    with in_own_names({**RENAMED, **conversation.names()}):
        chat = chat_request(service, asked, conversation, ignored)
        return objects.TokensCount(len(whole_conversation(service, body.exchange.tenant, chat).token_ids))


create_message, count_tokens = answered(_prepare), answered(_count)
