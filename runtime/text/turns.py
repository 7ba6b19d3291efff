"""Finds the token that opens a turn of a chat."""

from __future__ import annotations

import functools

from tokenizer import ChatTemplateError, Tokenizer

_CHAT = ({"role": "user", "content": "Hi"},)
_CHATS = tuple((*_CHAT, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": last}) for last in "AB")


@functools.lru_cache(maxsize=16)
def turn_start_id(tokenizer: Tokenizer | None, template: str | None = None) -> int | None:
    """The special token that begins the generation prompt of a template (None: the tokenizer's own), as it does every
    turn; if the prompt begins with none, the one before a user's later message. None if there is neither."""
    if tokenizer is None or (template is None and not tokenizer.has_chat_template):
        return None
    special = tokenizer.all_special_ids
    try:
        closed, opened = (
            tokenizer.apply_chat_template(_CHAT, None, opens, chat_template=template) for opens in (False, True)
        )
        first = opened[len(closed) : len(closed) + 1]
        if opened[: len(closed)] == closed and not special.isdisjoint(first):
            return first[0]
        one, other = (tokenizer.apply_chat_template(chat, None, chat_template=template) for chat in _CHATS)
    except ChatTemplateError:
        return None
    shared = next((place for place, (left, right) in enumerate(zip(one, other)) if left != right), 1)
    return next((token_id for token_id in one[shared - 1 : 0 : -1] if token_id in special), None)
