"""What `/v1/responses` answers, and the events of its streams, as typed objects in OpenAI's shapes; None is sent as
null, and UNSET not at all (the usage, until there is one)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.openai_api.answers import ChatTokenLogprob
from server.responses_api.schema import FunctionChoice, FunctionTool, Status, TextOptions


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = msgspec.field(default_factory=list)


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str = ""


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: Status = "in_progress"
    content: list[OutputText] = msgspec.field(default_factory=list)
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """summary: always empty; the reasoning itself is in `content`."""

    id: str
    status: Status = "in_progress"
    summary: list[Any] = msgspec.field(default_factory=list)
    content: list[ReasoningText] = msgspec.field(default_factory=list)


class OutputFunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall
ContentPart = OutputText | ReasoningText


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(msgspec.Struct):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ReasoningSettings(msgspec.Struct):
    effort: str | None
    summary: str | None


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class Response(msgspec.Struct, kw_only=True):
    """The response as it stands: in its stream's events, at its end, and when it is asked for again."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus = "in_progress"
    background: Literal[False] = False
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningSettings
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | UnsetType = UNSET
    metadata: dict[str, str]


class ResponseDeleted(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseInputItems(msgspec.Struct, kw_only=True):
    """One page holds them all."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


# Events. `sequence_number` is set when an event is sent.


class ResponseCreated(msgspec.Struct, tag_field="type", tag="response.created"):
    response: Response
    sequence_number: int = 0


class ResponseInProgress(msgspec.Struct, tag_field="type", tag="response.in_progress"):
    response: Response
    sequence_number: int = 0


class ResponseCompleted(msgspec.Struct, tag_field="type", tag="response.completed"):
    response: Response
    sequence_number: int = 0


class ResponseIncomplete(msgspec.Struct, tag_field="type", tag="response.incomplete"):
    response: Response
    sequence_number: int = 0


class ResponseFailed(msgspec.Struct, tag_field="type", tag="response.failed"):
    response: Response
    sequence_number: int = 0


class OutputItemAdded(msgspec.Struct, tag_field="type", tag="response.output_item.added"):
    output_index: int
    item: OutputItem
    sequence_number: int = 0


class OutputItemDone(msgspec.Struct, tag_field="type", tag="response.output_item.done"):
    output_index: int
    item: OutputItem
    sequence_number: int = 0


class ContentPartAdded(msgspec.Struct, tag_field="type", tag="response.content_part.added"):
    item_id: str
    output_index: int
    content_index: int
    part: ContentPart
    sequence_number: int = 0


class ContentPartDone(msgspec.Struct, tag_field="type", tag="response.content_part.done"):
    item_id: str
    output_index: int
    content_index: int
    part: ContentPart
    sequence_number: int = 0


class OutputTextDelta(msgspec.Struct, tag_field="type", tag="response.output_text.delta"):
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ChatTokenLogprob]
    sequence_number: int = 0


class OutputTextDone(msgspec.Struct, tag_field="type", tag="response.output_text.done"):
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ChatTokenLogprob]
    sequence_number: int = 0


class ReasoningTextDelta(msgspec.Struct, tag_field="type", tag="response.reasoning_text.delta"):
    item_id: str
    output_index: int
    content_index: int
    delta: str
    sequence_number: int = 0


class ReasoningTextDone(msgspec.Struct, tag_field="type", tag="response.reasoning_text.done"):
    item_id: str
    output_index: int
    content_index: int
    text: str
    sequence_number: int = 0


class ArgumentsDelta(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str
    sequence_number: int = 0


class ArgumentsDone(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int = 0


class ErrorEvent(msgspec.Struct, tag_field="type", tag="error"):
    code: str | None
    message: str
    param: str | None = None
    sequence_number: int = 0


Event = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
)
