"""The requests of `/v1/responses`: OpenAI's fields, and vLLM's extensions that a chat also has.

Fields without effect and unsupported ones are in `server.openai_api.fields`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from server.openai_api.schema import (
    MAX_TOOLS,
    CommonFields,
    Int,
    JsonObjectFormat,
    Name,
    ReasoningEffort,
    TextFormat,
    held,
)


class NamedJsonSchemaFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag="json_schema"
):
    """`response_format`'s json_schema without its inner object."""

    schema: dict[str, Any]
    name: Name | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """verbosity: only "medium", the default."""

    format: TextFormat | JsonObjectFormat | NamedJsonSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """effort: the chat template's variable `reasoning_effort`. summary: accepted without effect, since the reasoning
    itself is sent."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A function of the client."""

    name: Name
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class NamespaceTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="namespace"):
    """The client's functions in a namespace; `server.responses_api.request` gives them the names that the model
    reads."""

    name: Name
    description: str
    tools: Annotated[list[FunctionTool], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]


class CustomTool(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag="custom"
):
    """A function whose one argument is a text. format: what the text looks like, which the model is told."""

    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None


class WebSearchTool(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="web_search"):
    """A tool that OpenAI runs. The model is told that it is absent."""


class WebSearchPreviewTool(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="web_search_preview"):
    """The same by an older name."""


AbsentTool = WebSearchTool | WebSearchPreviewTool
ResponsesTool = FunctionTool | NamespaceTool | CustomTool | WebSearchTool | WebSearchPreviewTool
"""The other kinds of OpenAI's tools are run by OpenAI."""


class FunctionChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag="function"
):
    """The one function that must be called, or one that may be. namespace: of the function."""

    name: Name
    namespace: Name | None = None


class AllowedFunctionsChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"
):
    """Only these of the request's tools may be called ("auto"); one of them must be ("required")."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctionsChoice


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_obfuscation: padding against traffic analysis; refused when true."""

    include_obfuscation: bool | None = None


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Only the first brings something: no other exists here. (Reasoning is sent in plain text.)"""


class ResponsesRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`.

    input                 a text, or items: messages, function calls and their outputs, reasoning
    instructions          the system message of this response alone
    previous_response_id  continues the conversation of a stored response
    store                 keep the response for `GET` and `previous_response_id` (default: true)
    metadata              returned as sent
    """

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], held(*INPUT_ITEMS, min_length=1)]
    instructions: str | None = None
    previous_response_id: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[Include] | None = None
    max_output_tokens: Int | None = None
    top_logprobs: Int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponsesTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


SAME_AS_IN_A_CHAT = (*CommonFields.__struct_fields__, "parallel_tool_calls", "stop", "chat_template_kwargs")
"""Fields that mean what they mean in a chat."""


# Input items


Status = Literal["in_progress", "completed", "incomplete"]


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message in the input's form, or an output message as it was received."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[dict[str, Any]], held(InputPart)]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class InputFunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str
    namespace: Name | None = None
    id: str | None = None
    status: Status | None = None


class InputFunctionCallOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a call of a function or a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Annotated[list[dict[str, Any]], held(InputPart)]
    id: str | None = None
    status: Status | None = None


class InputCustomToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: Name
    input: str
    namespace: Name | None = None
    id: str | None = None
    status: Status | None = None


class InputReasoningPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An assistant's reasoning before the next item of its turn. The summary is not read if there is content;
    encrypted reasoning of another server is never read."""

    type: Literal["reasoning"]
    summary: list[InputReasoningPart]
    id: str | None = None
    content: list[InputReasoningPart] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class InputPart(msgspec.Struct):
    """A part of an item's content; `server.responses_api.request` reads it."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


INPUT_ITEMS = (InputMessage, InputFunctionCall, InputCustomToolCall, InputFunctionCallOutput, InputReasoning)
