"""Tool calls as Hermes and Qwen3 models write them, streamed argument by argument.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Rome"}}
    </tool_call>

A call has begun as soon as its name is known and its arguments begin; from there on they are handed out as they come,
and they stay as the model wrote them even where that is no JSON. What never comes to a name stays content. White space
around calls is their layout. A closing tag, or the brace before it, may be missing; a tag within a JSON string is text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import uuid4

import msgspec

from runtime.text.json_scanner import JsonScanner
from runtime.text.parts import Part, PartKind, ToolCallDelta, held_back

MAX_NAME_LENGTH = 256
"""Characters of a function's name; with more, it is none."""

_WHITE_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes a call: an object with "name" and "arguments" between two tags."""

    open_tag: str
    close_tag: str


HERMES = ToolFormat("<tool_call>", "</tool_call>")


@dataclass(slots=True)
class _Call:
    """What has been read of one call.

    arguments   as JSON; of an object that was handed out as it came, None
    has_begun   something of it was handed out
    is_dropped  it is one too many
    """

    keys: list[str] = field(default_factory=list)
    name: str | None = None
    arguments: str | None = None
    has_begun: bool = False
    is_dropped: bool = False


class ToolCallParser:
    """Parts of an answer: "content", "call" and "layout". With `parallel` False the first call is kept, the others are
    layout."""

    def __init__(self, tool_format: ToolFormat, *, parallel: bool = True) -> None:
        self._format = tool_format
        self._is_parallel = parallel
        self._num_calls = 0
        self._held = ""  # not handed out yet; read up to _at
        self._at = 0
        self._parts: list[Part] = []
        self._read: Callable[[ToolCallParser], bool] = ToolCallParser._content
        self._is_behind_call = False  # nothing but white space since the last one
        self._call = _Call()
        self._scanner = JsonScanner()
        self._value_start = 0

    def push(self, text: str) -> list[Part]:
        is_content = self._read is ToolCallParser._content and not self._held
        if is_content and "<" not in text and text[-1:] not in _WHITE_SPACE:  # as most of a text is
            self._is_behind_call = False
            return [Part("content", text)]
        self._held += text
        while self._read(self):
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        is_layout = self._call.has_begun or (self._is_behind_call and not self._held.strip(_WHITE_SPACE))
        if self._read is ToolCallParser._broken_arguments:
            self._hand_out_arguments(len(self._held))
        self._hand_out("layout" if is_layout else "content", len(self._held))
        parts, self._parts = self._parts, []
        return parts

    # What may come next. Each reads on from `_at`, and returns whether the next may read: something is left.

    def _content(self) -> bool:
        tag = self._format.open_tag
        start = self._held.find(tag, self._at)
        end = start if start >= 0 else len(self._held) - held_back(self._held, tag)
        shown = len(self._held[:end].rstrip(_WHITE_SPACE))
        if shown:
            self._is_behind_call = False
        self._hand_out("content", shown)
        self._at = 0
        if start < 0:
            return False
        self._at = start - shown + len(tag)
        self._call = _Call()
        return self._then(ToolCallParser._object)

    def _object(self) -> bool:
        return self._expect("{", ToolCallParser._key)

    def _key(self) -> bool:
        first = self._next()
        if first == '"':
            return self._begin_value(ToolCallParser._key_string)
        if first == "}":
            return self._end_of_object()
        return first is not None and self._fail()

    def _key_string(self) -> bool:
        raw = self._value()
        if raw is None:
            return self._scanner.is_broken
        key = _string(raw)
        if key is None:
            return self._fail()
        self._call.keys.append(key)
        return self._then(ToolCallParser._colon)

    def _colon(self) -> bool:
        return self._expect(":", ToolCallParser._first_of_value)

    def _first_of_value(self) -> bool:
        first, call = self._next(), self._call
        if first == "{" and call.keys[-1] == "arguments" and call.name is not None and not call.has_begun:
            self._begin(self._at)
            return self._begin_value(ToolCallParser._object_arguments)
        return first is not None and self._begin_value(ToolCallParser._any_value)

    def _object_arguments(self) -> bool:
        self._at = self._scanner.push(self._held, self._at)
        self._hand_out_arguments(self._at)
        if self._scanner.is_broken:
            return self._then(ToolCallParser._broken_arguments)
        return self._scanner.is_complete and self._then(ToolCallParser._comma_or_end)

    def _broken_arguments(self) -> bool:
        """All up to the closing tag, but for the brace that closes the call's own object."""
        tag = self._format.close_tag
        start = self._held.find(tag)
        end = start if start >= 0 else len(self._held) - held_back(self._held, tag)
        arguments = self._held[:end].rstrip(_WHITE_SPACE).removesuffix("}")
        self._hand_out_arguments(len(arguments))
        self._at = end - len(arguments)
        return start >= 0 and self._then(ToolCallParser._closing_tag)

    def _any_value(self) -> bool:
        raw = self._value()
        if raw is None:
            return self._scanner.is_broken
        key = self._call.keys[-1]
        if key == "name" and self._call.name is None:
            name = _string(raw)
            if not name or len(name) > MAX_NAME_LENGTH:
                return self._fail()
            self._call.name = name
        elif key == "arguments" and self._call.arguments is None:
            self._call.arguments = raw
        return self._then(ToolCallParser._comma_or_end)

    def _comma_or_end(self) -> bool:
        if self._next() == "}":
            return self._end_of_object()
        return self._expect(",", ToolCallParser._key)

    def _end_of_object(self) -> bool:
        if not self._call.has_begun:
            if self._call.name is None or (self._call.arguments is None and self._call.keys != ["name"]):
                return self._fail()
            self._begin(self._at, _arguments(self._call.arguments))
        self._at += 1
        self._hand_out("layout", self._at)
        return self._then(ToolCallParser._closing_tag)

    def _closing_tag(self) -> bool:
        """The tag ends the call, and so does anything else, which is content then."""
        tag = self._format.close_tag
        first = self._next()
        if first is None:
            return False
        if self._held.startswith(tag, self._at):
            self._hand_out("layout", self._at + len(tag))
        elif tag.startswith(self._held[self._at :]):
            return False
        self._call.has_begun = False
        self._is_behind_call = True
        return self._then(ToolCallParser._content)

    # What they are made of.

    def _next(self) -> str | None:
        """The next character that is not white space; None where there is none yet."""
        while self._at < len(self._held):
            if self._held[self._at] not in _WHITE_SPACE:
                return self._held[self._at]
            self._at += 1
        return None

    def _expect(self, character: str, then: Callable[[ToolCallParser], bool]) -> bool:
        found = self._next()
        if found is None:
            return False
        if found != character:
            return self._fail()
        self._at += 1
        return self._then(then)

    def _begin_value(self, then: Callable[[ToolCallParser], bool]) -> bool:
        self._scanner = JsonScanner()
        self._value_start = self._at
        return self._then(then)

    def _value(self) -> str | None:
        """The value's text when all of it has come. A broken value fails."""
        self._at = self._scanner.push(self._held, self._at)
        if self._scanner.is_complete:
            return self._held[self._value_start : self._at]
        if self._scanner.is_broken:
            self._fail()
        return None

    def _fail(self) -> bool:
        """What has begun as a call ends here, what has not is content. Nothing of it is looked at again: outside of
        strings, what has been read holds no tag."""
        return self._then(ToolCallParser._closing_tag if self._call.has_begun else ToolCallParser._content)

    def _then(self, read: Callable[[ToolCallParser], bool]) -> bool:
        self._read = read
        return True

    def _begin(self, length: int, arguments: str = "") -> None:
        """The first `length` characters held are a call's, whose name is known."""
        self._call.has_begun = True
        self._call.is_dropped = self._num_calls > 0 and not self._is_parallel
        if self._call.is_dropped:
            self._hand_out("layout", length)
            return
        index = self._num_calls
        self._num_calls += 1
        calls = [ToolCallDelta(index, f"call_{uuid4().hex[:24]}", self._call.name)]
        if arguments:
            calls.append(ToolCallDelta(index, arguments=arguments))
        self._hand_out("call", length, tuple(calls))

    def _hand_out_arguments(self, length: int) -> None:
        if self._call.is_dropped:
            self._hand_out("layout", length)
        elif length:
            piece = ToolCallDelta(self._num_calls - 1, arguments=self._held[:length])
            self._hand_out("call", length, (piece,))

    def _hand_out(self, kind: PartKind, length: int, calls: tuple[ToolCallDelta, ...] = ()) -> None:
        if length:
            self._parts.append(Part(kind, self._held[:length], calls))
            self._held = self._held[length:]
            self._at = max(0, self._at - length)


def _string(raw: str) -> str | None:
    """What a JSON string says; None where it is none, or says what is no text (half a surrogate pair)."""
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.MsgspecError:
        return None


def _arguments(raw: str | None) -> str:
    """The arguments of a call that did not come as an object: none at all, or an object written as a string."""
    if raw is None or raw == "null":
        return "{}"
    return _string(raw) or raw
