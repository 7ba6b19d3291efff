"""Records forward passes on a GPU, with the samples after them, when a batch's shape recurs and the GPU waited for its
launches, and replays them.

Launching a pass from Python can take longer than the GPU needs for a few hundred tokens. While a long prompt is
computed in chunks beside decodes, step after step has the same shape; so have decodes that decode graphs do not cover.
A shape that comes once is never recorded: a recording costs two to three times its launches (Qwen3-8B on an H200,
before launches became cheaper: 16 to 20 ms, recorded 36 to 60). Nor is one whose pass keeps the GPU longer than the
host: 256 tokens took 22 ms and replayed 8, but 2,048 took 46 and replayed 46. That is measured when the shape first
comes, except on an emulated device, whose times mean nothing, and whose shapes are recorded. So are those of steps
with drafts: they recur, and nothing else runs while one is launched.

A recording plans attention for the batch's own longest chunk, and for sequences up to a power of two: the plans, and so
the bits, are those of the eager pass.

Steps with drafts have all kinds of shapes. They are padded to few: 2, 4 or 8 tokens for each of as many sequences as
decode graphs have places. The padding consists of empty sequences, whose results are not stored and whose samples are
ignored.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cuda.attention.parts import MIN_PART_KEYS
from runtime import ops
from runtime.batch import Batch
from runtime.device.errors import LaunchError
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph, GraphPool
from runtime.device.stream import Event
from runtime.dtype import dtype_of_array, int32
from runtime.engine.limits import EngineLimits
from runtime.engine.steps.decode_device import Agree, Forward, alone
from runtime.engine.steps.draw_inputs import (
    Computed,
    DrawShape,
    WrittenDraws,
    draw_arrays,
    room_for,
    shape_of,
)
from runtime.engine.steps.ragged import Layout
from runtime.errors import DeviceError, OutOfMemoryError
from runtime.kv.cache import KVCache
from runtime.sampling_arrays import SamplingArrays
from runtime.tensor.storage import Storage
from runtime.tensor.tensor import Tensor
from runtime.tensor.views import contiguous_strides

logger = logging.getLogger("xserv.engine")

T = TypeVar("T")

NUM_KEPT = 32
"""Recordings; the least recently used one is dropped first."""
NUM_REMEMBERED = 1024
"""Shapes that came and were not recorded; the oldest is dropped first."""
WAITING = 1.25
"""The GPU waits for launches if it takes at most so many times as long as they do."""
_ALIGNMENT = 16
_MOST_LISTED = 1 << 16
"""Ids that each list of a recording's draws may have: of penalties, and of biases."""
_WIDTHS = (2, 4, 8)
"""Tokens of a sequence in a step with drafts; attention over few queries takes up to eight at one's cost."""


class _Shape(NamedTuple):
    """The fixed properties of a recorded layout. ``max_seq_len`` is rounded up. ``draws`` is None if it does not
    sample."""

    num_tokens: int
    num_seqs: int
    num_logits: int
    max_query_len: int
    max_seq_len: int
    draws: DrawShape | None

    @property
    def tries(self) -> bool:
        """Whether it is one of the few shapes of steps with drafts."""
        return self.draws is not None and 1 < self.max_query_len <= _WIDTHS[-1] and self.num_logits == self.num_tokens


_QUERY_STARTS, _LOGITS_INDICES = 2, 4
"""Indices of these in `Layout.shaped`; the slots follow the latter."""


@dataclass(slots=True)
class _Recorded:
    """``inputs``, ``shaped``, their own, and ``draws`` are on the host, where the upload is laid out in ``size_bytes``.
    The graph's result is overwritten by each replay."""

    graph: Graph | None
    inputs: Layout
    shaped: list[NDArray[Any]]
    draws: list[NDArray[Any]]
    size_bytes: int

    def release(self) -> None:
        if self.graph is not None:
            self.graph.release()


@dataclass(frozen=True, slots=True)
class _Pass:
    """An eager pass: the seconds of its launches, and events at its start and end on the device."""

    launch_s: float
    start: Event
    end: Event

    @property
    def waited(self) -> bool:
        """Whether the GPU waited for the launches; False if the pass still runs."""
        return self.end.is_done() and self.end.elapsed_ms(self.start) <= WAITING * 1e3 * self.launch_s


class ForwardGraphs:
    """Graphs of one model's forward passes, with shared inputs and one memory pool. Belongs to the engine's loop. Ranks
    record at the same time; if one of them fails none records any more.

    batch_sizes  numbers of sequences that steps with drafts are padded to, ascending
    num_steps   steps run from them
    num_failed  recordings that failed: after the second no more are made
    looks_at_times  whether a shape is recorded only if the GPU waited for its launches
    """

    def __init__(
        self, gpu: Gpu, limits: EngineLimits, kv_cache: KVCache, batch_sizes: list[int], agree: Agree = alone
    ) -> None:
        self._agree = agree
        self.num_steps = self.num_failed = 0
        self._gpu = gpu
        self._limits = limits
        self._batch_sizes = batch_sizes
        self._kv_cache = kv_cache
        self._num_groups = len(kv_cache.spec.group_kinds)
        self._kept: dict[_Shape, _Recorded] = {}  # most recently used last
        self._seen: dict[_Shape, _Pass | None] = {}  # None if it kept the GPU busy
        self.looks_at_times = not gpu.driver.is_emulated
        self._has_given_up = False
        self._host: NDArray[np.uint8] | None = None  # with the first recording, as the device's
        self._device: Storage | None = None
        self._pool: GraphPool | None = None
        self._sent: _Recorded | None = None  # the latest, and each of its inputs as it was written
        self._given: list[NDArray[Any] | None] = []
        self._written = WrittenDraws()

    @property
    def num_recorded(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """Bytes on the device, for the inputs and the graphs' memory."""
        inputs = 0 if self._device is None else self._device.size_bytes
        return inputs + (0 if self._pool is None else self._pool.reserved_bytes)

    def run(
        self, layout: Layout, forward: Forward, draws: SamplingArrays | None = None, *, may_record: bool
    ) -> Computed:
        """The result of ``forward``, always the same function, for the batch, and of sampling if it is replayed;
        possibly still running, and valid until the next run.

        Raises LaunchError if the device is lost, and what ``forward`` raises.
        """
        if draws is not None and (not len(layout.logits_indices) or room_for(draws) > _MOST_LISTED):
            draws = None
        num_logits = len(layout.logits_indices)
        shape = self._shape_of(layout, draws)
        kept = self._kept.pop(shape, None)
        if kept is not None:
            self._send(kept, layout, draws)
        elif may_record and self._is_worth_recording(shape):
            kept = self._record(shape, layout, forward, draws)
        if kept is None:
            batch = layout.batch(self._gpu.device, exact=self._limits.exact)
            return self._run_timed(shape, batch, forward) if may_record else forward(batch)
        self._kept[shape] = kept
        if len(self._kept) > NUM_KEPT:
            self._kept.pop(next(iter(self._kept))).release()
        assert kept.graph is not None
        kept.graph.replay()
        self.num_steps += 1
        left = cast(Computed, kept.graph.result)
        if left.logits is None or left.logits.shape[0] == num_logits:
            return left
        return left._replace(logits=left.logits[:num_logits])

    def release(self) -> None:
        """Free the memory; nothing is run any more."""
        self._has_given_up = True
        for kept in self._kept.values():
            kept.release()
        self._kept.clear()
        self._pool = self._host = self._device = self._sent = None

    def _shape_of(self, layout: Layout, draws: SamplingArrays | None) -> _Shape:
        """Steps of decodes with drafts are padded to one of few shapes, with as many empty sequences after the given
        ones as the remaining tokens may need."""
        length = MIN_PART_KEYS
        while length < layout.max_seq_len:
            length *= 2
        length = min(length, self._limits.max_model_len)
        num_logits = len(layout.logits_indices)
        shape = _Shape(
            len(layout.token_ids), len(layout.seq_lens), num_logits, layout.max_query_len, length,
            None if draws is None else shape_of(draws, num_logits),
        )  # fmt: skip
        if draws is None or not shape.tries:
            return shape
        places = self._batch_sizes[bisect_left(self._batch_sizes, shape.num_seqs)]
        longest = _WIDTHS[bisect_left(_WIDTHS, shape.max_query_len)]
        num_tokens = places * longest
        return _Shape(num_tokens, 2 * places, num_tokens, longest, length, shape_of(draws, num_tokens))

    def _run_timed(self, shape: _Shape, batch: Batch, forward: Forward) -> Computed:
        """Run eagerly. The time of a new shape that could be recorded is remembered."""
        most_tokens, most_seqs = self._most
        has_room = shape.num_tokens <= most_tokens and shape.num_seqs <= most_seqs
        if self._has_given_up or not has_room or shape in self._seen:
            return forward(batch)
        start = self._gpu.new_event(is_timed=True).record(self._gpu.stream)
        begun = time.perf_counter()
        computed = forward(batch)
        end = self._gpu.new_event(is_timed=True).record(self._gpu.stream)
        self._seen[shape] = _Pass(time.perf_counter() - begun, start, end)
        if len(self._seen) > NUM_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return computed

    def _is_worth_recording(self, shape: _Shape) -> bool:
        """Whether it came before, and the GPU waited for its launches, or it is one of few. Ranks agree, since they get
        the same shapes."""
        before = self._seen.get(shape)
        if before is None or self._has_given_up:
            return False
        if self._agree(not self.looks_at_times or shape.tries or before.waited):
            del self._seen[shape]
            return True
        if self._agree is not alone or before.end.is_done():
            self._seen[shape] = None
        return False

    @property
    def _most(self) -> tuple[int, int]:
        """Tokens and sequences that the inputs have room for."""
        limits = self._limits
        return max(limits.max_num_batched_tokens, _WIDTHS[-1] * limits.max_num_seqs), 2 * limits.max_num_seqs

    def _record(
        self, shape: _Shape, layout: Layout, forward: Forward, draws: SamplingArrays | None
    ) -> _Recorded | None:
        """Returns None if it fails: then only pages that the step writes anyway have changed. Ranks agree before the
        work first runs, in which they meet, and on the outcome."""
        placed = self._tried(lambda: self._place(shape))
        if not self._agree(placed is not None):
            self._has_given_up = self._has_given_up or self._agree is not alone
            return None
        assert placed is not None
        kept, batch, fields = placed
        self._send(kept, layout, draws)

        def run() -> Computed:
            computed = forward(batch)
            if shape.draws is None or computed.logits is None:
                return computed
            drawn = Tensor.empty((2 * shape.draws.num_draws + 1,), int32, self._gpu.device)
            ops.draw(computed.logits, fields, drawn, has_penalties=shape.draws.has_penalties)
            return computed._replace(drawn=drawn)

        def capture() -> Graph:
            if self._pool is None:
                self._pool = GraphPool(self._gpu)
            return Graph.capture(self._gpu, run, pool=self._pool, is_chained=True)

        kept.graph = self._tried(capture)
        if not self._agree(kept.graph is not None):
            kept.release()
            self._has_given_up = self._has_given_up or self._agree is not alone
            return None
        return kept

    def _tried(self, work: Callable[[], T]) -> T | None:
        """The result of ``work``, or None if it fails for a reason other than a lost device."""
        try:
            return work()
        except OutOfMemoryError as error:
            self._give_up("the memory of recorded steps is not to be had", error)
            return None
        except LaunchError:  # the device is lost
            raise
        except DeviceError as error:
            self.num_failed += 1
            if self.num_failed > 1:
                self._give_up("steps with prompts cannot be recorded", error)
            return None

    def _give_up(self, why: str, error: Exception) -> None:
        self._has_given_up = True
        logger.warning("%s, %d recordings hold %s bytes: %s", why, len(self._kept), f"{self.size_bytes:,}", error)

    def _place(self, shape: _Shape) -> tuple[_Recorded, Batch, list[Tensor]]:
        """A shape's inputs on the host and on the device, one array after another. The graph is still to be
        recorded."""
        device, groups = self._gpu.device, self._num_groups
        if self._device is None:
            most, most_seqs = self._most
            draws = DrawShape(most, _MOST_LISTED, True)
            largest = _Shape(most, most_seqs, most, most, self._limits.max_model_len, draws)
            every = self._arrays_of(largest, lambda dtype, size: np.empty(size, dtype))
            size = sum(_aligned(array) for array in every)
            self._device, self._host = Storage.allocate(device, size), np.zeros(size, np.uint8)
        storage, host, offset = self._device, cast(NDArray[np.uint8], self._host), 0
        tensors: list[Tensor] = []

        def take(dtype: Any, sizes: tuple[int, ...]) -> NDArray[Any]:
            nonlocal offset
            size_bytes = int(np.prod(sizes)) * np.dtype(dtype).itemsize
            array: NDArray[Any] = host[offset : offset + size_bytes].view(dtype).reshape(sizes)
            element = dtype_of_array(array)
            strides = contiguous_strides(sizes)
            tensors.append(Tensor(storage, element, sizes, strides, offset // element.itemsize))
            offset += _aligned(array)
            return array

        ids, positions, query_start, seq_lens, indices, slots, tables, *draw_fields = self._arrays_of(shape, take)
        inputs = Layout(
            ids, positions, query_start, seq_lens, slots, tables, indices, shape.max_query_len, shape.max_seq_len
        )
        batch = Batch(
            token_ids=tensors[0],
            positions=tensors[1],
            query_start=tensors[2],
            seq_lens=tensors[3],
            slot_mappings=tuple(tensors[5][group] for group in range(groups)),
            block_tables=tuple(tensors[6][group] for group in range(groups)),
            logits_indices=tensors[4],
            max_query_len=shape.max_query_len,
            max_seq_len=shape.max_seq_len,
            exact=self._limits.exact,
        )
        return _Recorded(None, inputs, inputs.shaped, draw_fields, offset), batch, tensors[7:]

    def _arrays_of(self, shape: _Shape, take: Callable[[Any, tuple[int, ...]], NDArray[Any]]) -> list[NDArray[Any]]:
        """The arrays of a batch of this shape, by ``take(dtype, sizes)``, in memory order."""
        tokens, seqs, groups = shape.num_tokens, shape.num_seqs, self._num_groups
        width = -(-shape.max_seq_len // self._limits.block_size)
        return [
            *(take(np.int32, (size,)) for size in (tokens, tokens, seqs + 1, seqs, shape.num_logits)),
            take(np.int64, (groups, tokens)), take(np.int32, (groups, seqs, width)),
            *(draw_arrays(shape.draws, take) if shape.draws is not None else ()),
        ]  # fmt: skip

    def _send(self, kept: _Recorded, layout: Layout, draws: SamplingArrays | None) -> None:
        """Queue the copy of a batch to its recording's inputs, after pages that are being copied."""
        if kept is not self._sent:  # others use the same memory
            self._sent, self._given, self._written = kept, [None] * len(kept.shaped), WrittenDraws()
        if draws is not None:
            self._written.write(kept.draws, draws)
        lacking = len(kept.shaped[0]) - len(layout.token_ids)
        for i, (target, given) in enumerate(zip(kept.shaped, layout.shaped)):
            if given is self._given[i]:
                continue
            self._given[i] = given
            target[: len(given)] = given
            if len(target) > len(given):
                target[len(given) :] = _tail(i, target, given, lacking, kept.inputs.max_query_len)
        tables, given_tables = kept.inputs.block_tables, layout.block_tables
        num_seqs, width = given_tables.shape[1], min(given_tables.shape[2], tables.shape[2])
        tables[:, :num_seqs, :width] = given_tables[:, :, :width]
        tables[:, :num_seqs, width:] = tables[:, num_seqs:] = 0
        self._kv_cache.wait_for_arrivals()
        self._gpu.write(cast(Storage, self._device).address, cast(NDArray[np.uint8], self._host)[: kept.size_bytes])


def _tail(field: int, target: NDArray[Any], given: NDArray[Any], lacking: int, width: int) -> NDArray[np.int32] | int:
    """The padding of ``Layout.shaped[field]`` for ``lacking`` tokens: those of empty sequences of at most ``width``,
    which are not stored, and a draw for each of them."""
    if field == _QUERY_STARTS:
        ends = np.minimum(np.arange(1, len(target) - len(given) + 1) * width, lacking)
        return (int(given[-1]) + ends).astype(np.int32)
    if field == _LOGITS_INDICES:
        return np.arange(len(given), len(target), dtype=np.int32)
    return -1 if field > _LOGITS_INDICES else 0  # slots


def _aligned(array: NDArray[Any]) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
