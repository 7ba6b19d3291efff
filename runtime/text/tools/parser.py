"""Parses tool calls from an answer's text incrementally, in any notation.

A call begins once its name is known and its arguments begin; from then on they are handed out as they come, unchanged
even if they are not JSON. A call without a name stays content. White space around calls is their layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.text.parts import Part
from runtime.text.tools.notation import ToolReading
from runtime.text.tools.reader import WHITE_SPACE, AnswerReader


class ToolCallParser:
    """Parts of an answer: "content", "call" and "layout".

    special_markers  the notation's markers that are special tokens of the model
    """

    def __init__(self, reading: ToolReading, special_markers: frozenset[str] = frozenset()) -> None:
        assert reading.notation.read is not None, f"{reading.notation.name} has a parser of its own"
        self._reader = AnswerReader(
            dict(reading.functions),
            special_markers,
            frozenset(reading.functions) if reading.is_closed else None,
            parallel=reading.parallel,
            short_ids=reading.notation.short_ids,
        )
        self._reading = reading.notation.read(self._reader)
        self._is_over = False
        self._go_on()

    def push(self, text: str, places: Sequence[int] = ()) -> list[Part]:
        """The parts that are certain now. `places`: indices of special tokens in this text."""
        if places or not self._reader.add_plain(text):
            self._reader.add(text, places)
            self._go_on()
        return self._taken()

    def finish(self) -> list[Part]:
        reader = self._reader
        reader.has_ended = True
        self._go_on()
        self._end()
        return self._taken()

    def _go_on(self) -> None:
        if not self._is_over:
            self._is_over = next(self._reading, self) is self
        if self._is_over and not self._reader.has_ended:
            self._reader.content(len(self._reader.held))

    def _end(self) -> None:
        reader = self._reader
        is_layout = reader.has_begun or (reader.is_behind_call and not reader.held.strip(WHITE_SPACE))
        reader.at = len(reader.held)
        if is_layout:
            reader.layout()
        else:
            reader.content(reader.at)

    def _taken(self) -> list[Part]:
        parts, self._reader.parts = self._reader.parts, []
        return parts
