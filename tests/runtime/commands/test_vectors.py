"""`xserv embed` and `xserv rank`."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from runtime.cli import app
from tests.models.encoder_cases import QUERY, TEXTS, expected, write_encoder, write_layout

LINES = [text for text in TEXTS if text]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(LINES) + "\n\n", encoding="utf-8")
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_embed(tmp_path: Path, texts: Path) -> None:
    folder, output = write_layout(tmp_path / "model", "mean"), tmp_path / "vectors.npy"
    link = tmp_path / "link.npy"
    link.symlink_to(output)
    run("embed", texts, "--model", folder, "--prompt-name", "document", "--output", link)
    assert link.is_symlink()
    theirs = expected("layout mean document")[[bool(text) for text in TEXTS]]
    np.testing.assert_allclose(np.load(output), theirs, atol=1e-5)
    lines = [json.loads(line) for line in run("embed", texts, "--model", folder, "--dimensions", 5).splitlines()]
    assert [len(line) for line in lines] == [5] * len(LINES)


def test_an_output_that_cannot_be_written(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out before a model is loaded; a file that was there stays, and none is left half."""
    result = CliRunner().invoke(app, ["embed", str(texts), "--model", "/none", "-o", str(tmp_path / "no" / "a.npy")])
    assert (result.exit_code, "a.npy.part: No such file" in result.output) == (1, True)
    (tmp_path / "folder.npy").mkdir()
    result = CliRunner().invoke(app, ["embed", str(texts), "--model", "/none", "-o", str(tmp_path / "folder.npy")])
    assert (result.exit_code, "Is a directory" in result.output) == (1, True)
    output = tmp_path / "a.npy"
    output.write_bytes(b"before")

    def full(file: io.BytesIO, array: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", full)
    folder = write_layout(tmp_path / "model", "mean")
    result = CliRunner().invoke(app, ["embed", str(texts), "--model", str(folder), "-o", str(output)])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "xserv: error: No space left on device")
    assert output.read_bytes() == b"before"
    assert not [*tmp_path.glob("*.part")]


def test_rank(tmp_path: Path, texts: Path) -> None:
    folder = write_encoder(tmp_path / "model", "bert_pairs")
    theirs = expected("scores bert_pairs")[[bool(text) for text in TEXTS]]
    order = np.argsort(-theirs, kind="stable").tolist()
    found = [json.loads(line) for line in run("rank", QUERY, texts, "--model", folder, "--json").splitlines()]
    assert [each["index"] for each in found] == order
    np.testing.assert_allclose([each["relevance_score"] for each in found], theirs[order], rtol=1e-5)
    assert [each["document"] for each in found] == [LINES[index] for index in order]
    (best,) = run("rank", QUERY, texts, "--model", folder, "--top", 1).splitlines()
    assert best == f"{theirs[order[0]]:.4f}\t{LINES[order[0]]}"


def test_wrong_arguments(tmp_path: Path, texts: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for arguments, message in (
        (["embed", empty], "has no text"),
        (["embed", texts, "--output", tmp_path / "vectors.txt"], "must end in .npy"),
        (["rank", "a", empty], "has no text"),
    ):
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())


def test_an_encoder_does_not_chat(tmp_path: Path) -> None:
    """One line at the start, for each command and call."""
    folder = write_encoder(tmp_path / "model", "bert")
    for arguments in (["chat"], ["generate", "--prompt", "a"], ["generate", "--chat", "--prompt", "a"]):
        result = CliRunner().invoke(app, [*arguments, "--model", str(folder)], input="one\ntwo\n")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.splitlines()[-1] == (
            "xserv: error: BertModel generates no text: ask for embeddings"
        ), result.stderr  # fmt: skip
        assert result.stderr.count("generates no text") == 1
