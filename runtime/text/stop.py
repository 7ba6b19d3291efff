"""Stop strings in a text that comes in pieces, and the token ids of texts that an answer must not hold.

The match is the occurrence that begins first in the text (of those with the same start, the one that ends first),
however the text is cut. So a shorter string inside a longer one that has begun earlier waits until the longer one is
complete or has failed. Each character costs O(1) amortised whatever the number of strings (Aho and Corasick, "Efficient
string matching", 1975).

In an answer they are looked for in its content: not in its reasoning, its tool calls, nor the layout between them. A
stop string lies in one stretch of content, with nothing else between its characters. Places are counted in characters
from the answer's beginning, shown or not.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from runtime.engine.errors import RequestError
from runtime.text.parts import Part
from tokenizer import Tokenizer


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


class ContentStops:
    """
    match  the stop string that has ended the answer, or None
    """

    def __init__(self, stops: list[str], *, keeps_stop: bool) -> None:
        self.match: StopMatch | None = None
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._matcher: StopMatcher | None = None  # of the current stretch of content, or None
        self._start = 0  # where the stretch begins
        self._end = 0  # end of the text that was read
        self._held = ""  # the end of the stretch, which may become a stop string
        self._lead = ""  # the held text's
        self._passed: list[Part] = []

    def push(self, parts: Sequence[Part], floor: int, token_end: Callable[[int], int], *, is_last: bool) -> list[Part]:
        """The parts that cannot belong to a stop string. After a match, those before it, with the stop string itself if
        it is kept.

        floor      a stop string that ends at or before it does not count
        token_end  returns the end of the last token that ends at or before a place: text is passed on by whole tokens
        """
        for part in parts:
            if part.kind == "content" and part.takes_stops:
                self._read(part, floor)
            else:
                self._end_stretch()
                if self.match is None:
                    self._passed.append(part)
                    self._end += len(part.text)
            if self.match is not None:
                break
        if is_last:
            self._end_stretch()
        elif self._matcher is not None:
            self._pass_on(token_end(self._start + self._matcher.safe_end))
        passed, self._passed = self._passed, []
        return passed

    def _read(self, part: Part, floor: int) -> None:
        if self._matcher is None:
            self._matcher = StopMatcher(self._stops)
            self._start, self._lead = self._end, part.lead
        self._held += part.text
        num_early = max(0, floor - self._end)
        self._end += len(part.text)
        match = self._matcher.push(part.text[:num_early], can_match=False)
        self._note(match or self._matcher.push(part.text[num_early:]))

    def _end_stretch(self) -> None:
        if self._matcher is not None:
            self._note(self._matcher.finish())
            if self.match is None:
                self._pass_on(self._end)
                self._matcher = None

    def _note(self, match: StopMatch | None) -> None:
        if match is not None and self._matcher is not None:
            self.match = StopMatch(self._start + match.start, self._start + match.end, match.stop)
            self._pass_on(self.match.end if self._keeps_stop else self.match.start)
            self._matcher = None

    def _pass_on(self, end: int) -> None:
        """The held text up to ``end``."""
        length = end - self._end + len(self._held)
        if length > 0 and self._held:
            self._passed.append(Part("content", self._held[:length], lead=self._lead))
            self._held, self._lead = self._held[length:], ""


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Each word as the ids that begin a text with it, and, if these differ and are as many, those that follow a space,
    as in vLLM. A word may still be generated as other tokens.

    Raises ``RequestError`` whose ``param`` is ``bad_words`` or one of its entries.
    """
    if tokenizer is None:
        raise RequestError("the model has no tokenizer: bad_words cannot be read", param="bad_words")
    banned = []
    for i, word in enumerate(words):
        bare = word.lstrip(" ")
        ids = tokenizer.encode(bare, add_special_tokens=False)
        spaced = tokenizer.encode(f" {bare}", add_special_tokens=False)
        if not bare or not ids or not spaced:
            name = f"bad_words[{i}]"
            raise RequestError(f"{name} must hold more than spaces, and be text to the model", param=name)
        banned.append(ids)
        if spaced[0] != ids[0] and len(spaced) == len(ids):
            banned.append(spaced)
    return banned
