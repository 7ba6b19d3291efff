"""A chat request that has passed every check, of any endpoint, while its answer is generated."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.engine.sampling_params import SamplingParams
from runtime.text.pipeline import TextDelta
from server.openai_api.answers import ChatFinishReason, ChatLogprobs, ChatTokenLogprob, Usage
from server.openai_api.logprobs import chat_logprobs
from server.requests.generation import Generation
from server.requests.structured import RequestSchemas
from server.service import Service


@dataclass(frozen=True, slots=True)
class Chat:
    """A request that has passed every check, and its generation.

    schemas  of its grammar, and the request's field that defines it
    echo     the beginning of the answer
    left_out  names of fields that the chat template leaves out
    """

    service: Service
    request_id: str
    created: int
    generation: Generation
    params: SamplingParams
    schemas: RequestSchemas
    prompt_token_ids: list[int]
    echo: str
    left_out: list[str]
    is_streamed: bool
    has_usage: bool
    has_running_usage: bool
    has_token_ids: bool

    def logprobs(self, tokens: list[ChatTokenLogprob]) -> ChatLogprobs | None:
        """null unless requested."""
        return ChatLogprobs(tokens) if self.params.logprobs is not None else None

    def token_logprobs(self, delta: TextDelta) -> list[ChatTokenLogprob]:
        """Log probabilities of the content's tokens, without the one that ended the answer unless its text is shown."""
        return chat_logprobs(delta, self.service.tokenizer)

    def finish_reason(self, delta: TextDelta, *, has_calls: bool) -> ChatFinishReason:
        """The reason why a choice ended, from its last delta."""
        assert delta.finish_reason is not None
        return "tool_calls" if has_calls and delta.finish_reason == "stop" else delta.finish_reason

    def usage(self) -> Usage:
        generation = self.generation
        return Usage.of(
            generation.num_prompt_tokens,
            generation.num_completion_tokens,
            generation.num_cached_tokens,
            generation.num_reasoning_tokens,
            generation.of_prediction,
        )
