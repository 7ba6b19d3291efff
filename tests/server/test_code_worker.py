"""The colours of code: every character has one, and the code stays what it is."""

from __future__ import annotations

import random

import pytest
from pygments.lexers import get_all_lexers

from server.code_worker import HighlightError, highlight

CODE = """\n\n#!/bin/sh\n\tdef f(x: int) -> str:  # é😀\n    return f"{x!r}" + 'y' * 0x1F\n\n<b class="x">&amp;</b>
{"a": 1} SELECT * FROM t WHERE a = 'b'; /* c */ @decorator\n- removed\n+ added  \n"""


def pieces(code: str, runs: list[str | int]) -> list[tuple[str, str]]:
    found = []
    units = code.encode("utf-16-le")
    at = 0
    for name, length in zip(runs[::2], runs[1::2], strict=True):
        assert isinstance(length, int)
        found.append((str(name), units[at : at + 2 * length].decode("utf-16-le")))
        at += 2 * length
    assert at == len(units)
    return found


def test_python() -> None:
    code = "def f(x):\n    return 'é😀' + 1  # why\n"
    runs = pieces(code, highlight("python", code))
    assert ("k", "def") in runs
    assert ("f", "f") in runs
    assert ("s", "'é😀'") in runs
    assert ("m", "1") in runs
    assert ("c", "# why") in runs


LANGUAGES = ("js", "html", "json", "bash", "c++", "rust", "sql", "diff", "yaml", "console", "tex")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_usual_languages_keep_the_code(language: str) -> None:
    runs = pieces(CODE, highlight(language, CODE))
    assert "".join(text for _, text in runs) == CODE
    assert any(name for name, _ in runs)


@pytest.mark.exhaustive
def test_every_language_keeps_the_code_or_is_refused() -> None:
    draw = random.Random(3)
    num_refused = 0
    languages = sorted(names[0] for _, names, _, _ in get_all_lexers() if names)
    for language in languages:
        code = "".join(draw.choice(CODE) for _ in range(200)) + CODE
        try:
            pieces(code, highlight(language, code))
        except HighlightError:
            num_refused += 1
    assert num_refused < len(languages) / 2


@pytest.mark.parametrize("language", ["", "nothing", "../python", "python; rm"])
def test_an_unknown_language_is_refused(language: str) -> None:
    with pytest.raises(HighlightError):
        highlight(language, "x = 1")
