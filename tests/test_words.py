"""Tell-tales of English that a reader has to translate back: docstrings, comments and help of the product have none."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("numba_kernels", "models", "runtime", "server", "tokenizer", "tools")

OPENING = re.compile(r"(What|Where|Of|Which|Who|Whose)\b")
"""A docstring that begins with a relative clause or a genitive does not say what the thing is."""

SENTENCE = re.compile(r"\.\s+(What|Of|Who|Whose)\b(?=[^.?!]*\.(?:[\s\"']|$))")
"""So does a later sentence, unless it asks something."""

BEHIND = re.compile(r"\bbehind\b", re.IGNORECASE)
"""In time and in order a thing comes after another one."""

PLACES = re.compile(
    r"behind (a|an|the|its|one|another) (\w+ )?"
    r"(proxy|proxies|load balancer|gateway|router|interface|firewall|lock|flag|door|feature flag)",
    re.IGNORECASE,
)
"""What may stand in front of something else."""

PERSONS = re.compile(r"\b(whoever|nobody)\b", re.IGNORECASE)
"""Callers, clients, kernels and logs have names."""


SUSPECT = re.compile(
    rf"{BEHIND.pattern}|{PERSONS.pattern}|[\"'](?:{OPENING.pattern})|{SENTENCE.pattern}", re.IGNORECASE
)
"""A file without a match has no tell-tale: most files need no parsing."""


def words_of(source: str) -> Iterator[tuple[int, str, bool]]:
    """Line, text, and whether it is a docstring: the docstrings and comments of a file, and the help of its options. A
    string after an assignment is the docstring of its name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            yield node.value.lineno, str(node.value.value), True
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else []:
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.lineno, each.value.value, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def tell_tales(source: str) -> Iterator[tuple[int, str]]:
    """Line and word of each."""
    if not SUSPECT.search(source):
        return
    for line, text, is_docstring in words_of(source):
        if is_docstring and (found := OPENING.match(text)):
            yield line, found[0]
        if is_docstring:
            yield from ((line, found[1]) for found in SENTENCE.finditer(text))
        for pattern in (BEHIND, PERSONS):
            for found in pattern.finditer(PLACES.sub("", text)):
                yield line, found[0]


def test_docstrings_and_comments_are_plain() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, word in tell_tales(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("What a maker asks for.", ["What"]),
        ("Of each row the largest.", ["Of"]),
        ("Whether a page is needed.", []),
        ("The pages behind it are released.", ["behind"]),
        ("The server runs behind a proxy.", []),
        ("It stands behind a reverse proxy, and the pages lie behind.", ["behind"]),
        ("Nobody reads them.", ["Nobody"]),
        ("The step after this one.", []),
        ("It reads rows. What it reads is kept.", ["What"]),
        ("It reads rows. Of these\nit keeps two.", ["Of"]),
        ("What the answer is: a list. Who asked? Nothing else.", ["What"]),
        ("It says what it reads. Who may ask?", []),
    ],
)
def test_the_patterns(text: str, words: list[str]) -> None:
    assert [word for _, word in tell_tales(f'"""{text}"""\n')] == words
    assert [word for _, word in tell_tales(f'X = 1\n"""{text}"""\n')] == words


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('option(help="What is asked.")', ["What"]),
        ('option(help="Seconds behind the first.")', ["behind"]),
        ('option(help="Route that is asked.", metavar="What")', []),
        ('option(about="Of the weights.")', []),
    ],
)
def test_help_is_plain(source: str, words: list[str]) -> None:
    assert [word for _, word in tell_tales(source)] == words
