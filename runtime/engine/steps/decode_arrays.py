"""The inputs of decode steps, in arrays with fixed addresses, which a decode graph reads in each step.

A row of the executor has a place in them, which it keeps from step to step. The device holds the block tables, to which
only additions are uploaded, and the columns: one number a place of position, slot, sampling parameters and so on. All
of a step is uploaded in one copy: the columns, then the added blocks, then the token lists of penalties. Ids, statuses
and the flag for bad ids are downloaded in one.

A graph is for a number of places, which may be more than the step has sequences. An empty place is padding: its token
is not stored and sees no keys, and its sample is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import USUAL_FIELDS, Batch, fields_of
from runtime.dtype import DType, float32, int32, uint8
from runtime.engine.limits import EngineLimits
from runtime.engine.steps.inputs import DEVICE_TYPES, PADDING
from runtime.engine.steps.persistent_batch import PersistentBatch
from runtime.engine.steps.recorder import Recorder, Recording, StepBuffers
from runtime.sampling_arrays import SAMPLING_FIELDS
from runtime.tensor.storage import Storage
from runtime.tensor.tensor import Tensor

TAIL_WORDS = 1 << 18
"""Room in the upload for added blocks (two words each) and the tokens of penalties: 1 MiB."""

_PROGRESS = ("positions", "seq_lens", "position")
"""Columns that advance with each step, adjacent in memory; position: of the token to be sampled, in the output."""


def _columns_of(num_batch_slots: int, num_groups: int) -> list[tuple[str, DType, int, float]]:
    """Name, type, length and padding of each column, in their order in memory."""
    columns: list[tuple[str, Any, float]] = [("sources", np.int32, -1)]  # the token's place in the previous step, or -1
    for name, field in USUAL_FIELDS.items():
        if field.per in ("token", "chunk"):  # a place is both
            names = [f"{name}_{group}" for group in range(num_groups)] if field.by_group else [name]
            columns += [(each, field.dtype, field.padding) for each in names]
    columns += [(name, DEVICE_TYPES[name], PADDING.get(name, 0)) for name, _, size in SAMPLING_FIELDS if size == "n"]
    made = [(name, DType.parse(np.dtype(dtype)), num_batch_slots, padding) for name, dtype, padding in columns]
    made.sort(key=lambda column: (-column[1].itemsize, column[0] in _PROGRESS))
    return [*made, ("num_changes", int32, 1, 0)]


@dataclass(slots=True)
class Placement:
    """The batch slots of a step's rows.

    batch_slots      of each row, in the order of the step
    num_batch_slots  of the graph to run: 0 ... num_batch_slots - 1
    """

    batch_slots: NDArray[np.intp]
    num_batch_slots: int


class _Upload(NamedTuple):
    """A step's buffers, and the parts of their upload: the columns as they lie in memory, and the tail."""

    buffers: StepBuffers
    columns: NDArray[np.uint8]
    tail: NDArray[np.int32]


class DecodeArrays:
    """``max_num_seqs`` places. Belongs to the engine's loop.

    The order is `place`, `send`, `launch`, `StepBuffers.wait`. A placement that is not sent is replaced by the next;
    two steps may be in flight.

    Raises OutOfMemoryError if the device or the system has no room.
    """

    def __init__(self, recorder: Recorder, limits: EngineLimits, rows: PersistentBatch) -> None:
        device = recorder.device
        self.recorder = recorder
        self._row_data = rows
        self._exact = limits.exact
        self._num_groups = rows.tables.num_groups
        self._num_batch_slots = batch_slots = limits.max_num_seqs
        self._table_width = width = limits.table_width(limits.max_model_len)
        columns = _columns_of(batch_slots, self._num_groups)
        self._size = size = -(-sum(count * dtype.itemsize for _, dtype, count, _ in columns) // 16) * 16
        inputs = Storage.allocate(device, size + 4 * TAIL_WORDS)
        self._inputs = Tensor(inputs, uint8, (inputs.size_bytes,), (1,))
        self._host: NDArray[np.uint8] = np.zeros(size, np.uint8)
        self._columns: dict[str, NDArray[Any]] = {}
        self._on_device: dict[str, Tensor] = {}
        offset = 0
        for name, dtype, count, padding in columns:
            end = offset + count * dtype.itemsize
            self._columns[name] = self._host[offset:end].view(dtype.numpy)
            self._columns[name].fill(padding)
            self._on_device[name] = Tensor(inputs, dtype, (count,), (1,), offset // dtype.itemsize)
            offset = end
        first = self._columns[_PROGRESS[0]].ctypes.data - self._host.ctypes.data
        self._progress = self._host[first : first + 4 * len(_PROGRESS) * batch_slots].view(np.int32)
        self._empty = self._host.copy()
        self._tail = {dtype: Tensor(inputs, dtype, (TAIL_WORDS,), (1,), size // 4) for dtype in (int32, float32)}
        self._tables = Tensor.zeros((self._num_groups * batch_slots, width), int32, device)  # group by group
        self._flat_tables = self._tables.view(-1)
        self._group_starts = range(0, self._num_groups * batch_slots, batch_slots)
        self._results = Tensor.zeros(3 * batch_slots + 1, int32, device)
        self._numbers = Tensor.arange(batch_slots + 1, dtype=int32).to(device)
        self._uploads = []
        for _ in range(2):
            buffers = recorder.new_buffers(size + 4 * TAIL_WORDS, 3 * batch_slots + 1)
            self._uploads.append(_Upload(buffers, buffers.upload[:size], buffers.upload[size:].view(np.int32)))
        self._batch_slot_of = np.full(batch_slots, -1, np.intp)  # by row; -1: none
        self._row_at = np.full(batch_slots, -1, np.intp)  # by place; -1: none
        self._changes: dict[int, int] = {}  # entries that the device's tables lack, and the block of each
        self._has_sources = False  # whether the column holds any
        self._rows: NDArray[np.int64] | None = None  # of the step placed last
        self._batch_slots = np.zeros(0, np.intp)  # of these rows
        self._first_entries = np.zeros(0, np.int64)  # of these rows, in the host's tables
        self._num_used = 0  # places of its graph
        self._progress_at = np.zeros(0, np.intp)  # flat indices of the rows in those columns
        self._ahead = np.zeros((len(_PROGRESS), 0), np.int32)  # these entries less ``starts``

    @property
    def size_bytes(self) -> int:
        """Bytes on the device."""
        tensors = (self._inputs, self._tables, self._results, self._numbers)
        return sum(tensor.size_bytes for tensor in tensors)

    # Inputs and outputs of a step

    def forget(self, row: int) -> None:
        """The row belongs to another sequence from now on."""
        batch_slot = self._batch_slot_of[row]
        if batch_slot >= 0:
            self._batch_slot_of[row] = self._row_at[batch_slot] = -1
            self._rows = None

    def add(self, group: int, row: int, first: int, block_ids: Sequence[int]) -> None:
        """Add blocks to the row, from entry ``first`` of its table in this group on."""
        batch_slot = int(self._batch_slot_of[row])
        if batch_slot >= 0:
            self._change(group, batch_slot, first, block_ids)

    def place(
        self, rows: NDArray[np.int64], starts: NDArray[np.int64], num_batch_slots: int,
        numbers: Mapping[str, NDArray[Any]] | None = None,
    ) -> Placement:  # fmt: skip
        """Lay out the step that computes the token at ``starts [n]`` of each row, in batch slots below
        ``num_batch_slots``: their present ones, if possible. ``numbers`` are the step's (`StepInput.numbers`)."""
        if rows is not self._rows or num_batch_slots != self._num_used:
            self._assign(rows, num_batch_slots)
            self._rows, self._num_used = rows, num_batch_slots
        batch_slots = self._batch_slots
        for group, slots in enumerate(self._row_data.tables.slots(self._first_entries, starts)):
            self._columns[f"slot_mappings_{group}"][batch_slots] = slots
        for name, values in (numbers or {}).items():
            self._columns[name][batch_slots] = values
        self._progress[self._progress_at] = (self._ahead + starts.astype(np.int32)).reshape(-1)
        return Placement(batch_slots, num_batch_slots)

    def send(
        self,
        placement: Placement,
        token_ids: NDArray[np.int32],
        sources: NDArray[np.intp] | None = None,
        lists: Mapping[str, Sequence[NDArray[np.int32]]] | None = None,
    ) -> StepBuffers:
        """Queue the upload of the step's inputs.

        token_ids  of each row, its last, or anything if the device has it
        sources    of each row: the place where the previous step samples its token, or -1; None for no row
        lists      by their fields' names, of each row
        """
        self._uploads.reverse()
        upload = self._uploads[0]
        upload.buffers.wait()  # of the step before the last: over
        columns, tail = self._columns, upload.tail
        columns["token_ids"][placement.batch_slots] = token_ids
        if sources is not None or self._has_sources:
            columns["sources"][placement.batch_slots] = -1 if sources is None else sources
            self._has_sources = sources is not None
        num_listed = 0 if lists is None else sum(len(each) for of_rows in lists.values() for each in of_rows)
        columns["num_changes"][0] = num_changes = self._write_changes(tail[: TAIL_WORDS - num_listed])
        end = 2 * num_changes
        if lists is not None:
            end = self._write_lists(placement, lists, tail, end)
        upload.columns[:] = self._host
        self.recorder.upload(self._inputs, upload.buffers, self._size + 4 * end)
        return upload.buffers

    def launch(self, graph: Recording, placement: Placement, buffers: StepBuffers, *, has_chains: bool) -> None:
        """Queue the step, and the download of its samples."""
        num_results = (3 if has_chains else 2) * placement.num_batch_slots + 1
        self.recorder.launch(graph, self._results, num_results, buffers)

    # Reads and writes of a graph

    def take_inputs(self, num_batch_slots: int) -> None:
        """Queue the kernel that completes the inputs after the upload."""
        device = self._on_device
        ops.take_decode_inputs(
            self._tail[int32],
            device["num_changes"],
            self._tables,
            device["sources"][:num_batch_slots],
            self._results,
            device["token_ids"][:num_batch_slots],
        )

    def batch(self, num_batch_slots: int, max_seq_len: int, *, has_adapters: bool = False) -> Batch:
        """The first places as a batch of decodes."""
        fields: dict[str, Any] = {}
        for name, field in fields_of(is_last_wanted=False, has_adapters=has_adapters).items():
            if field.per == "block":
                fields[name] = tuple(self._tables[start : start + num_batch_slots] for start in self._group_starts)
            elif name == "logits_adapters":  # each token needs logits
                fields[name] = self._on_device["adapters"][:num_batch_slots]
            elif field.per in ("start", "logit"):
                fields[name] = self._numbers[: num_batch_slots + (field.per == "start")]
            elif field.by_group:
                groups = range(self._num_groups)
                fields[name] = tuple(self._on_device[f"{name}_{group}"][:num_batch_slots] for group in groups)
            else:
                fields[name] = self._on_device[name][:num_batch_slots]
        return Batch(**fields, max_query_len=1, max_seq_len=max_seq_len, exact=self._exact)

    def sample(self, logits: Tensor, *, has_penalties: bool, has_chains: bool) -> None:
        """Queue sampling from ``logits [num_batch_slots, vocab_size]``."""
        num_batch_slots = logits.shape[0]
        fields = [
            self._on_device[name][:num_batch_slots]
            if size == "n"
            else self._tail[float32 if dtype == np.float32 else int32]
            for name, dtype, size in SAMPLING_FIELDS
        ]
        results = self._results[: (3 if has_chains else 2) * num_batch_slots + 1]
        ops.sample_into(logits, fields, results, has_penalties=has_penalties, has_chains=has_chains)

    def clear(self) -> None:
        """Empty all places on the device, for a trial run of a graph."""
        self.recorder.write(self._inputs, self._empty)

    # Internals

    def _change(self, group: int, batch_slot: int, first: int, block_ids: Sequence[int]) -> None:
        entry = (self._group_starts[group] + batch_slot) * self._table_width + first
        self._changes.update(zip(range(entry, entry + len(block_ids)), block_ids))

    def _assign(self, rows: NDArray[np.int64], num_batch_slots: int) -> None:
        """Give each row a place, and write its parameters there."""
        batch_slots, tables = self._batch_slot_of[rows], self._row_data.tables
        is_new = (batch_slots < 0) | (batch_slots >= num_batch_slots)
        if is_new.any():
            left = batch_slots[is_new]
            self._row_at[left[left >= 0]] = -1
            is_free = np.ones(num_batch_slots, np.bool_)
            is_free[batch_slots[~is_new]] = False
            new = np.flatnonzero(is_free)[: np.count_nonzero(is_new)]
            losers = self._row_at[new]
            self._batch_slot_of[losers[losers >= 0]] = -1
            batch_slots[is_new] = new
            self._batch_slot_of[rows] = batch_slots
            self._row_at[new] = rows[is_new]
            for row, batch_slot in zip(rows[is_new].tolist(), new.tolist()):
                for group, num_blocks in enumerate(tables.num_blocks):
                    self._change(group, batch_slot, 0, tables.table[group, row, : num_blocks[row]].tolist())
        self._batch_slots, self._first_entries = batch_slots, tables.first_entries(rows)
        columns = np.arange(0, len(self._progress), self._num_batch_slots)
        self._progress_at = (columns[:, None] + batch_slots).reshape(-1)
        sampling = self._row_data.sampling
        ahead = self._row_data.rotary_offsets[rows], np.ones_like(rows), 1 - sampling.num_prompt_tokens[rows]
        self._ahead = np.stack(ahead).astype(np.int32)
        self._host[:] = self._empty
        sampling.write_columns(self._columns, batch_slots, rows)
        for name, numbers in self._row_data.numbers.items():
            self._columns[name][batch_slots] = numbers.take(rows)

    def _write_changes(self, tail: NDArray[np.int32]) -> int:
        """Write the changes of block tables as pairs; returns how many. Without room they are uploaded separately."""
        count = len(self._changes)
        if not count:
            return 0
        entries, block_ids = list(self._changes), list(self._changes.values())
        self._changes.clear()
        if 2 * count <= len(tail):
            tail[: 2 * count : 2] = entries
            tail[1 : 2 * count : 2] = block_ids
            return count
        order = np.argsort(entries)
        sorted_entries, sorted_ids = np.array(entries)[order], np.array(block_ids, np.int32)[order]
        ends = [*(np.flatnonzero(np.diff(sorted_entries) != 1) + 1).tolist(), count]  # of adjacent entries
        for start, end in zip([0, *ends], ends):
            self.recorder.write(self._flat_tables[int(sorted_entries[start]) :], sorted_ids[start:end])
        return 0

    def _write_lists(
        self, placement: Placement, lists: Mapping[str, Sequence[NDArray[np.int32]]], tail: NDArray[np.int32], at: int
    ) -> int:
        """Write the lists from ``tail[at]`` on, in step order; returns their end."""
        for name, of_rows in lists.items():
            lengths = [len(each) for each in of_rows]
            ends = at + np.cumsum(lengths)
            self._columns[f"{name}_start"][placement.batch_slots] = ends - lengths
            self._columns[f"{name}_end"][placement.batch_slots] = ends
            first, at = at, int(ends[-1])
            np.concatenate(of_rows, out=tail[first:at])
        return at
