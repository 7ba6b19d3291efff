"""Regular expressions out of a model's folder, matched in time linear in the text.

All possible places in the pattern are followed at once, in the order in which a backtracking matcher would try them, so
the match is the same, and no pattern takes exponential time. The syntax is that of Python's `regex` module with DOTALL,
as transformers compiles these patterns, as far as `linear_program` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tokenizer.patterns.linear_program import compiled, first_tests

MOST_STEPS = 5_000_000
"""Steps of one pass of `matches`: a few seconds, at most."""


class StepsError(ValueError):
    """The pattern takes too many steps on this text."""


class Match(NamedTuple):
    """The indices of a match, and the texts of its named groups that took part."""

    start: int
    end: int
    groups: dict[str, str]


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
        self.program, self.names = compiled(text)
        self.num_slots = 2 * len(self.names)
        self.looks_ahead = any(each.kind == "assert" for each in self.program)
        """Whether a match depends on the character after it, or on the text's end."""
        first = first_tests(self.program)
        self.may_be_empty = first is None
        """Whether it matches the empty text at any place; one at an assertion does not count."""
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


def _holds(assertion: str, before: str, after: str | None) -> bool:
    if assertion == "start":
        return not before
    if assertion == "end":
        return after is None
    edge = _is_word(before) != _is_word(after or "")
    return edge if assertion == "word_edge" else not edge


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()
