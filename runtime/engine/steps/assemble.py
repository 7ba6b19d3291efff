"""Makes a `StepInput` from the scheduler's plan, the only module that reads sequences for a step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from runtime.batch import STEP_FIELDS
from runtime.engine.dry import NO_BREAKERS
from runtime.engine.limits import EngineLimits
from runtime.engine.scheduling.pictures import Pictures
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.scheduling.step import Chunk, Step
from runtime.engine.steps.step_input import (
    LAST_TOKEN,
    BlockAddition,
    FeatureSpan,
    Mode,
    PromptLogprobs,
    RowLoad,
    StepInput,
    UncutSpan,
)
from runtime.kv.groups import NO_BLOCK

_OF_SEQUENCES = {name: attrgetter(field.row) for name, field in STEP_FIELDS.items() if field.row}
_OF_CHUNKS = {name: attrgetter(field.step) for name, field in STEP_FIELDS.items() if field.step}
"""Read the numbers of a sequence and of a chunk that the batch has (`StepField`)."""
_IS_LAST = attrgetter("is_last")


@dataclass(slots=True)
class Assembled:
    """A step's input, and the sequences and requests of its rows.

    sequences        the sequence of each chunk, in the order of the input's rows
    sampling_sequences  those of chunks that sample
    prompt_requests  the request of each of the input's ``prompt_logprobs``
    """

    input: StepInput
    sequences: list[Sequence]
    sampling_sequences: list[Sequence]
    prompt_requests: list[Request]


class Assembler:
    """Tracks the contents of the executor's rows. A step that was assembled but not `sent` is forgotten.

    A running sequence's tables of tokens only grow. Entries are sent to the executor with the first chunk that needs
    them, as numbers inside the group's pool; those of states with every chunk, since they change places.
    """

    def __init__(self, limits: EngineLimits, mode: Mode) -> None:
        self._mode: Mode = mode
        self._is_processed = limits.has_logits_processors
        self._block_size = limits.block_size
        max_num_seqs, num_groups = limits.max_num_seqs, len(limits.cache_kinds)
        self._states = [group for group, kind in enumerate(limits.cache_kinds) if not kind.follows_tokens]
        self._following = [group for group in range(num_groups) if group not in self._states]
        firsts = list(accumulate(limits.pool_sizes, initial=0))
        self._first_blocks = [firsts[pool] for pool in limits.cache_pools or (0,) * num_groups]  # by group
        self._num_blocks = [[0] * max_num_seqs for _ in range(num_groups)]  # by row: entries that the executor has
        self._num_covered = np.zeros(max_num_seqs, np.int64)  # by row: tokens whose pages it has in all groups
        self._first_unknown = [0] * max_num_seqs  # by row: position whose prompt log probabilities come next
        self._last_tokens = np.full(max_num_seqs, LAST_TOKEN, np.int32)
        self._ones = np.ones(max_num_seqs, np.int64)
        # The previous plan, which mostly has the same sequences in the same order.
        self._planned_rows: list[int] = []
        self._order: NDArray[np.intp] = np.empty(0, np.intp)  # its chunks by row
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)
        self._one_each, self._last_of_each = self._ones[:0], self._last_tokens[:0]  # of decodes, as long as its rows
        self._sequences: list[Sequence] = []  # by row
        self._has_pictures = False

    def assemble(self, step: Step, loads: list[RowLoad]) -> Assembled:
        """The input of a planned step, with the ``loads`` of the sequences that start in it."""
        chunks, count = step.chunks, len(step.chunks)
        planned_rows: list[int] = [chunk.sequence.row for chunk in chunks]  # type: ignore[misc]  # all of them run
        if loads or planned_rows != self._planned_rows:
            self._sort(chunks, planned_rows)
        rows, sampling_sequences = self._rows, self._sequences
        starts = np.array([chunk.start for chunk in chunks], np.int64)[self._order]
        last_positions, counts, num_samples = starts, self._one_each, self._one_each
        token_ids = self._last_of_each
        prompt_logprobs: list[PromptLogprobs] = []
        prompt_requests: list[Request] = []
        if step.num_tokens == count + step.num_drafts and all(map(_IS_LAST, chunks)):
            if step.num_drafts:  # decodes, with drafts
                chunks = [chunks[i] for i in self._order.tolist()]
                num_samples = counts = np.array([chunk.num_tokens for chunk in chunks], np.int64)
                last_positions = starts + counts - 1
                ids = [(LAST_TOKEN, *chunk.draft_ids) for chunk in chunks]
                token_ids = np.array([*chain.from_iterable(ids)], np.int32)
        else:
            chunks = [chunks[i] for i in self._order.tolist()]
            counts = np.array([chunk.num_tokens for chunk in chunks], np.int64)
            last_positions = starts + counts - 1
            num_samples = np.array([chunk.num_samples for chunk in chunks], np.int64)
            token_ids = _tokens_of(chunks, step.num_tokens)
            sampling_sequences = [chunk.sequence for chunk in chunks if chunk.is_last]
            prompt_logprobs, prompt_requests = self._wanted_prompt_logprobs(chunks)
        made = StepInput(
            number=step.number,
            rows=rows,
            starts=starts,
            counts=counts,
            num_samples=num_samples,
            token_ids=token_ids,
            mode=self._mode,
            additions=self._additions(last_positions),
            loads=loads,
            swap_out=step.swap_out,
            swap_in=step.swap_in,
            copies=step.copies,
            prompt_logprobs=prompt_logprobs,
        )
        if _OF_CHUNKS:
            by_row = [step.chunks[i] for i in self._order.tolist()]
            made.numbers = {name: np.array([of(chunk) for chunk in by_row]) for name, of in _OF_CHUNKS.items()}
        if self._has_pictures:
            _add_pictures(made, self._sequences)
        return Assembled(made, self._sequences, sampling_sequences, prompt_requests)

    def sent(self, step: StepInput) -> None:
        """The executor has started this step."""
        for addition in step.additions:
            row = addition.row
            self._num_blocks[addition.group][row] = addition.first + len(addition.block_ids)
            num_pages = min([self._num_blocks[group][row] for group in self._following], default=0)
            self._num_covered[row] = num_pages * self._block_size

    def load_of(self, sequence: Sequence) -> RowLoad:
        """The row load of a sequence that starts to run, whose tokens are all known."""
        request, params, row = sequence.request, sequence.request.params, sequence.row
        assert row is not None
        self._num_covered[row] = 0
        for num_blocks in self._num_blocks:
            num_blocks[row] = 0
        known = request.prompt_logprobs if sequence.needs_prompt_logprobs else None
        self._first_unknown[row] = sequence.num_prompt_tokens if known is None else len(known) - 1
        numbers, has_dry = params.numbers, params.has_dry
        bias, ends = params.logit_bias or {}, {*request.eos_token_ids, *(params.stop_token_ids or ())}
        reads_outputs = bool(params.bad_words_token_ids) or params.reasoning_budget is not None or has_dry
        has_outputs = params.has_penalties or reads_outputs or self._is_processed
        return RowLoad(
            row=row,
            seed=request.seed,
            choice_index=sequence.index,
            num_prompt_tokens=sequence.num_prompt_tokens,
            last_token_id=sequence.last_token_id,
            rotary_offset=sequence.rotary_offset,
            numbers=numbers,
            logprobs=params.logprobs,
            logprob_ids=params.logprob_token_ids or [],
            # A repetition penalty counts an id once, however often the prompt has it.
            prompt_ids=np.unique(request.prompt_ids) if numbers["repetition_penalty"] != 1.0 else None,
            output_ids=sequence.output_ids.copy() if has_outputs else None,
            bias_ids=list(bias),
            bias_values=list(bias.values()),
            min_tokens=params.min_tokens,
            end_ids=sorted(ends) if params.min_tokens else [],
            bad_words=params.bad_words_token_ids or [],
            allowed_ids=params.allowed_token_ids,
            reasoning_budget=params.reasoning_budget,
            stages=params.stages,
            mirostat_mu=2.0 * params.mirostat_tau if sequence.mirostat_mu is None else sequence.mirostat_mu,
            dry_prompt_ids=request.prompt_ids if has_dry else None,
            dry_breakers=params.dry_breakers or NO_BREAKERS,
            processed_prompt_ids=request.prompt_ids if self._is_processed else None,
            extra_args=params.extra_args if self._is_processed else None,
            has_masks=sequence.matcher is not None,
            row_numbers={name: of(sequence) for name, of in _OF_SEQUENCES.items()},
        )

    def _sort(self, chunks: list[Chunk], planned_rows: list[int]) -> None:
        order = sorted(range(len(chunks)), key=planned_rows.__getitem__)
        self._planned_rows, self._order = planned_rows, np.array(order, np.intp)
        self._rows = np.array(planned_rows, np.int64)[self._order]
        self._one_each, self._last_of_each = self._ones[: len(order)], self._last_tokens[: len(order)]
        self._sequences = [chunks[i].sequence for i in order]
        self._has_pictures = any(each.request.pictures is not None for each in self._sequences)

    def _additions(self, last_positions: NDArray[np.int64]) -> list[BlockAddition]:
        """Block table entries that the executor lacks for sequences whose chunks' last tokens are at these positions
        ``[n]``."""
        additions = []
        for i in (last_positions >= self._num_covered[self._rows]).nonzero()[0].tolist():
            sequence, row = self._sequences[i], int(self._rows[i])
            for group in self._following:
                first, block_ids = self._num_blocks[group][row], sequence.blocks[group]
                if len(block_ids) > first:
                    additions.append(self._addition(group, row, first, block_ids[first:]))
        if self._states:
            for sequence, row in zip(self._sequences, self._rows.tolist()):
                additions += [self._addition(group, row, 0, sequence.blocks[group]) for group in self._states]
        return additions

    def _addition(self, group: int, row: int, first: int, block_ids: list[int]) -> BlockAddition:
        first_block = self._first_blocks[group]
        return BlockAddition(group, row, first, [max(NO_BLOCK, block_id - first_block) for block_id in block_ids])

    def _wanted_prompt_logprobs(self, chunks: list[Chunk]) -> tuple[list[PromptLogprobs], list[Request]]:
        """The prompt log probabilities of this step, and their requests: the token at position ``p + 1`` is predicted
        at ``p``."""
        wanted, requests, first_token = [], [], 0
        for chunk in chunks:
            request, row = chunk.sequence.request, chunk.sequence.row
            assert row is not None
            first = max(chunk.start, self._first_unknown[row])
            end = min(chunk.start + chunk.num_tokens, request.num_prompt_tokens - 1)
            if first < end:  # otherwise not requested, or known before a preemption
                targets = request.prompt_ids[first + 1 : end + 1]
                num_alternatives = request.params.prompt_logprobs or 0
                wanted.append(PromptLogprobs(first_token + first - chunk.start, targets, num_alternatives))
                requests.append(request)
            first_token += chunk.num_tokens
        return wanted, requests


def _add_pictures(step: StepInput, sequences: list[Sequence]) -> None:
    """For chunks with image tokens, or tokens before them: add spans, and positions of all the step's tokens."""
    chunks = list(zip(sequences, step.starts.tolist(), step.counts.tolist(), strict=True))
    if not any(seq.request.pictures is not None and start < seq.request.pictures.end for seq, start, _ in chunks):
        return  # rows have the offset
    positions, features, uncut, first, has_axes = [], [], list[UncutSpan](), 0, False
    for sequence, start, count in chunks:
        end, pictures = start + count, sequence.request.pictures
        places = np.arange(start, end, dtype=np.int32) + sequence.rotary_offset
        own = np.broadcast_to(places, (3, count)).copy()
        if pictures is not None:
            known = min(end, sequence.num_prompt_tokens) - start
            if known > 0 and pictures.positions is not None:
                has_axes = True
                own[:, :known] = pictures.positions[:, start : start + known]
            spans, wholes = chunk_spans(pictures, start, end, first)
            features += spans
            uncut += wholes
        positions.append(own)
        first += count
    if has_axes:
        step.rotary_positions = np.concatenate(positions, axis=1)
    step.features = features
    step.bidirectional_spans = uncut


def chunk_spans(pictures: Pictures, start: int, end: int, first: int) -> tuple[list[FeatureSpan], list[UncutSpan]]:
    """The spans of images and of uncut regions within a prompt's tokens ``start`` to ``end``; the first of these tokens
    is token ``first`` of the step."""
    features, uncut = list[FeatureSpan](), list[UncutSpan]()
    for item, slot in zip(pictures.items, pictures.slots, strict=True):
        low, high = max(item.first_token, start), min(item.end, end)
        if low < high:
            features.append(FeatureSpan(slot, low - item.first_token, first + low - start, high - low))
    for low, high in pictures.whole:
        if low < end and high > start:
            assert start <= low < high <= end, "a picture is cut"
            uncut.append(UncutSpan(first + low - start, high - low))
    return features, uncut


def _tokens_of(chunks: list[Chunk], num_tokens: int) -> NDArray[np.int32]:
    """The chunks' tokens, without the last token of a decode, which the row has."""
    token_ids = np.full(num_tokens, LAST_TOKEN, np.int32)
    first = 0
    for chunk in chunks:
        end = first + chunk.num_tokens
        if chunk.draft_ids:
            token_ids[first + 1 : end] = chunk.draft_ids
        elif chunk.num_tokens > 1 or not chunk.is_last:
            token_ids[first:end] = chunk.sequence.token_ids(chunk.start, chunk.start + chunk.num_tokens)
        first = end
    return token_ids
