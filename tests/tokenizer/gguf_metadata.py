"""GGUF's metadata of a `tokenizer.json`, as llama.cpp's converter writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tokenizer.byte_level import BYTE_TO_CHAR

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_level_metadata(folder: Path, pre: str, **more: Any) -> dict[str, Any]:
    """Of a byte-level `tokenizer.json`; holes among the ids are filled as a padded embedding's are."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens, types = _tokens(content)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    return _metadata("gpt2", tokens, types, {"pre": pre, "merges": merges, **more})


def sentencepiece_metadata(folder: Path, **more: Any) -> dict[str, Any]:
    """Of a `tokenizer.json` that was made of a SentencePiece model: a token's score is the place of its first merge."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens, types = _tokens(content)
    scores = np.zeros(len(tokens), np.float32)
    ids = {token: i for i, token in enumerate(tokens)}
    for place, merge in reversed(list(enumerate(content["model"]["merges"]))):
        scores[ids["".join(merge.split(" ") if isinstance(merge, str) else merge)]] = -place
    for i, token in enumerate(tokens):
        if token.startswith("<0x") and types[i] == NORMAL:
            types[i] = BYTE
    return _metadata("llama", tokens, types, {"scores": scores, "pre": "default", **more})


def gemma4_metadata(folder: Path, **more: Any) -> dict[str, Any]:
    """Of a `tokenizer.json` in the form of Gemma 4's."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens, types = _tokens(content)
    types = [BYTE if token.startswith("<0x") else kind for token, kind in zip(tokens, types, strict=True)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return _metadata("gemma4", tokens, types, {"merges": merges, **ids, **more})


def _tokens(content: dict[str, Any]) -> tuple[list[str], list[int]]:
    known = {i: (token, NORMAL) for token, i in content["model"]["vocab"].items()}
    for token in content.get("added_tokens", []):
        known[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    listed = [known.get(i, (f"[PAD{i}]", UNUSED)) for i in range(max(known) + 3)]
    return [token for token, _ in listed], [kind for _, kind in listed]


def _metadata(model: str, tokens: list[str], types: list[int], more: dict[str, Any]) -> dict[str, Any]:
    values = {"model": model, "tokens": tokens, "token_type": np.array(types, np.int32), **more}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def tiny_metadata(**changes: Any) -> dict[str, Any]:
    """A small byte-level vocabulary; `changes` replace keys, `...` removes one."""
    tokens = [*BYTE_TO_CHAR, "ab", "Ġab", "<|im_end|>", "<think>"]
    values = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["a b", "Ġ ab"],
        "token_type": np.array([NORMAL] * 258 + [CONTROL, USER_DEFINED], np.int32), "eos_token_id": 258, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not ...}
