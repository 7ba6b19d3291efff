"""The byte-level alphabet of GPT-2: one printable character for each of the 256 bytes.

Source: openai/gpt-2, `encoder.py`, `bytes_to_unicode`. Printable Latin-1 bytes stand for themselves, the
others are moved to U+0100 and above, so that no token of a vocabulary holds a space or a control character.
"""

from __future__ import annotations


def _alphabet() -> list[str]:
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    characters = []
    shift = 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + shift))
            shift += 1
    return characters


BYTE_TO_CHAR: list[str] = _alphabet()
"""Byte → character."""

CHAR_TO_BYTE: dict[str, int] = {character: byte for byte, character in enumerate(BYTE_TO_CHAR)}
"""Character → byte."""

# Mapping through Latin-1 lets str.translate do the whole word in C.
_TRANSLATION: dict[int, str] = dict(enumerate(BYTE_TO_CHAR))
# Bytes of the alphabet beyond Latin-1 are mapped back through other Latin-1 characters.
_BACK: dict[int, int] = {
    **dict.fromkeys(range(256), 0xFFFF),
    **{ord(character): byte for character, byte in CHAR_TO_BYTE.items()},
}


def to_byte_level(text: str) -> str:
    """Replace each UTF-8 byte of `text` by its character. Lone surrogates are encoded as U+FFFD would be."""
    return encode_utf8(text).decode("latin-1").translate(_TRANSLATION)


def from_byte_level(token: str) -> bytes:
    """The bytes that `token` stands for.

    A token with a character outside the alphabet (added tokens such as "<｜end▁of▁sentence｜>") stands for
    its own UTF-8 bytes.
    """
    try:
        return token.translate(_BACK).encode("latin-1")
    except UnicodeEncodeError:
        return encode_utf8(token)


def encode_utf8(text: str) -> bytes:
    """UTF-8, with U+FFFD for each lone surrogate: JSON escapes can hold them, and they have no UTF-8 form."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return replace_surrogates(text).encode("utf-8")


def replace_surrogates(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate (a surrogate pair becomes the character that it stands
    for)."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
