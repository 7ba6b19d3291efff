"""One chat with a model: a message in, the answer's text out piece by piece. Knows no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.commands.conversation import Conversation, Message
from runtime.commands.sampling import sampling_params
from runtime.errors import InvalidArgumentError, XservError
from runtime.text.chat import chat_prompt
from runtime.text.formats import AnswerFormat

if TYPE_CHECKING:
    from runtime.engine.sampling_params import SamplingParams
    from runtime.llm import LLM

MOST_RESERVED_TOKENS = 256
"""Room kept for the answer when nothing says how long it may be (never more than half the context)."""

MOST_CONTINUED_TOKENS = 128
"""Length of an answer of a model without a chat template, unless something says how long it may be."""


@dataclass(slots=True)
class AnswerStats:
    """The last answer; times in seconds."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    num_dropped_turns: int = 0
    finish_reason: str | None = None

    def line(self) -> str:
        """One line for a person."""
        later = self.num_output_tokens - 1
        decode_s = self.latency_s - self.ttft_s
        rate = f", {later / decode_s:.1f} tokens/s after it" if later > 0 and decode_s > 0 else ""
        return (
            f"{self.num_prompt_tokens} prompt tokens, {self.num_output_tokens} answered "
            f"({self.finish_reason}), first after {self.ttft_s * 1e3:.0f} ms{rate}"
        )


class ChatSession:
    """A conversation with `llm`.

    Without a chat template (`has_template`) the model goes on with the text: its prompt is all that was said so far,
    each message on a line of its own.

    given         fields of `SamplingParams` that override the model's defaults
    on_reasoning  is shown what the model thinks before it answers, as it comes; the conversation forgets it
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        given: dict[str, Any] | None = None,
        on_reasoning: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.llm = llm
        self.on_reasoning = on_reasoning
        self.has_template = llm.tokenizer is None or llm.tokenizer.has_chat_template
        self.answer_format = AnswerFormat.of(llm.tokenizer, tool_call_parser="none")
        self.conversation = Conversation(system)
        self.given: dict[str, Any] = {}
        self.stats = AnswerStats()
        self.set_sampling(given or {})
        self.encode([{"role": "user", "content": "?"}])  # a model that cannot chat says so at once

    def set_sampling(self, given: dict[str, Any]) -> None:
        """Replaces the overriding fields; raises `RequestError`, and changes nothing, when one is wrong."""
        params = self.params(given)
        if params.n != 1:
            raise InvalidArgumentError(f"n={params.n}: a chat has one answer", param="n")
        self.given = given

    def params(self, given: dict[str, Any]) -> SamplingParams:
        """`given` over the model's defaults. A text that is gone on with has no end of its own, and gets one."""
        return sampling_params(self.llm, given, max_tokens=None if self.has_template else MOST_CONTINUED_TOKENS)

    def encode(self, messages: list[Message]) -> list[int]:
        """The prompt's token ids, by the model's chat template; without one, those of the text so far."""
        if self.has_template:
            return chat_prompt(self.llm.tokenizer, messages)
        text = ""
        for message in messages:
            text += message["content"] if message["role"] == "assistant" else f"\n{message['content']}"
        return self.llm.get_tokenizer().encode(text.removeprefix("\n"))

    def answer(self, text: str) -> Generator[str, None, None]:
        """Asks, and yields the answer's text as it comes.

        Turns that no longer fit the context are forgotten, oldest first (`stats.num_dropped_turns`). An
        answer that the caller stops (by closing the iterator, or by an exception such as KeyboardInterrupt)
        stays in the conversation as far as it got; one without any text takes its question with it.
        """
        if self.conversation.is_open:  # an interrupt came at an awkward moment
            self.conversation.take_back()
        params = self.params(self.given)
        context = self.llm.client.info.max_model_len
        reserved = min(params.max_tokens or MOST_RESERVED_TOKENS, context // 2)
        self.conversation.ask(text)
        ids, num_dropped = self.conversation.fit(self.encode, context - reserved)
        self.stats = AnswerStats(num_prompt_tokens=len(ids), num_dropped_turns=num_dropped)
        pieces: list[str] = []
        start = time.perf_counter()
        try:
            with closing(self.llm.stream(ids, params, answer_format=self.answer_format)) as deltas:
                for delta in deltas:
                    now = time.perf_counter() - start
                    if delta.token_ids and not self.stats.num_output_tokens:
                        self.stats.ttft_s = now
                    self.stats.latency_s = now
                    self.stats.num_output_tokens += len(delta.token_ids)
                    self.stats.finish_reason = delta.finish_reason
                    if delta.finish_reason == "error":
                        raise XservError("the engine could not finish the answer; its log says why")
                    self.stats.num_reasoning_tokens += delta.num_reasoning_tokens
                    if delta.reasoning:
                        self.on_reasoning(delta.reasoning)
                    if delta.text:
                        pieces.append(delta.text)
                        yield delta.text
        finally:
            self.stats.finish_reason = self.stats.finish_reason or "stopped"
            if pieces or self.stats.finish_reason in ("stop", "length"):
                self.conversation.answer("".join(pieces))
            else:
                self.conversation.take_back()
