"""Parses an answer's text and special tokens to messages incrementally, whatever the model writes.

A message is a header, "<|message|>", its content and a stop token. The rules are those of the package `openai-harmony`
in its lenient mode. If that refuses an answer, or drops a part of it, the text becomes content of the most plausible
channel:

- a header that the package refuses is parsed as far as possible;
- a header that ends without "<|message|>", or has more than MAX_HEADER characters, is itself the content;
- text after a message without "<|start|>" is read as a header of the assistant's.

Each of these is counted in `num_malformed`. An unfinished header at the end is layout, unless it is plain text without
any sign of a header.

For the text pipeline analysis is reasoning, the assistant's function calls are tool calls, its other text is content.
Headers are layout, and so are messages of other roles. A newline separates two messages of one kind, as in vLLM. Stop
strings do not count in commentary, which a model writes before a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from runtime.text.harmony.header import WHITE_SPACE, Header, parse_header, recover
from runtime.text.harmony.message import (
    CHANNEL,
    CHANNELS,
    MESSAGE,
    SPECIAL_TOKENS,
    START,
    STOPS,
    HarmonyMessage,
    SpecialIds,
)
from runtime.text.harmony.prompt import AnswerStart
from runtime.text.parts import Part, PartKind, ToolCallDelta
from runtime.text.tools.reader import long_id
from runtime.text.tools.table import ToolReading
from tokenizer import IncrementalDecoder, Tokenizer

MAX_HEADER = 256
"""Most characters of a header; longer text is content."""


class Event(NamedTuple):
    """A stretch of the answer: the texts of all events, concatenated, are the answer.

    kind    "begin": a message's header, or nothing if that is its content; "text": of the started message;
            "end": its end; "layout": none of these
    header  of "begin"
    """

    kind: Literal["begin", "text", "end", "layout"]
    text: str
    header: Header | None = None


class HarmonyReader:
    """
    start          the answer's state at the prompt's end; the prompt's part counts, but is not in any event's text
    num_malformed  headers that `openai-harmony` would refuse, the assistant's messages without one of the three
                   channels, misplaced special tokens
    """

    def __init__(self, start: AnswerStart) -> None:
        self._state: Literal["start", "header", "content", "recovered"] = start.state
        self._role = start.role  # if the header does not have it
        self._held = start.header  # the header so far
        self._num_given = len(start.header)  # characters of it that are the prompt's
        self._is_unexpected = False  # the header began without its token
        self._events: list[Event] = []
        self.num_malformed = 0
        if self._state == "content":
            self._begin(parse_header(self._held, self._role), self._held)
            self.num_malformed = 0

    def push(self, text: str, places: Sequence[int] = ()) -> list[Event]:
        """`places`: indices of special tokens in the text."""
        at = 0
        for place in places:
            token = next(token for token in SPECIAL_TOKENS if text.startswith(token, place))
            self._read_text(text[at:place])
            self._read_token(token)
            at = place + len(token)
        self._read_text(text[at:])
        return self._taken()

    def finish(self) -> list[Event]:
        """The remaining events, at the end of the answer."""
        if self._state == "header":
            if self._is_unexpected or not self._may_go_on():
                self._recover()
            else:
                self._say("layout", self._held[self._num_given :])
                self._state = "start"
        if self._state in ("content", "recovered"):
            self._end("")
        return self._taken()

    def _may_go_on(self) -> bool:
        """Whether the text so far is a valid header, and not plain text."""
        words = "".join(text for text, is_text in recover(self._held, self._role).pieces if is_text).strip(WHITE_SPACE)
        is_begun_role = self._role is None and not any(space in words for space in WHITE_SPACE)
        return "<|" in self._held or "to=".startswith(words[:3]) or is_begun_role

    def _read_text(self, text: str) -> None:
        if not text:
            return
        if self._state == "start":
            self._begin_header("assistant", is_unexpected=True)
        if self._state == "header":
            self._held += text
            self._check_length()
        else:
            self._say("text", text)

    def _read_token(self, token: str) -> None:
        if self._state == "start":
            self._read_token_between(token)
        elif self._state == "header":
            self._read_token_in_header(token)
        elif token in STOPS:
            self._end(token)
        elif self._state == "content":
            self.num_malformed += 1
            self._say("text", token)
        elif token in (START, CHANNEL):  # the header was lost, and here is one
            self._end("")
            self._read_token_between(token)
        else:
            self._say("layout", token)

    def _read_token_between(self, token: str) -> None:
        if token == START:
            self._say("layout", token)
            self._begin_header(None)
        elif token in STOPS:
            self.num_malformed += 1
            self._say("layout", token)
        else:
            self._begin_header("assistant", is_unexpected=True)
            self._read_token_in_header(token)

    def _read_token_in_header(self, token: str) -> None:
        if token == MESSAGE:
            self._begin(parse_header(self._held, self._role), self._held + token)
            self._state = "content"
        elif token in STOPS:
            self._recover()
            self._end(token)
        elif token == START and self._is_unexpected:
            self._recover()
            self._end("")
            self._read_token_between(token)
        else:
            self._held += token
            self._check_length()

    def _begin_header(self, role: str | None, *, is_unexpected: bool = False) -> None:
        self._state, self._role, self._held, self._is_unexpected = "header", role, "", is_unexpected
        self._num_given = 0

    def _begin(self, header: Header, text: str) -> None:
        is_unknown = header.role == "assistant" and header.channel not in CHANNELS
        is_odd = header.recipient is not None and not header.has_to
        if header.is_malformed or is_unknown or is_odd or self._is_unexpected:
            self.num_malformed += 1
        self._events.append(Event("begin", text[self._num_given :], header))

    def _check_length(self) -> None:
        """Turns a header that is too long into content, independently of how the text was cut."""
        if len(self._held) > MAX_HEADER:
            rest, self._held = self._held[MAX_HEADER + 1 :], self._held[: MAX_HEADER + 1]
            self._recover(is_open=True)
            self._say("text", rest)

    def _recover(self, *, is_open: bool = False) -> None:
        """Makes the header the content of a message, if there is any. is_open: more of it comes"""
        channel, pieces = recover(self._held, self._role, keeps_end=is_open)
        has_text = any(is_text for _, is_text in pieces)
        is_message = has_text or is_open or (bool(self._held) and self._role is not None and not self._is_unexpected)
        self.num_malformed += 1
        if is_message:
            header = Header(self._role or "assistant", channel=channel, is_malformed=True)
            self._events.append(Event("begin", "", header))
        at = 0
        for text, is_text in pieces:
            self._say("text" if is_text else "layout", text[max(0, self._num_given - at) :])
            at += len(text)
        self._state = "recovered" if is_message else "start"

    def _end(self, token: str) -> None:
        """Ends the message, if one has begun."""
        if self._state == "start":
            self._say("layout", token)
        else:
            self._events.append(Event("end", token))
        self._state = "start"

    def _say(self, kind: Literal["text", "layout"], text: str) -> None:
        if text:
            self._events.append(Event(kind, text))

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class HarmonyParser:
    """
    tools  the functions that may be called; with None a call is content, or reasoning, by its channel
    """

    def __init__(self, start: AnswerStart, tools: ToolReading | None) -> None:
        self._reader = HarmonyReader(start)
        self._tools = tools
        self._kind: PartKind = "layout"  # of the current message
        self._takes_stops = True
        self._is_new = True  # nothing of the message has come
        self._shown: set[PartKind] = set()  # the kinds of the messages that had text
        self._num_calls = 0

    @property
    def num_malformed(self) -> int:
        """`HarmonyReader.num_malformed`."""
        return self._reader.num_malformed

    def push(self, text: str, places: Sequence[int] = ()) -> list[Part]:
        return [self._part(event) for event in self._reader.push(text, places)]

    def finish(self) -> list[Part]:
        return [self._part(event) for event in self._reader.finish()]

    def _part(self, event: Event) -> Part:
        if event.kind == "begin":
            assert event.header is not None
            return self._begin(event.header, event.text)
        if event.kind == "text":
            return self._text(event.text)
        return Part("layout", event.text)

    def _text(self, text: str) -> Part:
        if self._kind == "call":
            return Part("call", text, (ToolCallDelta(self._num_calls - 1, arguments=text),))
        lead = "\n" if self._is_new and self._kind in self._shown else ""
        self._is_new = False
        self._shown.add(self._kind)
        return Part(self._kind, text, lead=lead, takes_stops=self._takes_stops)

    def _begin(self, header: Header, text: str) -> Part:
        self._is_new, self._takes_stops = True, header.channel != "commentary"
        name = header.function
        if name is not None and self._may_call(name):
            if self._num_calls and self._tools is not None and not self._tools.parallel:
                self._kind = "layout"
                return Part("layout", text)
            self._kind = "call"
            self._num_calls += 1
            return Part("call", text, (ToolCallDelta(self._num_calls - 1, long_id(), name),))
        if header.role != "assistant":
            self._kind = "layout"
        else:
            self._kind = "reasoning" if header.channel == "analysis" else "content"
        return Part("layout", text)

    def _may_call(self, name: str) -> bool:
        tools = self._tools
        return tools is not None and (not tools.is_closed or name in tools.functions)


class MessageParser:
    """Takes ids as they come. Any ids give messages; errors are never raised.

    role      of the first message, whose header has begun; None if the ids begin with "<|start|>"
    messages  finished ones
    """

    def __init__(self, tokenizer: Tokenizer, ids: SpecialIds, role: str | None = "assistant") -> None:
        self.messages: list[HarmonyMessage] = []
        self._reader = HarmonyReader(AnswerStart(role, "", "start" if role is None else "header"))
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
        self._tokens = ids.by_id
        self._header: Header | None = None
        self._texts: list[str] = []

    @property
    def num_malformed(self) -> int:
        return self._reader.num_malformed

    def push(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            text, token = self._decoder.push((token_id,)), self._tokens.get(token_id)
            self._take(self._reader.push(text, () if token is None else (len(text) - len(token),)))

    def finish(self) -> list[HarmonyMessage]:
        """All messages, at the end of the ids."""
        self._take(self._reader.push(self._decoder.flush()))
        self._take(self._reader.finish())
        return self.messages

    def _take(self, events: Iterable[Event]) -> None:
        for kind, text, header in events:
            if kind == "begin":
                self._header, self._texts = header, []
            elif kind == "text":
                self._texts.append(text)
            elif kind == "end" and self._header is not None:
                role, name, channel, recipient, content_type, *_ = self._header
                content = "".join(self._texts)
                self.messages.append(HarmonyMessage(role, content, name, channel, recipient, content_type))
