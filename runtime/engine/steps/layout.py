"""The layout of a step: the arrays of its batch on the host, as `runtime.batch` declares them, and the block tables
that slots are computed from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import NO_LONG_CHUNKS, STEP_FIELDS, Batch, LongChunks, StepField, fields_of
from runtime.device.device import Device
from runtime.tensor.tensor import Tensor

NUMBERS = {name: field for name, field in STEP_FIELDS.items() if field.row or field.step}
"""The fields that are numbers of sequences or chunks; a step without them gets their padding."""


class BlockTables:
    """Each row's blocks, by KV cache group. Entries are numbered through all rows.

    table       [num_groups, num_rows, max_blocks] int32
    num_blocks  by group and row: written entries
    """

    def __init__(self, num_groups: int, num_rows: int, max_blocks: int, block_size: int) -> None:
        self.table = np.zeros((num_groups, num_rows, max_blocks), np.int32)
        self.num_blocks = [[0] * num_rows for _ in range(num_groups)]
        self._max_blocks = max_blocks
        self._block_size = block_size
        self._block_ids = self.table.reshape(num_groups, -1)  # by entry
        self._shifts = np.zeros(self._block_ids.shape, np.int64)  # by entry: slot minus position

    @property
    def num_groups(self) -> int:
        return len(self.table)

    def clear(self, row: int) -> None:
        """Forget the row's blocks."""
        for num_blocks in self.num_blocks:
            num_blocks[row] = 0

    def add(self, group: int, row: int, first: int, block_ids: Sequence[int]) -> None:
        """Write a row's blocks from its entry ``first`` on; later entries are forgotten."""
        start, count, size = row * self._max_blocks + first, len(block_ids), self._block_size
        self._block_ids[group, start : start + count] = block_ids
        shifts = [(block_id - index) * size for index, block_id in enumerate(block_ids, first)]
        self._shifts[group, start : start + count] = shifts
        self.num_blocks[group][row] = first + count

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tables of ascending rows ``[n]``, ``[num_groups, n, width]``: a view if they are dense."""
        count = len(rows)
        if rows[-1] == count - 1:
            return self.table[:, :count]
        width = max(num_blocks[row] for num_blocks in self.num_blocks for row in rows.tolist())
        return self.table[:, :, :width].take(rows, axis=1)

    def first_entries(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first entries of ``rows [n]``."""
        return rows * self._max_blocks

    def slots(self, first_entries: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of tokens at ``positions [n]`` of rows that begin at ``first_entries [n]``, ``[num_groups, n]``."""
        return self._shifts.take(first_entries + positions // self._block_size, axis=1) + positions


@dataclass(slots=True)
class StepLayout:
    """The arrays of a step's batch on the host, by the names of `STEP_FIELDS`. Those by group have a first axis for
    it; block tables may have any width. `is_last_wanted`: see `Batch`, and `want_last`; `long_chunks`: see `Batch`;
    `has_adapters`: some row has one."""

    arrays: dict[str, NDArray[Any]]
    max_query_len: int
    max_seq_len: int
    is_last_wanted: bool = False
    long_chunks: LongChunks = NO_LONG_CHUNKS
    has_adapters: bool = False

    def __post_init__(self) -> None:
        for name in NUMBERS.keys() - self.arrays.keys():
            count = self.num_tokens if NUMBERS[name].per == "token" else self.num_seqs
            self.arrays[name] = np.full(count, NUMBERS[name].padding, NUMBERS[name].dtype)
        if "logits_adapters" not in self.arrays:
            self.arrays["logits_adapters"] = self.arrays["adapters"].take(self.arrays["logits_indices"], mode="clip")

    def want_last(self) -> None:
        """Only the hidden states of chunks' last tokens are wanted."""
        last = self.arrays["query_start"][1:] - np.int32(1)
        self.arrays |= {
            "last_tokens": last,
            "last_positions": self.arrays["positions"].take(last, mode="clip"),
            "last_start": np.arange(len(last) + 1, dtype=np.int32),
            "logits_chunks": np.searchsorted(last, self.arrays["logits_indices"]).astype(np.int32),
            "last_adapters": self.arrays["adapters"].take(last, mode="clip"),
        }
        self.is_last_wanted = True

    @property
    def num_tokens(self) -> int:
        return len(self.arrays["token_ids"])

    @property
    def num_seqs(self) -> int:
        return len(self.arrays["seq_lens"])

    @property
    def num_logits(self) -> int:
        return len(self.arrays["logits_indices"])

    @property
    def fields(self) -> dict[str, StepField]:
        """The arrays that the step has, in the order of `STEP_FIELDS`."""
        return fields_of(is_last_wanted=self.is_last_wanted, has_adapters=self.has_adapters)

    def batch(self, device: Device, *, exact: bool) -> Batch:
        """The batch on a device."""
        parts: list[NDArray[Any]] = []
        for name, field in self.fields.items():
            parts.extend(self.arrays[name] if field.by_group else [self.arrays[name]])
        return self.batch_of(ops.place(parts, device), exact=exact)

    def batch_of(self, placed: Iterable[Tensor], *, exact: bool) -> Batch:
        """The batch whose arrays are on a device, in the order of `fields`, those of the groups one by one."""
        tensors = iter(placed)
        fields: dict[str, Any] = {
            name: tuple(next(tensors) for _ in self.arrays[name]) if field.by_group else next(tensors)
            for name, field in self.fields.items()
        }
        return Batch(
            **fields, max_query_len=self.max_query_len, max_seq_len=self.max_seq_len, exact=exact,
            is_last_wanted=self.is_last_wanted, long_chunks=self.long_chunks,
        )  # fmt: skip


class Chunks(NamedTuple):
    """The part of a layout that follows from the rows and the numbers of their tokens. ``[T]``: by token.

    rows         [n] ascending
    counts       [n] tokens of each
    query_start  [n + 1]
    of           [T] the chunk of each token; None if each has one
    offsets      [T] index in its chunk
    token_rows   [T]
    first_entries  [T] of the row, in its block table
    """

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    query_start: NDArray[np.int32]
    of: NDArray[np.int64] | None
    offsets: NDArray[np.int64] | None
    token_rows: NDArray[np.int64]
    first_entries: NDArray[np.int64]
    max_query_len: int

    @classmethod
    def of_rows(
        cls, rows: NDArray[np.int64], counts: NDArray[np.int64], num_tokens: int, tables: BlockTables
    ) -> Chunks:
        """For ``num_tokens``, the sum of the counts."""
        num_seqs = len(rows)
        if num_tokens == num_seqs:
            starts = np.arange(num_seqs + 1, dtype=np.int32)
            return cls(rows, counts, starts, None, None, rows, tables.first_entries(rows), 1)
        query_start = np.zeros(num_seqs + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        of = np.repeat(np.arange(num_seqs), counts)
        offsets, token_rows = np.arange(num_tokens) - query_start[of], rows[of]
        return cls(
            rows, counts, query_start, of, offsets, token_rows, tables.first_entries(token_rows), largest(counts)
        )

    def by_token(self, values: NDArray[Any]) -> NDArray[Any]:
        """``values [n]`` by chunk for each token."""
        return values if self.of is None else values.take(self.of)

    def positions(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The position of each token, in chunks that begin at ``starts [n]``."""
        return starts if self.offsets is None else self.by_token(starts) + self.offsets

    def layout(
        self,
        token_ids: NDArray[np.int32],
        starts: NDArray[np.int64],
        positions: NDArray[np.int64],
        rotary_offsets: NDArray[np.int64] | None,
        logits_indices: NDArray[np.int32],
        tables: BlockTables,
        numbers: Mapping[str, NDArray[Any]],
    ) -> StepLayout:
        """The layout of chunks at ``starts``, whose tokens have these ``positions``.

        rotary_offsets  [T] rotary position minus position; None if they are all 0
        numbers         [n] of each chunk, by the names of `NUMBERS`
        """
        seq_lens = (starts + self.counts).astype(np.int32)
        arrays: dict[str, NDArray[Any]] = {
            "token_ids": token_ids,
            "positions": (positions if rotary_offsets is None else positions + rotary_offsets).astype(np.int32),
            "query_start": self.query_start,
            "seq_lens": seq_lens,
            "slot_mappings": tables.slots(self.first_entries, positions),
            "block_tables": tables.of(self.rows),
            "logits_indices": logits_indices,
        }
        for name, given in numbers.items():
            arrays[name] = self.by_token(given) if NUMBERS[name].per == "token" else given
        has_adapters = "adapters" in numbers and bool((numbers["adapters"] >= 0).any())
        return StepLayout(arrays, self.max_query_len, largest(seq_lens), has_adapters=has_adapters)


def lay_out(
    token_ids: NDArray[np.int32],
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    tables: BlockTables,
    logits_indices: NDArray[np.int32],
    rotary_offsets: NDArray[np.int64] | None = None,
) -> StepLayout:
    """The layout of a pass outside the steps: chunks that begin at ``starts`` and have ``counts`` tokens, one a row, in
    the order of ``rows``, which ascend. ``rotary_offsets [n]`` are rotary positions minus positions in the sequence;
    None if they are all 0."""
    chunks = Chunks.of_rows(rows, counts, len(token_ids), tables)
    rotary = None if rotary_offsets is None else chunks.by_token(rotary_offsets)
    return chunks.layout(token_ids, starts, chunks.positions(starts), rotary, logits_indices, tables, {})


def largest(values: NDArray[np.int32] | NDArray[np.int64]) -> int:
    """The largest of ``values [n]``, at least one. For so few `max` takes five times as long."""
    return int(values[values.argmax()])
