"""Limits the mean time of steps with decodes: prompts get what it leaves.

A request's TPOT is a mean, too: steps without prompts save time, which one with prompts may use. A step model predicts
the time, so the scheduler still knows no clock. If decodes alone take all of it, at least every ``MOST_WITHOUT + 1``-th
step exceeds it and computes as many tokens of prompts as its budget allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.engine.scheduling.step import Chunk
from runtime.engine.scheduling.step_model import LinearStepModel, StepFeatures, features_of

MOST_WITHOUT = 32
"""Steps in a row whose time may have no room for the prompts that wait."""


@dataclass(slots=True)
class StepLimit:
    """See the module.

    max_tokens   the most tokens of a step
    seconds      the most mean seconds of steps with decodes; 0.0: the tokens alone count
    steps        the times of steps
    most_saved_s the most that is saved, and ``saved_s`` what is: seconds by which a step may exceed the mean
    num_without  steps in a row without room for prompts that wait
    is_full      the step that is planned has no room for all of a prompt: later ones do not overtake it
    """

    max_tokens: int
    seconds: float
    steps: LinearStepModel
    most_saved_s: float = 0.0
    saved_s: float = 0.0
    num_without: int = 0
    is_full: bool = False

    def most(self, chunks: Sequence[Chunk], start: int, count: int) -> int:
        """How many of a prompt's ``count`` tokens after ``start`` a step with these chunks may compute: at least half,
        unless no more time can be saved for later."""
        if self.seconds == 0.0 or count <= 0 or self.num_without >= MOST_WITHOUT:
            return count
        if self.is_full:
            return 0
        if not any(map(_is_decode, chunks)):
            return count
        tokens, sequences, pairs, context = features_of([(each.start, each.num_tokens) for each in chunks])
        most_s = self.seconds + max(self.saved_s, 0.0)
        low, high = 0, count
        while low < high:
            middle = (low + high + 1) // 2
            added = middle * start + middle * (middle + 1) // 2
            if self.steps.seconds(StepFeatures(tokens + middle, sequences + 1, pairs + added, context)) <= most_s:
                low = middle
            else:
                high = middle - 1
        return low if 2 * low >= count or self.saved_s >= self.most_saved_s else 0

    def go_on(self, before: StepLimit) -> None:
        """Take the place of another limit, with what it has saved."""
        self.saved_s = min(before.saved_s, self.most_saved_s)
        self.num_without = before.num_without

    def begin(self) -> None:
        """The next step is planned."""
        self.is_full = False

    def planned(self, chunks: Sequence[Chunk], *, has_prompts: bool) -> None:
        """A step was planned; ``has_prompts``: prompts wait for a later one."""
        is_without = has_prompts and bool(chunks) and all(map(_is_decode, chunks))
        self.num_without = self.num_without + 1 if is_without else 0
        if self.seconds and any(map(_is_decode, chunks)):
            took_s = self.steps.seconds(features_of([(each.start, each.num_tokens) for each in chunks]))
            saved_s = self.saved_s + self.seconds - took_s
            self.saved_s = max(min(saved_s, self.most_saved_s), -self.most_saved_s)


def _is_decode(chunk: Chunk) -> bool:
    is_one = chunk.is_last and chunk.num_tokens == 1 + len(chunk.draft_ids)
    return is_one and chunk.start >= chunk.sequence.num_prompt_tokens
