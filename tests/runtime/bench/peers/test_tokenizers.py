"""The tokenizer's rows of `bench peers`: what is timed has the same ids on every side."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.checkpoints.hub import resolve_model
from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers import host_work as bench
from runtime.bench.peers.host_work import LOADERS, Side, chat_like_prompt, default_texts, load_ours, tokenizer_rows

FILE = Path(resolve_model(None)) / "tokenizer.json"
TEXTS = {"prose": "The quick brown fox. " * 200, "code": "def f(x):\n    return x + 1\n" * 100}


def test_rows_for_each_text_and_the_prompt() -> None:
    pytest.importorskip("tokenizers", reason="needs the tokenizers library")
    rows = tokenizer_rows(FILE, TEXTS, num_rounds=2)
    assert [row["work"] for row in rows] == ["encode, prose", "encode, code", "encode, a prompt of 400 characters"]
    for row in rows:
        assert row["tokenizer"] == "demo"
        assert 0 < row["ours"]["min"] <= row["ours"]["median"] <= row["ours"]["max"]
        others = [row[name]["median"] for name in ("tokenizers", "tiktoken") if name in row]
        best = row["ours"]["median"] / max(others) if row["unit"] == "MB/s" else min(others) / row["ours"]["median"]
        assert row["ratio"] == pytest.approx(best)


def test_other_ids_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_wrong(file: Path) -> Side:
        ours = load_ours(file)
        return Side("tokenizers", lambda text: [*ours.encode(text), 1], ours.prompt)

    monkeypatch.setitem(LOADERS, "tokenizers", load_wrong)
    monkeypatch.setattr(bench, "installed", lambda: ["ours", "tokenizers"])
    with pytest.raises(BenchmarkError, match="prose: tokenizers gives other ids"):
        tokenizer_rows(FILE, TEXTS, num_rounds=1)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(BenchmarkError, match="there is no"):
        tokenizer_rows(Path("nowhere/tokenizer.json"))


def test_texts() -> None:
    assert all(len(text) > 200_000 for text in default_texts().values())
    assert len(chat_like_prompt(FILE, TEXTS["prose"])) == 400
