"""`/v1/responses`: OpenAI's newer chat API. A request is converted to a chat's request, and handled as one.

A stored response can be retrieved, continued (`previous_response_id`) and deleted; a running one can be cancelled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from server.errors import ApiError, in_own_names, invalid, own_name
from server.openai_api.chat import Chat, prepare_chat
from server.openai_api.schema import Message
from server.requests.answering import Answer, respond_awake
from server.requests.generation import GenerationError, Piece
from server.requests.thinking import settle_thinking
from server.responses_api import objects
from server.responses_api.objects import Event, Response, ResponseOutput
from server.responses_api.request import (
    LOGPROBS,
    RENAMED,
    absent_tools,
    begun_response,
    chat_request,
    flat_tools,
    input_messages,
    names_of_items,
    names_of_tools,
    output_messages,
)
from server.responses_api.schema import CustomTool, ResponsesRequest
from server.responses_api.store import ResponseStore, StoredResponse
from server.service import AppState, Service, Shared
from server.transport.body import decode_body, read_body
from server.transport.exchange import Exchange
from server.transport.json_answer import JsonAnswer
from server.transport.sse import named_frame


@dataclass(slots=True, kw_only=True)
class RunningResponse(Answer):
    """A response while it is generated. Its events are in OpenAI's order: created, in progress, each item with its
    parts, the end. There is no `[DONE]`.

    input_items   of its request
    conversation  the messages that it answers, without instructions
    """

    asked: Chat
    tenant: str | None
    response: Response
    output: ResponseOutput
    input_items: list[dict[str, Any]]
    conversation: list[Message]
    has_logprobs: bool
    finish_reason: str | None = None
    num_events: int = 0

    def admitted(self) -> None:
        key = self.tenant, self.response.id
        self.service.running_responses[key] = self
        self.generation.on_close.append(partial(self.service.running_responses.pop, key))

    def begins(self) -> Iterable[Event]:
        return objects.ResponseCreated(self.response), objects.ResponseInProgress(self.response)

    async def whole(self) -> Response:
        deque(self.ends(), maxlen=0)
        return self.response

    def failed_stream(self, error: GenerationError) -> bytes:
        told = self.failed(error)
        event = (
            objects.ErrorEvent(told.code, told.message) if error.is_cancelled else objects.ResponseFailed(self.response)
        )
        return self.spelled((event,))

    def spelled(self, events: Iterable[Event]) -> bytes:
        frames = []
        for event in events:
            event.sequence_number = self.num_events
            self.num_events += 1
            frames.append(named_frame(event))
        return b"".join(frames)

    def events(self, piece: Piece) -> Iterator[Event]:
        if piece.delta.finish_reason is not None:
            self.finish_reason = piece.delta.finish_reason
        return self.output.push(piece.delta, self.asked.token_logprobs(piece.delta) if self.has_logprobs else ())

    def ends(self) -> Iterator[Event]:
        response, is_complete = self.response, self.finish_reason != "length"
        response.weight_version = self.generation.weight_version
        yield from self.output.complete(is_complete=is_complete)
        if is_complete:
            response.status, response.completed_at = "completed", int(time.time())
        else:
            response.status, response.incomplete_details = "incomplete", objects.IncompleteDetails("max_output_tokens")
        self._end([*self.conversation, *output_messages(self.output.items)])
        yield objects.ResponseCompleted(response) if is_complete else objects.ResponseIncomplete(response)

    def failed(self, error: GenerationError) -> ApiError:
        told = self.service.failure(self.response.id, error)
        self.response.status = "cancelled" if error.is_cancelled else "failed"
        if not error.is_cancelled:
            self.response.error = objects.ResponseFault("server_error", told.message)
        deque(self.output.complete(is_complete=False), maxlen=0)
        self._end(self.conversation)
        return told

    def _end(self, conversation: list[Message]) -> None:
        generation, response = self.generation, self.response
        response.output = self.output.items
        response.usage = objects.ResponseUsage(
            input_tokens=generation.num_prompt_tokens,
            input_tokens_details=objects.InputTokensDetails(generation.num_cached_tokens, 0, *generation.missed),
            output_tokens=generation.num_completion_tokens,
            output_tokens_details=objects.OutputTokensDetails(generation.num_reasoning_tokens),
            total_tokens=generation.num_prompt_tokens + generation.num_completion_tokens,
        )
        if response.store:
            self.service.responses.put(self.tenant, response, self.input_items, conversation)


async def create_response(request: Request) -> HttpResponse:
    service: Service = request.app.state.service
    body = await read_body(request, service.config)
    asked = await service.prepare(len(body), partial(decode_body, body, ResponsesRequest, service.config))
    before: list[Message] = []
    if asked.previous_response_id is not None:
        stored = _stored(service.responses, body.exchange.tenant, asked.previous_response_id, "previous_response_id")
        before = stored.conversation
    running = await service.prepare_body(body, partial(_prepare, service, body.exchange, asked, before))
    return await respond_awake(service, running, request)


def _prepare(service: Service, exchange: Exchange, asked: ResponsesRequest, before: list[Message]) -> RunningResponse:
    """Prepares the request for the engine; `before` are the messages that it continues. Raises `ApiError`."""
    ignored = exchange.ignored
    given: list[dict[str, Any]] = (
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": asked.input}]}]
        if isinstance(asked.input, str)
        else asked.input
    )
    items = input_messages(asked.input)
    ignored += items.ignored
    conversation = [*before, *items.messages]
    response_id = f"resp_{uuid4().hex}"
    of_tools = names_of_tools(asked.tools or ())
    names = RENAMED | of_tools
    with in_own_names(names):
        tools, namespaced = flat_tools(asked.tools or ())
        ignored += [f"{place}.type={kind}" for place, kind in absent_tools(asked.tools or ()).items()]
        request = chat_request(asked, conversation, tools)
        settle_thinking(service, request, ignored, RENAMED)
        of_items = names_of_items(items, len(request.messages))
        names |= of_items
        chat = prepare_chat(service, exchange, request, response_id)
    told = (own_name(name, of_tools | of_items) for name in chat.left_out)
    ignored += [name for name in told if not name.startswith("messages")]  # stored responses reported theirs
    params = chat.generation.params
    return RunningResponse(
        asked=chat,
        names=RENAMED | of_tools,
        tenant=exchange.tenant,
        response=begun_response(
            asked, response_id, int(time.time()), chat.model_name, params.temperature, params.top_p
        ),
        output=ResponseOutput(
            namespaced, frozenset(tool.name for tool in asked.tools or () if isinstance(tool, CustomTool))
        ),
        input_items=[{"id": f"{_kind(item)}_{uuid4().hex}", **item} for item in given],
        conversation=conversation,
        has_logprobs=LOGPROBS in (asked.include or ()),
    )


def _kind(item: dict[str, Any]) -> str:
    kinds = {
        "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
        "custom_tool_call_output": "ctco", "reasoning": "rs",
    }  # fmt: skip
    return kinds.get(item.get("type", ""), "msg")


async def get_response(request: Request) -> HttpResponse:
    """A stored or running response, as it is now."""
    shared, tenant, response_id = _asked_for(request)
    if request.query_params.get("stream", "false") != "false":
        raise invalid("stream", "A stored response is not streamed again.", "unsupported_parameter")
    if (running := shared.running_responses.get((tenant, response_id))) is not None:
        running.response.output = running.output.items
        return JsonAnswer(running.response)
    return JsonAnswer(_stored(shared.responses, tenant, response_id).response)


async def delete_response(request: Request) -> HttpResponse:
    """Deletes a stored response. Responses that continue it are kept."""
    shared, tenant, response_id = _asked_for(request)
    if not await shared.responses.delete(tenant, response_id):
        raise _not_found(response_id, "response_id")
    return JsonAnswer(objects.ResponseDeleted(response_id))


async def cancel_response(request: Request) -> HttpResponse:
    """Ends a running response; one that has ended stays as it is."""
    shared, tenant, response_id = _asked_for(request)
    running = shared.running_responses.get((tenant, response_id))
    if running is None:
        return JsonAnswer(_stored(shared.responses, tenant, response_id).response)
    running.generation.cancel()
    running.response.output = running.output.items
    running.response.status = "cancelled"
    return JsonAnswer(running.response)


async def list_input_items(request: Request) -> HttpResponse:
    """The input items of a stored response's own request, the last first."""
    shared, tenant, response_id = _asked_for(request)
    items = _stored(shared.responses, tenant, response_id).input_items[::-1]
    return JsonAnswer(objects.ResponseInputItems(data=items, first_id=items[0]["id"], last_id=items[-1]["id"]))


def _asked_for(request: Request) -> tuple[Shared, str | None, str]:
    return AppState.of(request).shared, Exchange.of(request).tenant, request.path_params["response_id"]


def _stored(
    responses: ResponseStore, tenant: str | None, response_id: str, param: str = "response_id"
) -> StoredResponse:
    """Raises `ApiError` 404 if there is none."""
    stored = responses.get(tenant, response_id)
    if stored is None:
        raise _not_found(response_id, param)
    return stored


def _not_found(response_id: str, param: str) -> ApiError:
    return ApiError(404, f"There is no stored response {response_id[:100]!r}.", param=param, code="response_not_found")
