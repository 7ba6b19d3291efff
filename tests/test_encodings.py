"""Text is read and written as UTF-8, whatever the locale says: every place names its encoding."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("models", "numba_kernels", "runtime", "server", "tokenizer", "tools", "tests")
OTHER_OPENS = {"Image", "image_module", "os", "tarfile", "webbrowser", "zipfile"}
"""Whose `open` opens no text."""


SUSPECT = re.compile(r"open\(|(read|write)_text|TextIOWrapper|text=|universal_newlines")
"""A file without a match has no such call: most files need no parsing."""


def places_without_encoding(program: str) -> Iterator[int]:
    """The lines of calls that read or write text in the locale's encoding."""
    if not SUSPECT.search(program):
        return
    for node in ast.walk(ast.parse(program)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        owner = called.value if isinstance(called, ast.Attribute) else None
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "encoding" in given or None in given:
            continue
        is_text = any(getattr(given.get(each), "value", None) is True for each in ("text", "universal_newlines"))
        has_position = {"read_text": 1, "write_text": 2, "TextIOWrapper": 2}.get(name)
        if has_position is not None:
            is_text = len(node.args) < has_position
        elif name == "fdopen" or (name == "open" and getattr(owner, "id", "") not in OTHER_OPENS):
            first = 0 if owner is not None and name == "open" else 1
            mode = given.get("mode", node.args[first] if len(node.args) > first else ast.Constant("r"))
            is_text = isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" not in mode.value
        if is_text:
            yield node.lineno


@pytest.mark.parametrize(
    ("program", "is_found"),
    [
        ("path.read_text()", True),
        ("path.read_text(encoding='utf-8')", False),
        ("path.write_text(text)", True),
        ("open(path)", True),
        ("open(path, 'rb')", False),
        ("path.open('a')", True),
        ("path.open('ab')", False),
        ("os.fdopen(3, 'w')", True),
        ("os.open(path, os.O_RDONLY)", False),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.run(command, text=True, encoding='utf-8')", False),
        ("subprocess.run(command)", False),
    ],
)
def test_the_check_itself(program: str, is_found: bool) -> None:
    assert bool(list(places_without_encoding(program))) == is_found


@pytest.mark.parametrize("room", ROOMS)
def test_every_text_file_has_an_encoding(room: str) -> None:
    """Of the tests themselves, what several share."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / room).rglob("*.py"))
        if room != "tests" or not path.name.startswith("test_")
        for line in places_without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert not found, 'give encoding="utf-8"'


def test_nothing_says_to_install_a_name_that_no_registry_has_of_ours() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for pattern in ("*.md", "docs/*.md", "server/deploy/*", "server/**/*.py", "runtime/**/*.py")
        for path in ROOT.glob(pattern)
        if path.is_file() and re.search(r"pip install [\"']?xserv", path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert wrong == []
