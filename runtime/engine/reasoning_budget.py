"""A bound on the tokens of a choice's reasoning: after so many, the tokens that end it are forced.

A forced token is drawn from a mask of one id, so that whatever follows from a draw (proposals that are kept, penalties,
log probabilities) follows as usual. The forced token depends on the output's tokens alone.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.engine.checks import is_integer
from runtime.engine.errors import RequestError

MOST_BEFORE = 4
"""Tokens, of white space, that may precede the one that opens the reasoning."""


class ReasoningBudget(msgspec.Struct, frozen=True, kw_only=True):
    """
    num_tokens   of the reasoning, before the closing ids are forced
    opening_id   opens the reasoning, near the output's beginning; None: the prompt has opened it
    num_label    tokens after it that belong to the opening
    closing_id   ends the reasoning; it is among `closing_ids`, the ids that are forced

    Raises ``RequestError``.
    """

    num_tokens: int
    closing_id: int
    closing_ids: tuple[int, ...]
    opening_id: int | None = None
    num_label: int = 0

    def __post_init__(self) -> None:
        if not is_integer(self.num_tokens) or not 0 <= self.num_tokens < 2**31:
            problem = f"reasoning_budget.num_tokens must be between 0 and {2**31 - 1}, got {self.num_tokens!r:.80}"
            raise RequestError(problem, param="reasoning_budget")
        if self.closing_id not in self.closing_ids:
            problem = (
                f"reasoning_budget.closing_ids must hold closing_id, {self.closing_id}: got {self.closing_ids!r:.80}"
            )
            raise RequestError(problem, param="reasoning_budget")

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids that it names."""
        return self.closing_ids if self.opening_id is None else (*self.closing_ids, self.opening_id)

    def may_force(self, position: int) -> bool:
        """Whether some output has a forced token at this position."""
        first = self.num_tokens if self.opening_id is None else self.num_tokens + self.num_label + 1
        return 0 <= position - first < len(self.closing_ids) + (0 if self.opening_id is None else MOST_BEFORE)

    def forced(self, output_ids: NDArray[np.int32]) -> int | None:
        """The id that has to follow this output; None if any may."""
        if not self.may_force(len(output_ids)):
            return None
        start = 0
        if self.opening_id is not None:
            opened = np.flatnonzero(output_ids[: MOST_BEFORE + 1] == self.opening_id)
            if not opened.size:
                return None
            start = int(opened[0]) + 1 + self.num_label
        end = start + self.num_tokens
        place = len(output_ids) - end
        if not 0 <= place < len(self.closing_ids) or (output_ids[start:end] == self.closing_id).any():
            return None
        return self.closing_ids[place]
