"""Which notation a model's answers have, as its chat template and its vocabulary tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.text.reasoning import TAGS
from runtime.text.tool_calls import HERMES, ToolFormat

if TYPE_CHECKING:
    from tokenizer import Tokenizer

_OTHER_CALLS = ("<function=", "<arg_key>")
"""What templates write between the same tags where their models' calls are no JSON (Qwen3-Coder, GLM-4.5)."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What a model may write beside content.

    reasoning  between tags
    tools      how it writes tool calls; None: not at all, or in a way that is not known here
    """

    reasoning: bool = False
    tools: ToolFormat | None = None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer | None, *, reasoning_parser: str = "auto", tool_call_parser: str = "auto"
    ) -> AnswerFormat:
        """With "auto", what the tokenizer's chat templates and vocabulary show. Without a tokenizer nothing is text."""
        if tokenizer is None:
            return cls()
        return cls(
            _has_reasoning(tokenizer) if reasoning_parser == "auto" else reasoning_parser == "think",
            _tool_format(tokenizer) if tool_call_parser == "auto" else {"hermes": HERMES}.get(tool_call_parser),
        )


def _has_reasoning(tokenizer: Tokenizer) -> bool:
    templates = tokenizer.chat_templates.values()
    return any(tokenizer.token_to_id(tag) is not None or any(tag in text for text in templates) for tag in TAGS)


def _tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    templates = tokenizer.chat_templates.values()
    if any(other in text for text in templates for other in _OTHER_CALLS):
        return None
    return HERMES if any(HERMES.open_tag in text for text in templates) else None
