"""From logits to token ids: the sampling parameters of the running sequences, kept as columns by row.

A sequence's parameters are written once, when it is given its row; a step gathers the rows that it samples.
Only sequences with penalties, logit bias, bad words, ``min_tokens`` or allowed ids cost more than that. The draw
itself is ``ops.sample``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.engine.messages import TokenLogprobs
from runtime.engine.sampling_params import MAX_BAD_WORD_TOKENS
from runtime.engine.scheduling.sequence import Sequence
from runtime.sampling_arrays import SampledTokens, SamplingArrays
from runtime.tensor.tensor import Tensor

logger = logging.getLogger("xserv.engine")

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""The parameters that are kept as rows of one array, so that one call gathers them."""

PenaltyLists = tuple[NDArray[np.int32], NDArray[np.int32]]
"""The ids of a prompt and of an output that penalties count."""


class Sampler:
    """Parameters of up to ``max_num_seqs`` running sequences over a vocabulary of ``vocab_size`` ids.

    num_prompt_tokens  by row, int64
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._floats = np.zeros((len(_FLOATS), max_num_seqs), np.float32)
        self._integers = np.zeros((2, max_num_seqs), np.int32)  # top_k, choice_index
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        # Rows that cost more than their numbers: penalties; bias, bad words, ids that min_tokens may mask; allowed ids
        # or a grammar.
        self._flags = np.zeros((3, max_num_seqs), np.bool_)
        self._prompt_ids: list[NDArray[np.int32]] = [_NO_IDS] * max_num_seqs
        self._bias_ids: list[NDArray[np.int32]] = [_NO_IDS] * max_num_seqs
        self._bias_values: list[NDArray[np.float32]] = [_NO_VALUES] * max_num_seqs
        self._masked_ids: list[NDArray[np.int32]] = [_NO_IDS] * max_num_seqs
        self._bad_words: list[list[list[int]]] = [[]] * max_num_seqs
        self._allowed: list[NDArray[np.uint32] | None] = [None] * max_num_seqs

    def load(self, row: int, sequence: Sequence) -> None:
        """Write a sequence's parameters into its row."""
        request, params = sequence.request, sequence.request.params
        self.num_prompt_tokens[row] = sequence.num_prompt_tokens
        self._floats[:, row] = [getattr(params, name) for name in _FLOATS]
        self._integers[:, row] = params.top_k, sequence.index
        self._seeds[row] = request.seed
        # A repetition penalty counts an id once, however often the prompt has it.
        self._prompt_ids[row] = np.unique(request.prompt_ids) if params.repetition_penalty != 1.0 else _NO_IDS
        bias = params.logit_bias or {}
        self._bias_ids[row] = np.fromiter(bias.keys(), np.int32, len(bias))
        self._bias_values[row] = np.fromiter(bias.values(), np.float32, len(bias))
        masked = {*request.eos_token_ids, *(params.stop_token_ids or ())} if params.min_tokens else set()
        self._masked_ids[row] = np.fromiter(masked, np.int32, len(masked))
        self._bad_words[row] = params.bad_words_token_ids or []
        allowed = params.allowed_token_ids
        self._allowed[row] = None if allowed is None else _bit_mask(allowed, self.vocab_size)
        has_bias = bool(bias or masked or params.bad_words_token_ids)
        self._flags[:, row] = params.has_penalties, has_bias, allowed is not None or params.grammar is not None

    def gather(self, sequences: Sequences[Sequence], rows: NDArray[np.intp]) -> SamplingArrays:
        """The parameters of one step, for running sequences whose tokens are all known and their ``rows [n]``.

        Where one has a grammar there is an allowed mask, which is still to be narrowed by the grammars' masks."""
        no_entries = np.zeros(len(rows) + 1, np.int32)
        floats = dict(zip(_FLOATS, self._floats.take(rows, axis=1)))  # each contiguous
        top_k, choice_index = self._integers.take(rows, axis=1)
        flags = self._flags.take(rows, axis=1)
        any_penalties, any_bias, any_allowed = np.logical_or.reduce(flags, axis=1)
        arrays = SamplingArrays(
            **floats,
            top_k=top_k,
            seed=self._seeds.take(rows),
            choice_index=choice_index,
            position=np.array([sequence.num_output_tokens for sequence in sequences], np.int32),
            prompt_ids=_NO_IDS,
            prompt_start=no_entries,
            output_ids=_NO_IDS,
            output_start=no_entries,
            bias_ids=_NO_IDS,
            bias_values=_NO_VALUES,
            bias_start=no_entries,
        )
        if any_penalties:
            prompts, outputs = zip(*self.penalty_lists(sequences, rows))
            arrays.prompt_ids, arrays.prompt_start = _ragged(prompts, np.int32)
            arrays.output_ids, arrays.output_start = _ragged(outputs, np.int32)
        if any_bias:
            self._gather_bias(arrays, sequences, rows)
        if any_allowed:
            everything = np.full(-(-self.vocab_size // 32), 0xFFFFFFFF, np.uint32)
            masks = [self._allowed[row] for row in rows]
            arrays.allowed_mask = np.stack([everything if mask is None else mask for mask in masks])
        return arrays

    def gather_sound(
        self, sequences: Sequences[Sequence], rows: NDArray[np.intp]
    ) -> tuple[SamplingArrays, list[int]]:
        """The same, and the places of those whose own parameters raise an error: what stands there is another's, for
        a draw that is for nobody. Raises an error that no single one of them raises."""
        try:
            return self.gather(sequences, rows), []
        except Exception:
            broken = [place for place in range(len(rows)) if self._is_broken(sequences[place], rows[place : place + 1])]
            if not broken:
                raise
        sound = sorted(set(range(len(rows))).difference(broken))
        if not sound:
            return SamplingArrays.neutral(len(rows)), broken
        places = [sound[0] if place in broken else place for place in range(len(rows))]
        return self.gather([sequences[place] for place in places], rows[places]), broken

    def _is_broken(self, sequence: Sequence, row: NDArray[np.intp]) -> bool:
        try:
            self.gather([sequence], row)
        except Exception:
            logger.exception("request %s: its sampling parameters failed", sequence.request.request_id)
            return True
        return False

    def penalty_lists(self, sequences: Sequences[Sequence], rows: NDArray[np.intp]) -> list[PenaltyLists]:
        """What penalties count, of each of these sequences, whose tokens are all known; empty without penalties."""
        return [
            (self._prompt_ids[row], sequence.output_ids) if wanted else (_NO_IDS, _NO_IDS)
            for sequence, row, wanted in zip(sequences, rows, self._flags[0].take(rows))
        ]

    def num_penalty_ids(self, sequences: Sequences[Sequence], rows: NDArray[np.intp]) -> int | None:
        """At least as many as `penalty_lists` will hold, one more token of each known by then; None: no penalties."""
        (wanted,) = self._flags[0].take(rows).nonzero()
        if not wanted.size:
            return None
        chosen: list[int] = wanted.tolist()
        return sum(len(self._prompt_ids[rows[i]]) + sequences[i].num_output_tokens + 1 for i in chosen)

    def are_plain(self, rows: NDArray[np.intp]) -> bool:
        """Whether none of these sequences has penalties, logit bias, bad words, ``min_tokens``, allowed ids or a
        grammar."""
        return not self._flags.take(rows, axis=1).any()

    def masks(self, sequences: Sequences[Sequence], rows: NDArray[np.intp], positions: NDArray[np.int64]) -> bool:
        """Whether the draw of one of these sequences, at ``positions [n]`` of their outputs, is under a logit bias,
        allowed ids, a grammar, bad words (which may forbid none), or ids that ``min_tokens`` forbids."""
        may_mask, has_allowed = self._flags[1:].take(rows, axis=1)
        return bool(has_allowed.any()) or any(
            len(self._bias_ids[rows[i]]) > 0
            or len(self._bad_words[rows[i]]) > 0
            or positions[i] < sequences[i].request.params.min_tokens
            for i in may_mask.nonzero()[0].tolist()
        )

    def write_columns(
        self, columns: Mapping[str, NDArray[Any]], places: NDArray[np.intp], rows: NDArray[np.intp]
    ) -> None:
        """Write the numbers of these rows to their ``places [n]`` in columns that bear the parameters' names."""
        for name, values in zip(_FLOATS, self._floats):
            columns[name][places] = values.take(rows)
        for name, numbers in zip(("top_k", "choice_index"), self._integers):
            columns[name][places] = numbers.take(rows)
        columns["seed"][places] = self._seeds.take(rows).view(columns["seed"].dtype)

    def _gather_bias(
        self, arrays: SamplingArrays, sequences: Sequences[Sequence], rows: NDArray[np.intp]
    ) -> None:
        ids: list[NDArray[np.int32]] = []
        values: list[NDArray[np.float32]] = []
        for sequence, row in zip(sequences, rows):
            ids.append(self._bias_ids[row])
            values.append(self._bias_values[row])
            forbidden = []
            if sequence.num_output_tokens < sequence.request.params.min_tokens:
                forbidden.append(self._masked_ids[row])
            if self._bad_words[row]:
                forbidden.append(_last_ids(self._bad_words[row], sequence.output_ids))
            if forbidden:
                masked = np.concatenate(forbidden)
                ids[-1] = np.concatenate((ids[-1], masked))
                values[-1] = np.concatenate((values[-1], np.full(len(masked), -np.inf, np.float32)))
        arrays.bias_ids, arrays.bias_start = _ragged(ids, np.int32)
        arrays.bias_values = np.concatenate(values)


def sample(logits: Tensor, arrays: SamplingArrays) -> SampledTokens:
    """One token a row of ``logits [n, vocab_size]`` float32, which stay as they are."""
    return ops.sample(logits, arrays)


def token_logprobs(
    logits: Tensor, token_ids: NDArray[np.int32], num_alternatives: Sequences[int]
) -> list[TokenLogprobs]:
    """Log probability and rank of ``token_ids [n]`` under the raw ``logits [n, vocab_size]``, each with as
    many of the most probable ids as ``num_alternatives`` says."""
    most = min(max(num_alternatives), logits.shape[1])
    chosen, ranks, top_ids, top_logprobs = ops.log_softmax_topk(logits, token_ids, most)
    return [
        TokenLogprobs(token_id, logprob, rank, ids[:count], logprobs[:count])
        for token_id, logprob, rank, ids, logprobs, count in zip(
            token_ids.tolist(),
            chosen.tolist(),
            ranks.tolist(),
            top_ids.tolist(),
            top_logprobs.tolist(),
            num_alternatives,
        )
    ]


_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_VALUES: NDArray[np.float32] = np.empty(0, np.float32)


def forbidden_ids(sequence: Sequence) -> set[int]:
    """The ids that ``min_tokens`` and bad words forbid to be drawn next."""
    request, params = sequence.request, sequence.request.params
    forbidden = set(_last_ids(params.bad_words_token_ids or [], sequence.output_ids).tolist())
    if sequence.num_output_tokens < params.min_tokens:
        forbidden.update(request.eos_token_ids, params.stop_token_ids or ())
    return forbidden


def _last_ids(words: list[list[int]], output_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """The last ids of those words whose other ids the output ends with."""
    tail: list[int] = output_ids[-MAX_BAD_WORD_TOKENS:].tolist()
    last = [word[-1] for word in words if len(word) == 1 or tail[1 - len(word) :] == word[:-1]]
    return np.array(last, np.int32)


def _bit_mask(allowed: list[int], vocab_size: int) -> NDArray[np.uint32]:
    """Bit ``t % 32`` of word ``t // 32`` is set for every allowed id ``t``; ``[ceil(vocab_size / 32)]``."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _ragged(
    parts: Sequences[NDArray[np.int32]], dtype: type[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The parts in one row, and ``[len(parts) + 1]`` offsets."""
    start = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(part) for part in parts], out=start[1:])
    return np.concatenate(parts, dtype=dtype), start
