"""Finds stop strings in an answer's content: not in its reasoning, its tool calls, nor the layout between them.

A stop string lies in one stretch of content, with nothing else between its characters. Places are counted in characters
from the answer's beginning, shown or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.text.parts import Part
from runtime.text.stop import StopMatch, StopMatcher


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
