"""Records forward passes on the CPU, with the samples after them, when a batch of their shape first comes, and replays
them.

Recording a model's operations from Python takes milliseconds in which the processors wait. While a long prompt is
computed in chunks beside decodes, step after step has the same number of tokens and sequences: such a step costs no
more than copying its arrays to the recording's inputs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cpu.running.arena import Arena
from numba_kernels.cpu.running.recording import NotRecordableError, Recording, record
from runtime import ops
from runtime.device.device import CPU
from runtime.dtype import dtype_of_array, float32, int32
from runtime.engine.limits import EngineLimits
from runtime.engine.steps.decode_device import Forward
from runtime.engine.steps.draw_inputs import Computed, DrawShape, WrittenDraws, draw_arrays, room_for
from runtime.engine.steps.ragged import Layout
from runtime.sampling_arrays import SAMPLING_FIELDS, SamplingArrays
from runtime.tensor.tensor import Tensor

NUM_KEPT = 64
"""Recordings, about 100 KB each; the least recently used one is dropped first."""

_ROOM = 1 << 17
"""Ids that each list of draws may have: of penalties, and of biases."""


class _Shape(NamedTuple):
    """The fixed properties of a recorded layout. ``max_seq_len`` is rounded up."""

    num_tokens: int
    num_seqs: int
    num_logits: int
    max_seq_len: int
    draws: bool


@dataclass(frozen=True, slots=True)
class _Recorded:
    """``inputs``, ``draws`` are read by the recording; ``shaped`` are the inputs' own. ``left`` is overwritten by each
    replay."""

    recording: Recording
    inputs: Layout
    shaped: list[NDArray[Any]]
    draws: list[NDArray[Any]] | None
    left: Computed


class RecordedForwards:
    """Recordings of one model's forward passes, with shared inputs and memory; for one thread.

    sequence_lengths  to which the longest sequence is rounded up, ascending
    num_steps   steps run from them
    num_failed  always 0: the first failure ends all recording
    """

    num_failed = 0

    def __init__(self, limits: EngineLimits, sequence_lengths: list[int], num_groups: int) -> None:
        self._limits = limits
        self._lengths = sequence_lengths
        self.num_steps = 0
        self._arena = Arena()
        self._kept: dict[_Shape, _Recorded] = {}  # most recently used last
        self._given: list[NDArray[Any] | None] = [None] * (5 + num_groups)  # each input as it was written last
        self._written = WrittenDraws()
        tokens = max(limits.max_num_batched_tokens, limits.max_model_len)  # some policies compute a prompt whole
        seqs = limits.max_num_seqs
        self._token_ids, self._positions = np.zeros((2, tokens), np.int32)
        self._slot_mappings = np.zeros((num_groups, tokens), np.int64)
        self._query_start, self._seq_lens = np.zeros((2, seqs + 1), np.int32)
        self._logits_indices = np.zeros(tokens, np.int32)
        self._draws = draw_arrays(DrawShape(tokens, _ROOM, True), lambda dtype, size: np.zeros(size, dtype))
        self._drawn = np.zeros(2 * tokens + 1, np.int32)
        self._tables = np.zeros((num_groups, seqs * -(-limits.max_model_len // limits.block_size)), np.int32)

    @property
    def num_recorded(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """Bytes of memory for results, and of recordings."""
        return self._arena.size_bytes + sum(kept.recording.size_bytes for kept in list(self._kept.values()))

    def run(
        self, layout: Layout, forward: Forward, draws: SamplingArrays | None = None, *, may_record: bool
    ) -> Computed | None:
        """The result of ``forward``, always the same function, for the batch, and of sampling; valid until the next
        run. Returns None, before any work, if there is no recording of this shape, and none may be made.

        Raises NotRecordableError, before any work, and its kernels' errors.
        """
        longest = self._lengths[bisect_left(self._lengths, layout.max_seq_len)]
        num_logits = len(layout.logits_indices)
        is_drawn = draws is not None and num_logits > 0 and room_for(draws) <= _ROOM
        shape = _Shape(len(layout.token_ids), len(layout.seq_lens), num_logits, longest, is_drawn)
        kept = self._kept.pop(shape, None)
        if kept is None:
            if not may_record:
                return None
            kept = self._record(shape, forward)
        self._kept[shape] = kept
        if len(self._kept) > NUM_KEPT:
            del self._kept[next(iter(self._kept))]
        for i, (recorded, given) in enumerate(zip(kept.shaped, layout.shaped)):
            if given is not self._given[i]:  # otherwise unchanged since the last step
                self._given[i] = given
                recorded[...] = given
        recorded_tables, tables = kept.inputs.block_tables, layout.block_tables
        width = min(tables.shape[2], recorded_tables.shape[2])
        recorded_tables[:, :, :width] = tables[:, :, :width]  # all blocks of the sequences
        if kept.draws is not None and draws is not None:
            self._written.write(kept.draws, draws)
        kept.recording.replay()
        self.num_steps += 1
        return kept.left

    def clear(self) -> None:
        """Free the memory; nothing is run any more."""
        self._kept.clear()
        self._arena = Arena()

    def _record(self, shape: _Shape, forward: Forward) -> _Recorded:
        tokens, seqs = shape.num_tokens, shape.num_seqs
        width = -(-shape.max_seq_len // self._limits.block_size)
        inputs = Layout(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            query_start=self._query_start[: seqs + 1],
            seq_lens=self._seq_lens[:seqs],
            slot_mappings=self._slot_mappings[:, :tokens],
            block_tables=self._tables[:, : seqs * width].reshape(-1, seqs, width),
            logits_indices=self._logits_indices[: shape.num_logits],
            max_query_len=tokens - seqs + 1,
            max_seq_len=shape.max_seq_len,
        )
        batch = inputs.batch(CPU, exact=self._limits.exact)
        draws, drawn, fields = None, None, []
        if shape.draws:
            arrays = zip(self._draws, SAMPLING_FIELDS, strict=True)
            draws = [array[: shape.num_logits] if size == "n" else array for array, (_, _, size) in arrays]
            fields = [Tensor.over(array, dtype_of_array(array)) for array in draws]
            drawn = Tensor.over(self._drawn[: 2 * shape.num_logits + 1], int32)
        with record(self._arena) as recording:
            computed = forward(batch)
            if drawn is not None and computed.logits is not None:
                ops.draw(computed.logits, fields, drawn, has_penalties=True)  # without any, the kernel skips them

        def borrowed(tensor: Tensor) -> Tensor:
            return Tensor.over(self._arena.borrowed(tensor.array), float32)

        try:
            hidden, logits = (None if each is None else borrowed(each) for each in (computed.hidden, computed.logits))
            left = Computed(hidden, logits, drawn, tuple(map(borrowed, computed.kept)))
        except ValueError as error:
            raise NotRecordableError("a forward pass returns what no kernel has made") from error
        return _Recorded(recording, inputs, inputs.shaped, draws, left)
