"""An answer of `/api/chat` or `/api/generate` as it grows: each delta is a line, and the last line has the usage.

Ollama's tool calls are whole: a call waits until the next one, or the answer's end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from msgspec import UNSET

from runtime.text.pipeline import TextDelta
from server.ollama_api.objects import AnsweredFunction, AnsweredMessage, AnsweredToolCall, ChatLine, GenerateLine
from server.openai_api.answers import ChatTokenLogprob
from server.openai_api.logprobs import chat_logprobs
from server.requests.generation import Generation
from server.requests.structured import RequestSchemas
from server.requests.tool_input import tool_input
from tokenizer import Tokenizer

Line = ChatLine | GenerateLine


@dataclass(slots=True)
class _OpenCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class OllamaAnswer:
    """`push` takes the deltas in order, then `finish` the end; both return the lines of a stream. `whole` returns their
    sum.

    model      as in the request
    is_chat    lines have a message, else a response
    """

    model: str
    is_chat: bool
    is_streamed: bool
    generation: Generation
    tokenizer: Tokenizer | None
    schemas: RequestSchemas
    _call: _OpenCall | None = None
    _num_calls: int = 0
    _is_cut: bool = False
    _texts: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)
    _calls: list[AnsweredToolCall] = field(default_factory=list)
    _logprobs: list[ChatTokenLogprob] = field(default_factory=list)

    def push(self, delta: TextDelta) -> list[Line]:
        """Adds a delta; returns its lines."""
        calls: list[AnsweredToolCall] = []
        for piece in delta.tool_calls:
            if piece.id is not None:
                calls += self._close_call()
                self._call = _OpenCall(piece.id, piece.name or "")
            if self._call is not None:
                self._call.arguments.append(piece.arguments)
        if delta.finish_reason is not None:
            self._is_cut = delta.finish_reason == "length"
            calls += self._close_call()
        logprobs = chat_logprobs(delta, self.tokenizer)
        self._texts.append(delta.text)
        self._thoughts.append(delta.reasoning)
        self._calls += calls
        self._logprobs += logprobs
        if not (delta.text or delta.reasoning or calls or logprobs):
            return []
        return [self._line(delta.text, delta.reasoning, calls, logprobs)]

    def finish(self) -> Line:
        """Ends the answer; returns the last line."""
        return self._end(self._line("", "", [], []))

    def whole(self) -> Line:
        return self._end(self._line("".join(self._texts), "".join(self._thoughts), self._calls, self._logprobs))

    def _close_call(self) -> list[AnsweredToolCall]:
        call, self._call = self._call, None
        if call is None:
            return []
        function = AnsweredFunction(self._num_calls, call.name, tool_input("".join(call.arguments)))
        self._num_calls += 1
        return [AnsweredToolCall(call.id, function)]

    def _line(self, text: str, thinking: str, calls: list[AnsweredToolCall], logprobs: list[ChatTokenLogprob]) -> Line:
        shown = logprobs or UNSET
        if self.is_chat:
            message = AnsweredMessage(text, thinking=thinking or UNSET, tool_calls=calls or UNSET)
            return ChatLine(model=self.model, message=message, done=False, logprobs=shown)
        return GenerateLine(model=self.model, response=text, thinking=thinking or UNSET, done=False, logprobs=shown)

    def _end(self, line: Line) -> Line:
        now, meter, generation = time.monotonic(), self.generation.meter, self.generation
        begun = generation.arrival_time_s
        first = now if meter is None or meter.first_token_s is None else meter.first_token_s
        line.done = True
        line.done_reason = "length" if self._is_cut else "stop"
        line.total_duration = _nanoseconds(now - begun)
        line.load_duration = 0
        line.prompt_eval_count = generation.num_prompt_tokens
        line.prompt_eval_duration = _nanoseconds(first - begun)
        line.eval_count = generation.num_completion_tokens
        line.eval_duration = _nanoseconds(now - first)
        return line


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
