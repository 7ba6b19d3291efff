"""Readers of calls whose arguments are one JSON object, in all the ways in which models put a name beside it."""

from __future__ import annotations

import msgspec

from runtime.text.tools.forms import NAME, CallForm, is_marker, pieces
from runtime.text.tools.json_scanner import as_json
from runtime.text.tools.literals import python_call, python_list
from runtime.text.tools.reader import MAX_NAME_LENGTH, AnswerReader, Reader, Reading, accept_all

ARGUMENT_KEYS = ("arguments", "parameters")
_BESIDE_NAME = frozenset({"name", "id", "type"})
"""The keys of a call without arguments."""


def json_objects(openings: tuple[str, ...], closings: tuple[str, ...] = (), name_key: str = "name") -> Reader:
    """Objects with the name and the arguments between two tags: one, several, or a list of them.

    A closing tag may be missing; the text in its place is content.
    """

    def read(answer: AnswerReader) -> Reading[None]:
        while (yield from answer.content_until(openings)) is not None:
            if (yield from _objects(answer, closings, name_key)):
                yield from answer.close(*closings)

    return read


def json_or_python(openings: tuple[str, ...], closings: tuple[str, ...]) -> Reader:
    """Between two tags a list of calls in Python's notation, or objects as in `json_objects`."""

    def read(answer: AnswerReader) -> Reading[None]:
        while (yield from answer.content_until(openings)) is not None:
            first = yield from answer.next_character()
            start, num_calls = answer.at, answer.num_begun
            if not (yield from _objects(answer, closings)) and first == "[":
                answer.at = start
                yield from python_list(answer)
            if answer.num_begun > num_calls:
                yield from answer.close(*closings)

    return read


def bare_json_objects(openings: tuple[str, ...] = (), *, has_methods: bool = False) -> Reader:
    """The same without a required tag: an answer that begins with such an object is a call. After a tag, with
    `has_methods`, "name.call(key=value)" is accepted, too."""

    def read(answer: AnswerReader) -> Reading[None]:
        yield from _objects(answer, ())
        while openings and (yield from answer.content_until(openings)) is not None:
            if (yield from answer.next_character()) in ("{", "["):
                yield from _objects(answer, ())
            elif has_methods and (yield from python_call(answer, method=".call")):
                answer.end_call()

    return read


def _objects(answer: AnswerReader, ends: tuple[str, ...], name_key: str = "name") -> Reading[bool]:
    """Calls one after another, with a comma or a semicolon between them if any, or a list of them. Returns whether
    there was one; the text after the last is not read."""
    is_list = (yield from answer.next_character()) == "["
    answer.at += is_list
    num_read, start = 0, answer.at
    while True:
        first = yield from answer.next_character()
        if num_read and first in (",", ";"):
            answer.at += 1
            first = yield from answer.next_character()
        if is_list and num_read and first == "]":
            answer.at += 1
            answer.layout()
            return True
        if first != "{" or not (yield from json_object(answer, ends, name_key)):
            break
        answer.end_call()
        num_read, start = num_read + 1, 0
    if num_read:
        answer.at = start
    return num_read > 0


def named_objects(opening: str, name_end: str, ignored: str) -> Reader:
    """A name, a marker, and the arguments; or a list of objects with both (Mistral)."""

    def read(answer: AnswerReader) -> Reading[None]:
        while (yield from answer.content_until((opening,))) is not None:
            if (yield from answer.next_character()) in ("[", "{"):
                yield from _objects(answer, ())
            elif (yield from _named(answer, name_end, ignored, opening)):
                answer.end_call()

    return read


def _named(answer: AnswerReader, name_end: str, ignored: str, opening: str) -> Reading[bool]:
    start = answer.at
    name = yield from answer.name((name_end, ignored, "{"))
    if name is None:
        answer.at = start
        return False
    if (yield from answer.accept(ignored)) is not None:
        found = yield from answer.find((name_end,), answer.at, most=MAX_NAME_LENGTH)
        if found is None:
            return False
        answer.at = found[0]
    yield from answer.accept(name_end)
    return (yield from _arguments(answer, name, (name_end,), empty=(opening,)))


def _arguments(
    answer: AnswerReader, name: str, ends: tuple[str, ...], tail: str = "", *, empty: tuple[str, ...]
) -> Reading[bool]:
    """The arguments of the named function, or none: null, an empty string, or one of `empty`, which is not read.
    Returns whether that makes a call."""
    if (yield from answer.next_character()) == "{":
        if not answer.begin(name):
            return False
        yield from answer.json_arguments(ends, tail)
        return True
    start = answer.at
    found = yield from answer.accept("null", "None", '""', "''", *empty)
    if found in empty:
        answer.at = start
    return found is not None and answer.begin(name, "{}")


def framed_objects(form: CallForm) -> Reader:
    """Calls of this form, which has the name outside of the arguments' object."""
    openings = pieces(form.before_name)
    own = pieces(form.head.partition(NAME)[0])
    middle, tail, between, after = map(pieces, (form.after_name, form.tail, form.between, form.after))
    starts = tuple(filter(is_marker, openings))
    ends = tuple(filter(is_marker, (*tail, *after))) or starts
    name_ends = (middle[0],) if middle else ("{",)

    def read(answer: AnswerReader) -> Reading[None]:
        while (opening := (yield from answer.content_until(starts))) is not None:
            start = answer.at
            is_next = yield from accept_all(answer, openings[openings.index(opening) + 1 :])
            while is_next:
                yield from answer.next_character()
                name = yield from answer.name(name_ends)
                if name is None or not (yield from accept_all(answer, middle)):
                    break
                if not (yield from _arguments(answer, name, ends, empty=ends)):
                    break
                yield from _accept_or_stay(answer, tail)
                answer.end_call()
                start = 0
                is_next = yield from _accept_or_stay(answer, [*between, *own])
                if not is_next:
                    yield from _accept_or_stay(answer, after)
                    answer.layout()
            answer.at = min(start, answer.at)

    return read


def _accept_or_stay(answer: AnswerReader, wanted: list[str]) -> Reading[bool]:
    """Whether these pieces are next; nothing is read if not. At the answer's end the beginning of one is enough."""
    start = answer.at
    if wanted and (yield from accept_all(answer, wanted)):
        return True
    rest = answer.held[answer.at :]
    if answer.has_ended and rest and any(piece.startswith(rest) for piece in wanted):
        answer.at = len(answer.held)
    else:
        answer.at = start
    return False


def lines_of_names(answer: AnswerReader) -> Reading[None]:
    """The name of one of the tools alone in the answer's first line, and the arguments after it (GLM-4)."""
    while True:
        yield from answer.next_character()
        start = answer.at
        name = yield from answer.name(("\n", "\r\n"))
        if name not in answer.functions or (yield from answer.next_character()) != "{" or not answer.begin(name):
            answer.at = start
            return
        yield from answer.json_arguments(())
        answer.end_call()


def fenced_objects(answer: AnswerReader) -> Reading[None]:
    """DeepSeek's: V3 writes a kind, a name and the arguments in a fence, V3.1 a name and the arguments."""
    all_begin, all_end, begin, separator, end = DEEPSEEK_MARKERS
    while (yield from answer.content_until((all_begin, begin))) is not None:
        if answer.is_at(begin, answer.at - len(begin)):
            answer.at -= len(begin)
        has_calls, is_broken = False, False
        while not is_broken and (yield from _next_is(answer, begin)):
            if (yield from _fenced(answer, separator, end)):
                yield from answer.close(end)
                has_calls = True
            else:
                is_broken = True
        if has_calls and not is_broken:
            yield from answer.close(all_end)


def _next_is(answer: AnswerReader, marker: str) -> Reading[bool]:
    yield from answer.next_character()
    return (yield from answer.accept(marker)) is not None


def _fenced(answer: AnswerReader, separator: str, end: str) -> Reading[bool]:
    start = answer.at
    name = yield from answer.name((separator,))
    if name is None:
        answer.at = start
        return False
    yield from answer.accept(separator)
    has_fence = (yield from answer.next_character()) != "{"
    if (yield from answer.accept(end, f"null{end}", f'""{end}')) is not None:
        answer.at -= len(end)
        return answer.begin(name, "{}")
    if has_fence:
        name = yield from answer.name(("\n", "\r\n"))
        yield from answer.next_character()
        if name is None or (yield from answer.accept("```json", "```")) is None:
            return False
    if not (yield from _arguments(answer, name, (end,), "\n```" if has_fence else "", empty=("```", end))):
        return False
    if has_fence:
        yield from answer.next_character()
        yield from answer.accept("```")
    return True


DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)


def json_object(answer: AnswerReader, ends: tuple[str, ...], name_key: str = "name") -> Reading[bool]:
    """A call: an object of a name and the arguments, in any order, possibly with other keys. Returns whether it is one;
    an object that has begun as a call is one even if it breaks off."""
    answer.at += 1
    name: str | None = None
    arguments: str | None = None
    keys: list[str] = []
    while (first := (yield from answer.next_character())) != "}":
        raw = (yield from answer.json_value()) if first in ('"', "'") else None
        key = None if raw is None else _string(raw)
        if key is None or (yield from answer.next_character()) != ":":
            return answer.has_begun
        answer.at += 1
        keys.append(key)
        first = yield from answer.next_character()
        if first == "{" and key in ARGUMENT_KEYS and name is not None and not answer.has_begun:
            if not answer.begin(name):
                return False
            yield from answer.json_arguments(ends, "}")
        elif (raw := (yield from answer.json_value())) is None:
            return answer.has_begun
        elif key == name_key and name is None:
            name = _string(raw)
            if not name or len(name) > MAX_NAME_LENGTH:
                return answer.has_begun
        elif key in ARGUMENT_KEYS and arguments is None:
            arguments = raw
        first = yield from answer.next_character()
        if first == ",":
            answer.at += 1
        elif first != "}":
            return answer.has_begun
    is_call = answer.has_begun or (
        name is not None
        and (arguments is not None or _BESIDE_NAME.issuperset({*keys} - {name_key}))
        and answer.begin(name, _object_of(arguments))
    )
    if not is_call:
        return False
    answer.at += 1
    answer.layout()
    return True


def _string(raw: str) -> str | None:
    """The value of a JSON string; None if it is not one, or not valid text (half a surrogate pair)."""
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.MsgspecError:
        return None


def _object_of(raw: str | None) -> str:
    """The arguments of a call that are not an object: missing, or an object written as a string."""
    text = None if raw is None else _string(raw)
    if raw is None or raw == "null" or (text is not None and not text.strip()):
        return "{}"
    return raw if text is None else as_json(text) or text
