"""What a picture is in a prompt's text, where that is more than the token that a template writes for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runtime.engine.messages import ImageSupport

if TYPE_CHECKING:
    from tokenizer import Tokenizer


def picture_texts(tokenizer: Tokenizer | None, support: ImageSupport | None) -> Mapping[str, str]:
    """What stands for each text of templates that means a picture: for Gemma 3, the picture's token between those that
    frame it, and empty lines around them. Most models' templates write the picture's token, and need nothing."""
    if tokenizer is None or support is None or support.frame is None:
        return {}
    begin, token, end = (tokenizer.id_to_token(each) for each in (support.frame[0], support.token_id, support.frame[1]))
    if begin is None or token is None or end is None:
        return {}
    return {begin: f"\n\n{begin}{token}{end}\n\n"}


def with_picture_texts(text: str, texts: Mapping[str, str]) -> str:
    """The text with these in their places."""
    for written, meant in texts.items():
        text = text.replace(written, meant)
    return text
