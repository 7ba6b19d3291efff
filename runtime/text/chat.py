"""A conversation to the prompt that the model was trained on, by the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runtime.engine.errors import RequestError

if TYPE_CHECKING:
    from tokenizer import Tokenizer


def chat_prompt(
    tokenizer: Tokenizer | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    **template_kwargs: Any,
) -> list[int]:
    """The prompt's token ids. ``template_kwargs`` are names that the template may read (``enable_thinking``).

    Raises ``RequestError`` when the model has no tokenizer or no chat template, or when the template refuses
    the conversation.
    """
    from tokenizer import ChatTemplateError

    if tokenizer is None:
        raise RequestError("the model has no tokenizer: it takes token ids, not messages", param="messages")
    if chat_template is None and not tokenizer.has_chat_template:
        raise RequestError(
            "the model has no chat template: give a prompt, or chat_template", param="messages"
        )
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            **template_kwargs,
        )
    except ChatTemplateError as error:
        raise RequestError(str(error), param="messages") from error
    return ids
