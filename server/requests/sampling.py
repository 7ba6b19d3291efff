"""Converts a request's fields to `SamplingParams`: the request's value, else the generation config's, else OpenAI's
default. Ranges are checked by `SamplingParams` itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from runtime.sampling_table import COLUMNS
from runtime.text.dry_breakers import with_dry_breakers
from runtime.text.stop import bad_words_token_ids
from server.errors import engine_errors, in_own_names, invalid
from server.openai_api.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from tokenizer import Tokenizer

_SAME_NAME = (
    "n",
    *COLUMNS,
    "seed",
    "samplers",
    "temperature_last",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "min_tokens",
    "allowed_token_ids",
    "prompt_logprobs",
)
"""Fields that mean to the engine what they mean in the request."""

_FILTERS = [name for name, column in COLUMNS.items() if column.shapes_draws]

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat goes on to the end of the context."""


def chat_params(
    request: ChatCompletionRequest, defaults: Mapping[str, Any], tokenizer: Tokenizer | None, **extra: Any
) -> SamplingParams:
    """`extra` are further parameters, by `SamplingParams`' names. Raises `ApiError` 400 naming the field."""
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    elif request.max_tokens not in (None, max_tokens):
        raise invalid("max_tokens", "max_tokens and max_completion_tokens contradict each other; send one.")
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    elif request.top_logprobs is not None and request.top_logprobs != 0:
        raise invalid("top_logprobs", "top_logprobs asks for logprobs to be true.")
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise invalid("top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {logprobs}.")
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    names = {"max_tokens": "max_completion_tokens"} if request.max_completion_tokens is not None else {}
    asked = limit | {"logprobs": logprobs} | extra
    return _params(request, {"max_tokens": None, **defaults}, asked, names, tokenizer)


def completion_params(
    request: CompletionRequest, defaults: Mapping[str, Any], tokenizer: Tokenizer | None, **extra: Any
) -> SamplingParams:
    """Raises `ApiError` 400 naming the field. With `max_tokens=0` one token is sampled, and dropped by the caller: the
    engine has no requests without output."""
    limit = {}
    if request.max_tokens is not None:
        limit = {"max_tokens": request.max_tokens or 1}
    prompt_logprobs = {}
    if request.echo and request.prompt_logprobs is None and request.logprobs is not None:
        prompt_logprobs = {"prompt_logprobs": request.logprobs}
    return _params(
        request,
        {**defaults, "max_tokens": COMPLETION_MAX_TOKENS},
        limit | {"logprobs": request.logprobs} | prompt_logprobs | extra,
        {},
        tokenizer,
    )


def _params(
    request: GenerationRequest,
    defaults: Mapping[str, Any],
    asked: Mapping[str, Any],
    names: Mapping[str, str],
    tokenizer: Tokenizer | None,
) -> SamplingParams:
    fields = {**defaults, "detokenize": tokenizer is not None}
    if fields.get("temperature") == 0 and _asks_for_draws(request):
        del fields["temperature"]
    if getattr(request, "mirostat", None):  # the filters that the model recommends would act before it
        fields = {name: value for name, value in fields.items() if name == "temperature" or name not in _FILTERS}
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    fields.update(asked)
    if request.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(request.logit_bias)
    if request.vllm_xargs is not None:
        fields["extra_args"] = request.vllm_xargs
    own_names = {"bad_words_token_ids": "bad_words", "extra_args": "vllm_xargs", **names}
    with in_own_names(own_names), engine_errors():
        if request.bad_words:
            fields["bad_words_token_ids"] = bad_words_token_ids(request.bad_words, tokenizer)
        params = SamplingParams(**fields, dry_sequence_breakers=request.dry_sequence_breakers)
        return with_dry_breakers(params, tokenizer)


def _asks_for_draws(request: GenerationRequest) -> bool:
    """Whether a request implies sampling. A model may recommend greedy decoding, but several choices, or sampling
    fields, would have no effect then: without a temperature they mean OpenAI's default, 1."""
    how_to_draw = ["seed", *_FILTERS]
    return (request.n or 1) > 1 or any(getattr(request, name) is not None for name in how_to_draw)


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """JSON has only strings for keys: "50256" is token 50256."""
    by_id = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise invalid("logit_bias", f"logit_bias: {key[:40]!r} is not a token id.")
        by_id[int(key)] = value
    return by_id


def stream_flags(request: GenerationRequest) -> tuple[bool, bool]:
    """Whether a stream ends with the usage, and whether every chunk has it. Raises `ApiError` 400."""
    options = request.stream_options
    if options is None:
        return False, False
    if not request.stream:
        raise invalid("stream_options", "stream_options is only for stream: true.")
    if options.include_obfuscation:
        raise invalid(
            "stream_options.include_obfuscation", "Padding of the stream is not built.", "unsupported_parameter"
        )
    return bool(options.include_usage), bool(options.continuous_usage_stats)
