"""Where a choice is in its grammar, and the masks of the ids that may come next.

A step's masks are computed beside its forward pass, in threads of llguidance's that do not hold Python's lock; they
are waited for where tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Never

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from runtime.engine.grammar.vocabulary import Vocabulary
    from runtime.engine.scheduling.sequence import Request, Sequence


class GrammarMatcher:
    """One choice's place in its grammar. What goes wrong in it stays in it: see ``error``."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self.ll_matcher = matcher
        self.vocabulary = vocabulary

    @property
    def error(self) -> str | None:
        """What went wrong, for the log; nothing can be drawn any more."""
        return self.ll_matcher.get_error() if self.ll_matcher.is_error() else None

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and nothing but the end can follow."""
        return self.ll_matcher.is_stopped() and not self.ll_matcher.is_error()

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these, one after the other, the grammar has a place for. The matcher stays where it is."""
        return 0 if self.ll_matcher.is_error() else self.ll_matcher.validate_tokens(token_ids)

    def forced(self) -> list[int]:
        """What has to come next, as the tokenizer would write it: what is drawn may be cut differently."""
        return [] if self.ll_matcher.is_error() else self.ll_matcher.compute_ff_tokens()

    def consume(self, token_id: int) -> bool:
        """Go on by a token that was drawn; False where the grammar has no place for it."""
        return self.ll_matcher.consume_token(token_id)


class PendingMasks:
    """The masks of one step, under way; see `DrawMasks`.

    draws      the step's draws that they belong to
    sequences  of each of them
    """

    def __init__(
        self, draws: list[int], sequences: list[Sequence], buffer: NDArray[np.uint32], done: Future[None]
    ) -> None:
        self._draws = draws
        self._sequences = sequences
        self._buffer = buffer
        self._done = done

    def wait(self) -> tuple[NDArray[np.intp], NDArray[np.uint32], list[int]]:
        """The draws ``[m]``, the ids that each allows ``[m, words]``, and the draws without any: their matchers have
        failed."""
        self._done.result()
        failed = []
        for draw, sequence, mask in zip(self._draws, self._sequences, self._buffer):
            matcher = sequence.matcher
            assert matcher is not None
            if matcher.ll_matcher.is_error():
                mask.fill(0)
                failed.append(draw)
                continue
            for token_id in idle_ends(sequence.request, matcher.vocabulary):
                mask[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
        return np.array(self._draws, np.intp), self._buffer, failed


class FailedMasks:
    """Masks that could not be begun; see `DrawMasks`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> Never:
        """Raises what was raised, so that the step fails and the engine goes on."""
        raise self._error


class MaskComputer:
    """Computes masks of a step's sequences, all at once, in threads. Belongs to the engine's loop."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def start(
        self, sequences: Sequences[Sequence], num_draws: NDArray[np.int64], drafts: Mapping[Sequence, list[int]]
    ) -> PendingMasks | FailedMasks | None:
        """Begin with those of the drawing sequences that have a grammar; None: none has. ``num_draws``: of each
        of the step's chunks: the first, and one behind each of its sequence's ``drafts``.

        Until the masks were waited for nobody may touch the matchers. An error is raised by that wait.
        """
        if all(sequence.matcher is None for sequence in sequences):
            return None
        try:
            return self._begin(sequences, num_draws[num_draws > 0].tolist(), drafts)
        except Exception as error:
            return FailedMasks(error)

    def _begin(
        self, sequences: Sequences[Sequence], num_draws: list[int], drafts: Mapping[Sequence, list[int]]
    ) -> PendingMasks:
        draws: list[int] = []
        owners: list[Sequence] = []
        work: list[tuple[LLMatcher, int, list[int]]] = []  # matcher, its first mask, its proposals
        num_words = first = 0
        for sequence, count in zip(sequences, num_draws):
            if sequence.matcher is not None:
                work.append((sequence.matcher.ll_matcher, len(draws), drafts.get(sequence, [])))
                draws += range(first, first + count)
                owners += [sequence] * count
                num_words = sequence.matcher.vocabulary.num_mask_words
            first += count
        buffer = np.empty((len(draws), num_words), np.uint32)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "xserv-masks")
        return PendingMasks(draws, owners, buffer, self._thread.submit(self._fill, work, buffer))

    def close(self) -> None:
        """Compute no more."""
        if self._thread is not None:
            self._thread.shutdown()

    def _fill(self, work: list[tuple[LLMatcher, int, list[int]]], buffer: NDArray[np.uint32]) -> None:
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor()
        memory = buffer.ctypes.data, buffer.strides[0], len(buffer)
        if plain := [(matcher, first) for matcher, first, proposals in work if not proposals]:
            self._executor.unsafe_compute_mask_ptr(plain, *memory)
        if len(plain) < len(work):
            drafted = [one for one in work if one[2]]
            for _, first, proposals in drafted:  # behind one that ends the text, or has no place, nothing is kept
                buffer[first : first + len(proposals) + 1] = 0xFFFFFFFF
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *memory)


def idle_ends(request: Request, vocabulary: Vocabulary) -> list[int]:
    """The ends of sequence that do not end a choice of this request: a grammar's text has no place for them."""
    return [token_id for token_id in vocabulary.eos_token_ids if token_id not in request.stop_ids]


def can_draw_end(sequence: Sequence, vocabulary: Vocabulary) -> bool:
    """Whether the next token can be an end of sequence that ends the choice."""
    request = sequence.request
    allowed = request.params.allowed_token_ids
    return sequence.num_output_tokens >= request.params.min_tokens and any(
        token_id in request.stop_ids and (allowed is None or token_id in allowed)
        for token_id in vocabulary.eos_token_ids
    )
