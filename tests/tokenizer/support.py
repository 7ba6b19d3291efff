"""What the tokenizer's tests share: real data where it lies, small tokenizers made by hand, random text."""

from __future__ import annotations

import json
import random
import unicodedata
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tokenizer import Tokenizer
from tokenizer.json_fields import Fields
from tokenizer.loading import TokenizerFiles

FIXTURES = Path(__file__).parent / "fixtures"

# What Unicode 15.0 and 15.1 added, as ranges (DerivedAge.txt).
_UNICODE_15 = (
    (0x0CF3, 0x0CF3), (0x0ECE, 0x0ECE), (0x2FFC, 0x2FFF), (0x31EF, 0x31EF), (0x10EFD, 0x10EFF), (0x1123F, 0x11241),
    (0x11B00, 0x11B09), (0x11F00, 0x11F59), (0x1342F, 0x1342F), (0x13439, 0x13455), (0x1B132, 0x1B132),
    (0x1B155, 0x1B155), (0x1D2C0, 0x1D2D3), (0x1DF25, 0x1DF2A), (0x1E030, 0x1E06D), (0x1E08F, 0x1E08F),
    (0x1E4D0, 0x1E4F9), (0x1F6DC, 0x1F6DC), (0x1F774, 0x1F776), (0x1F77B, 0x1F77F), (0x1F7D9, 0x1F7D9),
    (0x1FA75, 0x1FA77), (0x1FA87, 0x1FA88), (0x1FAAD, 0x1FAAF), (0x1FABB, 0x1FABD), (0x1FABF, 0x1FABF),
    (0x1FACE, 0x1FACF), (0x1FADA, 0x1FADB), (0x1FAE8, 0x1FAE8), (0x1FAF7, 0x1FAF8), (0x2EBF0, 0x2EE5D),
    (0x31350, 0x323AF),
)  # fmt: skip
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

REAL_TOKENIZERS = (
    "tokenizers/gpt2",
    "tokenizers/qwen3",
    "tokenizers/gpt-oss",
    "models/stories260K",
    "models/stories260K/bytelevel",
    "models/slm4096-gpt2",
)


def shared(path: str) -> Path:
    """A path under ../shared/data, or a skip where it is not there."""
    found = SHARED / path
    if not found.exists():
        pytest.skip(f"needs ../shared/data/{path}")
    return found


@cache
def real_tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_file(shared(name) / "tokenizer.json")


def build(content: dict[str, Any]) -> Tokenizer:
    """Our tokenizer for the content of a tokenizer.json."""
    return Tokenizer(TokenizerFiles(Fields(json.loads(json.dumps(content)), "tokenizer.json")))


def library(content: dict[str, Any]) -> Any:
    """The `tokenizers` library's tokenizer for the same content."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers library")
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def content_of(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """The content of a tokenizer.json."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "model": model,
        **parts,
    }


def byte_level_model(merges: list[str], **options: Any) -> dict[str, Any]:
    """A BPE model over the byte-level alphabet."""
    from tokenizer.byte_level import BYTE_TO_CHAR

    return bpe_model(list(BYTE_TO_CHAR), merges, **options)


def bpe_model(alphabet: list[str], merges: list[str], **options: Any) -> dict[str, Any]:
    """A BPE model whose vocabulary is `alphabet` and what `merges` ("a b") make of it."""
    prefix = len(options.get("continuing_subword_prefix") or "")
    made = [left + right[prefix:] for left, right in (merge.split(" ") for merge in merges)]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*alphabet, *made]))}
    return {"type": "BPE", "vocab": vocab, "merges": merges, **options}


def added_token(content: str, token_id: int, **flags: bool) -> dict[str, Any]:
    """An entry of "added_tokens"."""
    rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token_id, "content": content, **rules, **flags}


@cache
def assigned_codes() -> list[int]:
    """Code points assigned in Unicode 14, which Python 3.11 has: the `tokenizers` library follows no newer one
    everywhere."""
    newer = {code for first, last in _UNICODE_15 for code in range(first, last + 1)}
    return [
        code for code in range(0x110000)
        if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co") and code not in newer
    ]  # fmt: skip


@cache
def _assigned() -> tuple[list[int], list[list[int]], list[int]]:
    """`assigned_codes`, the same by block, and the combining ones."""
    codes = assigned_codes()
    blocks: dict[int, list[int]] = defaultdict(list)
    for code in codes:
        blocks[code >> 7].append(code)
    return codes, list(blocks.values()), [code for code in codes if unicodedata.combining(chr(code))]


@cache
def _emoji() -> list[int]:
    return [code for code in _assigned()[0] if 0x1F300 <= code < 0x1FB00]


_COMMON = "  \t\n\r'sSſKdmtTlLrReEvV019aAzZ.,!_-/\x00\x1c\x85\xa0\u200d\u2028\u3000ʕ▁ΣσİıßéÉ"
_WORDS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<s>",
    "</s>",
    "<think>",
    "<0x0A>",
    "<|return|>",
    "'ſ",
    "don't",
    "I'LL",
    "👨‍👩‍👧",
    "ﬀ",
    "  ",
)


def random_text(source: random.Random, extra_words: tuple[str, ...] = ()) -> str:
    """Text of every kind: one script, all scripts, stacked marks, white space and contractions, emoji."""
    codes, blocks, marks = _assigned()
    parts = []
    for _ in range(source.randint(1, 6)):
        kind = source.random()
        length = source.randint(1, 12)
        if kind < 0.25:
            block = source.choice(blocks)
            parts.append("".join(chr(source.choice(block)) for _ in range(length)))
        elif kind < 0.35:
            parts.append("".join(chr(source.choice(codes)) for _ in range(length)))
        elif kind < 0.45:
            base = source.choice(blocks)
            parts += [chr(source.choice(base)) + chr(source.choice(marks)) + chr(source.choice(marks)) for _ in "ab"]
        elif kind < 0.75:
            parts.append("".join(source.choice(_COMMON) for _ in range(length)))
        elif kind < 0.9:
            parts.append(source.choice(_WORDS + extra_words))
        else:
            parts.append(chr(source.choice(_emoji())) * source.randint(1, 3))
    return "".join(parts)
