"""The text of an image in a prompt, if that is more than the token that a template writes for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from runtime.engine.messages import ImageSupport
from tokenizer import Tokenizer


class PictureText(NamedTuple):
    """The text of an image in a prompt.

    token     the template's token for it, or None if the model reads no images
    replaced  texts that templates write, and their replacements: for Gemma 3, the image token between those that
              frame it, and empty lines around them. Most models' templates write the image token, and need nothing
    """

    token: str | None = None
    replaced: Mapping[str, str] = MappingProxyType({})


NO_PICTURES = PictureText()


def picture_text(tokenizer: Tokenizer | None, support: ImageSupport | None) -> PictureText:
    """The texts of a model's images. ``support`` describes how it reads images, or is None if it reads none."""
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
    """The text with these replacements."""
    for written, meant in texts.items():
        text = text.replace(written, meant)
    return text
