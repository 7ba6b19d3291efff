"""A step's ragged batch as arrays on the host: tokens, positions, slots, block tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import Batch
from runtime.device.device import Device
from runtime.engine.steps.block_tables import BlockTables


@dataclass(slots=True)
class Layout:
    """A ragged batch as arrays on the host; the fields are ``runtime.batch.Batch``'s.

    slot_mappings  [num_groups, num_tokens]
    block_tables   [num_groups, num_seqs, width]
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    query_start: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    slot_mappings: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    logits_indices: NDArray[np.int32]
    max_query_len: int
    max_seq_len: int

    @property
    def shaped(self) -> list[NDArray[np.int32] | NDArray[np.int64]]:
        """The arrays sized by the numbers of tokens, sequences and logits; block tables may have any width."""
        arrays = [self.token_ids, self.positions, self.query_start, self.seq_lens, self.logits_indices]
        return [*arrays, *self.slot_mappings]

    def batch(self, device: Device, *, exact: bool) -> Batch:
        """The batch on a device."""
        placed = ops.place([*self.shaped, *self.block_tables], device)
        num_groups = len(self.slot_mappings)
        ids, positions, query_start, seq_lens, indices = placed[:5]
        return Batch(
            token_ids=ids,
            positions=positions,
            query_start=query_start,
            seq_lens=seq_lens,
            slot_mappings=tuple(placed[5 : 5 + num_groups]),
            block_tables=tuple(placed[5 + num_groups :]),
            logits_indices=indices,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            exact=exact,
        )


def lay_out(
    token_ids: NDArray[np.int32],
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    tables: BlockTables,
    logits_indices: NDArray[np.int32],
    rotary_offsets: NDArray[np.int64] | None = None,
) -> Layout:
    """The ragged batch of chunks that begin at ``starts`` and have ``counts`` tokens, one a row, in the order of
    ``rows``, which ascend. ``rotary_offsets [n]`` are rotary positions minus positions in the sequence; None if they
    are all 0."""
    num_seqs, num_tokens = len(counts), len(token_ids)
    if num_tokens == num_seqs:
        query_start = np.arange(num_seqs + 1, dtype=np.int32)
        row_of_token, positions, max_query_len = rows, starts, 1
    else:
        query_start = np.zeros(num_seqs + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        chunk_of_token = np.repeat(np.arange(num_seqs), counts)
        row_of_token = rows[chunk_of_token]
        positions = np.arange(num_tokens) + (starts - query_start[:-1])[chunk_of_token]
        max_query_len = largest(counts)
    seq_lens = (starts + counts).astype(np.int32)
    rotary = positions if rotary_offsets is None else positions + np.repeat(rotary_offsets, counts)
    return Layout(
        token_ids,
        rotary.astype(np.int32),
        query_start,
        seq_lens,
        tables.slots(tables.first_entries(row_of_token), positions),
        tables.of(rows),
        logits_indices,
        max_query_len,
        largest(seq_lens),
    )


def largest(values: NDArray[np.int32] | NDArray[np.int64]) -> int:
    """The largest of ``values [n]``, at least one. For so few `max` takes five times as long."""
    return int(values[values.argmax()])
