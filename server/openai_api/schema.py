"""The requests of OpenAI's API, with vLLM's additional sampling parameters, as typed objects.

An absent or null field is None; then the model's generation config, then OpenAI's default applies.
Types are strict (a bool is no number, "1" no integer); ranges are checked by `SamplingParams`. Fields without effect
and unsupported ones are in `server.openai_api.fields`; the requests of `/v1/responses` in
`server.responses_api.schema`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from runtime.engine.samplers import MAX_BREAKERS
from runtime.pooling import Pooling
from runtime.sampling_table import COLUMNS

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer of 64 bits: no request brings arithmetic on thousands of digits."""


def held(*kinds: type, min_length: int | None = None, max_length: int | None = None) -> msgspec.Meta:
    """Annotates a list whose objects, of these types, the schema leaves open, since they are read one by one."""
    return msgspec.Meta(extra={"held": kinds}, min_length=min_length, max_length=max_length)


Prompt = str | list[str | Int | list[Int]]
"""A text, texts, the ids of one prompt, or those of several. A mixture passes here and is refused later."""

MAX_NAME_CHARACTERS = 128

_NAME = rf"^[a-zA-Z0-9_.-]{{1,{MAX_NAME_CHARACTERS}}}$(?!\n)"
_REQUEST_ID = r"^[a-zA-Z0-9_.:-]{1,128}$(?!\n)"
PATTERNS_IN_WORDS = {
    _NAME: f'1 to {MAX_NAME_CHARACTERS} ASCII letters, digits, "_", "-" and "."',
    _REQUEST_ID: '1 to 128 ASCII letters, digits, "_", "-", "." and ":"',
}
"""The patterns in words, for errors."""

Name = Annotated[str, msgspec.Meta(pattern=_NAME)]
"""The name of a function or a format: as long as Anthropic's may be. (Python's `$` would pass a last newline, JSON
Schema's does not.)"""

RequestId = Annotated[str, msgspec.Meta(pattern=_REQUEST_ID)]
"""A client's name for its request: safe in a header, a path and a log line."""

MAX_TOOLS = 128
"""Functions of a request."""

MAX_BAD_WORDS = 128
MAX_SAMPLERS = 16
MAX_GRAMMAR_CHARACTERS = 64 * 1024
"""A regular expression or a grammar in a request."""


SAMPLING_TYPES: dict[str, Any] = {
    name: (Int if column.kind is int else float) | None for name, column in COLUMNS.items()
}


class SamplingFields(msgspec.Struct, kw_only=True):
    """The parameters of `runtime.sampling_table`, None by default: msgspec reads a class's annotations and values."""

    __annotations__ = SAMPLING_TYPES
    vars().update(dict.fromkeys(COLUMNS))


class CommonFields(SamplingFields, kw_only=True):
    """The fields of every API that generates, beside its own, with one meaning.

    samplers    names of samplers in the order in which they act; the others are off
    temperature_last  the temperature acts after the filters, as in llama.cpp
    dry_sequence_breakers  texts that DRY's repetitions do not reach over; by default llama.cpp's
    priority    smaller is admitted first; not used by the "deadline" and "fcfs" policies
    cache_salt  cached prefixes are shared only with requests of the same salt
    request_id  the request's name in logs, in `X-Request-Id` and for `POST /v1/requests/{id}/cancel`
    """

    stream: bool | None = None
    seed: Int | None = None
    samplers: Annotated[list[str], msgspec.Meta(max_length=MAX_SAMPLERS)] | None = None
    temperature_last: bool | None = None
    dry_sequence_breakers: Annotated[list[str], msgspec.Meta(max_length=MAX_BREAKERS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    priority: Int | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    request_id: RequestId | None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: one more chunk before `[DONE]`, with no choices and the whole usage.
    continuous_usage_stats (vLLM's): every chunk has the usage so far.
    include_obfuscation: padding against traffic analysis; refused when true."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text, the default."""


class JsonObjectFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag="json_object"
):
    """Some JSON object; with a schema (llama.cpp's and others' field), JSON that matches it."""

    schema: dict[str, Any] | None = None


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """schema: if absent, any JSON object is an answer. strict: whether objects allow only the properties that they
    list; an answer always follows the schema. name: OpenAI requires one; it has no effect here."""

    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that matches a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat

GrammarText = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's structured outputs: exactly one of these.

    json         a JSON schema, or one as text
    regex        a regular expression that the whole answer matches
    choice       a list of texts; the answer is one of them
    grammar      a context-free grammar in Lark's notation
    json_object  true: some JSON object
    """

    json: dict[str, Any] | GrammarText | None = None
    regex: GrammarText | None = None
    choice: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1024)] | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's: where a prompt's keys and values are.

    do_remote_decode    compute the prompt and one token; the answer says where another server can take its pages
    do_remote_prefill   take the pages that the fields below name, as another server has answered them
    remote_engine_id    the lease
    remote_block_ids    the pages
    remote_host, remote_port  the other server's engine; one of `--kv-transfer-peer`
    tp_size             of the other server; 1
    """

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_engine_id: str | None = None
    remote_block_ids: Annotated[list[Int], msgspec.Meta(max_length=2**20)] | None = None
    remote_host: str | None = None
    remote_port: Int | None = None
    tp_size: Literal[1] | None = None


class GenerationRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """The common fields of chat and completions, beside `CommonFields`. Meanings and ranges:
    `runtime.engine.SamplingParams`.

    ttft_target_s, tpot_target_s  seconds until the first token is due, and from each to the next (an extension of
                        ours, for the "deadline" policy)
    return_token_ids    choices have `token_ids`, the answer `prompt_token_ids`; always for a model without tokenizer
    bad_words           texts that the answer will not hold as tokens
    truncate_prompt_tokens  only this many of the prompt's last tokens are read; -1 leaves room for the answer
    speculation         false disables speculative decoding for it (an extension of ours; answers are the same)
    response_format, structured_outputs  the required form of the answer; at most one of them
    kv_transfer_params  the prompt's keys and values come from another server, or go there
    vllm_xargs          `extra_args` for the engine's logits processors; vLLM's name
    """

    model: str | None = None
    stream_options: StreamOptions | None = None

    n: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[Int], msgspec.Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    max_tokens: Int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Annotated[list[Int], msgspec.Meta(max_length=2**18)] | None = None
    bad_words: Annotated[list[str], msgspec.Meta(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: Int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    kv_transfer_params: KVTransferParams | None = None
    vllm_xargs: dict[str, Any] | None = None

    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    echo: bool | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    return_token_ids: bool | None = None
    speculation: bool | None = None


class FunctionDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """returns  `return`, which transformers' `get_json_schema` writes, for the chat template"""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    returns: dict[str, Any] | None = msgspec.field(default=None, name="return")


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Name


class NamedToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The one function that must be called."""

    function: NamedFunction


class AllowedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the request's tools."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Only these of the request's tools may be called ("auto"); one of them must be ("required")."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"
):
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """arguments: JSON, as text or as an object; empty means no arguments."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: Int | None = None


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. An assistant's message may be sent back as it was received, so it has that message's fields, too:
    `annotations` are not read, `audio` and `function_call` must be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], held(ContentPart)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text, or parts of it, that the answer may repeat."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], msgspec.Meta(max_length=1024)]

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`.

    logprobs, top_logprobs   whether, and how many alternatives beside each token (0 … 20)
    tools, tool_choice       given to the chat template, unless tool_choice is "none"; "required" and a named
                             function force a call; allowed_tools are the only ones that are given
    parallel_tool_calls      false: at most one call (default: true)
    reasoning_effort         the template's variable of that name
    thinking_budget          most tokens of reasoning, after which it is closed; -1: no limit
    add_generation_prompt    the template ends with the opening of the assistant's turn (default: true)
    continue_final_message   the last message is left open and continued
    echo                     the answer begins with the content of the last message where that is the
                             assistant's
    chat_template_kwargs     further variables for the model's template
    documents                the template's variable of that name
    prediction               a text that the answer may repeat: its tokens are proposed as the answer follows it
    mm_processor_kwargs      `min_pixels` and `max_pixels`, or `size`, of the request's pictures as the model reads them
    return_tokens_as_token_ids  log probabilities are those of all `token_ids`, and name tokens "token_id:17"
    """

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Annotated[list[dict[str, Any]], held(Tool, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_budget: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None
    prediction: Prediction | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`.

    prompt              a string, a list of strings, token ids, or a list of lists of token ids
    logprobs            alternatives beside each token (0 … 20)
    echo                the answer begins with the prompt; with logprobs, with those of the prompt
    add_special_tokens  the encoding adds the tokenizer's own BOS and the like (default: true)
    suffix              the text after the answer, for a model that was taught to fill in
    return_tokens_as_token_ids  log probabilities name tokens "token_id:17"
    """

    prompt: Prompt
    suffix: str | None = None
    logprobs: Int | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None


EmbeddingInput = str | list[str | Int | list[Int]]


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`.

    input            a text, texts, the ids of one input, or those of several
    messages         instead of it: a conversation, which may have pictures, as the chat template writes it
    mm_processor_kwargs  of these pictures, as in a chat
    encoding_format  "float": numbers; "base64": the same as little-endian float32
    dimensions       only the first so many numbers, at length one; the model must have them
    pooling          which hidden states become the embedding: the first token's ("cls"), the last token's ("last"), the
                     mean of all ("mean") ...; an extension of ours (default: the model's own; a decoder's is "last")
    normalize        at length one (default: as the model's folder says, else true)
    prompt_name      the model's prompt of that name stands before each text, such as "query"; "" for none
    add_special_tokens  the encoding adds the tokenizer's own BOS and the like (default: true)
    """

    model: str | None = None
    input: EmbeddingInput | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    request_id: RequestId | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: a `prompt`, or a chat's `messages`.

    add_special_tokens      default: true for a prompt, false for messages, whose template writes its own
    add_generation_prompt, continue_final_message, tools, chat_template_kwargs  for messages, as in a chat
    return_token_strs       each token's text, too
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[dict[str, Any]], held(Tool, max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`: special tokens stay in the text."""

    model: str | None = None
    tokens: list[Int]


class ContentPart(msgspec.Struct):
    """A part of a chat's content; `server.requests.prompt` reads it."""

    type: str
    text: str | None = None
    refusal: str | None = None
