"""Samples token ids from logits, with the sampling parameters of the running sequences in columns by row.

A sequence's parameters are written once, when it gets its row; a step gathers the rows of its samples. Only rows with
penalties, logit bias, bad words, ``min_tokens`` or allowed ids cost more than that. ``ops.sample`` does the sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.engine.logits.processing import RowProcessors
from runtime.engine.messages import TokenLogprobs
from runtime.engine.reasoning_budget import ReasoningBudget
from runtime.engine.sampling_params import MAX_BAD_WORD_TOKENS
from runtime.engine.steps.chains import NO_WORDS, Chains
from runtime.engine.steps.step_input import RowLoad
from runtime.sampling_arrays import SAMPLING_FIELDS, SamplingArrays
from runtime.sampling_table import KERNEL_COLUMNS, PENALTIES
from runtime.tensor.tensor import Tensor

logger = logging.getLogger("xserv.engine")

_FLOATS = [name for name, column in KERNEL_COLUMNS.items() if column.dtype == "float32"]
_INTEGERS = [name for name, column in KERNEL_COLUMNS.items() if column.dtype == "int32"] + ["choice_index"]
"""Parameters that are rows of one array, so that one call gathers all of a type."""

RowNumbers = NDArray[np.int64]
Number = TypeVar("Number", np.int32, np.float32)

PenaltyLists = tuple[NDArray[np.int32], NDArray[np.int32]]
"""The ids of a prompt and of an output that penalties count."""

_FIRST_OUTPUTS = 64


class SamplingRows:
    """Parameters of ``max_num_seqs`` rows over a vocabulary of ``vocab_size`` ids.

    num_prompt_tokens  by row
    num_alternatives   by row: alternatives in each token's log probabilities, or -1 for none at all
    logprob_ids        by row: the ids whose log probabilities are wanted, if it names any
    keeps_outputs      by row: whether penalties, bad words or DRY depend on the output
    chains             by row: its chain of samplers
    processors         by row: its logits processors
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, processors: RowProcessors, *, tells_processed: bool = False
    ) -> None:
        """``tells_processed``: log probabilities are told of processed logits."""
        self.vocab_size = vocab_size
        self.processors = processors
        self._tells_processed = tells_processed
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_alternatives = np.full(max_num_seqs, -1, np.int64)
        self.logprob_ids: dict[int, NDArray[np.int32]] = {}
        self.keeps_outputs = np.zeros(max_num_seqs, np.bool_)
        self._floats = np.zeros((len(_FLOATS), max_num_seqs), np.float32)
        self._integers = np.zeros((len(_INTEGERS), max_num_seqs), np.int32)
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        # Rows that cost more than their numbers: penalties; bias, bad words, ids that min_tokens may mask; allowed ids
        # or a grammar; a chain; logits that are read or written between the model and the samplers.
        self._flags = np.zeros((5, max_num_seqs), np.bool_)
        self.chains = Chains(max_num_seqs)
        self._min_tokens = np.zeros(max_num_seqs, np.int64)
        self._prompt_ids: list[NDArray[np.int32]] = [_NO_IDS] * max_num_seqs
        self._outputs: list[NDArray[np.int32]] = [_NO_IDS] * max_num_seqs
        self._bias_ids: list[NDArray[np.int32]] = [_NO_IDS] * max_num_seqs
        self._bias_values: list[NDArray[np.float32]] = [_NO_VALUES] * max_num_seqs
        self._num_bias = np.zeros(max_num_seqs, np.int64)  # of these, before the ids that min_tokens forbids
        self._bad_words: list[list[list[int]]] = [[]] * max_num_seqs
        self._allowed: list[NDArray[np.uint32] | None] = [None] * max_num_seqs
        self._budgets: dict[int, ReasoningBudget] = {}
        self._broken: set[int] = set()

    def load(self, load: RowLoad) -> None:
        """Write a row's parameters."""
        row, numbers = load.row, load.numbers
        self._broken.discard(row)
        self.num_prompt_tokens[row] = load.num_prompt_tokens
        self.num_alternatives[row] = -1 if load.logprobs is None else load.logprobs
        self.logprob_ids.pop(row, None)
        if load.logprob_ids:
            self.logprob_ids[row] = np.array(load.logprob_ids, np.int32)
        self._floats[:, row] = [numbers[name] for name in _FLOATS]
        self._integers[:, row] = [*(int(numbers[name]) for name in _INTEGERS[:-1]), load.choice_index]
        self._seeds[row] = load.seed
        self._prompt_ids[row] = _NO_IDS if load.prompt_ids is None else load.prompt_ids
        self._bias_ids[row] = np.array([*load.bias_ids, *load.end_ids], np.int32)
        self._bias_values[row] = np.array([*load.bias_values, *[-np.inf] * len(load.end_ids)], np.float32)
        self._num_bias[row] = len(load.bias_ids)
        self._min_tokens[row] = load.min_tokens
        self._bad_words[row] = load.bad_words
        self._allowed[row] = None if load.allowed_ids is None else _bit_mask(load.allowed_ids, self.vocab_size)
        has_penalties = any(numbers[name] != neutral for name, neutral in PENALTIES.items())
        self._budgets.pop(row, None)
        if load.reasoning_budget is not None:
            self._budgets[row] = load.reasoning_budget
        has_bias = bool(load.bias_ids or load.bad_words or (load.min_tokens and load.end_ids) or row in self._budgets)
        has_masks, has_chain = load.allowed_ids is not None or load.has_masks, self.chains.load(load)
        is_processed = self.processors.load(load)
        tells_processed = self._tells_processed and load.logprobs is not None
        self._flags[:, row] = has_penalties, has_bias, has_masks, has_chain, is_processed or tells_processed
        has_dry = load.dry_prompt_ids is not None
        keeps = has_penalties or bool(load.bad_words) or row in self._budgets or has_dry or is_processed
        self.keeps_outputs[row] = keeps
        self._outputs[row] = _NO_IDS
        if keeps:
            known = _NO_IDS if load.output_ids is None else load.output_ids
            self._outputs[row] = np.empty(len(known) + _FIRST_OUTPUTS, np.int32)
            self._outputs[row][: len(known)] = known

    def break_row(self, load: RowLoad) -> None:
        """The row samples nothing until its next load."""
        self._broken.add(load.row)
        self.num_prompt_tokens[load.row] = load.num_prompt_tokens
        self.num_alternatives[load.row] = -1
        self.logprob_ids.pop(load.row, None)
        self.keeps_outputs[load.row] = False
        self._budgets.pop(load.row, None)
        self.chains.forget(load.row)
        self.processors.forget(load.row)
        self._flags[:, load.row] = True

    @property
    def has_broken(self) -> bool:
        """Whether the parameters of some row could not be written."""
        return bool(self._broken)

    def write_outputs(self, rows: RowNumbers, positions: NDArray[np.int64], token_ids: NDArray[np.int32]) -> None:
        """Write the tokens at ``positions [n]`` of the rows' outputs; later ones count no more."""
        for row, position, token_id in zip(rows.tolist(), positions.tolist(), token_ids.tolist()):
            if self.keeps_outputs[row]:
                if position >= len(self._outputs[row]):
                    self._outputs[row] = np.resize(self._outputs[row], 2 * position)
                self._outputs[row][position] = token_id

    def gather(self, rows: RowNumbers, positions: NDArray[np.int64]) -> SamplingArrays:
        """The parameters of samples at ``positions [n]`` of the outputs of ``rows [n]``, all before which are known.

        If a row has a grammar there is an allowed mask, which is still to be narrowed by the grammars' masks."""
        ends_of_none: dict[str, Any] = dict.fromkeys(_ENDS_OF_LISTS, np.zeros(len(rows), np.int32))
        floats = zip(_FLOATS, self._floats.take(rows, axis=1))  # each contiguous
        integers = zip(_INTEGERS, self._integers.take(rows, axis=1))
        any_penalties, any_bias, any_allowed, any_chains, _ = np.logical_or.reduce(
            self._flags.take(rows, axis=1), axis=1
        )
        arrays = SamplingArrays(
            **dict(floats),
            **dict(integers),
            **_NO_LISTS,
            **ends_of_none,
            seed=self._seeds.take(rows),
            position=positions.astype(np.int32),
        )
        if any_penalties:
            prompts, outputs = zip(*self.penalty_lists(rows, positions))
            owners: list[int] = rows.tolist()
            arrays.prompt_ids, arrays.prompt_start, arrays.prompt_end = shared_lists(owners, prompts)
            arrays.output_ids, arrays.output_start, arrays.output_end = shared_lists(owners, outputs)
        if any_bias:
            self._gather_bias(arrays, rows, positions)
        if any_allowed:
            everything = np.full(-(-self.vocab_size // 32), 0xFFFFFFFF, np.uint32)
            masks = [self._allowed[row] for row in rows]
            arrays.allowed_mask = np.stack([everything if mask is None else mask for mask in masks])
        if any_chains:
            words = self.chain_words(rows, positions)
            arrays.chain_words, arrays.chain_start, arrays.chain_end = shared_lists([None] * len(rows), words)
        if self._budgets:
            self._force(arrays, rows, positions)
        return arrays

    def gather_sound(self, rows: RowNumbers, positions: NDArray[np.int64]) -> tuple[SamplingArrays, list[int]]:
        """The same, and the samples whose own parameters raise an error: these get another's, whose result is
        ignored. Raises an error that no single one of them raises."""
        if not self._broken:
            try:
                return self.gather(rows, positions), []
            except Exception:
                pass
        broken = [i for i in range(len(rows)) if self._is_broken(rows[i : i + 1], positions[i : i + 1])]
        if not broken:
            return self.gather(rows, positions), []
        sound = sorted(set(range(len(rows))).difference(broken))
        if not sound:
            return SamplingArrays.neutral(len(rows)), broken
        chosen = [sound[0] if i in broken else i for i in range(len(rows))]
        return self.gather(rows[chosen], positions[chosen]), broken

    def _is_broken(self, row: RowNumbers, position: NDArray[np.int64]) -> bool:
        if int(row[0]) in self._broken:
            return True
        try:
            self.gather(row, position)
        except Exception:
            logger.exception("the sampling parameters of row %d failed", row[0])
            return True
        return False

    def penalty_lists(self, rows: RowNumbers, positions: NDArray[np.int64]) -> list[PenaltyLists]:
        """The ids that penalties count in each of these samples; empty without penalties."""
        return [
            (self._prompt_ids[row], self._outputs[row][:position]) if wanted else (_NO_IDS, _NO_IDS)
            for row, position, wanted in zip(rows.tolist(), positions.tolist(), self._flags[0].take(rows).tolist())
        ]

    def chain_words(self, rows: RowNumbers, positions: NDArray[np.int64]) -> list[NDArray[np.int32]]:
        """The words of each of these samples' chains; empty without one."""
        return [
            self.chains.words(row, self._outputs[row][:position]) if has_chain else NO_WORDS
            for row, position, has_chain in zip(rows.tolist(), positions.tolist(), self._flags[3].take(rows).tolist())
        ]

    def num_listed(self, rows: RowNumbers, positions: NDArray[np.int64]) -> tuple[int | None, int | None]:
        """Upper bounds of the ids in `penalty_lists`, and of the words in `chain_words`; None without any."""
        (wanted,), (chained,) = self._flags[0].take(rows).nonzero(), self._flags[3].take(rows).nonzero()
        num_ids = sum(len(self._prompt_ids[rows[i]]) + int(positions[i]) for i in wanted.tolist())
        num_words = sum(self.chains.most_words(int(rows[i]), int(positions[i])) for i in chained.tolist())
        return num_ids if wanted.size else None, num_words if chained.size else None

    def are_processed(self, rows: RowNumbers) -> bool:
        """Whether some of these rows' logits are read or written between the model and the samplers: by a logits
        processor, or to tell processed ones."""
        return bool(self._flags[4].take(rows).any())

    def outputs(self, rows: RowNumbers, positions: NDArray[np.int64]) -> list[NDArray[np.int32]]:
        """The outputs before each of these samples, of rows that keep theirs; views."""
        return [self._outputs[row][:position] for row, position in zip(rows.tolist(), positions.tolist())]

    def are_plain(self, rows: RowNumbers) -> bool:
        """Whether none of these rows has penalties, logit bias, bad words, ``min_tokens``, allowed ids, a grammar, a
        budget of reasoning, a chain or a logits processor."""
        return not self._flags.take(rows, axis=1).any()

    def masks(self, rows: RowNumbers, positions: NDArray[np.int64]) -> bool:
        """Whether one of these samples is under a logit bias, allowed ids, a grammar, bad words (which may forbid
        none), or ids that ``min_tokens`` forbids, may be forced by a budget of reasoning, or `are_processed`."""
        may_mask, has_allowed = self._flags[1:3].take(rows, axis=1)
        return (
            bool(has_allowed.any())
            or self.are_processed(rows)
            or any(
                self._num_bias[rows[i]] > 0
                or len(self._bad_words[rows[i]]) > 0
                or positions[i] < self._min_tokens[rows[i]]
                or ((budget := self._budgets.get(int(rows[i]))) is not None and budget.may_force(int(positions[i])))
                for i in may_mask.nonzero()[0].tolist()
            )
        )

    def write_columns(
        self, columns: Mapping[str, NDArray[Any]], batch_slots: NDArray[np.intp], rows: RowNumbers
    ) -> None:
        """Write the numbers of these rows to their ``batch_slots [n]`` in columns with the parameters' names."""
        for name, values in zip(_FLOATS, self._floats):
            columns[name][batch_slots] = values.take(rows)
        for name, numbers in zip(_INTEGERS, self._integers):
            columns[name][batch_slots] = numbers.take(rows)
        columns["seed"][batch_slots] = self._seeds.take(rows).view(columns["seed"].dtype)

    def _force(self, arrays: SamplingArrays, rows: RowNumbers, positions: NDArray[np.int64]) -> None:
        """Samples that a budget of reasoning forces have one allowed id, and no bias."""
        for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist())):
            budget = self._budgets.get(row)
            forced = None if budget is None else budget.forced(self._outputs[row][:position])
            if forced is None:
                continue
            if arrays.allowed_mask is None:
                arrays.allowed_mask = np.full((len(rows), -(-self.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
            arrays.allowed_mask[i] = _bit_mask([forced], self.vocab_size)
            if len(arrays.bias_ids):
                arrays.bias_end[i] = arrays.bias_start[i]

    def _gather_bias(self, arrays: SamplingArrays, rows: RowNumbers, positions: NDArray[np.int64]) -> None:
        owners: list[int | None] = []
        ids: list[NDArray[np.int32]] = []
        values: list[NDArray[np.float32]] = []
        for row, position in zip(rows.tolist(), positions.tolist()):
            end = None if position < self._min_tokens[row] else self._num_bias[row]
            ids.append(self._bias_ids[row][:end])
            values.append(self._bias_values[row][:end])
            owners.append(row)
            if self._bad_words[row]:
                forbidden = last_ids(self._bad_words[row], self._outputs[row][:position])
                ids[-1] = np.concatenate((ids[-1], forbidden))
                values[-1] = np.concatenate((values[-1], np.full(len(forbidden), -np.inf, np.float32)))
                owners[-1] = None  # another sample's list has other words
        arrays.bias_ids, arrays.bias_start, arrays.bias_end = shared_lists(owners, ids)
        arrays.bias_values, _, _ = shared_lists(owners, values)


def token_logprobs(
    logits: Tensor, token_ids: NDArray[np.int32], num_alternatives: Sequence[int]
) -> list[TokenLogprobs]:
    """Log probability and rank of ``token_ids [n]`` under ``logits [n, vocab_size]``, each with
    ``num_alternatives`` of the most probable ids."""
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


def with_logits(entries: Sequence[TokenLogprobs], logits: Tensor) -> list[TokenLogprobs]:
    """The same with each token's logit in the rows of ``logits [n, vocab_size]`` instead of its log probability."""
    return [
        msgspec.structs.replace(entry, logprob=float(row[entry.token_id]), top_logprobs=row[entry.top_ids].tolist())
        for entry, row in zip(entries, logits.to("cpu").array, strict=True)
    ]


def logprobs_of(logits: Tensor, index: int, token_ids: NDArray[np.int32], *, is_normalized: bool = True) -> list[float]:
    """Log probabilities of ``token_ids`` under row ``index`` of ``logits [n, vocab_size]``; if not normalized, the
    logits."""
    row = ops.gather_rows(logits, Tensor.from_numpy(np.array([index], np.int32)).to(logits.device)).to("cpu").array[0]
    if not is_normalized:
        as_they_are: list[float] = row[token_ids].tolist()
        return as_they_are
    numbers = row.astype(np.float64)
    largest_logit = float(numbers.max())
    total = largest_logit + float(np.log(np.exp(numbers - largest_logit).sum()))
    found: list[float] = (numbers[token_ids] - total).tolist()
    return found


_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_VALUES: NDArray[np.float32] = np.empty(0, np.float32)
_NO_LISTS: dict[str, Any] = {name: np.empty(0, dtype) for name, dtype, size in SAMPLING_FIELDS if size == "any"}
_ENDS_OF_LISTS = [name for name, _, _ in SAMPLING_FIELDS if name.endswith(("_start", "_end"))]


def last_ids(words: list[list[int]], output_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """The last ids of those words whose other ids end the output."""
    tail: list[int] = output_ids[-MAX_BAD_WORD_TOKENS:].tolist()
    last = [word[-1] for word in words if len(word) == 1 or tail[1 - len(word) :] == word[:-1]]
    return np.array(last, np.int32)


def _bit_mask(allowed: list[int], vocab_size: int) -> NDArray[np.uint32]:
    """Bit ``t % 32`` of word ``t // 32`` is set for every allowed id ``t``; ``[ceil(vocab_size / 32)]``."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def shared_lists(
    owners: Sequence[int | None], lists: Sequence[NDArray[Number]]
) -> tuple[NDArray[Number], NDArray[np.int32], NDArray[np.int32]]:
    """All samples' lists in one array, and the start and end of each, ``[len(lists)]``.

    Neighbours of one owner share a list, as prefixes of the longest. An owner of None does not share.
    """
    kept: list[NDArray[Number]] = []
    starts: list[int] = []
    start, end, before = 0, 0, None
    for owner, each in zip(owners, lists, strict=True):
        if owner is None or owner != before:
            start, before = end, owner
            kept.append(each)
        elif len(each) > end - start:
            kept[-1] = each
        end = max(end, start + len(each))
        starts.append(start)
    start_of = np.array(starts, np.int32)
    lengths = np.array([len(each) for each in lists], np.int32)
    return np.concatenate(kept), start_of, start_of + lengths
