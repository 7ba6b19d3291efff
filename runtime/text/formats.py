"""Which notation a model's answers have, as its chat template and its vocabulary tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.text.reasoning import CLOSE_TAG, OPEN_TAG
from runtime.text.tool_calls import HERMES, ToolFormat

if TYPE_CHECKING:
    from tokenizer import Tokenizer

_OTHER_CALLS = ("<function=", "<arg_key>")
"""What templates write between the same tags where their models' calls are no JSON (Qwen3-Coder, GLM-4.5)."""


def has_reasoning(tokenizer: Tokenizer) -> bool:
    """Whether the model may think between tags."""
    return tokenizer.token_to_id(OPEN_TAG) is not None or any(
        tag in template for template in tokenizer.chat_templates.values() for tag in (OPEN_TAG, CLOSE_TAG)
    )


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """How the model writes tool calls; None: its template has no calls, or some that are not known here."""
    templates = tokenizer.chat_templates.values()
    if any(other in template for template in templates for other in _OTHER_CALLS):
        return None
    return HERMES if any(HERMES.open_tag in template for template in templates) else None
