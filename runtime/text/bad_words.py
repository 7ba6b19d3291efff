"""Turns texts that an answer must not hold into the token ids that the engine forbids."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.engine.errors import RequestError
from tokenizer import Tokenizer


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Each word as the ids that begin a text with it, and, if these differ and are as many, those that follow a space,
    as in vLLM. A word may still be generated as other tokens.

    Raises ``RequestError`` whose ``param`` is ``bad_words`` or one of its entries.
    """
    if tokenizer is None:
        raise RequestError("the model has no tokenizer: bad_words cannot be read", param="bad_words")
    banned = []
    for i, word in enumerate(words):
        bare = word.lstrip(" ")
        ids = tokenizer.encode(bare, add_special_tokens=False)
        spaced = tokenizer.encode(f" {bare}", add_special_tokens=False)
        if not bare or not ids or not spaced:
            name = f"bad_words[{i}]"
            raise RequestError(f"{name} must hold more than spaces, and be text to the model", param=name)
        banned.append(ids)
        if spaced[0] != ids[0] and len(spaced) == len(ids):
            banned.append(spaced)
    return banned
