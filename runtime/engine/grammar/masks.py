"""Masks of the ids that a step's draws may have by their grammars.

They are computed during the step's forward pass, in llguidance's threads, which do not hold the GIL; the sampler waits
for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.engine.grammar.matcher import LLMatcher, Vocabulary
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.later import later

_llguidance = later("llguidance")

_NO_WORDS: NDArray[np.uint32] = np.empty((0, 0), np.uint32)


class PendingMasks:
    """The masks of one step, being computed; see `DrawMasks`. If that failed, the wait raises the original error.

    draws      indices of the step's draws that have a mask
    sequences  the sequence of each of them
    """

    def __init__(
        self, samples: list[int], sequences: list[Sequence], buffer: NDArray[np.uint32], done: Future[None]
    ) -> None:
        self._samples = samples
        self._sequences = sequences
        self._buffer = buffer
        self._done = done

    def wait(self) -> tuple[NDArray[np.intp], NDArray[np.uint32], list[int]]:
        """The draws ``[m]``, the ids that each allows ``[m, words]``, and the draws without a mask, whose matchers have
        failed."""
        self._done.result()
        failed = []
        for sample, sequence, mask in zip(self._samples, self._sequences, self._buffer):
            matcher = sequence.matcher
            assert matcher is not None
            if matcher.ll_matcher.is_error():
                mask.fill(0)
                failed.append(sample)
                continue
            for token_id in idle_ends(sequence.request, matcher.vocabulary):
                mask[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
        return np.array(self._samples, np.intp), self._buffer, failed


class MaskComputer:
    """Computes the masks of a step's sequences, in threads. Belongs to the engine's loop."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._executor: Any = None

    def start(
        self, sequences: Sequences[Sequence], num_samples: NDArray[np.int64], drafts: Mapping[Sequence, list[int]]
    ) -> PendingMasks | None:
        """Start on the sampling sequences that have a grammar; None if none has. ``num_samples`` counts the samples of
        each of the step's chunks: one, and one after each of its sequence's ``drafts``.

        The matchers must not be touched until the masks were waited for; an error is raised by that wait.
        """
        if all(sequence.matcher is None for sequence in sequences):
            return None
        try:
            return self._begin(sequences, num_samples[num_samples > 0].tolist(), drafts)
        except Exception as error:  # the step fails, and the engine goes on
            failed: Future[None] = Future()
            failed.set_exception(error)
            return PendingMasks([], [], _NO_WORDS, failed)

    def _begin(
        self, sequences: Sequences[Sequence], num_samples: list[int], drafts: Mapping[Sequence, list[int]]
    ) -> PendingMasks:
        samples: list[int] = []
        owners: list[Sequence] = []
        work: list[tuple[LLMatcher, int, list[int]]] = []  # matcher, its first mask, its draft tokens
        num_words = first = 0
        for sequence, count in zip(sequences, num_samples):
            if sequence.matcher is not None:
                work.append((sequence.matcher.ll_matcher, len(samples), drafts.get(sequence, [])))
                samples += range(first, first + count)
                owners += [sequence] * count
                num_words = sequence.matcher.vocabulary.num_mask_words
            first += count
        buffer = np.empty((len(samples), num_words), np.uint32)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "xserv-masks")
        return PendingMasks(samples, owners, buffer, self._thread.submit(self._fill, work, buffer))

    def close(self) -> None:
        """Stop computing masks."""
        if self._thread is not None:
            self._thread.shutdown()

    def _fill(self, work: list[tuple[LLMatcher, int, list[int]]], buffer: NDArray[np.uint32]) -> None:
        if self._executor is None:
            self._executor = _llguidance.LLExecutor()
        memory = buffer.ctypes.data, buffer.strides[0], len(buffer)
        if plain := [(matcher, first) for matcher, first, proposals in work if not proposals]:
            self._executor.unsafe_compute_mask_ptr(plain, *memory)
        if len(plain) < len(work):
            drafted = [one for one in work if one[2]]
            for _, first, proposals in drafted:  # a draft token after an end or a rejected one is not kept
                buffer[first : first + len(proposals) + 1] = 0xFFFFFFFF
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *memory)


def idle_ends(request: Request, vocabulary: Vocabulary) -> list[int]:
    """End-of-sequence ids that do not end a choice of this request, since its grammar does not accept them."""
    return [token_id for token_id in vocabulary.eos_token_ids if token_id not in request.stop_ids]


def can_draw_end(sequence: Sequence, vocabulary: Vocabulary) -> bool:
    """Whether the next token can be an end of sequence that ends the choice."""
    request = sequence.request
    allowed = request.params.allowed_token_ids
    return sequence.num_output_tokens >= request.params.min_tokens and any(
        token_id in request.stop_ids and (allowed is None or token_id in allowed)
        for token_id in vocabulary.eos_token_ids
    )
