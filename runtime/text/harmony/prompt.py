"""Detects models that speak harmony, renders their prompts, and finds the state of the answer at a prompt's end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal, NamedTuple

from runtime.engine.errors import RequestError
from runtime.text.harmony.conversation import harmony_messages
from runtime.text.harmony.message import CHANNEL, MESSAGE, START, Renderer, SpecialIds, special_ids
from tokenizer import ChatTemplateError, Tokenizer

VARIABLES = frozenset({"reasoning_effort", "model_identity", "now"})
"""Variables of a conversation's prompt beside messages and tools."""

_PROBE = tuple({"role": role, "content": role} for role in ("user", "assistant", "user"))


def speaks_harmony(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary has harmony's special tokens, and the chat template writes them."""
    return special_ids(tokenizer) is not None and any(
        all(token in text for token in (START, CHANNEL, MESSAGE)) for text in tokenizer.chat_templates.values()
    )


def has_plain_template(tokenizer: Tokenizer) -> bool:
    """Whether the chat template writes a conversation as harmony does, so that it can be rendered here. A template with
    its own system message, for example, does not."""
    now = datetime(2026, 1, 2)
    try:
        written = tokenizer.apply_chat_template(_PROBE, None, True, now=now)
    except ChatTemplateError:
        return False
    return written == harmony_prompt(tokenizer, _PROBE, now=now)


def harmony_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    parses_content: bool = False,
    reasoning_effort: str | None = None,
    model_identity: str | None = None,
    now: datetime | None = None,
) -> list[int]:
    """The token ids of a conversation, for a model that speaks harmony.

    parses_content  a special token's text in a message becomes the token
    now             its date is in the system message; today's by default

    Raises ``RequestError``.
    """
    ids = special_ids(tokenizer)
    assert ids is not None
    if not messages:
        raise RequestError("the conversation is empty: it needs at least one message", param="messages")
    built = harmony_messages(
        messages,
        tools,
        current_date=f"{now or datetime.now():%Y-%m-%d}",
        reasoning_effort=reasoning_effort,
        model_identity=model_identity,
        keeps_last_reasoning=continue_final_message,
    )
    renderer = Renderer(tokenizer, ids, parses_content=parses_content)
    if not continue_final_message:
        return renderer.conversation(built, "assistant" if add_generation_prompt else None)
    last = built[-1]
    if last.recipient is not None or last.role in ("system", "developer"):
        raise RequestError("continue_final_message: the last message has no text to go on with", param="messages")
    last = replace(last, content=last.content.rstrip())
    return [*renderer.conversation(built[:-1]), *renderer.open_message(last)]


class AnswerStart(NamedTuple):
    """The state of the answer at a prompt's end.

    role     of the started message, if nothing else of it is known; else None
    header   the prompt's part of the message's header, after the role
    state    what comes next: a message, the rest of its header, or of its content
    """

    role: str | None = "assistant"
    header: str = ""
    state: Literal["start", "header", "content"] = "header"


def answer_start(tokenizer: Tokenizer, ids: SpecialIds, prompt_token_ids: Sequence[int]) -> AnswerStart:
    """After a prompt without any message the assistant's header is open."""
    begin = len(prompt_token_ids)
    while begin and prompt_token_ids[begin - 1] != ids.start:
        begin -= 1
        if prompt_token_ids[begin] in (ids.end, ids.return_, ids.call):
            return AnswerStart(None, "", "start")
    if not begin:
        return AnswerStart()
    message = list(prompt_token_ids[begin:])
    has_content = ids.message in message
    header = tokenizer.decode(message[: message.index(ids.message)] if has_content else message)
    if has_content:
        return AnswerStart(None, header, "content")
    return AnswerStart() if header == "assistant" else AnswerStart(None, header)


def answer_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer."""
    ids = special_ids(tokenizer)
    return () if ids is None else (ids.return_, ids.call)
