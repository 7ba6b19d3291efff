"""Classes of characters: two characters are in one class if no part of a pattern distinguishes them.

General categories are the `regex` module's, as in `patterns`, except that U+0295 has the reference's. A pattern's atoms
are matched against one character of each kind, so that a table of all 1,114,112 characters takes milliseconds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.later import later
from tokenizer.patterns.oniguruma import MOVED_LETTER
from tokenizer.patterns.tree import NotTabularError
from tokenizer.patterns.unicode_tables import WHITE_SPACE

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
