"""Stop strings in a text that comes in pieces.

The match is the occurrence that begins first in the text (of those with the same start, the one that ends first),
however the text is cut. So a shorter string inside a longer one that has begun earlier waits until the longer one is
complete or has failed. Each character costs O(1) amortised whatever the number of strings (Aho and Corasick, "Efficient
string matching", 1975).
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string found at ``text[start:end]``, counted in characters from the text's beginning."""

    start: int
    end: int
    stop: str


class _Automaton:
    """The trie of all stop strings. A node is the longest suffix of the text that begins some stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.longest_stops: list[str | None] = [None]  # the longest stop string that ends at the node
        for stop in stops:
            node = 0
            for character in stop:
                if character not in self.children[node]:
                    self.children[node][character] = len(self.children)
                    self.children.append({})
                    self.depths.append(self.depths[node] + 1)
                    self.longest_stops.append(None)
                node = self.children[node][character]
            self.longest_stops[node] = stop
        self.first = re.compile("[" + "".join(map(re.escape, self.children[0])) + "]")
        """Finds a character that begins a stop string."""
        self.fallbacks = [0] * len(self.children)  # the node of the longest proper suffix
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self.children[node].items():
                self.fallbacks[child] = self.step(self.fallbacks[node], character)
                self.longest_stops[child] = self.longest_stops[child] or self.longest_stops[self.fallbacks[child]]
                queue.append(child)

    def step(self, node: int, character: str) -> int:
        while node and character not in self.children[node]:
            node = self.fallbacks[node]
        return self.children[node].get(character, 0)


_automaton = lru_cache(maxsize=256)(_Automaton)


class StopMatcher:
    """Looks for the first of ``stops`` (none of them empty) in the text that ``push`` brings."""

    def __init__(self, stops: list[str]) -> None:
        self._automaton = _automaton(tuple(stops))
        self._node = 0
        self._end = 0
        self._candidate: StopMatch | None = None

    @property
    def safe_end(self) -> int:
        """Characters from the text's beginning that cannot belong to a later match."""
        return self._end - self._automaton.depths[self._node]

    def push(self, text: str, *, can_match: bool = True) -> StopMatch | None:
        """The match, as soon as no other can begin before it. If ``can_match`` is False, no match may end here."""
        automaton = self._automaton
        node = self._node
        if not node and self._candidate is None and automaton.first.search(text) is None:
            self._end += len(text)
            return None
        for character in text:
            node = automaton.step(node, character)
            self._end += 1
            stop = automaton.longest_stops[node]
            if stop is not None and can_match:
                start = self._end - len(stop)
                if self._candidate is None or start < self._candidate.start:
                    self._candidate = StopMatch(start, self._end, stop)
            if self._candidate is not None and self._end - automaton.depths[node] >= self._candidate.start:
                break
        else:
            self._node = node
            return None
        return self._candidate

    def finish(self) -> StopMatch | None:
        """The match, if any, at the end of the text."""
        return self._candidate
