"""A split pattern as a table: each step reads one character's class and finds the word's end.

A backtracking matcher tries the alternatives of a pattern one after another; a deterministic automaton follows all of
them at once, one table entry a character. A state is the list of possible places in the pattern, in the order in which
a backtracking matcher would try them (R. Cox, "Regular Expression Matching: the Virtual Machine Approach",
https://swtch.com/~rsc/regexp/regexp2.html), so that the match found is the same, not the longest. Places less preferred
than a match are never tried, and are left out.

Matches are seen one character late: an entry records whether a match ends before the character being read. So a
look-ahead at one character, as in ``\\s+(?!\\S)``, is no more than a condition on that character.

The syntax of known tokenizers' split patterns is supported; anything else raises `NotTabularError`, and the `regex`
module matches the pattern (`pre_tokenizers`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.later import later
from tokenizer.patterns.oniguruma import MOVED_LETTER
from tokenizer.patterns.tree import Character, Choice, LookAhead, Node, NotTabularError, Repeat, Row, parse
from tokenizer.patterns.unicode_tables import WHITE_SPACE

_MOST_STATES = 512
_MOST_PLACES = 4096
_MATCH = -1  # the place after the whole pattern


@dataclass(frozen=True, slots=True)
class Automaton:
    """A pattern's tables.

    classes      [0x110000] uint8: the class of each character
    transitions  [num_states * (num_classes + 1)] int32: at `state + class`, where state is a row's first index and the
                 last class stands for the end of the text: the next state times 2, plus 1 if a match ends before this
                 character. State 0 is dead, the second row is the start of a word.
    num_classes  characters' classes, the end not counted
    """

    classes: np.ndarray
    transitions: np.ndarray
    num_classes: int

    @property
    def start(self) -> int:
        """The state in which a word begins."""
        return self.num_classes + 1


def compile_automaton(pattern: str) -> Automaton:
    """The tables of a pattern in the syntax of the `regex` module, as `oniguruma.translate` writes it.

    Raises `NotTabularError` for unsupported syntax, for a pattern that matches the empty text, and for one that does
    not match at every character: words must cover every text without gaps.
    """
    tree = parse(pattern)
    program = _Program()
    program.first = program.add(tree, _MATCH)
    classified = classify(program.atoms)
    rows = _rows(program, classified)
    width = classified.num_classes + 1
    transitions = np.array(rows, np.int32)  # [num_states, width, 2]
    packed = transitions[:, :, 0] * (2 * width) + transitions[:, :, 1]
    return Automaton(classified.classes, packed.reshape(-1).astype(np.int32), classified.num_classes)


class _Program:
    """The pattern as numbered places. A place reads a character, chooses, looks ahead, or is the end.

    readers    place: (atom, place after it)
    choices    place: places in order of preference
    lookaheads place: (atom, whether it must not match, place after it)
    """

    def __init__(self) -> None:
        self.atoms: list[str] = []
        self.readers: dict[int, tuple[int, int]] = {}
        self.choices: dict[int, list[int]] = {}
        self.lookaheads: dict[int, tuple[int, bool, int]] = {}
        self.first = _MATCH
        self._num_places = 0

    def _new_place(self) -> int:
        self._num_places += 1
        if self._num_places > _MOST_PLACES:
            raise NotTabularError("the pattern is too long")
        return self._num_places - 1

    def _atom(self, atom: str) -> int:
        if atom not in self.atoms:
            self.atoms.append(atom)
        return self.atoms.index(atom)

    def add(self, node: Node, behind: int) -> int:
        """The place at which `node` begins, given the place after it."""
        match node:
            case Character(atom):
                place = self._new_place()
                self.readers[place] = self._atom(atom), behind
                return place
            case LookAhead(atom, is_negative):
                place = self._new_place()
                self.lookaheads[place] = self._atom(atom), is_negative, behind
                return place
            case Row(parts):
                for part in reversed(parts):
                    behind = self.add(part, behind)
                return behind
            case Choice(branches):
                place = self._new_place()
                self.choices[place] = [self.add(branch, behind) for branch in branches]
                return place
            case Repeat(body, least, most):
                return self._add_repeat(body, least, most, behind)

    def _add_repeat(self, body: Node, least: int, most: int | None, behind: int) -> int:
        if most is None:
            if body.may_be_empty():
                raise NotTabularError("a repeated part may be empty")
            loop = self._new_place()
            self.choices[loop] = [self.add(body, loop), behind]
            behind = loop
        else:
            end = behind
            for _ in range(most - least):
                place = self._new_place()
                self.choices[place] = [self.add(body, behind), end]
                behind = place
        for _ in range(least):
            behind = self.add(body, behind)
        return behind


def _rows(program: _Program, classified: ClassTable) -> list[list[tuple[int, int]]]:
    """The table: for each state and class (the end last) the next state's number and whether a match has ended."""
    members = [*classified.members, None]  # None is the end of the text
    numbers: dict[tuple[int, ...], int] = {(): 0, (program.first,): 1}
    states = list(numbers)
    rows: list[list[tuple[int, int]]] = []
    while len(rows) < len(states):
        row = []
        for member in members:
            places, has_matched = _step(program, states[len(rows)], member)
            if places not in numbers:
                numbers[places] = len(states)
                states.append(places)
                if len(states) > _MOST_STATES:
                    raise NotTabularError("the pattern has too many states")
            row.append((numbers[places], int(has_matched)))
        rows.append(row)
    if any(has_matched for _, has_matched in rows[1]):
        raise NotTabularError("the pattern matches the empty text")
    if not all(has_matched for state, _ in rows[1][:-1] for _, has_matched in rows[state]):
        raise NotTabularError("the pattern does not match every character")
    return rows


def _step(program: _Program, places: Sequence[int], member: frozenset[int] | None) -> tuple[tuple[int, ...], bool]:
    """The places after one character, and whether a match ends before it.

    `member`: the atoms that match the character; None at the end of the text.
    """
    behind: dict[int, None] = {}  # an ordered set
    seen: set[int] = set()
    pending = list(reversed(places))
    while pending:
        place = pending.pop()
        if place == _MATCH:
            return tuple(behind), True  # places less preferred than a match are not tried
        if place in seen:
            continue
        seen.add(place)
        if place in program.choices:
            pending.extend(reversed(program.choices[place]))
        elif place in program.lookaheads:
            atom, is_negative, following = program.lookaheads[place]
            if (member is not None and atom in member) != is_negative:
                pending.append(following)
        else:
            atom, following = program.readers[place]
            if member is not None and atom in member:
                behind[following] = None
    return tuple(behind), False


# Classes of characters: two characters are in one class if no part of a pattern distinguishes them. General categories
# are the `regex` module's, except that U+0295 has the reference's. A pattern's atoms are matched against one character
# of each kind, so that a table of all 1,114,112 characters takes milliseconds.

regex = later("regex")

NUM_CHARACTERS = 0x110000
_CATEGORIES = (
    "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po",
    "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf",
)  # fmt: skip
_PROPERTIES = {*_CATEGORIES, *"LMNPSZC"}
_ASSIGNED = ((0, 0x40000), (0xE0000, 0xE0200))  # outside, all characters are of one kind: C
_MOST_CLASSES = 255
_FOLDED_TO_ASCII = "\u017f\u212a"  # long s and the Kelvin sign: characters beyond ASCII that fold to one ASCII letter


@dataclass(frozen=True, slots=True)
class ClassTable:
    """The classes of all characters.

    classes  [0x110000] uint8
    members  for each class: the numbers of the atoms that match its characters
    """

    classes: np.ndarray
    members: list[frozenset[int]]

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.members)


def classify(atoms: Sequence[str]) -> ClassTable:
    """The classes that `atoms` distinguish; each atom matches one character, in the syntax of the `regex` module.

    Raises `NotTabularError` for a property that is not a general category, and for too many classes.
    """
    named = set(re.findall(r"\\[pP]\{(\w+)\}", "".join(atoms)))
    if unknown := named - _PROPERTIES:
        raise NotTabularError(f"property {min(unknown)!r} is not supported")
    literals = _literals(atoms)
    if MOVED_LETTER in literals:
        raise NotTabularError(f"{MOVED_LETTER!r} is not supported")
    singled_out = literals | {*WHITE_SPACE, *_FOLDED_TO_ASCII, *map(chr, range(128))}
    cuts = np.array(sorted({ord(character) + step for character in singled_out for step in (0, 1)}))
    run_starts, run_groups = _runs(frozenset(named))
    starts = np.union1d(run_starts, cuts)
    groups = run_groups[np.searchsorted(run_starts, starts, "right") - 1]
    intervals = np.searchsorted(cuts, starts, "right")
    matchers = [regex.compile(atom, flags=regex.VERSION0).fullmatch for atom in atoms]
    # Between two cuts the characters of one group are all the same to the atoms: the first stands for them.
    number_of_kind: dict[tuple[int, int], int] = {}
    number_of: dict[frozenset[int], int] = {}
    numbers = []
    for start, kind in zip(starts.tolist(), zip(groups.tolist(), intervals.tolist())):
        if kind not in number_of_kind:
            members = frozenset(i for i, matches in enumerate(matchers) if matches(chr(start)))
            number_of_kind[kind] = number_of.setdefault(members, len(number_of))
        numbers.append(number_of_kind[kind])
    if len(number_of) > _MOST_CLASSES:
        raise NotTabularError("the pattern has too many classes of characters")
    lengths = np.diff(starts, append=NUM_CHARACTERS)
    return ClassTable(np.repeat(np.array(numbers, np.uint8), lengths), list(number_of))


def _literals(atoms: Sequence[str]) -> set[str]:
    """The characters named in atoms, including the ends of ranges."""
    found = set()
    for atom in atoms:
        plain = re.sub(r"\\[pP]\{\w+\}", "", atom)
        found |= {chr(int(digits, 16)) for digits in re.findall(r"\\U([0-9A-F]{8})", plain)}
        found |= {character for character in re.sub(r"\\U[0-9A-F]{8}", "", plain) if not character.isascii()}
    return found


@functools.cache
def _runs(properties: frozenset[str]) -> tuple[np.ndarray, np.ndarray]:
    """The beginnings of runs of characters with equal `properties`, and a number for each run's kind."""
    groups: dict[frozenset[str], list[str]] = {}
    for category in _CATEGORIES:
        groups.setdefault(frozenset(name for name in properties if category.startswith(name)), []).append(category)
    listed = ["".join(f"\\p{{{category}}}" for category in group) for group in groups.values()]
    alternatives = "|".join(f"([{group}]+)" for group in listed)
    matcher = regex.compile(f"{alternatives}|[^{''.join(listed)}]+", flags=regex.VERSION0)
    starts: list[int] = []
    numbers: list[int] = []
    for first, end in _ASSIGNED:
        text = np.arange(first, end, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
        for run in matcher.finditer(text.replace(MOVED_LETTER, "a")):
            starts.append(first + run.start())
            numbers.append(run.lastindex or 0)
        starts.append(end)
        numbers.append(0)
    return np.array(starts), np.array(numbers)
