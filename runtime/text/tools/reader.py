"""The interface of the readers of tool calls to an answer's text: they read front to back, as if it were complete.

A reader is a generator. It yields when it needs more text, and is resumed when there is more, or when the answer has
ended. So its decisions depend on the text alone and not on how the text was cut. Text before `at` has been read;
`content`, `layout`, `begin` and `argue` classify it and hand it out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from secrets import choice as any_of
from string import ascii_letters, digits
from typing import TypeVar
from uuid import uuid4

from runtime.text.parts import Part, PartKind, ToolCallDelta, held_back
from runtime.text.tools.forms import CALL_ID, CALL_NUMBER
from runtime.text.tools.json_scanner import JsonScanner

MAX_NAME_LENGTH = 256
"""Most characters of a function's name."""
WHITE_SPACE = " \t\r\n"
NAME_CHARACTERS = frozenset(ascii_letters + digits + "_.-")
"""The characters of a name outside of JSON: those that OpenAI's API allows, and the dot of a module's name."""

T = TypeVar("T")
Reading = Generator[None, None, T]


class AnswerReader:
    """
    held       text that is not handed out yet
    at         how much of it has been read
    has_ended  no more text comes
    functions  the parameters' JSON schemas of the permitted functions; empty if unknown

    special    markers that are special tokens: they count only if sampled as such
    only       the names that count as calls, or None for any
    """

    def __init__(
        self,
        functions: dict[str, object],
        special: frozenset[str] = frozenset(),
        only: frozenset[str] | None = None,
        *,
        parallel: bool = True,
        short_ids: bool = False,
    ) -> None:
        self.held = ""
        self.at = 0
        self.has_ended = False
        self.functions = functions
        self.parts: list[Part] = []
        self.num_begun = 0  # calls, dropped ones included
        self.is_behind_call = False  # nothing but white space since the last one
        self.has_begun = False  # a part of the current call was handed out
        self._is_dropped = False  # it is one too many
        self._special = special
        self._only = only
        self._is_parallel = parallel
        self._new_id = _short_id if short_ids else long_id
        self._base = 0  # characters that were handed out
        self._places: set[int] = set()  # indices of special tokens, in characters from the beginning
        self._first_characters: frozenset[str] | None = None  # of the markers searched for in content

    def add(self, text: str, places: Sequence[int]) -> None:
        """Add text; `places`: indices of special tokens in it."""
        if places:
            behind = self._base + len(self.held)
            self._places.update(behind + place for place in places)
        self.held += text

    def add_plain(self, text: str) -> bool:
        """Add text that can only be content, the usual case; False if `add` is needed."""
        first = self._first_characters
        if first is None or self.held or text[-1:] in WHITE_SPACE or not first.isdisjoint(text):
            return False
        self.is_behind_call = False
        self._base += len(text)
        self.parts.append(Part("content", text))
        return True

    # Looking

    def is_at(self, marker: str, place: int | None = None) -> bool:
        """Whether the marker is at `place`, by default at the current one."""
        place = self.at if place is None else place
        return self.held.startswith(marker, place) and (
            marker not in self._special or self._base + place in self._places
        )

    def may_begin(self, marker: str) -> bool:
        """Whether the text from `at` on may become the marker."""
        return (
            marker not in self._special
            and len(self.held) - self.at < len(marker)
            and not self.has_ended
            and (marker.startswith(self.held[self.at :]))
        )

    def next_character(self) -> Reading[str | None]:
        """The next character that is not white space, which is not read yet, or None."""
        while True:
            while self.at < len(self.held):
                if self.held[self.at] not in WHITE_SPACE:
                    return self.held[self.at]
                self.at += 1
            if self.has_ended:
                return None
            yield

    def accept(self, *markers: str) -> Reading[str | None]:
        """The next marker, which is read, or None if none is next."""
        while not self.has_ended and any(map(self.may_begin, markers)):
            yield
        for marker in markers:
            if self.is_at(marker):
                self.at += len(marker)
                return marker
        return None

    def find(self, markers: Sequence[str], start: int, *, most: int | None = None) -> Reading[tuple[int, str] | None]:
        """The first of the markers from `start` on, and its index; None if there is none before the end, or before
        `most` characters. Nothing may be handed out meanwhile."""
        searched = start
        while True:
            found = self.first_of(markers, searched)
            if found is not None:
                return found
            searched = max(start, self.safe_end(markers, start))
            if self.has_ended or (most is not None and searched - start > most):
                return None
            yield

    def first_of(self, markers: Sequence[str], start: int) -> tuple[int, str] | None:
        """The first of the markers in the text so far; the longer of two at one index."""
        best: tuple[int, str] | None = None
        for marker in markers:
            place = self.held.find(marker, start)
            while place >= 0 and not self.is_at(marker, place):
                place = self.held.find(marker, place + 1)
            if place >= 0 and (best is None or (place, -len(marker)) < (best[0], -len(best[1]))):
                best = place, marker
        return best

    def safe_end(self, markers: Sequence[str], start: int) -> int:
        """The index up to which the text so far cannot be the start of a marker."""
        end = len(self.held)
        if self.has_ended:
            return end
        longest = max((len(marker) for marker in markers if marker not in self._special), default=0)
        for place in range(max(start, end - longest + 1), end):
            tail = self.held[place:]
            if any(marker not in self._special and marker.startswith(tail) for marker in markers):
                return place
        return end

    # Reading

    def content_until(self, markers: Sequence[str]) -> Reading[str | None]:
        """Hand out content up to the first of the markers and read that; None if there is none.

        White space before the marker is kept: it belongs to the call if one follows. Without a marker, only white space
        may be left.
        """
        searched = self.at
        while True:
            found = self.first_of(markers, searched)
            end = self.safe_end(markers, searched) if found is None else found[0]
            shown = len(self.held[:end].rstrip(WHITE_SPACE))
            self.content(shown)
            if found is not None:
                self.at = found[0] - shown + len(found[1])
                return found[1]
            if self.has_ended:
                return None
            self.at = searched = end - shown
            self._first_characters = frozenset(marker[0] for marker in markers if marker not in self._special)
            yield
            self._first_characters = None

    def name(self, ends: Sequence[str]) -> Reading[str | None]:
        """A function's name, which is followed by one of the ends; that is not read yet."""
        start = self.at
        while True:
            while self.at < len(self.held) and self.held[self.at] in NAME_CHARACTERS:
                self.at += 1
            if self.at < len(self.held) or self.has_ended or self.at - start > MAX_NAME_LENGTH:
                break
            yield
        name = self.held[start : self.at]
        if not name or len(name) > MAX_NAME_LENGTH:
            return None
        while not self.has_ended and any(map(self.may_begin, ends)):
            yield
        return name if any(map(self.is_at, ends)) else None

    def json_value(self) -> Reading[str | None]:
        """A value, as JSON; None if there is none, or it does not end."""
        scanner, written = JsonScanner(), ""
        while True:
            self.at = scanner.push(self.held, self.at)
            written += scanner.take()
            if scanner.is_complete:
                return written
            if scanner.is_broken or self.has_ended:
                return None
            yield

    def json_arguments(self, ends: Sequence[str], tail: str = "") -> Reading[None]:
        """The call's arguments, a JSON object, handed out as they come. Invalid JSON is handed out unchanged, up to the
        first of the ends, without the `tail` that closes the enclosing value."""
        scanner, num_waiting = JsonScanner(), 0
        while True:
            end = scanner.push(self.held, self.at + num_waiting)
            written, waiting = scanner.take(), scanner.waiting
            if scanner.is_broken or self.has_ended:
                written, waiting = written + waiting, ""
            num_waiting = len(waiting)
            self.at = end - num_waiting
            self.argue(written)
            if scanner.is_complete or (self.has_ended and not scanner.is_broken):
                return
            if scanner.is_broken:
                break
            yield
        searched = 0
        while True:
            found = self.first_of(ends, searched)
            end = self.safe_end(ends, searched) if found is None else found[0]
            is_last = found is not None or self.has_ended
            text = self.held[:end]
            kept = text.rstrip(WHITE_SPACE)
            if found is not None:
                kept = kept.removesuffix(tail)
            elif is_last:
                kept = text
            else:  # it may be the tail, or its beginning
                kept = kept[: len(kept) - held_back(kept, tail)]
            self.at = len(kept)
            self.argue(kept)
            if is_last:
                self.at = end - len(kept)
                return
            searched = end - len(kept)
            yield

    # Classifying the text

    def content(self, length: int) -> None:
        """So much of the held text is the answer's content."""
        if length:
            self.is_behind_call = False
            self._hand_out("content", length)

    def layout(self) -> None:
        """The text read so far is layout."""
        self._hand_out("layout", self.at)

    def begin(self, name: str, arguments: str = "") -> bool:
        """The text read so far begins a call; False if that function may not be called."""
        if self._only is not None and name not in self._only:
            return False
        self.has_begun = True
        self._is_dropped = self.num_begun > 0 and not self._is_parallel
        index = self.num_begun
        self.num_begun += 1
        if self._is_dropped:
            self.layout()
            return True
        calls = [ToolCallDelta(index, self._new_id(), name)]
        if arguments:
            calls.append(ToolCallDelta(index, arguments=arguments))
        self._hand_out("call", self.at, tuple(calls))
        return True

    def argue(self, arguments: str) -> None:
        """The text read so far adds this to the call's arguments."""
        if self._is_dropped or not arguments:
            self.layout()
        else:
            self._hand_out("call", self.at, (ToolCallDelta(self.num_begun - 1, arguments=arguments),))

    def close(self, *markers: str) -> Reading[None]:
        """End the call, with one of the markers or before anything else, which is content then."""
        start = self.at
        yield from self.next_character()
        if (yield from self.accept(*markers)) is None:
            rest = self.held[self.at :]
            is_cut_off = self.has_ended and any(marker.startswith(rest) for marker in markers)
            self.at = len(self.held) if is_cut_off else start
        self.end_call()

    def end_call(self) -> None:
        """End the call; content or another call follows."""
        self.layout()
        self.has_begun = False
        self.is_behind_call = True

    def _hand_out(self, kind: PartKind, length: int, calls: tuple[ToolCallDelta, ...] = ()) -> None:
        if length:
            self.parts.append(Part(kind, self.held[:length], calls))
            self.held = self.held[length:]
            self.at = max(0, self.at - length)
            self._base += length
            if self._places:
                self._places = {place for place in self._places if place >= self._base}


Reader = Callable[[AnswerReader], Reading[None]]


def accept_all(answer: AnswerReader, wanted: Sequence[str]) -> Reading[bool]:
    """Whether these pieces of a form are next, with any white space between; they are read. An id is any text up to the
    piece after it, or up to a brace."""
    for i, piece in enumerate(wanted):
        yield from answer.next_character()
        if piece in (CALL_ID, CALL_NUMBER):
            end = wanted[i + 1] if i + 1 < len(wanted) else "{"
            found = yield from answer.find((end,), answer.at, most=MAX_NAME_LENGTH)
            if found is None:
                return False
            answer.at = found[0]
        elif (yield from answer.accept(piece)) is None:
            return False
    return True


def long_id() -> str:
    """A call id in OpenAI's form."""
    return f"call_{uuid4().hex[:24]}"


def _short_id() -> str:
    """Nine letters and digits: Mistral's templates accept no others."""
    return "".join(any_of(ascii_letters + digits) for _ in range(9))
