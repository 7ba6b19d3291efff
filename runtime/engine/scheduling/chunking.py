"""The most tokens of one prompt in a step.

Smaller chunks let the decodes of other sequences go on sooner, larger ones read the weights less often. Sarathi-Serve
(Agrawal et al., 2024, and its scheduler's dynamic chunking) shrinks them as a prompt proceeds: attention to a longer
context makes later chunks more expensive, so equal times need smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runtime.engine.config import SchedulingConfig
from runtime.engine.scheduling.pictures import Pictures
from runtime.engine.scheduling.prompt_times import PromptTimes
from runtime.engine.scheduling.step import Step

CHUNK_MULTIPLE = 32
"""Staged chunks are multiples of this, as the tiles of matrix products are."""


class Chunking(Protocol):
    """``most(num_computed)`` is the most tokens of a prompt in one step after ``num_computed`` tokens."""

    def most(self, num_computed: int) -> int: ...


class FixedChunks:
    """The same everywhere in a prompt."""

    def __init__(self, size: int) -> None:
        self.size = size

    def most(self, num_computed: int) -> int:
        return self.size


class StagedChunks:
    """``stages`` sizes from ``high`` down to ``low``, evenly spaced and rounded up to multiples of 32; each holds for
    an equal share of the first ``over_tokens`` tokens, the last for all that follow."""

    def __init__(self, high: int, low: int, stages: int, over_tokens: int) -> None:
        fall = (high - low) / max(1, stages - 1)
        self.sizes = [round_up(high - fall * stage) for stage in range(stages)]
        self.tokens_per_stage = -(-over_tokens // stages)

    def most(self, num_computed: int) -> int:
        return self.sizes[min(num_computed // self.tokens_per_stage, len(self.sizes) - 1)]


class EqualChunks:
    """Chunks that take as long as the first ``size`` tokens of a prompt, by measured times, in multiples of 32. For
    several open steps, one after another in a model's stages."""

    def __init__(self, size: int, times: PromptTimes) -> None:
        self.size, self.times = size, times

    def most(self, num_computed: int) -> int:
        if not num_computed:
            return self.size
        return min(self.size, round_up(self.times.as_long_as(self.size, num_computed)))


def round_up(size: float) -> int:
    """The smallest multiple of 32 that is not less."""
    return -int(-size // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def chunking_of(config: SchedulingConfig, max_num_batched_tokens: int, depth: int, times: PromptTimes) -> Chunking:
    """The chunking that the configuration names. By default a step's budget is the only limit, or, with ``depth`` open
    steps, all of them share it and take equal times."""
    if config.prefill_chunk_stages is not None:
        return StagedChunks(*config.prefill_chunk_stages)
    if depth > 1 and config.prefill_chunk is None:
        size = max(CHUNK_MULTIPLE, round_up(max_num_batched_tokens / depth))
        return EqualChunks(min(size, max_num_batched_tokens), times)
    return FixedChunks(config.prefill_chunk or max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """Cuts prompts into steps, if they may be cut."""

    chunking: Chunking
    cuts_prompts: bool

    def size(self, step: Step, num_computed: int, remaining: int, pictures: Pictures | None) -> int:
        """How many of a prompt's ``remaining`` tokens the step may compute. A prompt that may not be cut may exceed the
        budget if it is alone; an image that may not be cut may exceed the chunk's size."""
        if self.cuts_prompts:
            most = min(remaining, step.budget)
            count = min(most, self.chunking.most(num_computed))
            if pictures is not None and pictures.whole and count > 0:
                return pictures.whole_chunk(num_computed, count, most)
            return count
        return remaining if remaining <= step.budget or not step.chunks else 0
