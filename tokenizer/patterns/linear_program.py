"""Programs of `linear_pattern`: the text of a regular expression, read into instructions.

It refuses by name what its matcher cannot express (lookaround, backreferences, atomic groups) and what no published
pattern needs (inline flags, properties).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, NoReturn

MOST_PLACES = 256
"""Instructions of a compiled pattern; each character of a text costs at most so many steps."""

_REFUSED_GROUPS = (
    ("(?=", "a lookahead (?=...)"), ("(?!", "a negative lookahead (?!...)"), ("(?<=", "a lookbehind (?<=...)"),
    ("(?<!", "a negative lookbehind (?<!...)"), ("(?>", "an atomic group (?>...)"), ("(?P=", "a backreference (?P=)"),
    ("(?(", "a conditional group (?(...)...)"), ("(?R", "recursion (?R)"), ("(?&", "recursion (?&...)"),
    ("(?P>", "recursion (?P>...)"), ("(?|", "a branch reset (?|...)"), ("(?#", "a comment (?#...)"),
)  # fmt: skip
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_HEXADECIMAL = {"x": 2, "u": 4, "U": 8}
_ASSERTIONS = {"A": "start", "Z": "end", "b": "word_edge", "B": "no_word_edge"}
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_NAME = re.compile(r"\w+")


class PatternError(ValueError):
    """The pattern is invalid, or not supported; the message says which."""


class Instruction(NamedTuple):
    """Its `kind` is "read" (one character that passes `test`), "split" (to `targets`, in order of preference), "save"
    (the index, in `slot`), "assert" or "match"."""

    kind: str
    test: Callable[[str], bool] | None = None
    targets: tuple[int, ...] = ()
    slot: int = 0
    assertion: str = ""


def compiled(text: str) -> tuple[list[Instruction], list[str]]:
    """The program of a pattern, and the names of its groups. Raises `PatternError`."""
    compiler = _Compiler(text)
    compiler.whole()
    return compiler.program, compiler.names


def first_tests(program: list[Instruction]) -> list[Callable[[str], bool]] | None:
    """The tests of a match's first character; None for a pattern that matches the empty text."""
    tests: list[Callable[[str], bool]] = []
    waiting, seen = [0], set[int]()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        each = program[place]
        if each.kind == "match":
            return None
        if each.test is not None:
            tests.append(each.test)
        elif each.kind != "assert":
            waiting += each.targets if each.kind == "split" else (place + 1,)
    return tests


@lru_cache(maxsize=256)
def _test_of(text: str) -> Callable[[str], bool]:
    """The test of a class of characters. Raises `PatternError`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            matches = re.compile(text, re.DOTALL).match
    except re.error as error:
        raise PatternError(f"{text!r}: {error}") from error
    known: dict[str, bool] = {}

    def test(character: str) -> bool:
        found = known.get(character)
        if found is None:
            found = matches(character) is not None
            if len(known) < 1024:
                known[character] = found
        return found

    return test


@dataclass(slots=True)
class _Limits:
    least: int
    most: int | None
    is_lazy: bool


class _Compiler:
    """Reads a pattern and writes its program: a recursive-descent reader whose rules return pieces of the program,
    relative to their own beginning."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self.names: list[str] = []
        self.program: list[Instruction] = []

    def whole(self) -> None:
        body = self._alternatives()
        if self._at < len(self._text):
            self._fail("an unmatched )")
        self.program = self._joined(body, [Instruction("match")])

    def _fail(self, what: str) -> NoReturn:
        raise PatternError(f"the pattern {self._text!r}: {what}")

    def _takes(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _joined(self, *pieces: list[Instruction]) -> list[Instruction]:
        """One piece after another, their targets moved."""
        whole: list[Instruction] = []
        for piece in pieces:
            base = len(whole)
            whole += [each._replace(targets=tuple(t + base for t in each.targets)) for each in piece] if base else piece
        if len(whole) > MOST_PLACES:
            self._fail(f"it needs more than {MOST_PLACES} places")
        return whole

    def _alternatives(self) -> list[Instruction]:
        self._depth += 1
        if self._depth > 50:
            self._fail("groups are nested deeper than 50")
        branches = [self._row()]
        while self._takes("|"):
            branches.append(self._row())
        self._depth -= 1
        whole = branches.pop()
        while branches:
            first = branches.pop()
            rest = len(first) + 2
            jump = [Instruction("split", targets=(1 + len(whole),))]
            whole = self._joined([Instruction("split", targets=(1, rest))], first, jump, whole)
        return whole

    def _row(self) -> list[Instruction]:
        pieces: list[list[Instruction]] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            piece = self._part()
            if (limits := self._limits()) is not None:
                piece = self._repeated(piece, limits)
            pieces.append(piece)
        return self._joined(*pieces)

    def _limits(self) -> _Limits | None:
        if self._takes("?"):
            limits = _Limits(0, 1, False)
        elif self._takes("*"):
            limits = _Limits(0, None, False)
        elif self._takes("+"):
            limits = _Limits(1, None, False)
        elif (found := _COUNT.match(self._text, self._at)) is not None and any(found[i] for i in (1, 3)):
            self._at = found.end()
            least = int(found[1] or 0)
            limits = _Limits(least, (int(found[3]) if found[3] else None) if found[2] else least, False)
        else:
            return None
        if max(limits.least, limits.most or 0) > MOST_PLACES:
            self._fail(f"more than {MOST_PLACES} repetitions")
        if limits.most is not None and limits.most < limits.least:
            self._fail("limits of a repetition are the wrong way round")
        limits.is_lazy = self._takes("?")
        if not limits.is_lazy and self._takes("+"):
            self._fail("a possessive repetition")
        if self._text[self._at : self._at + 1] in ("*", "+", "?"):
            self._fail("a doubled repetition")
        return limits

    def _repeated(self, piece: list[Instruction], limits: _Limits) -> list[Instruction]:
        def choice(inside: int, outside: int) -> Instruction:
            return Instruction("split", targets=(outside, inside) if limits.is_lazy else (inside, outside))

        whole = self._joined(*[piece] * limits.least)
        if limits.most is None:
            loop = self._joined([choice(1, len(piece) + 2)], piece)
            return self._joined(whole, [*loop, Instruction("split", targets=(0,))])
        optional: list[Instruction] = []
        for _ in range(limits.most - limits.least):
            optional = self._joined([choice(1, 1 + len(piece) + len(optional))], piece, optional)
        return self._joined(whole, optional)

    def _part(self) -> list[Instruction]:
        character = self._text[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            return [Instruction("read", _test_of(self._class()))]
        if character == "\\":
            return [self._escape()]
        self._at += 1
        if character == ".":
            return [Instruction("read", _test_of("."))]
        if character == "^":
            return [Instruction("assert", assertion="start")]
        if character == "$":
            self._fail("$ is not supported, since it also holds before a last line end: \\Z means the end")
        if character in "*+?":
            self._fail("a repetition of nothing")
        return [Instruction("read", _test_of(re.escape(character)))]

    def _group(self) -> list[Instruction]:
        for opening, what in _REFUSED_GROUPS:
            if self._text.startswith(opening, self._at):
                self._fail(f"{what} is not supported: it has no bound in time, or no use here")
        name = ""
        if self._takes("(?:"):
            pass
        elif self._takes("(?P<") or self._takes("(?<"):
            found = _NAME.match(self._text, self._at)
            if found is None or not self._text.startswith(">", found.end()):
                self._fail("a group's name is not closed")
            name, self._at = found[0], found.end() + 1
        elif self._text.startswith("(?", self._at):
            self._fail("an inline flag (?...) is not supported")
        else:
            self._at += 1
        slot = -1
        if name:
            if name not in self.names:
                self.names.append(name)
            slot = 2 * self.names.index(name)
        inner = self._alternatives()
        if not self._takes(")"):
            self._fail("a group is not closed")
        if slot < 0:
            return inner
        return self._joined([Instruction("save", slot=slot)], inner, [Instruction("save", slot=slot + 1)])

    def _class(self) -> str:
        """The text of a class of characters."""
        start = self._at
        self._at += 1
        self._takes("^")
        self._takes("]")
        while not self._text.startswith("]", self._at):
            if self._at >= len(self._text):
                self._fail("a class [...] is not closed")
            if self._text.startswith("[:", self._at):
                self._fail("a POSIX class [:...:] is not supported")
            if self._text[self._at] == "\\":
                if self._text[self._at + 1 : self._at + 2] in ("p", "P", "N", "X", "R", "h"):
                    self._fail(f"\\{self._text[self._at + 1]} is not supported")
                self._at += 1
            self._at += 1
        self._at += 1
        return self._text[start : self._at]

    def _escape(self) -> Instruction:
        letter = self._text[self._at + 1 : self._at + 2]
        if not letter:
            self._fail("it ends with a backslash")
        self._at += 2
        if letter in "dDsSwW":
            return Instruction("read", _test_of(f"\\{letter}"))
        if letter in _ASSERTIONS:
            return Instruction("assert", assertion=_ASSERTIONS[letter])
        if letter in _HEXADECIMAL:
            digits = self._text[self._at : self._at + _HEXADECIMAL[letter]]
            if re.fullmatch(f"[0-9a-fA-F]{{{_HEXADECIMAL[letter]}}}", digits) is None or int(digits, 16) > 0x10FFFF:
                self._fail(f"\\{letter} needs {_HEXADECIMAL[letter]} hexadecimal digits")
            self._at += len(digits)
            return Instruction("read", _test_of(re.escape(chr(int(digits, 16)))))
        if letter.isdigit():
            self._fail(f"a backreference or octal \\{letter} is not supported")
        if letter.isalpha() and letter not in _ESCAPED:
            self._fail(f"\\{letter} is not supported")
        return Instruction("read", _test_of(re.escape(_ESCAPED.get(letter, letter))))
