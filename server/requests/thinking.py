"""What other APIs say of thinking, as variables of the model's chat template."""

from __future__ import annotations

from typing import Any

from tokenizer import Tokenizer


def thinking_variables(tokenizer: Tokenizer | None, is_enabled: bool | None, *, has_tools: bool) -> dict[str, Any]:
    """`enable_thinking`, where the request says anything and the template knows it."""
    if is_enabled is None or not has_variable(tokenizer, "enable_thinking", has_tools=has_tools):
        return {}
    return {"enable_thinking": is_enabled}


def has_variable(tokenizer: Tokenizer | None, name: str, *, has_tools: bool) -> bool:
    """Whether the model's chat template names this variable."""
    if tokenizer is None or not tokenizer.has_chat_template:
        return False
    return name in tokenizer.chat_template(has_tools=has_tools)
