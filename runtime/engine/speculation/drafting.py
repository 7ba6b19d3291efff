"""The ways of drafting from pairs: token by token, a pass over pairs and then steps with the drafter's own results
(`Stepping`), or all tokens at once, one pass over a block of positions after the pairs (`Blocks`).

On the CPU a pass over pairs and all following steps are recorded as one compiled call: launching the operations of a
small layer from Python takes longer than running them. A recording is for a number of pairs, of sequences and of steps,
and for sequences up to a length; it is made on first use. Pairs are padded to a round number by those of a dummy
sequence, which write nothing.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.drafters.hidden_state_drafter import BlockDrafter, SteppingDrafter
from runtime import ops
from runtime.batch import Batch
from runtime.device.device import CPU
from runtime.device.errors import CaptureError
from runtime.dtype import float32
from runtime.engine.limits import EngineLimits
from runtime.engine.speculation.drafter import SAMPLED_BY, Drawing, Ids, PairChunks, rows_of, sample_ahead
from runtime.engine.steps.layout import BlockTables, StepLayout, lay_out
from runtime.engine.steps.recorder import Computed, Recording, Recordings, open_recorder
from runtime.kv.cache import KVCache
from runtime.sampling_table import KERNEL_COLUMNS
from runtime.tensor.tensor import Tensor


class Stepping:
    """See `Drafting`. On the CPU all steps are one recording, if they can be recorded.

    If the drafter only reads pages, nothing is written: each sequence has one pair, that of its last token, and all
    steps have the place of its hidden states, rotated by one more.
    """

    pair_ahead = 1

    def __init__(
        self, drafter: SteppingDrafter, pages: KVCache, tables: BlockTables, limits: EngineLimits, most: int, *,
        only_reads: bool = False,
    ) -> None:  # fmt: skip
        self._drafter, self._pages, self._tables, self._limits = drafter, pages, tables, limits
        self._only_reads = only_reads
        self._recorded: RecordedDrafts | None = None
        if drafter.device.kind == "cpu" and limits.decode_graphs != "off":
            self._recorded = RecordedDrafts(drafter, pages, tables, limits, most, only_reads=only_reads)

    def slots_after(self, most: int) -> int:
        """See `Drafting`. The last proposal is not computed."""
        return max(0, most - 1)

    def absorb(self, chunks: PairChunks) -> None:
        self._compute(chunks)

    def draft(self, chunks: PairChunks, sampling_sequences: list[Drawing]) -> list[list[int]]:
        if self._recorded is not None and (found := self._recorded.run(chunks, sampling_sequences)) is not None:
            return found
        return self._step_by_step(chunks, sampling_sequences)

    def _step_by_step(self, chunks: PairChunks, sampling_sequences: list[Drawing]) -> list[list[int]]:
        normed, hidden = self._compute(chunks)
        found: list[list[int]] = [[] for _ in sampling_sequences]
        ready = np.arange(len(sampling_sequences))  # the sequences of the rows
        ends = chunks.starts + chunks.counts
        for ahead in range(max(one.most for one in sampling_sequences)):
            sequences = [sampling_sequences[i].sequence for i in ready]
            sampled = sample_ahead(self._drafter.logits(normed), sequences, [ahead] * len(ready))
            going_on = []  # rows that are drafted further
            for row, (i, token_id) in enumerate(zip(ready, sampled, strict=True)):
                if token_id >= 0:
                    found[i].append(token_id)
                    if ahead + 1 < sampling_sequences[i].most:
                        going_on.append(row)
            if not going_on:
                break
            newest = np.array([sampled[row] for row in going_on], np.int32)
            ready = ready[going_on]
            if len(going_on) < len(sampled):
                hidden = rows_of(hidden, np.array(going_on, np.int32), self._drafter.device)
            ones = np.ones(len(ready), np.int64)
            places = ends[ready] - 1 if self._only_reads else ends[ready] + ahead
            normed, hidden = self._forward(newest, chunks.rows[ready], places, ones, hidden)
        return found

    def _compute(self, chunks: PairChunks) -> tuple[Tensor, Tensor]:
        """`_forward`'s result for the last pair of each sequence."""
        states = self._drafter.fuse(chunks.own_states(self._drafter.device))
        normed, hidden = self._forward(chunks.token_ids, chunks.rows, chunks.starts, chunks.counts, states)
        if chunks.counts.max() == 1:
            return normed, hidden
        return tuple(rows_of(each, chunks.last, self._drafter.device) for each in (normed, hidden))  # type: ignore[return-value]

    def _forward(
        self, token_ids: Ids, rows: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64],
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        offsets = np.ones(len(rows), np.int64) if self._only_reads else None
        layout = lay_out(token_ids, rows, starts, counts, self._tables, np.empty(0, np.int32), offsets)
        if self._only_reads:
            layout.arrays["slot_mappings"][:] = -1
        batch = layout.batch(self._drafter.device, exact=self._limits.exact)
        return self._drafter.forward(batch, hidden, self._pages)


_SIZES = (*range(2, 10), 17, 33, 65)
"""Numbers of pairs that there are recordings for, with at least one of padding."""

MOST_PAIRS, MOST_SEQUENCES = _SIZES[-1] - 1, 16
"""Steps of one recording; more are computed operation by operation."""


@dataclass(frozen=True, slots=True)
class _Shape:
    num_pairs: int
    num_seqs: int
    num_steps: int
    max_seq_len: int


class RecordedDrafts:
    """Recordings of one drafter over its pages. Belongs to the engine's loop."""

    def __init__(
        self, drafter: SteppingDrafter, pages: KVCache, tables: BlockTables, limits: EngineLimits, most_steps: int, *,
        only_reads: bool = False,
    ) -> None:  # fmt: skip
        self._drafter, self._pages, self._tables, self._limits = drafter, pages, tables, limits
        self._only_reads, groups = only_reads, tables.num_groups
        self._recorder = open_recorder(CPU)
        self._lengths = self._recorder.sequence_lengths(limits.max_model_len, exact=limits.exact)
        self._most_steps = most_steps
        self._recordings: Recordings[_Shape, Recording] = Recordings(self._recorder.most_kept)
        seqs, width = MOST_SEQUENCES, drafter.target.config.hidden_size
        self._states = [np.zeros((MOST_PAIRS + 1, width), np.float32) for _ in drafter.layers]
        self._given = [Tensor.over(each, float32) for each in self._states]
        # The arrays of the pass over pairs, then those of each step after it.
        self._token_ids, self._positions = np.zeros((2, MOST_PAIRS + 1), np.int32)
        self._slots = np.full((groups, MOST_PAIRS + 1), -1, np.int64)
        self._query_start, self._seq_lens = np.zeros((2, seqs + 2), np.int32)
        self._last = np.zeros(seqs, np.int32)
        self._tables_of = np.zeros((groups, (seqs + 1) * -(-limits.max_model_len // limits.block_size)), np.int32)
        self._step_positions, self._step_lens, self._draw_positions = np.zeros((3, most_steps, seqs), np.int32)
        self._step_slots = np.full((most_steps, groups, seqs), -1, np.int64)
        self._results = np.zeros((most_steps, 2 * seqs + 1), np.int32)
        self._columns: dict[str, NDArray[Any]] = {
            name: np.full(seqs, column.neutral, column.dtype) for name, column in KERNEL_COLUMNS.items()
        }
        self._seeds, self._choices = np.zeros(seqs, np.int64), np.zeros(seqs, np.int32)
        self._nothing, self._no_values = np.zeros(seqs, np.int32), np.zeros(seqs, np.float32)
        self._no_logits = np.empty(0, np.int32)
        with contextlib.suppress(CaptureError):  # its kernels are compiled before the first request
            self._record(_Shape(_SIZES[0], 1, most_steps, self._lengths[0]))

    def run(self, chunks: PairChunks, sampling_sequences: list[Drawing]) -> list[list[int]] | None:
        """The draft tokens after the pairs. None, before any work, if there are too many, or the drafter's operations
        cannot be recorded."""
        num_pairs, num_seqs = len(chunks.token_ids), len(chunks.rows)
        steps = max(most for _, most in sampling_sequences)
        if num_pairs > MOST_PAIRS or num_seqs > MOST_SEQUENCES or steps > self._most_steps:
            return None
        ahead = np.array([0 if self._only_reads else most - 1 for _, most in sampling_sequences])
        most_slots = chunks.starts + chunks.counts + ahead
        longest = self._lengths[bisect_left(self._lengths, int(most_slots.max()))]
        shape = _Shape(_SIZES[bisect_left(_SIZES, num_pairs + 1)], num_seqs, steps, longest)
        self._write(chunks, sampling_sequences, shape)
        kept = self._recordings.take(shape)
        if kept is None:
            try:
                kept = self._record(shape)
            except CaptureError:
                return None
            self._recordings.add(shape, kept)
        kept.replay()
        ids, failed = self._results[:steps, :num_seqs], self._results[:steps, num_seqs : 2 * num_seqs] != 0
        found = []
        for i, (_, most) in enumerate(sampling_sequences):
            bad = failed[:most, i].nonzero()[0]
            found.append(ids[: int(bad[0]) if bad.size else most, i].tolist())
        return found

    def _write(self, chunks: PairChunks, sampling_sequences: list[Drawing], shape: _Shape) -> None:
        pairs, seqs = len(chunks.token_ids), shape.num_seqs
        rows, starts, counts = chunks.rows, chunks.starts, chunks.counts
        for target, given in zip(self._states, chunks.states, strict=True):
            np.take(given.array, chunks.state_rows, 0, target[:pairs])
        ends, first = starts + counts, np.cumsum(counts) - counts
        positions = np.arange(pairs) + np.repeat(starts - first, counts)
        entries = self._tables.first_entries(rows)
        self._token_ids[:pairs] = chunks.token_ids
        self._positions[:pairs] = positions + int(self._only_reads)
        if not self._only_reads:
            self._slots[:, :pairs] = self._tables.slots(np.repeat(entries, counts), positions)
            self._slots[:, pairs : shape.num_pairs] = -1
        self._positions[pairs : shape.num_pairs] = 0
        self._token_ids[pairs : shape.num_pairs] = 0
        self._query_start[1 : seqs + 1] = first + counts
        self._query_start[seqs + 1] = shape.num_pairs
        self._seq_lens[:seqs] = ends
        self._seq_lens[seqs] = shape.num_pairs - pairs
        self._last[:seqs] = first + counts - 1
        width = -(-shape.max_seq_len // self._limits.block_size)
        tables = self._tables.of(rows)
        target = self._tables_of[:, : (seqs + 1) * width].reshape(-1, seqs + 1, width)
        used = min(width, tables.shape[2])
        target[:, :seqs, :used] = tables[:, :, :used]
        target[:, seqs] = 0
        steps = shape.num_steps
        ahead = np.arange(steps - 1)[:, None]
        most = np.array([each for _, each in sampling_sequences])
        is_own = ahead + 1 < most  # later ones are padding, and write nothing
        batch_slots = np.where(is_own & (not self._only_reads), ends + ahead, ends - 1)
        self._step_positions[: steps - 1, :seqs] = batch_slots + int(self._only_reads)
        self._step_lens[: steps - 1, :seqs] = batch_slots + 1
        if not self._only_reads:
            slots = self._tables.slots(np.tile(entries, max(0, steps - 1)), batch_slots.reshape(-1))
            own = np.where(is_own, slots.reshape(len(slots), *batch_slots.shape), -1)
            self._step_slots[: steps - 1, :, :seqs] = own.transpose(1, 0, 2)
        for name in SAMPLED_BY:
            self._columns[name][:seqs] = [getattr(sequence.request.params, name) for sequence, _ in sampling_sequences]
        self._seeds[:seqs] = np.array([sequence.request.seed for sequence, _ in sampling_sequences], np.uint64).view(
            np.int64
        )
        self._choices[:seqs] = [sequence.index for sequence, _ in sampling_sequences]
        outputs = np.array([sequence.num_output_tokens for sequence, _ in sampling_sequences])
        self._draw_positions[:steps, :seqs] = outputs + np.arange(steps)[:, None]

    def _record(self, shape: _Shape) -> Recording:
        pairs, seqs, longest, exact = shape.num_pairs, shape.num_seqs, shape.max_seq_len, self._limits.exact
        width = -(-longest // self._limits.block_size)
        tables = self._tables_of[:, : (seqs + 1) * width].reshape(-1, seqs + 1, width)
        starts = np.arange(seqs + 1, dtype=np.int32)
        first: dict[str, NDArray[Any]] = {
            "token_ids": self._token_ids[:pairs], "positions": self._positions[:pairs],
            "query_start": self._query_start[: seqs + 2], "seq_lens": self._seq_lens[: seqs + 1],
            "slot_mappings": self._slots[:, :pairs], "block_tables": tables, "logits_indices": self._no_logits,
        }  # fmt: skip
        batches = [StepLayout(first, pairs - seqs, longest).batch(CPU, exact=exact)]
        results = [Tensor.from_numpy(self._results[step, : 2 * seqs + 1]) for step in range(shape.num_steps)]
        for step in range(shape.num_steps - 1):
            arrays: dict[str, NDArray[Any]] = {
                "token_ids": self._results[step, :seqs], "positions": self._step_positions[step, :seqs],
                "query_start": starts, "seq_lens": self._step_lens[step, :seqs],
                "slot_mappings": self._step_slots[step, :, :seqs], "block_tables": tables[:, :seqs],
                "logits_indices": self._no_logits,
            }  # fmt: skip
            batches.append(StepLayout(arrays, 1, longest).batch(CPU, exact=exact))
        columns = [*(self._columns[name] for name in KERNEL_COLUMNS), self._seeds, self._choices]
        fields = [Tensor.from_numpy(each[:seqs]) for each in columns]
        positions = [Tensor.from_numpy(each[:seqs]) for each in self._draw_positions[: shape.num_steps]]
        none, values = Tensor.from_numpy(self._nothing[:seqs]), Tensor.from_numpy(self._no_values[:seqs])
        lists = [none] * 7 + [values] + [none] * 5
        given, last = [each[:pairs] for each in self._given], Tensor.from_numpy(self._last[:seqs])
        drafter = self._drafter

        def work() -> Computed:
            normed, hidden = drafter.forward(batches[0], drafter.fuse(given), self._pages)
            normed, hidden = ops.gather_rows(normed, last), ops.gather_rows(hidden, last)
            for step in range(shape.num_steps):
                sampled = [*fields, positions[step], *lists]
                ops.sample_into(drafter.logits(normed), sampled, results[step], has_penalties=False)
                if step + 1 < shape.num_steps:
                    normed, hidden = drafter.forward(batches[step + 1], hidden, self._pages)
            return Computed(None, None)

        return self._recorder.record(work)


_NO_LOGITS = np.empty(0, np.int32)


class Blocks:
    """See `Drafting`. Hidden states of a step become keys and values in the pages; the block's own are overwritten by
    the next step's. A block always has its training length, however short the draft, since its positions attend to each
    other."""

    pair_ahead = 0  # keys and values are the hidden states'

    def __init__(self, drafter: BlockDrafter, pages: KVCache, tables: BlockTables, limits: EngineLimits) -> None:
        self._drafter, self._pages, self._tables, self._exact = drafter, pages, tables, limits.exact
        self._most = drafter.block_size - drafter.first_proposal

    def slots_after(self, most: int) -> int:
        return self._drafter.block_size if most > 0 else 0

    def absorb(self, chunks: PairChunks) -> None:
        drafter = self._drafter
        layout = lay_out(chunks.token_ids, chunks.rows, chunks.starts, chunks.counts, self._tables, _NO_LOGITS)
        batch = layout.batch(drafter.device, exact=self._exact)
        drafter.absorb(batch, drafter.fuse(chunks.own_states(drafter.device)), self._pages)

    def draft(self, chunks: PairChunks, sampling_sequences: list[Drawing]) -> list[list[int]]:
        self.absorb(chunks)
        known = chunks.token_ids[chunks.last]
        normed = self._drafter.forward(self._blocks_after(chunks, known), self._pages)
        most = np.array([min(one.most, self._most) for one in sampling_sequences])
        if self._drafter.is_chained:
            return self._draw_in_turn(normed, known, sampling_sequences, most)
        of = np.repeat(np.arange(len(sampling_sequences)), most)
        ahead = np.arange(len(of)) - np.repeat(np.cumsum(most) - most, most)
        sampled = self._draw(normed, np.repeat(known, most), of, ahead, sampling_sequences)
        parts = np.split(np.array(sampled, np.int32), np.cumsum(most)[:-1])
        return [ids[: int(np.argmax(ids < 0)) if (ids < 0).any() else None].tolist() for ids in parts]

    def _blocks_after(self, chunks: PairChunks, known: NDArray[np.int32]) -> Batch:
        size, ends = self._drafter.block_size, chunks.starts + chunks.counts
        ids = np.full((len(known), size), self._drafter.mask_token_id, np.int32)
        ids[:, 0] = known
        layout = lay_out(ids.reshape(-1), chunks.rows, ends, np.full(len(known), size), self._tables, _NO_LOGITS)
        batch = layout.batch(self._drafter.device, exact=self._exact)
        (batch.bidirectional_until,) = ops.place([np.repeat(ends + size, size).astype(np.int32)], self._drafter.device)
        return batch

    def _draw_in_turn(
        self, normed: Tensor, known: NDArray[np.int32], sampling_sequences: list[Drawing], most: NDArray[np.int64]
    ) -> list[list[int]]:
        """Sample each position after the previous one."""
        found: list[list[int]] = [[] for _ in sampling_sequences]
        before, of = known, np.arange(len(sampling_sequences))
        for ahead in range(int(most.max())):
            sampled = np.array(self._draw(normed, before, of, np.full(len(of), ahead), sampling_sequences), np.int32)
            goes_on = sampled >= 0
            for i, token_id in zip(of[goes_on].tolist(), sampled[goes_on].tolist(), strict=True):
                found[i].append(token_id)
            goes_on &= most[of] > ahead + 1
            before, of = sampled[goes_on], of[goes_on]
            if not of.size:
                break
        return found

    def _draw(
        self, normed: Tensor, before: NDArray[np.int32], of: NDArray[np.int64], ahead: NDArray[np.int64],
        sampling_sequences: list[Drawing],
    ) -> list[int]:  # fmt: skip
        """The tokens ``ahead`` in the blocks of these sequences, given by index, each after its predecessor."""
        drafter = self._drafter
        rows = (of * drafter.block_size + drafter.first_proposal + ahead).astype(np.int32)
        (ids,) = ops.place([before], drafter.device)
        logits = drafter.logits(rows_of(normed, rows, drafter.device), ids)
        return sample_ahead(logits, [sampling_sequences[i].sequence for i in of.tolist()], ahead.tolist())
