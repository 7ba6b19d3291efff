"""A step's ragged batch as arrays on the host: tokens, positions, slots, block tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import Batch
from runtime.device.device import Device
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.scheduling.step import Chunk


@dataclass(slots=True)
class Layout:
    """A ragged batch as arrays on the host; the fields are ``runtime.batch.Batch``'s."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    query_start: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    logits_indices: NDArray[np.int32]
    max_query_len: int
    max_seq_len: int

    def batch(self, device: Device, *, exact: bool) -> Batch:
        """On a device."""
        arrays = (
            self.token_ids, self.positions, self.query_start, self.seq_lens, self.slot_mapping, self.block_tables,
            self.logits_indices,
        )  # fmt: skip
        ids, places, query_starts, lengths, slot_mapping, tables, indices = ops.place(arrays, device)
        return Batch(
            token_ids=ids,
            positions=places,
            query_start=query_starts,
            seq_lens=lengths,
            slot_mappings=(slot_mapping,),
            block_tables=(tables,),
            logits_indices=indices,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            exact=exact,
        )


class BlockTables:
    """Each row's blocks: ``table [max_num_seqs, max_blocks]``, of which ``num_blocks[row]`` are written."""

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self.table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_blocks = [0] * max_num_seqs

    def of(self, sequences: list[Sequence], rows: list[int]) -> NDArray[np.int32]:
        """The sequences' rows, which ascend; written where one has got blocks."""
        num_blocks = self.num_blocks
        for sequence, row in zip(sequences, rows):
            block_ids = sequence.blocks[0]
            known = num_blocks[row]
            if known != len(block_ids):
                self.table[row, known : len(block_ids)] = block_ids[known:]
                num_blocks[row] = len(block_ids)
        if rows[-1] == len(rows) - 1:  # dense: no copy
            return self.table[: len(rows)]
        return self.table[:, : max(num_blocks[row] for row in rows)].take(rows, axis=0)


def lay_out(
    token_ids: NDArray[np.int32],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    block_tables: NDArray[np.int32],
    block_size: int,
    logits_indices: NDArray[np.int32],
) -> Layout:
    """The ragged batch of chunks that begin at ``starts`` and have ``counts`` tokens, in the order of their
    sequences' ``block_tables``."""
    num_seqs, num_tokens = len(counts), len(token_ids)
    if num_tokens == num_seqs:
        query_start = np.arange(num_seqs + 1, dtype=np.int32)
        sequence_of_token, positions, max_query_len = query_start[:-1], starts, 1
    else:
        query_start = np.zeros(num_seqs + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        sequence_of_token = np.repeat(np.arange(num_seqs), counts)
        positions = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], counts)
        max_query_len = int(counts.max())
    block, offset = np.divmod(positions, block_size)
    slots = block_tables[sequence_of_token, block].astype(np.int64)
    slots *= block_size
    slots += offset
    seq_lens = (starts + counts).astype(np.int32)
    return Layout(
        token_ids,
        positions.astype(np.int32),
        query_start,
        seq_lens,
        slots,
        block_tables,
        logits_indices,
        max_query_len,
        int(seq_lens.max()),
    )


def known_tokens(
    chunks: list[Chunk], num_tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.intp] | None, list[Sequence]]:
    """The chunks' tokens, and where the last ones of which sequences are to be filled in."""
    token_ids = np.empty(num_tokens, np.int32)
    unknown: list[int] = []
    sequences: list[Sequence] = []
    offset = 0
    for chunk in chunks:
        sequence, count = chunk.sequence, chunk.num_tokens
        known = min(count, sequence.num_tokens - chunk.start)
        if known:
            sequence.copy_tokens(chunk.start, token_ids[offset : offset + known])
        offset += count
        if known < count:
            unknown.append(offset - 1)
            sequences.append(sequence)
    return token_ids, np.array(unknown, np.intp) if unknown else None, sequences
