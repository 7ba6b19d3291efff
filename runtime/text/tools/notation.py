"""A notation: how a family of models writes tool calls. And the parser that reads any notation from an answer's text
incrementally.

A call begins once its name is known and its arguments begin; from then on they are handed out as they come, unchanged
even if they are not JSON. A call without a name stays content. White space around calls is their layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.text.parts import Part
from runtime.text.tools.reader import WHITE_SPACE, AnswerReader, Reader

ArgumentStyle = Literal["json", "qwen3_coder", "glm45", "python", "gemma"]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around a forced call's arguments. NAME is replaced by the function's name.

    before, between, after  around all calls, and between two
    head, tail              of each
    arguments               their style: one JSON object, or one by one
    """

    head: str
    tail: str
    before: str = ""
    between: str = ""
    after: str = ""
    arguments: ArgumentStyle = "json"


@dataclass(frozen=True, slots=True)
class Notation:
    """
    name       ours; names: the equivalent values of vLLM's `--tool-call-parser`
    read       finds the calls in an answer, or None if the format has a parser of its own (harmony)
    form       of a forced call
    markers    texts that count only if sampled as special tokens, in models that have them as such
    is_in      detects it in a chat template's text
    short_ids  calls have ids of nine letters and digits
    """

    name: str
    read: Reader | None = field(repr=False)
    form: CallForm = field(repr=False)
    markers: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    is_in: Callable[[str], bool] = field(default=lambda template: False, repr=False)
    short_ids: bool = False


@dataclass(frozen=True, slots=True)
class ToolReading:
    """Settings for parsing the calls of one answer.

    functions  the parameters' JSON schemas of the permitted functions
    is_closed  True: a call of any other function is content
    parallel   False: only the first call is kept
    """

    notation: Notation
    functions: Mapping[str, Any] = field(default_factory=dict)
    is_closed: bool = False
    parallel: bool = True

    @classmethod
    def of(
        cls, notation: Notation, tools: Sequence[Mapping[str, Any]], *, is_closed: bool = False, parallel: bool = True
    ) -> ToolReading:
        """`tools`: checked, in OpenAI's form."""
        functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        return cls(notation, functions, is_closed, parallel)


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
