"""From what a request calls a prompt to token ids. Runs in a thread: encoding takes time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import jinja2

from runtime.engine.errors import ContextLengthExceededError, RequestError
from runtime.engine.messages import EngineInfo
from runtime.engine.sampling_params import check_token_ids
from runtime.text.chat import chat_prompt
from server.config import ServerConfig
from server.conversation import check_ending, echoed_text, template_messages, template_tools
from server.errors import from_engine, invalid
from server.schema import ChatCompletionRequest, CompletionRequest
from tokenizer import Tokenizer


def completion_prompts(
    request: CompletionRequest, tokenizer: Tokenizer | None, config: ServerConfig, info: EngineInfo
) -> list[list[int]]:
    """The token ids of each prompt. Raises `ApiError` 400."""
    prompt = request.prompt
    given: Sequence[str | list[int]]
    if isinstance(prompt, str) or _are_ids(prompt):
        given = [prompt]
    elif _are_prompts(prompt):
        given = prompt
    else:
        raise invalid("prompt", "prompt must not mix strings, token ids and lists of them.", "invalid_type")
    if not given:
        raise invalid("prompt", "prompt must have at least one prompt.")
    if len(given) > config.max_prompts:
        raise invalid("prompt", f"prompt must have at most {config.max_prompts} prompts, got {len(given)}.")
    adds_special_tokens = request.add_special_tokens is not False
    prompts = []
    for text_or_ids in given:
        if isinstance(text_or_ids, str):
            if tokenizer is None:
                raise invalid("prompt", "This model has no tokenizer: prompt must be token ids.")
            ids = tokenizer.encode(text_or_ids, add_special_tokens=adds_special_tokens)
        else:
            ids = text_or_ids
        prompts.append(_checked(ids, "prompt", info))
    return prompts


def conversation_prompt(
    request: ChatCompletionRequest, tokenizer: Tokenizer | None, info: EngineInfo
) -> tuple[list[int], str]:
    """The token ids of the conversation, as the model's template writes it, and the text that `echo` puts
    before the answer. Raises `ApiError` 400."""
    messages = template_messages(request)
    tools = template_tools(request)
    adds_generation_prompt, continues_final_message = check_ending(request)
    if tokenizer is not None:
        if not tokenizer.has_chat_template:
            raise invalid("messages", "This model has no chat template; use /v1/completions.")
        template = tokenizer.chat_template(has_tools=tools is not None)
        if "developer" not in template:  # the newer name of the same role
            for message in messages:
                if message["role"] == "developer":
                    message["role"] = "system"
    variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED.intersection(variables)):
        name = f"chat_template_kwargs.{reserved[0]}"
        raise invalid(name, f"{name}: send this as a field of the request.")
    if request.documents is not None:
        variables["documents"] = request.documents
    try:
        ids = chat_prompt(
            tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=adds_generation_prompt,
            continue_final_message=continues_final_message,
            **variables,
        )
    except RequestError as error:
        # What the template itself says, the user may read; what went wrong within it stays here.
        cause = error.__cause__.__cause__ if error.__cause__ is not None else None
        if cause is None or isinstance(cause, jinja2.TemplateError):
            raise from_engine(error, {}) from None
        raise invalid("messages", "The chat template cannot render this conversation.") from None
    return _checked(ids, "messages", info), echoed_text(request, messages)


_RESERVED = frozenset(
    {
        "self",
        "tokenizer",
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
    }
)
"""Variables that a request cannot set through `chat_template_kwargs`."""


def _checked(ids: list[int], field: str, info: EngineInfo) -> list[int]:
    """What the engine would refuse too, before anything is done for each of the ids."""
    if not ids:
        raise invalid(field, f"{field} must come to at least one token.")
    try:
        if len(ids) >= info.max_model_len:
            raise ContextLengthExceededError(len(ids), info.max_model_len)
        if min(ids) < 0 or max(ids) >= info.vocab_size:
            check_token_ids(field, ids, info.vocab_size)
    except RequestError as error:
        raise from_engine(error, {"prompt": field}) from None
    return ids


def _are_ids(prompt: list[str | int | list[int]]) -> TypeGuard[list[int]]:
    return bool(prompt) and set(map(type, prompt)) == {int}


def _are_prompts(prompt: list[str | int | list[int]]) -> TypeGuard[list[str | list[int]]]:
    return set(map(type, prompt)) in ({str}, {list}, set())
