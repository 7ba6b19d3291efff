"""Parses an answer by its model's response template, as it comes.

Regions of text are handed out as they come, without the white space around them; a call once its region is closed. A
region that should be a call and is none is content, with its delimiters: no text is lost. A field whose region opens a
second time goes on, where transformers keeps the last one alone: what is sent cannot be taken back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runtime.text.parts import Part, PartKind, ToolCallDelta
from runtime.text.reasoning import ReasoningTags
from runtime.text.response_template.template import Delimiter, Field, ResponseTemplate, read_response_template
from runtime.text.response_template.values import cast, transformed
from runtime.text.tools.reader import MAX_NAME_LENGTH, long_id
from runtime.text.tools.table import ToolReading
from tokenizer import Tokenizer
from tokenizer.patterns.linear_pattern import Match, Search, StepsError

LONGEST_DELIMITER = 1024
"""Characters of a delimiter: what has begun longer ago is none, so that each character costs bounded time."""
MOST_READS = 64
"""How often each field's delimiter may read a character, on average; the first 1,000 characters are free. After that no
delimiter is looked for, and the rest of the answer belongs to the open region."""


@dataclass(frozen=True, slots=True)
class AnswerTemplate:
    """A model's response template, and the special tokens that its delimiters may match, which must be shown to it."""

    template: ResponseTemplate
    shown: tuple[str, ...] = ()
    _last_prefix: list[tuple[Sequence[int], str]] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> AnswerTemplate | None:
        """That of the tokenizer; None if it has none. Raises ``ResponseTemplateError``."""
        if tokenizer.response_template is None:
            return None
        template = read_response_template(tokenizer.response_template)
        special = filter(None, map(tokenizer.id_to_token, sorted(tokenizer.all_special_ids)))
        return cls(template, tuple(token for token in special if template.names(token)))

    @property
    def has_calls(self) -> bool:
        return any(field.role == "call" for field in self.template.fields)

    @property
    def tags(self) -> ReasoningTags | None:
        """The tags of reasoning, if they are plain texts."""
        for each in self.template.fields:
            if each.role == "reasoning" and each.opening and each.closing:
                first, last = each.opening.literals, each.closing.literals
                if first and last:
                    opening = first[0].strip()
                    label = next((opening.removeprefix(token) for token in self.shown if opening.startswith(token)), "")
                    return ReasoningTags(opening, last[0].strip(), label)
        return None

    def parser(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], tools: ToolReading | None
    ) -> ResponseTemplateParser:
        """For an answer to this prompt. Without `tools` no call is permitted."""
        prefix = self._prefix(tokenizer, prompt_token_ids)
        if tools is None:
            return ResponseTemplateParser(self.template, prefix, only=frozenset())
        return ResponseTemplateParser(
            self.template, prefix, functions=tools.functions, parallel=tools.parallel,
            only=frozenset(tools.functions) if tools.is_closed else None,
        )  # fmt: skip

    def _prefix(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> str:
        """The prompt's text after the last anchor; "" if there is none, or if finding it takes too many steps, since
        other text is not the answer's. The choices of a prompt share it."""
        for known, prefix in self._last_prefix:
            if known is prompt_token_ids:
                return prefix
        prefix = self._found_prefix(tokenizer, prompt_token_ids)
        self._last_prefix[:] = [(prompt_token_ids, prefix)]
        return prefix

    def _found_prefix(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> str:
        for num_tokens in (_USUAL_PREFIX, len(prompt_token_ids)):
            text = tokenizer.decode(prompt_token_ids[-num_tokens:])
            try:
                start = self._anchor_end(text)
            except StepsError:
                break
            if start >= 0:
                return text[start:]
        return ""

    def _anchor_end(self, text: str) -> int:
        anchor = self.template.anchor
        if anchor.literals:
            return max(text.rfind(each) + len(each) if each in text else -1 for each in anchor.literals)
        base = max(0, len(text) - _MOST_SEARCHED)
        return max((base + match.end for match in anchor.pattern.matches(text[base:])), default=-1)


_USUAL_PREFIX = 256
"""Tokens of a prompt among which the answer's turn usually begins."""
_MOST_SEARCHED = 16_384
"""Last characters of a prompt in which a pattern of the turn's beginning is looked for."""


class _Watched(NamedTuple):
    """A delimiter that is looked for, and whether it opens the field."""

    is_opening: bool
    field: Field
    search: Search


class ResponseTemplateParser:
    """Parts of an answer: "content", "reasoning", "call", and "layout".

    prefix     the prompt's text from the answer's turn on, which belongs to the answer for the template
    functions  the parameters' JSON schemas of the permitted functions
    only       the names that count as calls, or None for any
    parallel   False: only the first call is kept
    """

    def __init__(
        self,
        template: ResponseTemplate,
        prefix: str = "",
        *,
        functions: Mapping[str, Any] | None = None,
        only: frozenset[str] | None = None,
        parallel: bool = True,
    ) -> None:
        self._template = template
        self._functions, self._only, self._is_parallel = functions or {}, only, parallel
        self._parts: list[Part] = []
        self._prefix_left = len(prefix)  # of its characters, not handed out yet
        self._held = ""  # not handed out
        self._base = 0  # index of its first character
        self._before = ""  # the character before it
        self._field = template.implicit
        self._is_open = False  # the field has a region
        self._opening = self._body = ""  # of a region that is parsed once it is closed
        self._groups: dict[str, str] = {}
        self._has_text = False  # of the region, read
        self._has_shown = False  # and handed out
        self._space = ""  # after its text
        self._begun: set[str] = set()  # fields that have shown text
        self._num_calls = 0
        self._num_reads = 0
        self._watch()
        if prefix:
            self.push(prefix)
            self._parts.clear()

    def push(self, text: str, places: Sequence[int] = ()) -> list[Part]:
        """The parts that are certain now."""
        self._held += text
        self._go_on(has_ended=False)
        return self._taken()

    def finish(self) -> list[Part]:
        """The remaining parts, at the end of the text."""
        self._go_on(has_ended=True)
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # Delimiters

    def _watch(self) -> None:
        """Looks for what may come next: the end of the open region, or the beginning of any."""
        watched: list[tuple[bool, Field, Delimiter | None]]
        if self._field is not None and self._field is not self._template.implicit:
            watched = [(False, self._field, self._field.closing)]
        else:
            watched = [(True, field, field.opening) for field in self._template.fields]
            if self._field is not None:
                watched.append((False, self._field, self._field.closing))
        self._read = self._base
        if self._is_given_up:
            watched = []
        self._watched = [
            _Watched(is_opening, field, Search(delimiter.pattern, self._base, self._before))
            for is_opening, field, delimiter in watched
            if delimiter is not None
        ]

    @property
    def _is_given_up(self) -> bool:
        """Whether delimiters have read the answer so often that no more are looked for."""
        return self._num_reads > MOST_READS * (1_000 + self._read) * (1 + len(self._template.fields))

    def _go_on(self, *, has_ended: bool) -> None:
        while True:
            found = self._next(has_ended=has_ended)
            if found is None:
                break
            watched, match = found
            self._take(match.start - self._base)
            is_empty = match.end == match.start and not self._is_open
            if watched.is_opening:
                self._close()
                self._open(watched.field, match)
            else:
                self._groups.update(match.groups)
                self._close(self._cut(match.end - self._base))
            self._watch()
            if is_empty and match.end == self._base + len(self._held):
                break
        pending = [each.search.pending_start for each in self._watched]
        end = min([start for start in pending if start is not None], default=self._base + len(self._held))
        self._take((self._base + len(self._held) if has_ended else end) - self._base)
        if has_ended:
            self._close()

    def _next(self, *, has_ended: bool) -> tuple[_Watched, Match] | None:
        """The next delimiter, if it is certain."""
        end = self._base + len(self._held)
        while self._read < end:
            character = self._held[self._read - self._base]
            self._read += 1
            self._num_reads += len(self._watched)
            if self._is_given_up:
                self._watched = []
                self._read = end
                return None
            is_found = False
            for each in self._watched:
                search = each.search
                if search.is_decided:
                    is_found = True
                    continue
                search.read(character)
                if not search.is_idle:
                    start = search.pending_start
                    if start is not None and self._read - start > LONGEST_DELIMITER:
                        search.forget_before(self._read - LONGEST_DELIMITER)
                    is_found = is_found or search.is_decided
            if is_found and (found := self._first(is_last=False)) is not None:
                return found
        if has_ended:
            for each in self._watched:
                each.search.finish()
            return self._first(is_last=True)
        return None

    def _first(self, *, is_last: bool) -> tuple[_Watched, Match] | None:
        """The first match, the longest of those that begin together; None if another one may still come before it."""
        best: tuple[tuple[int, int, bool, str], _Watched, Match] | None = None
        waiting = self._read
        for each in self._watched:
            if each.search.is_decided:
                match = each.search.match(self._held, self._base)
                assert match is not None
                key = (match.start, match.start - match.end, not each.is_opening, each.field.name)
                if best is None or key < best[0]:
                    best = key, each, match
            elif (start := each.search.pending_start) is not None:
                waiting = min(waiting, start)
        if best is None or (not is_last and waiting <= best[2].start):
            return None
        return best[1], best[2]

    # Regions

    def _open(self, field: Field, match: Match) -> None:
        text = self._cut(match.end - self._base)
        self._field, self._is_open, self._groups = field, True, dict(match.groups)
        self._body, self._has_text, self._space = "", False, ""
        if field.role == "call":
            self._opening = text
        else:
            self._say("layout", text)

    def _take(self, length: int) -> None:
        """So much of the held text belongs to the current region."""
        if length <= 0:
            return
        text, field = self._cut(length), self._field
        if field is None or field.role == "layout":
            self._is_open = field is not None
            self._say("layout", text)
            return
        self._is_open = True
        if field.role == "call":
            self._body += text
            return
        if not field.value.strips:
            self._show(field, text)
            return
        if not self._has_text:
            start = len(text) - len(text.lstrip())
            self._say("layout", text[:start])
            text = text[start:]
        shown = (self._space + text).rstrip()
        if shown:
            self._has_text = True
            space = (self._space + text)[len(shown) :]
            self._show(field, shown)
            self._space = space
        else:
            self._space += text

    def _show(self, field: Field, text: str) -> None:
        """Text of content or reasoning. A region after the field's first is joined to it."""
        lead = ""
        if not self._has_shown and field.name in self._begun:
            lead = "\n" if field.join is None else field.join
        if self._say("reasoning" if field.role == "reasoning" else "content", text, lead=lead):
            self._has_shown = True
            self._begun.add(field.name)

    def _close(self, closing: str = "") -> None:
        """Ends the region, with its closing text."""
        field = self._field
        if field is not None and field.role == "call" and self._is_open:
            self._say_call(field, self._opening + self._body + closing)
        else:
            self._say("layout", self._space + closing)
        self._field, self._is_open, self._has_text, self._has_shown = self._template.implicit, False, False, False
        self._opening = self._body = self._space = ""
        self._groups = {}

    def _say_call(self, field: Field, text: str) -> None:
        try:
            calls = self._calls(field)
        except ValueError:
            calls = []
        if not calls:
            self._say("content", text)
            return
        if not self._is_parallel:
            calls = calls[: 1 if self._num_calls == 0 else 0]
        deltas: list[ToolCallDelta] = []
        for name, arguments in calls:
            deltas += [
                ToolCallDelta(self._num_calls, long_id(), name),
                ToolCallDelta(self._num_calls, arguments=arguments),
            ]
            self._num_calls += 1
        self._say("call" if deltas else "layout", text, tuple(deltas))

    def _calls(self, field: Field) -> list[tuple[str, str]]:
        """Names and arguments. Raises ``ValueError`` if the region is no call."""
        value = field.value(self._body)
        if field.transform is not None and field.transforms_each:
            if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
                raise ValueError("it is no list of objects")
            value = [transformed(field.transform, {**self._groups, **item}) for item in value]
        elif field.transform is not None:
            value = transformed(field.transform, {**self._groups, "content": value})
        return [self._call(each) for each in (value if isinstance(value, list) else [value])]

    def _call(self, value: Any) -> tuple[str, str]:
        function = value.get("function", value) if isinstance(value, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
            raise ValueError("it has no name")
        if self._only is not None and name not in self._only:
            raise ValueError("that function may not be called")
        arguments = function["arguments"] if "arguments" in function else function.get("parameters", {})
        if isinstance(arguments, str):
            return name, arguments or "{}"
        if isinstance(arguments, dict):
            arguments = cast(arguments, self._functions.get(name))
        return name, json.dumps({} if arguments is None else arguments, ensure_ascii=False)

    # Handing out

    def _cut(self, length: int) -> str:
        """Takes so many characters off the held text."""
        text, self._held = self._held[:length], self._held[length:]
        self._base += length
        if text:
            self._before = text[-1]
        return text

    def _say(self, kind: PartKind, text: str, calls: tuple[ToolCallDelta, ...] = (), lead: str = "") -> bool:
        """Hands it out, without what belongs to the prompt. Returns whether there is any."""
        dropped = min(len(text), self._prefix_left)
        self._prefix_left -= dropped
        text = text[dropped:]
        if text or calls:
            self._parts.append(Part(kind, text, calls, lead))
        return bool(text)
