"""The answers of `/v1/responses`, and the events of its streams, as typed objects in OpenAI's shapes; None is sent as
null, and UNSET not at all (the usage, until there is one). And a response's output as it grows: items and their events,
in OpenAI's order.

    added → (part added → deltas → text done → part done) → done         a message, or reasoning
    added → deltas → arguments done → done                               a function call
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType

from runtime.engine.messages import MissReason
from runtime.text.parts import ToolCallDelta
from server.openai_api.answers import AnswerItems, ChatTokenLogprob
from server.requests.structured import tool_input
from server.responses_api.schema import ResponsesTool, Status, TextOptions, ToolChoice


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
    namespace: str | UnsetType = UNSET


class OutputCustomToolCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str = ""
    status: Status = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomToolCall
ContentPart = OutputText | ReasoningText


class InputTokensDetails(msgspec.Struct):
    """miss_reason, first_difference: as in chat's `PromptTokensDetails`."""

    cached_tokens: int
    cache_write_tokens: int = 0
    miss_reason: MissReason | UnsetType = UNSET
    first_difference: int | UnsetType = UNSET


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
    """The response: in its stream's events, at its end, and when it is retrieved."""

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
    tool_choice: ToolChoice
    tools: list[ResponsesTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | UnsetType = UNSET
    metadata: dict[str, str]
    weight_version: str | UnsetType = UNSET


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


# Events: first their common fields.


class _Event(msgspec.Struct, tag_field="type", kw_only=True):
    """sequence_number: set when the event is sent."""

    sequence_number: int = 0


class _OfResponse(_Event):
    response: Response


class _OfItem(_Event):
    item_id: str
    output_index: int


class _OfPart(_OfItem):
    content_index: int


class ResponseCreated(_OfResponse, tag="response.created"):
    pass


class ResponseInProgress(_OfResponse, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, tag="response.incomplete"):
    pass


class ResponseFailed(_OfResponse, tag="response.failed"):
    pass


class OutputItemAdded(_Event, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class OutputItemDone(_Event, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ContentPartAdded(_OfPart, tag="response.content_part.added"):
    part: ContentPart


class ContentPartDone(_OfPart, tag="response.content_part.done"):
    part: ContentPart


class OutputTextDelta(_OfPart, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(_OfPart, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningTextDelta(_OfPart, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(_OfPart, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_OfItem, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfItem, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomInputDelta(_OfItem, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(_OfItem, tag="response.custom_tool_call_input.done"):
    input: str


class ErrorEvent(_Event, tag="error"):
    code: str | None
    message: str
    param: str | None = None


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
    | CustomInputDelta
    | CustomInputDone
    | ErrorEvent
)


Names = Mapping[str, tuple[str, str]]
"""The model's name of a function: its namespace, and its name there."""


class ResponseOutput(AnswerItems[OutputItem, Event]):
    """`namespaced`: functions in namespaces, by the model's names for them. `custom`: the names of custom tools."""

    def __init__(self, namespaced: Names, custom: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._namespaced, self._custom = namespaced, custom
        self._arguments: list[str] = []  # of the last call of a custom tool

    def complete(self, *, is_complete: bool) -> Iterator[Event]:
        """Ends the output: an answer has at least one item."""
        if not self.items:
            yield from self._grow("text", None, "")
        yield from self.finish(is_complete=is_complete)

    def _new(self, kind: str, call: ToolCallDelta | None) -> OutputItem:
        if call is None:
            return OutputMessage(_new_id("msg")) if kind == "text" else OutputReasoning(_new_id("rs"))
        if call.name in self._custom:
            self._arguments = []
            return OutputCustomToolCall(_new_id("ctc"), call.id or _new_id("call"), call.name or "")
        namespace, name = self._namespaced.get(call.name or "", (UNSET, call.name or ""))
        return OutputFunctionCall(_new_id("fc"), call.id or _new_id("call"), name, namespace=namespace)

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        self.items.append(item)
        yield OutputItemAdded(self.index, item)
        if isinstance(item, OutputMessage):
            item.content.append(OutputText())
            yield ContentPartAdded(item.id, self.index, 0, item.content[0])
        elif isinstance(item, OutputReasoning):
            item.content.append(ReasoningText())
            yield ContentPartAdded(item.id, self.index, 0, item.content[0])

    def _add(self, item: OutputItem, text: str, logprobs: Sequence[ChatTokenLogprob]) -> Iterator[Event]:
        if isinstance(item, OutputMessage):
            item.content[0].text += text
            item.content[0].logprobs += logprobs
            yield OutputTextDelta(item.id, self.index, 0, text, list(logprobs))
        elif isinstance(item, OutputReasoning):
            item.content[0].text += text
            yield ReasoningTextDelta(item.id, self.index, 0, text)
        elif isinstance(item, OutputCustomToolCall):
            self._arguments.append(text)
        else:
            item.arguments += text
            yield ArgumentsDelta(item.id, self.index, text)

    def _end(self, item: OutputItem, *, is_complete: bool) -> Iterator[Event]:
        if isinstance(item, OutputMessage):
            part = item.content[0]
            yield OutputTextDone(item.id, self.index, 0, part.text, part.logprobs)
            yield ContentPartDone(item.id, self.index, 0, part)
        elif isinstance(item, OutputReasoning):
            thought = item.content[0]
            yield ReasoningTextDone(item.id, self.index, 0, thought.text)
            yield ContentPartDone(item.id, self.index, 0, thought)
        elif isinstance(item, OutputCustomToolCall):
            item.input = _text_of("".join(self._arguments))
            yield CustomInputDelta(item.id, self.index, item.input)
            yield CustomInputDone(item.id, self.index, item.input)
        else:
            yield ArgumentsDone(item.id, self.index, item.name, item.arguments)
        item.status = "completed" if is_complete else "incomplete"
        yield OutputItemDone(self.index, item)


def _text_of(arguments: str) -> str:
    """The input of a custom tool's call; arguments of another form stay as they are."""
    fields = tool_input(arguments)
    text = fields.get("input")
    return text if isinstance(text, str) and len(fields) == 1 else arguments


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
