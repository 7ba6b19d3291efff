"""stdin, stdout and stderr as shells give them, and text files in other encodings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.commands.generate import read_prompts
from runtime.errors import InvalidArgumentError
from tests.runtime.commands.running import ROOT


def shell(command: str, **environment: str) -> tuple[int, bytes, bytes]:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (">&-", b"stdout is closed: nothing can be written"),
        (">/dev/full", b"No space left on device"),
        ("| true", b""),  # as other programs, whose output nobody reads any more
        (">&- 2>&-", b""),
    ],
)
def test_output_that_cannot_be_written_is_an_error_without_a_traceback(given: str, error: bytes) -> None:
    program = "import time; time.sleep(0.3); from runtime.cli import main; main()"
    status, out, err = shell(f'{sys.executable} -c "$PROGRAM" --version {given}', PROGRAM=program)
    assert status == 1
    assert out == b""
    assert err == (b"xserv: error: " + error + b"\n" if error else b"")


def test_a_locale_that_knows_ascii_alone_is_taken_for_utf_8() -> None:
    program = (
        "import sys; from runtime.commands.group import prepare_streams; prepare_streams(); "
        "print(sys.stdin.read() + chr(0x20ac))"
    )
    posix = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    status, out, err = shell(f"printf 'h\\303\\251' | {sys.executable} -c \"$PROGRAM\"", PROGRAM=program, **posix)
    assert (status, out, err) == (0, "hé€\n".encode(), b"")
    status, out, err = shell(
        f"printf 'h\\351' | {sys.executable} -c \"$PROGRAM\"", PROGRAM=program, PYTHONIOENCODING="latin-1"
    )
    assert (status, out, err) == (0, b"h\xe9\\u20ac\n", b"")


def test_a_file_of_prompts_in_another_encoding_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    for content, problem in (
        ("hé".encode("utf-16"), "is UTF-16, must be UTF-8: save it as UTF-8"),
        ("hé".encode("utf-32"), "is UTF-32, must be UTF-8: save it as UTF-8"),
        ("a\nhé".encode("latin-1"), "line 2 has the byte 0xe9"),
    ):
        file.write_bytes(content)
        with pytest.raises(InvalidArgumentError, match=problem) as caught:
            read_prompts(file)
        assert str(file) in str(caught.value)
    file.write_bytes("hé".encode("utf-8-sig"))
    assert read_prompts(file) == ["hé"]
    assert "byte order mark" in capsys.readouterr().err
