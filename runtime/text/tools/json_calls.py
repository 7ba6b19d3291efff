"""Calls whose arguments are one JSON object, in all the ways in which models put a name beside it."""

from __future__ import annotations

import msgspec

from runtime.text.tools.literals import python_call
from runtime.text.tools.reader import MAX_NAME_LENGTH, AnswerReader, Reader, Reading

ARGUMENT_KEYS = ("arguments", "parameters")


def json_objects(openings: tuple[str, ...], closings: tuple[str, ...] = (), *, has_list: bool = False) -> Reader:
    """Objects with "name" and the arguments, each between two tags; with `has_list`, there may be a list of them.

    A closing tag may be missing, and what comes in its place is content.
    """

    def read(answer: AnswerReader) -> Reading[None]:
        while (yield from answer.content_until(openings)) is not None:
            first, is_call = (yield from answer.next_character()), False
            if first == "{":
                is_call = yield from json_object(answer, closings)
            elif has_list and first == "[":
                is_call = yield from _list(answer, closings)
            if is_call:
                yield from answer.close(*closings)

    return read


def bare_json_objects(openings: tuple[str, ...] = (), separators: str = "", *, has_methods: bool = False) -> Reader:
    """The same where no tag needs to stand in front: an answer that begins with such an object is one. `separators` may
    stand between them. Behind a tag, `has_methods`, "name.call(key=value)" may stand, too."""

    def read(answer: AnswerReader) -> Reading[None]:
        if (yield from answer.next_character()) == "{":
            yield from _several(answer, separators)
        while openings and (yield from answer.content_until(openings)) is not None:
            if (yield from answer.next_character()) == "{":
                yield from _several(answer, separators)
            elif has_methods and (yield from python_call(answer, method=".call")):
                answer.end_call()

    return read


def _several(answer: AnswerReader, separators: str) -> Reading[None]:
    while (yield from json_object(answer, ())):
        answer.end_call()
        first = yield from answer.next_character()
        if first is not None and first in separators:
            answer.at += 1
            answer.layout()
            first = yield from answer.next_character()
        if first != "{":
            return


def named_objects(opening: str, name_end: str, ignored: str) -> Reader:
    """A name, a marker, and the arguments; or a list of objects with both (Mistral)."""

    def read(answer: AnswerReader) -> Reading[None]:
        while (yield from answer.content_until((opening,))) is not None:
            first = yield from answer.next_character()
            if first == "[":
                is_call = yield from _list(answer, ())
            elif first == "{":
                is_call = yield from json_object(answer, ())
            else:
                is_call = yield from _named(answer, name_end, ignored)
            if is_call:
                answer.end_call()

    return read


def _named(answer: AnswerReader, name_end: str, ignored: str) -> Reading[bool]:
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
    if (yield from answer.next_character()) != "{" or not answer.begin(name):
        return False
    yield from answer.json_arguments((name_end,))
    return True


def lines_of_names(answer: AnswerReader) -> Reading[None]:
    """The name of one of the tools alone in the answer's first line, and the arguments behind it (GLM-4)."""
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
    if has_fence:
        name = yield from answer.name(("\n", "\r\n"))
        yield from answer.next_character()
        if name is None or (yield from answer.accept("```json", "```")) is None:
            return False
    if (yield from answer.next_character()) != "{" or not answer.begin(name):
        return False
    yield from answer.json_arguments((end,), "\n```" if has_fence else "")
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


def json_object(answer: AnswerReader, ends: tuple[str, ...]) -> Reading[bool]:
    """A call: an object of a name and the arguments, in any order, other keys beside them. Whether it is one; what has
    begun as one is one even where it breaks off."""
    answer.at += 1
    name: str | None = None
    arguments: str | None = None
    keys: list[str] = []
    while (first := (yield from answer.next_character())) != "}":
        raw = (yield from answer.json_value()) if first == '"' else None
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
        elif key == "name" and name is None:
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
        name is not None and (arguments is not None or keys == ["name"]) and answer.begin(name, _object_of(arguments))
    )
    if not is_call:
        return False
    answer.at += 1
    answer.layout()
    return True


def _list(answer: AnswerReader, ends: tuple[str, ...]) -> Reading[bool]:
    """A list of calls. Whether there was one; what follows the last is content."""
    answer.at += 1
    num_read = 0
    while (yield from answer.next_character()) == "{" and (yield from json_object(answer, ends)):
        answer.end_call()
        num_read += 1
        first = yield from answer.next_character()
        if first in (",", "]"):
            answer.at += 1
            answer.layout()
        if first != ",":
            break
    return num_read > 0


def _string(raw: str) -> str | None:
    """What a JSON string says; None where it is none, or says what is no text (half a surrogate pair)."""
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.MsgspecError:
        return None


def _object_of(raw: str | None) -> str:
    """The arguments of a call that did not come as an object: none at all, or an object written as a string."""
    if raw is None or raw == "null":
        return "{}"
    return _string(raw) or raw
