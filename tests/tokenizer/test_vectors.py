"""The ids that other implementations give for the real tokenizers' texts."""

from __future__ import annotations

import json

import pytest

from tests.tokenizer.support import shared
from tokenizer import Tokenizer


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gpt-oss"])
def test_vectors(name: str) -> None:
    folder = shared(f"tokenizers/{name}")
    tokenizer = Tokenizer.from_pretrained(folder)
    lines = (folder / "vectors.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 50
    for line in lines:
        vector = json.loads(line)
        ids = tokenizer.encode(vector["text"], add_special_tokens=vector["add_special_tokens"])
        assert ids == vector["ids"], vector["text"]
