"""`bench tokenizer`: what is timed has the same ids on every side, and the report holds every part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from models.checkpoints.hub import resolve_model
from runtime.bench.metrics import BenchmarkError
from runtime.bench.tokenizers import bench_tokenizer as bench
from runtime.bench.tokenizers.bench_tokenizer import (
    bench_tokenizer,
    chat_like_prompt,
    default_texts,
    hard_texts,
    tokenizer_rows,
)
from runtime.bench.tokenizers.sides import LOADERS, Side, load_ours
from runtime.cli import app

FILE = Path(resolve_model(None)) / "tokenizer.json"
TEXTS = {"prose": "The quick brown fox. " * 200, "code": "def f(x):\n    return x + 1\n" * 100}


def test_rows_for_each_text_and_the_prompt() -> None:
    pytest.importorskip("tokenizers", reason="needs the tokenizers library")
    rows = tokenizer_rows([FILE], TEXTS, num_rounds=2)
    assert [row["work"] for row in rows] == ["encode, prose", "encode, code", "encode, a prompt of 400 characters"]
    for row in rows:
        assert row["tokenizer"] == "demo"
        assert 0 < row["ours"]["min"] <= row["ours"]["median"] <= row["ours"]["max"]
        others = [row[name]["median"] for name in ("tokenizers", "tiktoken") if name in row]
        best = row["ours"]["median"] / max(others) if row["unit"] == "MB/s" else min(others) / row["ours"]["median"]
        assert row["ratio"] == pytest.approx(best)


def test_the_whole_command() -> None:
    arguments = ["bench", "tokenizer", "--num-rounds", "1", "--loads", "1", "--long-characters", "2000", "--json"]
    done = CliRunner().invoke(app, [*arguments, "--text", f"ours={__file__}"])
    assert done.exit_code == 0, done.output
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert [row["work"] for row in report["scaling"]] == list(hard_texts(100))
    assert report["loading"][0]["ours"]["private_bytes"] > 0
    assert report["decoding"][0]["one_by_one_us"] > 0
    assert any("us a character" in line for line in bench.as_lines(report))


def test_other_ids_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_wrong(file: Path) -> Side:
        ours = load_ours(file)
        return Side("tokenizers", lambda text: [*ours.encode(text), 1], ours.prompt, ours.decode)

    monkeypatch.setitem(LOADERS, "tokenizers", load_wrong)
    monkeypatch.setattr(bench, "installed", lambda: ["ours", "tokenizers"])
    with pytest.raises(BenchmarkError, match="prose: tokenizers gives other ids"):
        tokenizer_rows([FILE], TEXTS, num_rounds=1)


def test_inputs_are_checked() -> None:
    with pytest.raises(BenchmarkError, match="there is no"):
        bench_tokenizer([Path("nowhere/tokenizer.json")])
    with pytest.raises(BenchmarkError, match="at least 1"):
        bench_tokenizer([FILE], num_rounds=0)
    done = CliRunner().invoke(app, ["bench", "tokenizer", "--text", "nothing"])
    assert done.exit_code == 2
    assert "NAME=FILE" in done.output


def test_texts() -> None:
    assert all(len(text) > 200_000 for text in default_texts().values())
    assert len(chat_like_prompt(FILE, TEXTS["prose"])) == 400
    assert all(len(text) == 1000 for text in hard_texts(1000).values())
