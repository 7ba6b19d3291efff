"""The real tokenizers against the `tokenizers` library: 3,000 random texts, one line of a megabyte, a
novel.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.tokenizer.support import REAL_TOKENIZERS, random_text, real_tokenizer, shared

tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers library")


@cache
def _random_texts() -> list[str]:
    source = random.Random(3000)
    return [random_text(source) for _ in range(3000)]


@pytest.mark.parametrize("name", REAL_TOKENIZERS)
@pytest.mark.exhaustive_cases("gpt-oss")
def test_random_texts(name: str) -> None:
    theirs = tokenizers.Tokenizer.from_file(str(shared(name) / "tokenizer.json"))
    ours = real_tokenizer(name)
    source = random.Random(20260731)
    size = theirs.get_vocab_size()
    for text in _random_texts():
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, text
        random_ids = [source.randrange(size + 3) for _ in range(8)]
        for decoded in (ids, random_ids):
            assert ours.decode(decoded) == theirs.decode(decoded, skip_special_tokens=False), decoded
            assert ours.decode(decoded, True) == theirs.decode(decoded, skip_special_tokens=True), decoded
    assert ours.vocab_size == size


@cache
def _megabyte(kind: str) -> str:
    source = random.Random(1)
    if kind == "one character":
        return "a" * 1_000_000
    if kind == "no spaces":
        return "".join(source.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(1_000_000))
    line = ""
    while len(line) < 1_000_000:
        line += "".join(random_text(source).replace("\n", " ").replace("\r", " ") for _ in range(500))
    return line[:1_000_000]


@pytest.mark.parametrize("kind", ["one character", "no spaces", "everything"])
@pytest.mark.parametrize(
    "name",
    [
        "tokenizers/gpt2",
        pytest.param("tokenizers/qwen3", marks=pytest.mark.exhaustive),
        pytest.param("models/stories260K", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive
def test_one_line_of_a_megabyte(name: str, kind: str) -> None:
    theirs = tokenizers.Tokenizer.from_file(str(shared(name) / "tokenizer.json"))
    ours = real_tokenizer(name)
    text = _megabyte(kind)
    ids = theirs.encode(text).ids
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", REAL_TOKENIZERS)
@pytest.mark.exhaustive_cases("gpt-oss", "models/")
def test_a_novel(name: str) -> None:
    theirs = tokenizers.Tokenizer.from_file(str(shared(name) / "tokenizer.json"))
    ours = real_tokenizer(name)
    text = shared("text/pride_and_prejudice.txt").read_text(encoding="utf-8")
    ids = theirs.encode(text).ids
    assert ours.encode(text) == ids
    assert ours.decode(ids, True) == theirs.decode(ids)
