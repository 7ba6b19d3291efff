"""Regular expressions out of a model's folder, matched in time linear in the text.

All possible places in the pattern are followed at once, in the order in which a backtracking matcher would try them, so
the match is the same, and no pattern takes exponential time. The syntax is that of Python's `regex` module with DOTALL,
as transformers compiles these patterns. It refuses by name what this way cannot express (lookaround, backreferences,
atomic groups) and what no published pattern needs (inline flags, properties).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, NoReturn

MOST_PLACES = 256
"""Instructions of a compiled pattern; each character of a text costs at most so many steps."""
MOST_STEPS = 5_000_000
"""Steps of one pass of `matches`: a few seconds, at most."""

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


class StepsError(ValueError):
    """The pattern takes too many steps on this text."""


class Match(NamedTuple):
    """The indices of a match, and the texts of its named groups that took part."""

    start: int
    end: int
    groups: dict[str, str]


class _Instruction(NamedTuple):
    """read: a test of one character; else `kind` is "split" to `targets` in order of preference, "save" of a place,
    "assert" or "match"."""

    kind: str
    test: Callable[[str], bool] | None = None
    targets: tuple[int, ...] = ()
    slot: int = 0
    assertion: str = ""


class _Move(NamedTuple):
    """A thread's next place; the thread that it follows, of those that arrived (-1: a new one); and the slots that take
    the current index."""

    place: int
    source: int
    slots: tuple[int, ...]


Moves = tuple[tuple[_Move, ...], _Move | None]
"""The threads that read the next character, and the match, before which nothing less preferred is left."""

_MOST_KNOWN = 4096
"""Remembered steps of one pattern."""


class LinearPattern:
    """A compiled pattern. Raises `PatternError`."""

    def __init__(self, text: str) -> None:
        self.text = text
        compiler = _Compiler(text)
        compiler.whole()
        self.program = compiler.program
        self.names = tuple(compiler.names)
        self.num_slots = 2 * len(self.names)
        self.looks_ahead = any(each.kind == "assert" for each in self.program)
        """Whether a match depends on the character after it, or on the text's end."""
        first = _first_tests(self.program)
        self.may_be_empty = first is None
        """Whether it matches the empty text anywhere."""
        self._first = None if self.looks_ahead else first
        self._survivors: dict[tuple[tuple[int, ...], str], tuple[int, ...]] = {}
        self._moves: dict[tuple[tuple[int, ...], bool], Moves] = {}

    def may_begin(self, character: str) -> bool:
        """Whether a match may begin with this character."""
        return self._first is None or any(test(character) for test in self._first)

    @classmethod
    def of_literals(cls, literals: list[str]) -> LinearPattern:
        """Any of these texts, the longest at one place."""
        return cls("|".join(re.escape(each) for each in sorted(literals, key=len, reverse=True)))

    def survivors(self, places: tuple[int, ...], character: str) -> tuple[int, ...]:
        """Those of the places, by index, that read this character."""
        found = self._survivors.get((places, character))
        if found is None:
            tests = [self.program[place].test for place in places]
            found = tuple(i for i, test in enumerate(tests) if test is not None and test(character))
            if len(self._survivors) >= _MOST_KNOWN:
                self._survivors.clear()
            self._survivors[places, character] = found
        return found

    def moves(self, arrived: tuple[int, ...], is_open: bool, before: str, after: str | None) -> Moves:
        """The places to which threads that have arrived at these lead, and, if it `is_open`, one that begins here."""
        if self.looks_ahead:
            return self._followed(arrived, is_open, before, after)
        found = self._moves.get((arrived, is_open))
        if found is None:
            found = self._followed(arrived, is_open, before, after)
            if len(self._moves) >= _MOST_KNOWN:
                self._moves.clear()
            self._moves[arrived, is_open] = found
        return found

    def _followed(self, arrived: tuple[int, ...], is_open: bool, before: str, after: str | None) -> Moves:
        seen: set[int] = set()
        threads: list[_Move] = []
        waiting = [_Move(0, -1, ())] if is_open else []
        waiting += [_Move(place, i, ()) for i, place in reversed(list(enumerate(arrived)))]
        while waiting:
            move = waiting.pop()
            place = move.place
            if place in seen:
                continue
            seen.add(place)
            instruction = self.program[place]
            kind = instruction.kind
            if kind == "read":
                threads.append(move)
            elif kind == "split":
                waiting.extend(move._replace(place=target) for target in reversed(instruction.targets))
            elif kind == "save":
                waiting.append(_Move(place + 1, move.source, (*move.slots, instruction.slot)))
            elif kind == "assert":
                if _holds(instruction.assertion, before, after):
                    waiting.append(move._replace(place=place + 1))
            else:
                return tuple(threads), move  # the rest is less preferred
        return tuple(threads), None

    def matches(self, text: str) -> Iterator[Match]:
        """All matches, one after another. Raises `StepsError`."""
        start, steps = 0, 0
        while start <= len(text):
            search = Search(self, start, text[start - 1 : start] if start else "")
            for place in range(start, len(text)):
                search.read(text[place])
                if search.is_decided:
                    break
            else:
                search.finish()
            steps += search.steps
            if steps > MOST_STEPS:
                raise StepsError(f"the pattern {self.text!r} takes more than {MOST_STEPS:,} steps")
            if (found := search.match(text, 0)) is None:
                return
            yield found
            start = found.end if found.end > found.start else found.end + 1


_Head = tuple[int, tuple[int, ...]]
"""The start of a thread's match, and the saved places."""


class Search:
    """Finds the first match in a text that comes character by character, from index `at` on; `before` is the character
    before that."""

    def __init__(self, pattern: LinearPattern, at: int, before: str = "") -> None:
        self._pattern = pattern
        self._at, self._before = at, before
        self._new: tuple[int, ...] = (-1,) * pattern.num_slots
        self._places: tuple[int, ...] = ()  # that read the next character, or, not followed yet, those arrived at
        self._heads: list[_Head] = []
        self._found: _Head | None = None
        self._found_end = 0
        self._is_followed = False
        self.steps = 0

    def read(self, character: str) -> None:
        """The next character of the text."""
        pattern = self._pattern
        self.steps += len(self._places) + 1
        if not self._is_followed:
            if self._found is None and not self._places and not pattern.may_begin(character):
                self._at += 1
                self._before = character
                return
            self._follow(character)
        survivors = pattern.survivors(self._places, character)
        self._places = tuple([self._places[i] + 1 for i in survivors])
        self._heads = [self._heads[i] for i in survivors]
        self._at += 1
        self._before = character
        self._is_followed = False
        if survivors and not pattern.looks_ahead:
            self._follow(None)

    def finish(self) -> None:
        """The text ends here."""
        if not self._is_followed:
            self._follow(None)
        self._places, self._heads = (), []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is found or begun."""
        return self._found is None and not self._places

    @property
    def is_decided(self) -> bool:
        """Whether a match is found that no more text can change."""
        return self._found is not None and not self._places

    @property
    def pending_start(self) -> int | None:
        """The index at which a match begins that is found or may come of what has begun; None if there is none."""
        starts = [start for start, _ in self._heads]
        if self._found is not None:
            starts.append(self._found[0])
        return min(starts, default=None)

    def match(self, text: str, base: int) -> Match | None:
        """The match, whose groups are taken from `text`, which begins at index `base`."""
        if self._found is None:
            return None
        start, saved = self._found
        groups = {
            name: text[saved[2 * i] - base : saved[2 * i + 1] - base]
            for i, name in enumerate(self._pattern.names)
            if saved[2 * i] >= 0 and saved[2 * i + 1] >= 0
        }
        return Match(start, self._found_end, groups)

    def forget_before(self, place: int) -> None:
        """Drop what has begun before this place and is no match yet."""
        kept = [i for i, (start, _) in enumerate(self._heads) if start >= place]
        self._places = tuple([self._places[i] for i in kept])
        self._heads = [self._heads[i] for i in kept]

    def _follow(self, after: str | None) -> None:
        """Finds what the threads that have arrived, and a match that begins here, read next. `after`: the next
        character."""
        moves, found = self._pattern.moves(self._places, self._found is None, self._before, after)
        heads = self._heads
        self._places = tuple([move.place for move in moves])
        self._heads = [self._moved(heads, move) for move in moves]
        if found is not None:
            self._found, self._found_end = self._moved(heads, found), self._at
        self._is_followed = True

    def _moved(self, heads: list[_Head], move: _Move) -> _Head:
        head = (self._at, self._new) if move.source < 0 else heads[move.source]
        if not move.slots:
            return head
        saved = list(head[1])
        for slot in move.slots:
            saved[slot] = self._at
        return head[0], tuple(saved)


def _first_tests(program: list[_Instruction]) -> list[Callable[[str], bool]] | None:
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


def _holds(assertion: str, before: str, after: str | None) -> bool:
    if assertion == "start":
        return not before
    if assertion == "end":
        return after is None
    edge = _is_word(before) != _is_word(after or "")
    return edge if assertion == "word_edge" else not edge


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()


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
        self.program: list[_Instruction] = []

    def whole(self) -> None:
        body = self._alternatives()
        if self._at < len(self._text):
            self._fail("an unmatched )")
        self.program = self._joined(body, [_Instruction("match")])

    def _fail(self, what: str) -> NoReturn:
        raise PatternError(f"the pattern {self._text!r}: {what}")

    def _takes(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _joined(self, *pieces: list[_Instruction]) -> list[_Instruction]:
        """One piece after another, their targets moved."""
        whole: list[_Instruction] = []
        for piece in pieces:
            base = len(whole)
            whole += [each._replace(targets=tuple(t + base for t in each.targets)) for each in piece] if base else piece
        if len(whole) > MOST_PLACES:
            self._fail(f"it needs more than {MOST_PLACES} places")
        return whole

    def _alternatives(self) -> list[_Instruction]:
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
            jump = [_Instruction("split", targets=(1 + len(whole),))]
            whole = self._joined([_Instruction("split", targets=(1, rest))], first, jump, whole)
        return whole

    def _row(self) -> list[_Instruction]:
        pieces: list[list[_Instruction]] = []
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

    def _repeated(self, piece: list[_Instruction], limits: _Limits) -> list[_Instruction]:
        def choice(inside: int, outside: int) -> _Instruction:
            return _Instruction("split", targets=(outside, inside) if limits.is_lazy else (inside, outside))

        whole = self._joined(*[piece] * limits.least)
        if limits.most is None:
            loop = self._joined([choice(1, len(piece) + 2)], piece)
            return self._joined(whole, [*loop, _Instruction("split", targets=(0,))])
        optional: list[_Instruction] = []
        for _ in range(limits.most - limits.least):
            optional = self._joined([choice(1, 1 + len(piece) + len(optional))], piece, optional)
        return self._joined(whole, optional)

    def _part(self) -> list[_Instruction]:
        character = self._text[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            return [_Instruction("read", _test_of(self._class()))]
        if character == "\\":
            return [self._escape()]
        self._at += 1
        if character == ".":
            return [_Instruction("read", _test_of("."))]
        if character == "^":
            return [_Instruction("assert", assertion="start")]
        if character == "$":
            self._fail("$ is not supported, since it also holds before a last line end: \\Z means the end")
        if character in "*+?":
            self._fail("a repetition of nothing")
        return [_Instruction("read", _test_of(re.escape(character)))]

    def _group(self) -> list[_Instruction]:
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
        return self._joined([_Instruction("save", slot=slot)], inner, [_Instruction("save", slot=slot + 1)])

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

    def _escape(self) -> _Instruction:
        letter = self._text[self._at + 1 : self._at + 2]
        if not letter:
            self._fail("it ends with a backslash")
        self._at += 2
        if letter in "dDsSwW":
            return _Instruction("read", _test_of(f"\\{letter}"))
        if letter in _ASSERTIONS:
            return _Instruction("assert", assertion=_ASSERTIONS[letter])
        if letter in _HEXADECIMAL:
            digits = self._text[self._at : self._at + _HEXADECIMAL[letter]]
            if re.fullmatch(f"[0-9a-fA-F]{{{_HEXADECIMAL[letter]}}}", digits) is None or int(digits, 16) > 0x10FFFF:
                self._fail(f"\\{letter} needs {_HEXADECIMAL[letter]} hexadecimal digits")
            self._at += len(digits)
            return _Instruction("read", _test_of(re.escape(chr(int(digits, 16)))))
        if letter.isdigit():
            self._fail(f"a backreference or octal \\{letter} is not supported")
        if letter.isalpha() and letter not in _ESCAPED:
            self._fail(f"\\{letter} is not supported")
        return _Instruction("read", _test_of(re.escape(_ESCAPED.get(letter, letter))))
