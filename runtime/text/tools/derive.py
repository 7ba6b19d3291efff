"""The notation of calls and the tags of reasoning that a chat template shows.

The template renders conversations that differ in one thing: a text or a call, one call or two, one argument or another,
with reasoning or without. The renderings differ in the texts around names, arguments and reasoning. A form that is
found is accepted if it writes what the template wrote, and its reader reads that back. Anything else, a template that
refuses calls, leaves them out or marks them by nothing, gives no notation, and the reason; no error is raised.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.text.reasoning import ReasoningTags
from runtime.text.tools.forms import CALL_ID, CALL_NUMBER, KEY, MARKER, NAME, CallForm, Listed, Tagged
from runtime.text.tools.table import NOTATIONS, Notation, ToolCallParser, ToolReading, of_form
from runtime.text.tools.tool_prompt import written
from tokenizer import ChatTemplateError, Tokenizer
from tokenizer.templates.chat_template import render_chat
from tokenizer.templates.template_forms import forms_of

_QUESTION, _MARK, _THOUGHT = "xservprobequestion", "xservprobetext", "xservprobethought"
_NAMES = ("xprobeone", "xprobetwo")
_IDS = ("xcallone1", "xcalltwo2")
_KEYS = ("xkeya", "xkeyb")
_VALUES = ("xvaluea", "xvalueb")
_FLAT: Mapping[str, Any] = dict(zip(_KEYS, _VALUES, strict=True))
_NUMBER: Mapping[str, Any] = {_KEYS[0]: 71935}
_MIXED: Mapping[str, Any] = {_KEYS[0]: 'x "y"', _KEYS[1]: [1, {"z": "w"}], "xkeyc": 2.5}
_PARAMETERS = {
    "type": "object",
    "properties": {
        _KEYS[0]: {"type": ["string", "integer"], "description": "d"},
        _KEYS[1]: {"type": ["string", "array"], "description": "d"},
        "xkeyc": {"type": "number", "description": "d"},
    },
    "required": [_KEYS[0]],
}
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": _PARAMETERS}} for name in _NAMES
]
_SPACINGS = ((", ", ": "), (",", ":"), (",", ": "), (", ", ":"))
_LONGEST = 262_144
"""Characters of a template that is rendered for this; a longer one shows nothing."""

Call = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Shown:
    """
    notation  of calls, or None for the reason `why`
    tags      of reasoning, or None if none are shown
    """

    notation: Notation | None = None
    tags: ReasoningTags | None = None
    why: str = ""


class _NothingShownError(ValueError):
    """The template does not show it; the message is the reason."""


def shown_by(tokenizer: Tokenizer) -> Shown:
    """The parts that the tokenizer's chat template shows; the one for tools, if it has several. Found once."""
    if not tokenizer.has_chat_template:
        return Shown(why="there is no chat template")
    return shown_in(tokenizer.chat_template(has_tools=True), tuple(tokenizer.special_tokens_map.items()))


@functools.lru_cache(maxsize=32)
def shown_in(template: str, variables: tuple[tuple[str, str], ...] = ()) -> Shown:
    """The same of a template; `variables` are the special tokens' names."""
    if len(template) > _LONGEST:
        return Shown(why=f"the chat template has more than {_LONGEST:,} characters")
    probe = _Probe(template, variables)
    try:
        tags = probe.tags()
    except (_NothingShownError, ChatTemplateError):
        tags = None
    try:
        return Shown(probe.notation(), tags)
    except (_NothingShownError, ChatTemplateError) as error:
        return Shown(None, tags, str(error))


class _Probe:
    """Renders conversations by one template. Raises `ChatTemplateError` and `_NothingShownError`."""

    def __init__(self, template: str, variables: tuple[tuple[str, str], ...]) -> None:
        self._template, self._variables = template, dict(variables)
        taken = [forms_of(template, variables, has_tools).arguments for has_tools in (True, False)]
        self._takes_objects, self._takes_text = taken[0] if any(taken[0]) else taken[1]  # it may refuse all tools

    def _rendered(self, said: Mapping[str, Any], **variables: Any) -> str:
        refused: ChatTemplateError | None = None
        for user in (_QUESTION, [{"type": "text", "text": _QUESTION}]):
            for tools in (_TOOLS, None):
                try:
                    return render_chat(
                        self._template, [{"role": "user", "content": user}, said], tools=tools,
                        variables={**self._variables, **variables},
                    )  # fmt: skip
                except ChatTemplateError as error:
                    refused = refused or error
        assert refused is not None
        raise refused

    def _saying(self, text: str, **fields: Any) -> str:
        for content in (text, [{"type": "text", "text": text}]):
            variables = {"enable_thinking": True} if fields else {}
            found = self._rendered({"role": "assistant", "content": content, **fields}, **variables)
            if found.count(text) == 1 and f"'{text}'" not in found:
                return found
        raise _NothingShownError("the chat template does not write the assistant's text")

    def _calling(self, calls: Sequence[Call]) -> str:
        made = []
        for (name, arguments), call_id in zip(calls, _IDS, strict=False):
            given: Any = dict(arguments) if self._takes_objects else json.dumps(arguments)
            made.append({"type": "function", "id": call_id, "function": {"name": name, "arguments": given}})
        return self._rendered({"role": "assistant", "content": "", "tool_calls": made})

    # Reasoning

    def tags(self) -> ReasoningTags | None:
        """The markers next to a message's reasoning."""
        text = self._saying(_MARK, reasoning_content=_THOUGHT)
        if text.count(_THOUGHT) != 1:
            said = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _MARK}]
            text = self._rendered({"role": "assistant", "content": said})
        if text.count(_THOUGHT) != 1 or not 0 <= text.index(_THOUGHT) <= text.find(_MARK):
            return None
        before, _, rest = text.partition(_THOUGHT)
        between = rest.partition(_MARK)[0]
        closing = MARKER.match(between.lstrip())
        opening = _last_tag(before)
        if closing is None:
            return None
        header = _last_tag(self._saying(_MARK).partition(_MARK)[0])
        if opening is None or opening == header:  # the template writes no opening tag
            opening = _opposite(closing[0])
            if opening is None or opening == header:
                return None
        token, label = opening
        if closing[0] == token or between.count(closing[0]) != 1:
            return None
        return ReasoningTags(token + label, closing[0], label)

    # Calls

    def notation(self) -> Notation:
        """The notation that the template's calls are in."""
        if not (self._takes_objects or self._takes_text):
            raise _NothingShownError("the chat template writes no calls")
        ending = self._saying(_MARK)
        one = _turn(self._calling([(_NAMES[0], _FLAT)]), ending)
        try:
            two: str | None = _turn(self._calling([(_NAMES[0], _FLAT), (_NAMES[1], _FLAT)]), ending)
        except ChatTemplateError:  # it takes single calls
            two = None
        if two is not None and (_NAMES[0] not in two or _NAMES[1] not in two):
            two = None
        if _NAMES[0] not in one:
            raise _NothingShownError("the chat template writes no calls")
        if any(word in one for word in (NAME, KEY, CALL_ID, CALL_NUMBER)):
            raise _NothingShownError("the texts around calls have words that stand for others")
        known = self._known(one, two, ending)
        if known is not None:
            return known
        style, argued = self._style(one, ending)
        form = _form(style, argued, one, two)
        around = ending[ending.find(_QUESTION) :]
        foreign = set(MARKER.findall(around)).intersection(MARKER.findall(form.before + form.head + form.between))
        if foreign:
            raise _NothingShownError(f"its calls are messages of their own, between {min(foreign)}")
        form, ends = _without_end(form)
        try:
            notation = of_form("chat_template", form, ends=ends, short_ids=_IDS[0] in one)
        except ValueError as error:
            raise _NothingShownError(str(error)) from error
        self._check(notation, one, two, ending)
        return notation

    def _known(self, one: str, two: str | None, ending: str) -> Notation | None:
        """A notation with a reader of its own, which reads other writings, too, if its markers are these."""
        markers, call = set(MARKER.findall(two or one)), [(_NAMES[0], _FLAT)]
        known = [each for each in NOTATIONS if each.has_own_reader and each.form.markers]
        for each in sorted(known, key=lambda each: _squeezed(written(each, call)) != _squeezed(one)):
            if markers.issuperset(each.form.markers) and _reads(each, one, call):
                form = each.form
                if form.arguments == "json":
                    try:
                        form = _form(*self._style(one, ending), one, two)
                    except _NothingShownError:
                        continue
                notation = replace(each, form=form)
                self._check(notation, one, two, ending)
                return notation
        return None

    def _style(self, one: str, ending: str) -> tuple[Any, dict[str, str]]:
        """The style of the arguments, and the text of those of `_FLAT` as the template writes them."""
        for spacing in _SPACINGS:
            text = json.dumps(_FLAT, separators=spacing)
            if text in one:
                return "json", {"text": text, "name_rest": ""}
        start = one.find(_NAMES[0]) + len(_NAMES[0])
        places = [one.find(text, start) for text in (_KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1])]
        if min(places) < 0 or places != sorted(places):
            raise _NothingShownError("its arguments are neither JSON nor between tags")
        first, value, second, last = places
        lead, gap = one[start:first], one[value + len(_VALUES[0]) : second]
        head_rest, end = one[first + len(_KEYS[0]) : value], one[last + len(_VALUES[1]) :]
        key_open = _common_end(lead, gap).lstrip()
        behind = _common_start(gap[: len(gap) - len(key_open)], end)
        if not MARKER.match(behind.strip()) or one[second + len(_KEYS[1]) : last] != head_rest:
            raise _NothingShownError("its arguments are neither JSON nor between tags")
        tail = behind.rstrip()
        number = _turn(self._calling([(_NAMES[0], _NUMBER)]), ending)
        at = number.find(_KEYS[0], number.find(_NAMES[0]))
        other_rest = number[at + len(_KEYS[0]) : number.find("71935", at)] if at >= 0 else ""
        if not other_rest or not head_rest.strip() or not key_open.startswith("<"):
            raise _NothingShownError("its arguments are neither JSON nor between tags")
        head = f"{key_open}{KEY}{head_rest}"
        other = None if other_rest == head_rest else f"{key_open}{KEY}{other_rest}"
        style = Tagged(head, tail, behind[len(tail) :], other)
        text = one[start + len(lead) - len(key_open) : last + len(_VALUES[1]) + len(behind)]
        return style, {"text": text, "name_rest": lead[: len(lead) - len(key_open)]}

    def _check(self, notation: Notation, one: str, two: str | None, ending: str) -> None:
        """Raises `_NothingShownError` unless what the template writes is what the notation writes and reads."""
        cases: list[tuple[str, list[Call]]] = [(one, [(_NAMES[0], _FLAT)])]
        if two is not None:
            cases.append((two, [(_NAMES[0], _FLAT), (_NAMES[1], _FLAT)]))
        cases.append((_turn(self._calling([(_NAMES[0], _MIXED)]), ending), [(_NAMES[0], _MIXED)]))
        for text, calls in cases:
            if not _reads(notation, text, calls):
                raise _NothingShownError("what it writes is not read back")
            style = notation.form.arguments
            if isinstance(style, Listed) or (style != "json" and calls[0][1] is _MIXED):
                continue  # the values of lists and objects may be written otherwise
            ours = written(notation, calls)
            for i in range(2):
                ours = ours.replace(f"call{i:05}", _IDS[i])
            end = "".join(notation.ends)
            if _squeezed(text).removesuffix(end) != _squeezed(ours):
                raise _NothingShownError("its calls differ in more than names and arguments")
        none = _turn(self._calling([(_NAMES[0], {})]), ending)
        if not _reads(notation, none, [(_NAMES[0], {})]):
            raise _NothingShownError("a call without arguments is not read back")


def _last_tag(text: str) -> tuple[str, str] | None:
    """The last marker of a text and the word after it; None if more than a word follows."""
    found = list(MARKER.finditer(text))
    if not found:
        return None
    label = text[found[-1].end() :].strip()
    return (found[-1][0], label) if label == "" or label.isalpha() else None


def _opposite(closing: str) -> tuple[str, str] | None:
    """The opening tag of a closing one."""
    opening = closing.replace("/", "", 1)
    return (opening, "") if opening != closing else None


def _turn(text: str, ending: str) -> str:
    """The assistant's turn of a rendering, without what is written around a text, too."""
    header, _, footer = ending.partition(_MARK)
    start = len(header) if text.startswith(header) else _whole(text, _equal(text, header), is_end=False)
    rest = text[start:]
    count = len(footer) if rest.endswith(footer) else _equal(rest[::-1], footer[::-1])
    rest = rest[: _whole(rest, len(rest) - count, is_end=True)]
    ends, start = set(MARKER.findall(footer)), max(0, *map(rest.rfind, _NAMES))
    after = [marker.start() for marker in MARKER.finditer(rest, start) if marker[0] in ends]
    end = min(after, default=len(rest))
    return rest[:end].strip()


def _equal(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _whole(text: str, place: int, *, is_end: bool) -> int:
    """The place, moved out of a marker that it cuts: to its end, or its beginning."""
    for marker in MARKER.finditer(text):
        if marker.start() < place < marker.end():
            return marker.end() if is_end else marker.start()
    return place


def _common_start(one: str, other: str) -> str:
    return one[: _whole(other, _whole(one, _equal(one, other), is_end=False), is_end=False)]


def _common_end(one: str, other: str) -> str:
    count = _equal(one[::-1], other[::-1])
    count = len(one) - _whole(one, len(one) - count, is_end=True)
    count = len(other) - _whole(other, len(other) - count, is_end=True)
    return one[len(one) - count :]


def _form(style: Any, argued: Mapping[str, str], one: str, two: str | None) -> CallForm:
    """The form of calls, read out of one and of two."""
    for i, call_id in enumerate(_IDS):
        one = one.replace(call_id, CALL_ID)
        two = two if two is None else two.replace(call_id, CALL_ID).replace(f":{i}<", f":{CALL_NUMBER}<")
    one = one.replace(":0<", f":{CALL_NUMBER}<")
    if any(text.count(name) > 1 for text in (one, two or "") for name in _NAMES):
        raise _NothingShownError("a call has its name twice")
    before, after_name, end = _around(one, argued["text"])
    if two is None:
        return CallForm(f"{before}{NAME}{after_name}", end, arguments=style, several=False)
    gap_start = two.find(argued["text"], two.find(_NAMES[0])) + len(argued["text"])
    gap = two[gap_start : two.find(_NAMES[1])]
    head = _common_end(before, gap)
    for first in (0, 1):  # calls may be numbered
        numbered = _NUMBERS[first].sub(CALL_NUMBER, before), _NUMBERS[first + 1].sub(CALL_NUMBER, gap)
        if CALL_NUMBER in (common := _common_end(*numbered)) and len(common) > len(head) + len(CALL_NUMBER):
            (before, gap), head = numbered, common
            break
    tail = _common_start(gap[: len(gap) - len(head)], end)
    return CallForm(
        f"{head}{NAME}{after_name}", tail, before=before[: len(before) - len(head)],
        between=gap[len(tail) : len(gap) - len(head)], after=end[len(tail) :], arguments=style,
    )  # fmt: skip


_NUMBERS = [re.compile(rf"(?<!\w){number}(?!\w)") for number in range(3)]


def _without_end(form: CallForm) -> tuple[CallForm, tuple[str, ...]]:
    """The form without the marker that ends the turn after calls, and that: the last of more than were opened."""
    found = list(MARKER.finditer(form.after))
    if len(found) != len(MARKER.findall(form.before)) + 1 or form.after[found[-1].end() :].strip():
        return form, ()
    return replace(form, after=form.after[: found[-1].start()]), (found[-1][0],)


def _around(text: str, arguments: str) -> tuple[str, str, str]:
    """The texts before the first call's name, between it and the arguments, and after them."""
    name = text.find(_NAMES[0])
    start = text.find(arguments, name)
    if name < 0 or start < 0:
        raise _NothingShownError("the arguments are before the name")
    return text[:name], text[name + len(_NAMES[0]) : start], text[start + len(arguments) :]


def _reads(notation: Notation, text: str, calls: Sequence[Call]) -> bool:
    """Whether the notation reads these calls, and nothing but markers of turns else, out of a text."""
    parser = ToolCallParser(ToolReading.of(notation, _TOOLS))
    parts = [*parser.push(text), *parser.finish()]
    found: list[list[str]] = []
    for part in parts:
        if part.kind == "content" and MARKER.sub("", part.text).strip():
            return False
        for call in part.calls:
            if call.name is not None:
                found.append([call.name, ""])
            else:
                found[-1][1] += call.arguments
    try:
        return [(name, json.loads(arguments)) for name, arguments in found] == [(n, dict(a)) for n, a in calls]
    except ValueError:
        return False


def _squeezed(text: str) -> str:
    return "".join(text.split())
