"""The process that gives code its colours (`server.worker_process`), with pygments, whose lexers are slow on bad input.

A job is `[language, text]`; its answer is the code as runs of characters, each of one class of the page's style sheet,
or null. Jobs and answers are JSON."""

from __future__ import annotations

from functools import lru_cache

import msgspec
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Token, _TokenType
from pygments.util import ClassNotFound

from server.worker_process import answer_jobs

MAX_MEMORY_BYTES = 1 << 30

CLASSES = {
    Token.Keyword: "k",
    Token.Keyword.Constant: "m",
    Token.Keyword.Type: "t",
    Token.Operator.Word: "k",
    Token.Name.Builtin: "b",
    Token.Name.Class: "t",
    Token.Name.Exception: "t",
    Token.Name.Namespace: "t",
    Token.Name.Function: "f",
    Token.Name.Decorator: "a",
    Token.Name.Attribute: "a",
    Token.Name.Tag: "k",
    Token.Name.Variable: "v",
    Token.Name.Entity: "m",
    Token.Literal.Number: "m",
    Token.Literal: "s",
    Token.Comment: "c",
    Token.Comment.Preproc: "a",
    Token.Generic.Heading: "k",
    Token.Generic.Subheading: "a",
    Token.Generic.Inserted: "i",
    Token.Generic.Deleted: "d",
    Token.Generic.Prompt: "c",
    Token.Generic.Output: "",
    Token.Generic.Traceback: "d",
}
"""The class of a kind of token, and of the kinds below it. Everything else has the text's own colour."""

Runs = list[str | int]
"""Class, length, class, length, …; lengths in UTF-16 units, which are what the page counts in."""


class HighlightError(ValueError):
    """The language is unknown, or its lexer changed the text."""


def highlight(language: str, code: str) -> Runs:
    """The runs of the code, all of it. Raises `HighlightError`."""
    runs: Runs = []
    length = 0
    for kind, text in _lexer(language).get_tokens(code):
        name = _class_of(kind)
        units = len(text.encode("utf-16-le", "surrogatepass")) // 2
        length += len(text)
        if runs and runs[-2] == name:
            runs[-1] = int(runs[-1]) + units
        else:
            runs += [name, units]
    if length != len(code):
        raise HighlightError("the lexer changed the code")
    return runs


def _lexer(language: str) -> Lexer:
    """The lexer; it neither adds nor removes line breaks."""
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        raise HighlightError("no such language") from None


@lru_cache(maxsize=256)
def _class_of(kind: _TokenType) -> str:
    at: _TokenType | None = kind
    while at is not None:
        if at in CLASSES:
            return CLASSES[at]
        at = at.parent
    return ""


def answer(job: memoryview, _: memoryview) -> msgspec.Raw:
    """The answer as JSON to a job as JSON; null leaves the code without colours."""
    try:
        return msgspec.Raw(msgspec.json.encode(highlight(*msgspec.json.decode(job))))
    except (HighlightError, RecursionError, MemoryError):
        return msgspec.Raw(b"null")


if __name__ == "__main__":
    answer_jobs(answer, max_memory_bytes=MAX_MEMORY_BYTES)
