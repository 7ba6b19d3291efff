"""Prepares a chat's request, of any API: its grammar, prompt and generation, with every check."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from runtime.engine.grammar.grammar import Grammar
from runtime.engine.sampling_params import SamplingParams
from runtime.text.formats import end_ids
from runtime.text.harmony.message import SpecialIds, after_analysis, in_final_channel, special_ids
from runtime.text.pipeline import TextDelta
from runtime.text.reasoning import after_reasoning, or_calls, reasoning_start
from runtime.text.tools.table import ToolReading
from server.errors import invalid
from server.openai_api.answers import ChatFinishReason, ChatLogprobs, ChatTokenLogprob, Usage
from server.openai_api.logprobs import chat_logprobs
from server.openai_api.schema import AllowedToolsChoice, ChatCompletionRequest
from server.requests.answering import Prepared
from server.requests.generation import Generation, Scheduling
from server.requests.prompt import conversation_prompt
from server.requests.sampling import chat_params, stream_flags
from server.requests.structured import (
    RequestSchemas,
    answer_grammar,
    callable_tools,
    contradiction,
    forced_calls,
    forces_call,
    free_calls_text,
    grammar_errors,
)
from server.requests.thinking import effort_budget
from server.requests.transfer import transfer_of
from server.service import Service
from server.transport.exchange import Exchange


@dataclass(slots=True, kw_only=True)
class Chat(Prepared):
    """
    echo       the beginning of the answer
    left_out   names of fields that the chat template leaves out
    names_ids  log probabilities name tokens by their ids
    """

    created: int
    params: SamplingParams
    prompt_token_ids: list[int]
    echo: str
    left_out: list[str]
    has_usage: bool
    has_running_usage: bool
    has_token_ids: bool
    names_ids: bool

    def logprobs(self, tokens: list[ChatTokenLogprob]) -> ChatLogprobs | None:
        """null unless requested."""
        return ChatLogprobs(tokens) if self.params.logprobs is not None else None

    def token_logprobs(self, delta: TextDelta) -> list[ChatTokenLogprob]:
        """Log probabilities of the content's tokens, without the one that ended the answer unless its text is shown; of
        all tokens if these are named by their ids."""
        return chat_logprobs(delta, self.service.tokenizer, as_ids=self.names_ids)

    def finish_reason(self, delta: TextDelta, *, has_calls: bool) -> ChatFinishReason:
        """The reason why a choice ended, from its last delta."""
        assert delta.finish_reason is not None
        return "tool_calls" if has_calls and delta.finish_reason == "stop" else delta.finish_reason

    def usage(self) -> Usage:
        return Usage.of(self.generation)


def prepare_chat(service: Service, exchange: Exchange, asked: ChatCompletionRequest, request_id: str) -> Chat:
    """A decoded request's generation, not admitted yet. Raises `ApiError`."""
    adapter = service.adapter_of(asked.model)
    has_usage, has_running_usage = stream_flags(asked)
    tools = callable_tools(asked)
    schemas = RequestSchemas(closes=service.config.close_schemas)
    grammar = chat_grammar(service, asked, tools, schemas)
    params = chat_params(asked, service.default_sampling, service.tokenizer, grammar=grammar)
    if asked.stream and params.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs are not sent in a stream.")
    prompt = conversation_prompt(service, exchange.tenant, asked)
    token_ids = prompt.token_ids
    answer_format = service.answer_format
    harmony = answer_format.harmony and not _is_of_whole_answer(asked)
    reasoning = answer_format.reasoning and not answer_format.harmony and not _is_of_whole_answer(asked)
    if reasoning:
        params = _with_budget(service, asked, exchange, params, token_ids)
        if grammar is not None:
            params = _with_reasoning(params, service, token_ids, schemas.field)
    elif asked.thinking_budget is not None:
        exchange.ignored.append(exchange.sent.get("thinking_budget", "thinking_budget"))
    prediction: tuple[int, ...] = ()
    if asked.prediction is not None and service.tokenizer is not None:
        prediction = tuple(service.tokenizer.encode_ordinary(asked.prediction.text))
    lease, source = transfer_of(service, asked, num_prompts=1, num_choices=params.n, max_tokens=params.max_tokens)
    generation = Generation(
        client=service.client,
        bridge=service.bridge,
        tokenizer=service.tokenizer,
        request_id=request_id,
        prompts=[token_ids],
        images=(prompt.images,),
        params=params,
        arrival_time_s=exchange.arrival_s,
        scheduling=replace(Scheduling.of(asked, adapter), prediction=prediction, lease=lease, source=source),
        reasoning=answer_format.tags if reasoning else None,
        tools=_tool_reading(service, asked, tools),
        harmony=harmony,
        template=None if forces_call(asked) or _is_of_whole_answer(asked) else answer_format.template,
        eos_token_ids=end_ids(answer_format, service.tokenizer, service.client.info.eos_token_ids),
    )
    exchange.num_replayed += prompt.num_replayed
    return Chat(
        service=service,
        created=int(time.time()),
        generation=generation,
        params=params,
        schemas=schemas,
        prompt_token_ids=token_ids,
        echo=prompt.echo,
        left_out=prompt.left_out,
        is_streamed=bool(asked.stream),
        has_usage=has_usage,
        has_running_usage=has_running_usage,
        has_token_ids=bool(asked.return_token_ids),
        names_ids=bool(asked.return_tokens_as_token_ids),
    )


def chat_grammar(
    service: Service, asked: ChatCompletionRequest, tools: list[dict[str, Any]] | None, schemas: RequestSchemas
) -> Grammar | None:
    """The grammar of the answer; `schemas` gets its schemas. A forced call is the whole answer; if calls are optional,
    the answer is in the format, or calls. Raises `ApiError` 400."""
    harmony = _harmony_ids(service, asked)
    if forces_call(asked):
        if asked.structured_outputs is not None:
            raise contradiction("structured_outputs", "tool_choice")
        grammar = forced_calls(asked, tools, service.answer_format, service.tokenizer, schemas)
        with grammar_errors(schemas.field):
            return grammar if harmony is None else after_analysis(grammar, harmony)
    free = answer_grammar(asked, schemas)
    if free is None:
        return None
    notation = service.answer_format.tools
    with grammar_errors(schemas.field):
        if harmony is not None:
            free = in_final_channel(free, harmony)
        if schemas.field == "response_format" and tools is not None and notation is not None:
            free = or_calls(free, free_calls_text(asked, tools, notation, service.answer_format, service.tokenizer))
        return free if harmony is None else after_analysis(free, harmony)


def _harmony_ids(service: Service, asked: ChatCompletionRequest) -> SpecialIds | None:
    """Token ids of harmony's messages if the grammar must include them; a continued message is already inside one."""
    if not service.answer_format.harmony or _is_of_whole_answer(asked) or asked.continue_final_message:
        return None
    assert service.tokenizer is not None
    return special_ids(service.tokenizer)


def _is_of_whole_answer(asked: ChatCompletionRequest) -> bool:
    """Whether the client's grammar covers all of the model's output."""
    return asked.structured_outputs is not None and asked.structured_outputs.grammar is not None


def _tool_reading(
    service: Service, asked: ChatCompletionRequest, tools: list[dict[str, Any]] | None
) -> ToolReading | None:
    """How the answer's calls are parsed, or None if it has none."""
    answer_format = service.answer_format
    notation = answer_format.forced_tools if forces_call(asked) else answer_format.tools
    if tools is None or notation is None:
        return None
    service.note_tools()
    return ToolReading.of(
        notation,
        tools,
        is_closed=isinstance(asked.tool_choice, AllowedToolsChoice),
        parallel=asked.parallel_tool_calls is not False,
    )


def _with_reasoning(
    params: SamplingParams, service: Service, prompt_token_ids: list[int], forced_by: str | None
) -> SamplingParams:
    """Starts the grammar at the end of the reasoning. Raises `ApiError` 400 if it is then too long."""
    tokenizer, tags = service.tokenizer, service.answer_format.tags
    assert tokenizer is not None
    assert params.grammar is not None
    with grammar_errors(forced_by):
        start, is_bounded = reasoning_start(tokenizer, prompt_token_ids, tags), params.reasoning_budget is not None
        grammar = after_reasoning(params.grammar, start, tokenizer, tags=tags, is_bounded=is_bounded)
    return msgspec.structs.replace(params, grammar=grammar)


def _with_budget(
    service: Service, asked: ChatCompletionRequest, exchange: Exchange, params: SamplingParams, token_ids: list[int]
) -> SamplingParams:
    """Bounds the reasoning by the request's budget, or by that of its effort."""
    assert service.tokenizer is not None
    num_tokens, end = asked.thinking_budget, service.reasoning_end
    if end is None and num_tokens is not None:
        exchange.ignored.append(exchange.sent.get("thinking_budget", "thinking_budget"))
    if num_tokens is None:
        num_tokens = effort_budget(service, asked.reasoning_effort, has_tools=bool(asked.tools))
    if end is None or num_tokens is None or num_tokens == -1:
        return params
    budget = end.after(num_tokens, reasoning_start(service.tokenizer, token_ids, service.answer_format.tags))
    return msgspec.structs.replace(params, reasoning_budget=budget)
