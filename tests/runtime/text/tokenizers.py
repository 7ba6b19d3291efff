"""Two small tokenizers, made on the spot: byte-level, and SentencePiece-style with byte fallback."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizer import Tokenizer
from tokenizer.byte_level import BYTE_TO_CHAR, to_byte_level

WORDS = ["the", " the", "end", "END", "<|", "|>", "ab", "abc", "bcd", "é", " €", "日本", "😀", "\n\n"]
SPECIAL = "<|im_end|>"


@cache
def byte_level_tokenizer() -> Tokenizer:
    """256 bytes, a few words that merges reach, one special token: the last id."""
    return build(byte_level_content())


def byte_level_content() -> dict[str, Any]:
    vocab = {letter: byte for byte, letter in enumerate(BYTE_TO_CHAR)}
    merges: list[str] = []
    for word in WORDS:
        pieces = list(to_byte_level(word))
        while len(pieces) > 1:
            merge = f"{pieces[0]} {pieces[1]}"
            pieces[:2] = [pieces[0] + pieces[1]]
            if pieces[0] not in vocab:
                vocab[pieces[0]] = len(vocab)
                merges.append(merge)
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [special(len(vocab))],
    }


@cache
def fallback_tokenizer() -> Tokenizer:
    """SentencePiece-style: 256 byte tokens, characters and words with "▁" for a space, one special token."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ["<unk>", "▁", *"abcdefghilnorst", "▁the", "▁a", "end", "é", "日"]:
        vocab[piece] = len(vocab)
    return build(
        {
            "model": {
                "type": "BPE",
                "vocab": vocab,
                "merges": [],
                "unk_token": "<unk>",
                "byte_fallback": True,
                "fuse_unk": True,
            },
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            },
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "added_tokens": [special(len(vocab))],
        }
    )


def with_special(*tokens: str) -> Tokenizer:
    """The byte-level one with more special tokens behind its own."""
    content = byte_level_content()
    first = content["added_tokens"][0]["id"]
    content["added_tokens"] += [special(first + i, token) for i, token in enumerate(tokens, 1)]
    return build(content)


def with_plain(*tokens: str) -> Tokenizer:
    """The same with tokens that are found in a text, but are not special."""
    content = byte_level_content()
    first = content["added_tokens"][0]["id"]
    content["added_tokens"] += [special(first + i, token) | {"special": False} for i, token in enumerate(tokens, 1)]
    return build(content)


def special(token_id: int, token: str = SPECIAL) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": token, "special": True, **flags}


def build(content: dict[str, Any]) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.from_file(write(Path(folder), content))


def write(folder: Path, content: dict[str, Any]) -> Path:
    """`tokenizer.json` in `folder`."""
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", **empty, **content}), encoding="utf-8")
    return file
