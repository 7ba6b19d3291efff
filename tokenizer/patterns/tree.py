"""A split pattern's syntax tree, the input of `automaton`.

The syntax is the part of `oniguruma.translate`'s output that a table can express: characters, classes, groups,
alternatives, greedy repetition, and a look-ahead at one character. Atoms (patterns of exactly one character) stay text:
`automaton.classify` matches them by the `regex` module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from tokenizer.errors import TokenizerError

_ATOM = re.compile(
    r"""\[ \^? (?: \\[pP]\{\w+\} | \\U[0-9A-F]{8} | \\[sSdD] | - )+ \]  # a class
    | \[iI\]
    | \(\?i: \\? [!-~] \)                                            # an ASCII character in both cases
    | \\ [sSdD] | \\ [^\w\s] | \\ [ \t\n\r\f\v] | [^\\\[\](){}|?*+.^$]  # a class or a character
    """,
    re.VERBOSE,
)
_INTERVAL = re.compile(r"\{(\d+)(,?)(\d*)\}")
_MOST_REPEATS = 64


class NotTabularError(TokenizerError):
    """A pattern that no table expresses."""


@dataclass(frozen=True, slots=True)
class Character:
    """One character that `atom` matches."""

    atom: str

    def may_be_empty(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Nothing, where `atom` matches the next character (or does not, if `is_negative`)."""

    atom: str
    is_negative: bool

    def may_be_empty(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Row:
    """One part after another."""

    parts: tuple[Node, ...]

    def may_be_empty(self) -> bool:
        return all(part.may_be_empty() for part in self.parts)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the branches; the first is preferred."""

    branches: tuple[Node, ...]

    def may_be_empty(self) -> bool:
        return any(branch.may_be_empty() for branch in self.branches)


@dataclass(frozen=True, slots=True)
class Repeat:
    """`body` from `least` to `most` times (unbounded if None), as often as possible."""

    body: Node
    least: int
    most: int | None

    def may_be_empty(self) -> bool:
        return self.least == 0 or self.body.may_be_empty()


Node = Character | LookAhead | Row | Choice | Repeat


def parse(pattern: str) -> Node:
    """The tree of a pattern. Raises `NotTabularError`."""
    return _Parser(pattern).whole()


class _Parser:
    """A recursive-descent reader."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.position = 0

    def fail(self, what: str) -> NoReturn:
        raise NotTabularError(f"pattern {self.pattern!r}, character {self.position}: {what}")

    def whole(self) -> Node:
        node = self.alternatives()
        if self.position < len(self.pattern):
            self.fail("unmatched )")
        return node

    def takes(self, text: str) -> bool:
        """Consumes `text` if it comes next; returns whether it did."""
        if not self.pattern.startswith(text, self.position):
            return False
        self.position += len(text)
        return True

    def alternatives(self) -> Node:
        branches = [self.row()]
        while self.takes("|"):
            branches.append(self.row())
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def row(self) -> Node:
        parts: list[Node] = []
        while self.position < len(self.pattern) and self.pattern[self.position] not in "|)":
            parts.append(self.repeated(self.part()))
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def part(self) -> Node:
        for opening, is_negative in (("(?!", True), ("(?=", False)):
            if self.takes(opening):
                node = LookAhead(self.atom(), is_negative)
                self.close()
                return node
        if self.takes("(?:"):
            inner = self.alternatives()
            self.close()
            return inner
        return Character(self.atom())

    def close(self) -> None:
        if not self.takes(")"):
            self.fail("expected )")

    def atom(self) -> str:
        found = _ATOM.match(self.pattern, self.position)
        if found is None:
            self.fail("is not supported")
        self.position = found.end()
        return found[0]

    def repeated(self, node: Node) -> Node:
        limits: tuple[int, int | None]
        if self.takes("?"):
            limits = 0, 1
        elif self.takes("*"):
            limits = 0, None
        elif self.takes("+"):
            limits = 1, None
        elif found := _INTERVAL.match(self.pattern, self.position):
            self.position = found.end()
            least = int(found[1])
            limits = least, (int(found[3]) if found[3] else None) if found[2] else least
        else:
            return node
        if self.position < len(self.pattern) and self.pattern[self.position] in "?*+{":
            self.fail("lazy, possessive and doubled repetition are not supported")
        if max(limits[0], limits[1] or 0) > _MOST_REPEATS:
            self.fail("too many repetitions")
        if limits[1] is not None and limits[1] < limits[0]:
            self.fail("repetition limits are the wrong way round")
        return Repeat(node, *limits)
