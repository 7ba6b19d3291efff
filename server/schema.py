"""The requests of OpenAI's API, with vLLM's additional sampling parameters, as typed objects.

A field that is absent or null is None: then the model's generation config decides, then OpenAI's default.
Types are strict (a bool is no number, "1" no integer); ranges are checked by `SamplingParams`. Fields that
have no effect or are not built are in `server.fields`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer of 64 bits: no request brings arithmetic on thousands of digits."""


Prompt = str | list[str | Int | list[Int]]
"""A text, texts, the ids of one prompt, or those of several. A mixture passes here and is refused later."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: one more chunk before `[DONE]`, with no choices and the whole usage.
    continuous_usage_stats (vLLM's): every chunk has the usage so far.
    include_obfuscation: padding against traffic analysis; refused when true."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions have in common. Meanings and ranges: `runtime.engine.SamplingParams`.

    priority            smaller is admitted first; the "deadline" and "fcfs" policies take none
    cache_salt          cached prefixes are shared only with requests of the same salt
    ttft_target_s, tpot_target_s  seconds until the first token is due, and from each to the next (an extension of
                        ours, for the "deadline" policy)
    return_token_ids    choices carry `token_ids`, the answer `prompt_token_ids`; always so for a model
                        without tokenizer
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[Int], msgspec.Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Annotated[list[Int], msgspec.Meta(max_length=2**18)] | None = None
    prompt_logprobs: Int | None = None

    echo: bool | None = None
    priority: Int | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    return_token_ids: bool | None = None


class FunctionDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: Int | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. An assistant's message may come back as it was answered, so it has that message's fields too:
    `annotations` are not read, `audio` and `function_call` must be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`.

    logprobs, top_logprobs   whether, and how many alternatives beside each token (0 … 20)
    tools, tool_choice       given to the chat template, unless tool_choice is "none"
    add_generation_prompt    the template ends with the opening of the assistant's turn (default: true)
    continue_final_message   the last message is left open and continued
    echo                     the answer begins with the content of the last message where that is the
                             assistant's
    chat_template_kwargs     further variables for the model's template
    documents                the template's variable of that name
    """

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`.

    prompt              a string, a list of strings, token ids, or a list of lists of token ids
    logprobs            alternatives beside each token (0 … 20)
    echo                the answer begins with the prompt; with logprobs, with those of the prompt
    add_special_tokens  the encoding adds the tokenizer's own BOS and the like (default: true)
    """

    prompt: Prompt
    logprobs: Int | None = None
    add_special_tokens: bool | None = None
