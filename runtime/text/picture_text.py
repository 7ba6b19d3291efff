"""What a picture is in a prompt's text, where that is more than the token that a template writes for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from runtime.engine.messages import ImageSupport

if TYPE_CHECKING:
    from tokenizer import Tokenizer


class PictureText(NamedTuple):
    """The text of a picture in a prompt.

    token     what a template would write for it; None: the model reads none
    replaced  texts that templates write, and what stands for them: for Gemma 3, the picture's token between those that
              frame it, and empty lines around them. Most models' templates write the picture's token, and need nothing
    """

    token: str | None = None
    replaced: Mapping[str, str] = MappingProxyType({})


NO_PICTURES = PictureText()


def picture_text(tokenizer: Tokenizer | None, support: ImageSupport | None) -> PictureText:
    """The marks of a model's pictures. ``support`` says how it reads pictures; it is None if it reads none."""
    if tokenizer is None or support is None:
        return NO_PICTURES
    token = tokenizer.id_to_token(support.token_id)
    if support.frame is None:
        return PictureText(token)
    begin, end = (tokenizer.id_to_token(each) for each in support.frame)
    if begin is None or token is None or end is None:
        return PictureText(token)
    return PictureText(begin, {begin: f"\n\n{begin}{token}{end}\n\n"})


def with_picture_texts(text: str, texts: Mapping[str, str]) -> str:
    """The text with these in their places."""
    for written, meant in texts.items():
        text = text.replace(written, meant)
    return text
