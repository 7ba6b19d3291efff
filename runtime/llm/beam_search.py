"""Beam search over one prompt, a step at a time: chooses the next prompts to run, and updates the beams from their log
probabilities. It does not use an engine; ``LLM.beam_search`` runs the prompts of all searches together.

The rules are transformers' (``generate(num_beams=...)`` with ``early_stopping=False``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime.engine.admission import prompt_of
from runtime.engine.checks import is_integer, is_number
from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineInfo
from runtime.engine.option_names import KnownOptions
from runtime.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from runtime.errors import XservError
from runtime.llm.outputs import BeamSearchOutput, BeamSearchSequence, Logprob, RequestOutput
from runtime.llm.prompts import Prompt, scheduling_of
from tokenizer import Tokenizer


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=KnownOptions):
    """Parameters of ``LLM.beam_search``.

    beam_width      beams that are kept, and returned: 1 … 10, fewer for a model with several ids that end an answer
    max_tokens      most new tokens of a beam
    ignore_eos      the model's end-of-sequence ids do not end a beam
    length_penalty  a beam's score is its log probability over its number of new tokens to the power of this; above 0
                    it favours long beams
    temperature     only 0 is allowed: beam search samples nothing

    Raises ``RequestError``.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not is_integer(value) or value < 1:
                raise RequestError(f"{name} must be an integer, at least 1, got {value!r:.80}", param=name)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be a bool, got {self.ignore_eos!r:.80}", param="ignore_eos")
        if not is_number(self.length_penalty) or not abs(self.length_penalty) <= 100.0:
            raise RequestError(
                f"length_penalty must be a number between -100 and 100, got {self.length_penalty!r:.80}",
                param="length_penalty",
            )
        if self.temperature != 0:
            raise RequestError(
                f"beam search draws nothing: temperature must be 0, got {self.temperature!r:.80}", param="temperature"
            )


@dataclass(slots=True)
class _Beam:
    """The new tokens, with the candidates of each, and the sum of their log probabilities."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    has_stopped: bool = False
    score: float = 0.0


class BeamSearch:
    """The beams of one prompt. Raises ``RequestError`` if the engine gives too few alternatives for them, and
    ``ContextLengthExceededError``."""

    def __init__(self, prompt: Prompt, token_ids: list[int], params: BeamSearchParams, info: EngineInfo) -> None:
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {type(params).__name__}", param="params")
        self.params = params
        self._prompt = token_ids
        self._scheduling = scheduling_of(prompt)
        self._eos = () if params.ignore_eos else info.eos_token_ids
        factor = max(2, 1 + len(self._eos))  # so that a width of beams continues even if all the others end
        if factor * params.beam_width > MAX_LOGPROBS:
            raise RequestError(
                f"beam_width must be at most {MAX_LOGPROBS // factor} for a model with {len(self._eos)} ids that end "
                f"an answer, got {params.beam_width}",
                param="beam_width",
            )
        prompt_of("prompt", token_ids, info.vocab_size, info.max_model_len)
        self._num_candidates = min(factor * params.beam_width, info.vocab_size)
        self._max_tokens = min(params.max_tokens, info.max_model_len - len(token_ids))
        self._running = [_Beam()]
        self._finished: list[_Beam] = []

    @property
    def step_params(self) -> SamplingParams:
        """The sampling parameters of each prompt."""
        return SamplingParams(temperature=0.0, max_tokens=1, logprobs=self._num_candidates, detokenize=False)

    def prompts(self) -> list[dict[str, Any]]:
        """The next prompts to run; empty when the search is over."""
        return [{"prompt_token_ids": self._prompt + beam.token_ids, **self._scheduling} for beam in self._running]

    def take(self, outputs: list[RequestOutput]) -> None:
        """Add one token to each beam, from the outputs of ``prompts()`` in their order. Raises ``XservError`` if the
        engine failed at one."""
        if not self._running:
            return
        length = len(self._running[0].token_ids) + 1
        is_last = length == self._max_tokens
        width = self.params.beam_width
        candidates = []
        for beam, output in zip(self._running, outputs, strict=True):
            (choice,) = output.outputs
            if not choice.logprobs:
                raise XservError(f"beam search: the engine could not compute a beam: {choice.error}")
            entries = choice.logprobs[0]
            for token_id, entry in entries.items():
                candidates.append((beam.cum_logprob + entry.logprob, token_id, beam, entries))
        candidates.sort(key=lambda candidate: -candidate[0])
        going_on: list[_Beam] = []
        for rank, (total, token_id, beam, entries) in enumerate(candidates[: self._num_candidates]):
            has_stopped = token_id in self._eos
            if (has_stopped or is_last) and rank >= width:
                continue  # as a candidate it only replaced those that end
            new = _Beam([*beam.token_ids, token_id], [*beam.logprobs, entries], total, has_stopped)
            new.score = total / length**self.params.length_penalty
            (self._finished if has_stopped or is_last else going_on).append(new)
        self._finished.sort(key=lambda beam: -beam.score)
        del self._finished[width:]
        self._running = going_on[:width]
        if self._running and len(self._finished) == width:
            best = self._running[0].cum_logprob / length**self.params.length_penalty
            if best <= self._finished[-1].score:
                self._running = []

    def result(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """The beams, best first."""
        found = []
        for beam in self._finished:
            ids = self._prompt + beam.token_ids
            found.append(
                BeamSearchSequence(
                    tokens=ids,
                    logprobs=beam.logprobs,
                    cum_logprob=beam.cum_logprob,
                    text=None if tokenizer is None else tokenizer.decode(ids),
                    finish_reason="stop" if beam.has_stopped else "length",
                )
            )
        return BeamSearchOutput(found)
