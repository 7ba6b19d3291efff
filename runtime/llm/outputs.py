"""Outputs of ``LLM`` and ``AsyncLLM``: prompts with their choices, embeddings, beams. vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.engine.messages import FinishReason, PrefixMiss, RequestTimes
from runtime.text.decisions import DecisionAnswer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token under the raw logits; ``rank`` 1 is the most probable."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One choice.

    logprobs            for each token of ``token_ids``, the token and its alternatives by id; None if not
                        requested
    cumulative_logprob  the sum over all tokens so far; None if not requested
    finish_reason       None while the choice goes on; "stop", "length", "abort", or "error" (with the reason in
                        ``error``)
    stop_reason         the stop string or stop id; None for EOS
    weight_version      of the weights that computed its tokens
    num_restarts        how often new weights began it anew
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    times: RequestTimes | None = None
    weight_version: str | None = None
    num_restarts: int = 0

    def finished(self) -> bool:
        """Whether the choice is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its choices. ``prompt`` is None if ids were given; ``prompt_logprobs[0]`` is None;
    ``num_cached_tokens`` of the prompt were in the prefix cache (None if nothing was computed), ``prefix_miss`` says
    why no more were; ``finished`` is True once all of its choices are."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    finished: bool = True
    prefix_miss: PrefixMiss | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The length of the vector."""
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(slots=True)
class PoolingOutput:
    """A vector, or the labels' scores; of a task for tokens, a list of those of each."""

    data: list[float] | list[list[float]]


@dataclass(slots=True)
class PoolingRequestOutput:
    """A prompt and what it was pooled to."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each label, by its number, or whatever the model's activation makes of its score."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class ClassificationRequestOutput:
    """A prompt and its labels."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    """The relevance of the second text to the first."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """A pair of texts, as its ids, and its score."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


@dataclass(slots=True)
class DecisionOutput:
    """The answers to questions about an input, in their order. All questions' prompts have ``num_prompt_tokens``;
    ``num_cached_tokens`` of these were in the prefix cache."""

    request_id: str
    answers: list[DecisionAnswer]
    num_prompt_tokens: int
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class BeamSearchSequence:
    """A beam. ``tokens`` and ``text`` include the prompt; ``logprobs`` has an entry for each new token, with its
    alternatives; ``cum_logprob`` is the sum over the new tokens."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str | None
    finish_reason: FinishReason


@dataclass(slots=True)
class BeamSearchOutput:
    """A prompt's beams, best first."""

    sequences: list[BeamSearchSequence]
