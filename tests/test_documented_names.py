"""What the pages name in the code is there: files, classes and their attributes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_size import PAGES

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("models", "numba_kernels", "runtime", "server", "tests", "tokenizer", "tools")
REMOVED = {"tools/comparing/compare_triton.py"}
"""Files that a page names with the commit that had them."""

_FILE = re.compile(r"[\w/]+/\w+\.(?:py|json|md|sh|js|yaml)")
_CLASS = re.compile(r"([A-Z]\w*[a-z]\w*)(?:\.(\w+))?(?:\(\))?")


@pytest.fixture(scope="module")
def words() -> set[str]:
    """The words of the product's and the tests' Python."""
    found: set[str] = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            found.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_what_there_is(page: Path, words: set[str]) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    folders = [ROOT, *(ROOT / room for room in ROOMS), ROOT / "runtime" / "engine", ROOT / "numba_kernels" / "cuda"]
    missing = []
    for name in re.findall(r"`([^`\n]+)`", text):
        if _FILE.fullmatch(name):
            is_there = name in REMOVED or any((folder / name.lstrip("/")).exists() for folder in folders)
        elif match := _CLASS.fullmatch(name):
            is_there = all(part in words for part in match.groups() if part)
        else:
            continue
        if not is_there:
            missing.append(name)
    assert not missing
