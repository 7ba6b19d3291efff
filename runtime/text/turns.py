"""Finds the token that opens a turn of a chat."""

from __future__ import annotations

import functools

from tokenizer import ChatTemplateError, Tokenizer

_CHAT = ({"role": "user", "content": "Hi"},)


@functools.lru_cache(maxsize=16)
def turn_start_id(tokenizer: Tokenizer | None) -> int | None:
    """The special token that begins the template's generation prompt, as it does every turn; None if there is none."""
    if tokenizer is None or not tokenizer.has_chat_template:
        return None
    try:
        closed, opened = (tokenizer.apply_chat_template(_CHAT, None, opens) for opens in (False, True))
    except ChatTemplateError:
        return None
    first = opened[len(closed) : len(closed) + 1]
    is_found = opened[: len(closed)] == closed and not tokenizer.all_special_ids.isdisjoint(first)
    return first[0] if is_found else None
