"""What decode steps are given, in arrays that stay where they are, since a decode graph reads the same addresses in
each step.

A sequence has a place in them, which it keeps from step to step. On the device lie its block table, to which only what
was added goes up, and the columns: one number a place of position, slot, sampling parameters and so on. All of a step
goes up in one copy: the columns, then the added blocks, then the token lists of penalties. Ids,
statuses and the flag for bad ids come down in one.

A graph is for a number of places, which may be more than the step has sequences. An empty place is harmless: its token
is stored nowhere and sees no keys, and what it draws is nobody's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import Batch
from runtime.device.device import Device
from runtime.dtype import DType, float32, int32, int64, uint8
from runtime.engine.config import EngineLimits
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.steps.decode_device import DecodeDevice, StepBuffers, StepGraph
from runtime.engine.steps.sampler import PenaltyLists, Sampler
from runtime.tensor.storage import Storage
from runtime.tensor.tensor import Tensor

TAIL_WORDS = 1 << 18
"""Room in the upload for added blocks (two words each) and the tokens of penalties: 1 MiB."""

_PROGRESS = ("positions", "seq_lens", "position")
"""Neighbouring columns that advance with each step; position: of the token to be drawn, in the output."""

_NEUTRAL = {"slot_mapping": -1, "sources": -1, "top_p": 1, "repetition_penalty": 1}
"""What an empty place holds; in all other columns 0."""


def _columns_of(num_places: int) -> list[tuple[str, DType, int]]:
    """Name, type and length of each column, in their order in memory."""
    whole = [(name, int64) for name in ("slot_mapping", "seed")]
    whole += [
        (name, int32) for name in (
            "token_ids", "sources", "top_k", "choice_index",  # sources: the place in the step before that draws the
            *_PROGRESS,  # token, or -1
        )
    ]  # fmt: skip
    whole += [
        (name, float32) for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        )
    ]  # fmt: skip
    starts = [(name, int32, num_places + 1) for name in ("prompt_start", "output_start")]  # of lists, in the tail
    return [*((name, dtype, num_places) for name, dtype in whole), *starts, ("num_changes", int32, 1)]


@dataclass(slots=True)
class Placement:
    """Where a step's sequences lie.

    places      of each sequence, in the order of the step
    num_places  of the graph that shall run: 0 ... num_places - 1
    additions   (place, first entry, blocks): what block tables on the device lack
    """

    places: NDArray[np.intp]
    num_places: int
    additions: list[tuple[int, int, list[int]]]


class DecodeArrays:
    """``max_num_seqs`` places. Belongs to the engine's loop.

    The order is `place`, `send`, `launch`, `StepBuffers.wait`. A placement that is not sent is forgotten with the next;
    two steps may be under way.

    Raises OutOfMemoryError where the device or the system has no room.
    """

    def __init__(self, device: Device, runs_on: DecodeDevice, limits: EngineLimits, sampler: Sampler) -> None:
        self.runs_on = runs_on
        self.sampler = sampler
        self._block_size = limits.block_size
        self._exact = limits.exact
        self._num_places = places = limits.max_num_seqs
        self._table_width = width = -(-limits.max_model_len // limits.block_size)
        columns = _columns_of(places)
        self._size = size = -(-sum(count * dtype.itemsize for _, dtype, count in columns) // 16) * 16
        inputs = Storage.allocate(device, size + 4 * TAIL_WORDS)
        self._inputs = Tensor(inputs, uint8, (inputs.size_bytes,), (1,))
        self._host: NDArray[np.uint8] = np.zeros(size, np.uint8)
        self._columns: dict[str, NDArray[Any]] = {}
        self._on_device: dict[str, Tensor] = {}
        offset = 0
        for name, dtype, count in columns:
            end = offset + count * dtype.itemsize
            self._columns[name] = self._host[offset:end].view(dtype.numpy)
            self._on_device[name] = Tensor(inputs, dtype, (count,), (1,), offset // dtype.itemsize)
            offset = end
        first = self._columns[_PROGRESS[0]].ctypes.data - self._host.ctypes.data
        self._progress = self._host[first : first + 4 * len(_PROGRESS) * places].view(np.int32).reshape(-1, places)
        self._empty_places()
        self._neutral = self._host.copy()
        self._tail = {
            dtype: Tensor(inputs, dtype, (TAIL_WORDS,), (1,), size // 4) for dtype in (int32, float32)
        }
        self._tables = Tensor.zeros((places, width), int32, device)
        self._flat_tables = self._tables.view(-1)
        self._results = Tensor.zeros(2 * places + 1, int32, device)
        self._zeros = Tensor.zeros(places + 1, int32, device)
        self._numbers = Tensor.arange(places + 1, dtype=int32).to(device)
        self._buffers = [runs_on.new_buffers(size + 4 * TAIL_WORDS, 2 * places + 1) for _ in range(2)]
        self._host_tables = np.zeros((places, width), np.int32)
        self._place_of = np.full(places, -1, np.intp)  # by row; -1: none
        self._row_at = np.full(places, -1, np.intp)  # by place; -1: none
        self._num_known = [0] * places  # by place: entries of the block table that the device has
        self._has_sources = False  # whether the column holds any
        self._step: tuple[list[int], int] = ([], 0)  # rows and number of places of the step placed last
        self._rows = self._places = np.zeros(0, np.intp)  # its rows and places
        self._place_list: list[int] = []
        self._ahead = np.zeros((len(_PROGRESS), 0), np.int64)  # those columns less ``starts``

    @property
    def size_bytes(self) -> int:
        """Of memory on the device."""
        tensors = (self._inputs, self._tables, self._results, self._zeros, self._numbers)
        return sum(tensor.size_bytes for tensor in tensors)

    # What a step sends and gets

    def forget(self, row: int) -> None:
        """The row is another sequence's from now on."""
        place = self._place_of[row]
        if place >= 0:
            self._place_of[row] = self._row_at[place] = -1
            self._step = ([], 0)

    def place(
        self, sequences: list[Sequence], rows: list[int], starts: NDArray[np.int64], num_places: int
    ) -> Placement:
        """Lay out the step that computes the token at ``starts [n]`` of each sequence, in places below ``num_places``:
        those that they have, where possible."""
        if self._step != (rows, num_places):
            self._assign(rows, num_places)
            self._step = (rows, num_places)
        places, known = self._places, self._num_known
        additions = []
        for sequence, place in zip(sequences, self._place_list):
            first = known[place]
            if len(sequence.blocks[0]) != first:
                added = sequence.blocks[0][first:]
                additions.append((place, first, added))
                self._host_tables[place, first : first + len(added)] = added
        columns = self._columns
        block, offset = np.divmod(starts, self._block_size)
        columns["slot_mapping"][places] = self._host_tables[places, block] * np.int64(self._block_size) + offset
        self._progress[:, places] = self._ahead + starts
        return Placement(places, num_places, additions)

    def send(
        self,
        placement: Placement,
        token_ids: list[int],
        sources: NDArray[np.intp] | None = None,
        lists: list[PenaltyLists] | None = None,
    ) -> StepBuffers:
        """Queue the copy of all that the step is given.

        token_ids  of each sequence, its last, or anything where the device has it
        sources    of each sequence: the place where the step before draws its token, or -1; None: of none
        lists      of each sequence, where penalties count
        """
        self._buffers.reverse()
        buffers = self._buffers[0]
        buffers.wait()  # of the step before the last: over
        columns, size = self._columns, self._size
        columns["token_ids"][placement.places] = token_ids
        if sources is not None or self._has_sources:
            columns["sources"][placement.places] = -1 if sources is None else sources
            self._has_sources = sources is not None
        tail: NDArray[np.int32] = buffers.upload[size:].view(np.int32)
        num_listed = 0 if lists is None else sum(len(ids) for pair in lists for ids in pair)
        num_changes = self._write_additions(placement, tail[: TAIL_WORDS - num_listed])
        end = 2 * num_changes
        columns["num_changes"][0] = num_changes
        if lists is not None:
            end = self._write_lists(placement, lists, tail, end)
        buffers.upload[:size] = self._host
        self.runs_on.upload(self._inputs, buffers, size + 4 * end)
        for place, first, added in placement.additions:
            self._num_known[place] = first + len(added)
        return buffers

    def launch(self, graph: StepGraph, placement: Placement, buffers: StepBuffers) -> None:
        """Queue the step, and the copy of what it draws."""
        self.runs_on.launch(graph, self._results, 2 * placement.num_places + 1, buffers)

    # What a graph reads and writes

    def take_inputs(self, num_places: int) -> None:
        """Queue what completes the inputs when they have come up."""
        device = self._on_device
        ops.take_decode_inputs(
            self._tail[int32],
            device["num_changes"],
            self._tables,
            device["sources"][:num_places],
            self._results,
            device["token_ids"][:num_places],
        )

    def batch(self, num_places: int, max_seq_len: int) -> Batch:
        """The first places as a batch of decodes."""
        device = self._on_device
        return Batch(
            token_ids=device["token_ids"][:num_places],
            positions=device["positions"][:num_places],
            query_start=self._numbers[: num_places + 1],
            seq_lens=device["seq_lens"][:num_places],
            slot_mappings=(device["slot_mapping"][:num_places],),
            block_tables=(self._tables[:num_places],),
            logits_indices=self._numbers[:num_places],
            max_query_len=1,
            max_seq_len=max_seq_len,
            exact=self._exact,
        )

    def draw(self, logits: Tensor, *, has_penalties: bool) -> None:
        """Queue the draw from ``logits [num_places, vocab_size]``."""
        num_places, device = logits.shape[0], self._on_device
        tail = self._tail[int32]
        fields = [
            *(
                device[name][:num_places] for name in (
                    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                    "frequency_penalty", "seed", "choice_index", "position",
                )
            ),
            tail, device["prompt_start"][: num_places + 1], tail, device["output_start"][: num_places + 1],
            tail, self._tail[float32], self._zeros[: num_places + 1],  # no logit bias
        ]  # fmt: skip
        ops.draw(logits, fields, self._results[: 2 * num_places + 1], has_penalties=has_penalties)

    def clear(self) -> None:
        """Empty all places on the device, for a graph that runs on trial."""
        self.runs_on.write(self._inputs, self._neutral)

    # Within

    def _empty_places(self) -> None:
        for name, column in self._columns.items():
            column.fill(_NEUTRAL.get(name, 0))

    def _assign(self, row_list: list[int], num_places: int) -> None:
        """Give each row a place, and write its parameters there."""
        rows = np.array(row_list, np.intp)
        places = self._place_of[rows]
        is_new = (places < 0) | (places >= num_places)
        if is_new.any():
            left = places[is_new]
            self._row_at[left[left >= 0]] = -1
            is_free = np.ones(num_places, np.bool_)
            is_free[places[~is_new]] = False
            new = np.flatnonzero(is_free)[: np.count_nonzero(is_new)]
            losers = self._row_at[new]
            self._place_of[losers[losers >= 0]] = -1
            places[is_new] = new
            self._place_of[rows] = places
            self._row_at[new] = rows[is_new]
            for place in new.tolist():
                self._num_known[place] = 0
        self._rows, self._places, self._place_list = rows, places, places.tolist()
        self._ahead = np.zeros((len(_PROGRESS), len(rows)), np.int64)
        self._ahead[1], self._ahead[2] = 1, 1 - self.sampler.num_prompt_tokens[rows]
        self._empty_places()
        self.sampler.write_columns(self._columns, places, rows)

    def _write_additions(self, placement: Placement, tail: NDArray[np.int32]) -> int:
        """Write the added blocks as pairs; how many. What finds no room goes up by itself."""
        count = 0
        for place, first, added in placement.additions:
            entry, end = place * self._table_width + first, count + len(added)
            if 2 * end > len(tail):
                self.runs_on.write(self._flat_tables[entry:], np.array(added, np.int32))
                continue
            pairs = tail[2 * count : 2 * end].reshape(-1, 2)
            pairs[:, 0] = np.arange(entry, entry + len(added))
            pairs[:, 1] = added
            count = end
        return count

    def _write_lists(
        self, placement: Placement, lists: list[PenaltyLists], tail: NDArray[np.int32], at: int
    ) -> int:
        """Write the lists from ``tail[at]`` on, by place; where they end."""
        order = np.argsort(placement.places).tolist()
        for index, name in enumerate(("prompt_start", "output_start")):
            starts = self._columns[name]
            starts.fill(0)
            starts[placement.places + 1] = [len(pair[index]) for pair in lists]
            np.cumsum(starts, out=starts)
            total = int(starts[-1])
            np.concatenate([lists[i][index] for i in order], out=tail[at : at + total])
            starts += at
            at += total
        return at
