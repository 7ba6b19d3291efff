"""`POST /v1/chat/completions/batch`: several conversations with the same fields, answered at once, in vLLM's shape: a
choice each, in their order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import UNSET

from server.errors import in_own_names, invalid
from server.openai_api.answers import ChatCompletion
from server.openai_api.chat import prepare_chat
from server.openai_api.chat_answer import ChatAnswer, ChatChunks, Choice
from server.openai_api.schema import ChatCompletionRequest, Message
from server.requests.answering import answered
from server.requests.thinking import settle_thinking
from server.service import Service, new_id
from server.transport.body import Body, decode_body

Conversation = Annotated[list[Message], msgspec.Meta(min_length=1)]


class BatchChatRequest(ChatCompletionRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions/batch`: a chat's fields, but for `stream`, `tools`, `prompt_logprobs` and `n`.

    messages  conversations, each a list of messages
    """

    messages: Annotated[list[Conversation], msgspec.Meta(min_length=1)]  # type: ignore[assignment]


@dataclass(slots=True, kw_only=True)
class _BatchAnswer(ChatAnswer):
    async def whole(self) -> ChatCompletion:
        answer = await ChatAnswer.whole(self)
        answer.prompt_token_ids = UNSET  # those of the first alone
        return answer


def _prepare(service: Service, body: Body) -> _BatchAnswer:
    exchange, most = body.exchange, service.config.max_prompts
    asked = decode_body(body, BatchChatRequest, service.config)
    for name in ("stream", "tools", "prompt_logprobs"):
        if getattr(asked, name):
            raise invalid(
                name, f"Unsupported parameter: {name} (not for several conversations).", "unsupported_parameter"
            )
    if asked.n not in (None, 1):
        raise invalid("n", f"n must be 1, got {asked.n}.")
    if len(asked.messages) > most:
        raise invalid("messages", f"messages must have at most {most} conversations, got {len(asked.messages)}.")
    request_id = new_id("chatcmpl")
    fields = {name: getattr(asked, name) for name in ChatCompletionRequest.__struct_fields__}
    chats = []
    for i, conversation in enumerate(asked.messages):
        one = ChatCompletionRequest(**{**fields, "messages": conversation})
        ignored: list[str] = []
        settle_thinking(service, one, ignored, exchange.sent)
        with in_own_names({f"messages[{j}]": f"messages[{i}][{j}]" for j in range(len(one.messages))}):
            chats.append(prepare_chat(service, exchange, one, request_id))
        exchange.ignored += [name for name in (*ignored, *chats[-1].left_out) if name not in exchange.ignored]
    first = chats[0]
    if any(chat.generation.params != first.generation.params for chat in chats):
        raise invalid("messages", "messages: either each conversation's answer begins within reasoning, or none.")
    generation = replace(
        first.generation,
        prompts=[chat.prompt_token_ids for chat in chats],
        images=tuple(images for chat in chats for images in chat.generation.images),
    )
    chat = replace(first, generation=generation)
    return _BatchAnswer(asked=chat, chunks=ChatChunks(chat), choices=[Choice([each.echo]) for each in chats])


create_chat_batch = answered(_prepare)
