"""Where a folder names special tokens, and which its class has: ids as transformers 5.24's AutoTokenizer gives them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.support import FIXTURES
from tokenizer import Tokenizer

PLAIN = "PreTrainedTokenizerFast"
EXTRAS = [278, 97, 32, 279, 32, 98]  # of TEXT
ONE_EXTRA = [278, 97, 32, 60, 124, 116]
NO_EXTRAS = [60, 101, 120, 116, 114, 97]
TEXT = "<extra_1>a <|tool|> b"

# Class, other fields, what TEXT begins with; ids of BOS, EOS, padding and unknown.
NAMED: list[tuple[str, dict[str, Any], list[int], list[int | None]]] = [
    (PLAIN, {"extra_special_tokens": ["<extra_1>", "<|tool|>"]}, EXTRAS, [None] * 4),
    (PLAIN, {"additional_special_tokens": ["<extra_1>", "<|tool|>"]}, EXTRAS, [None] * 4),
    (PLAIN, {"extra_special_tokens": {"image_token": "<extra_1>", "x": "<|tool|>"}}, EXTRAS, [None] * 4),
    (PLAIN, {"image_token": "<extra_1>", "boi_token": "<|tool|>", "add_bos_token": True}, EXTRAS, [None] * 4),
    (PLAIN, {"model_specific_special_tokens": {"image_token": "<extra_1>"}}, ONE_EXTRA, [None] * 4),
    (PLAIN, {"eos_token": None, "pad_token": None, "additional_special_tokens": None}, NO_EXTRAS, [None] * 4),
    ("GPT2Tokenizer", {"eos_token": "<|end|>"}, NO_EXTRAS, [278, 276, None, 278]),
    ("Qwen2TokenizerFast", {"eos_token": "<|end|>"}, NO_EXTRAS, [None, 276, 278, 278]),
    ("CohereTokenizerFast", {"eos_token": "<|end|>"}, NO_EXTRAS, [278, 276, 281, 279]),
    ("GPTNeoXTokenizerFast", {"eos_token": "<|end|>"}, NO_EXTRAS, [278, 276, 279, 278]),
]


@pytest.mark.parametrize(("kind", "config", "begins", "ids"), NAMED)
def test_special_tokens(
    kind: str, config: dict[str, Any], begins: list[int], ids: list[int | None], tmp_path: Path
) -> None:
    shutil.copy(FIXTURES / "bytelevel" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **config}))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(TEXT, add_special_tokens=False)[: len(begins)] == begins
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id] == ids


PAIRS: list[tuple[dict[str, Any], list[int], list[int | None]]] = [
    ({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"}, [276], [275, 276, None, 275]),
    ({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>"}, [275], [None, 275, 276, 276]),
    ({"add_bos_token": True, "bos_token": "<|end|>"}, [275, 275], [275, 276, None, 276]),
]


@pytest.mark.parametrize(("config", "end", "ids"), PAIRS)
def test_vocabulary_and_merges_alone(
    config: dict[str, Any], end: list[int], ids: list[int | None], tmp_path: Path
) -> None:
    model = json.loads((FIXTURES / "bytelevel" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("<|end|>") == end
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id] == ids
