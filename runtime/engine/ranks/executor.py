"""Runs steps of a model that is split over ranks: this process is rank 0, the others have processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.device.errors import LaunchError
from runtime.dtype import DType
from runtime.engine.errors import RequestError
from runtime.engine.process.wire import error_of
from runtime.engine.ranks.group import END_S, UNREAD_BYTES, RankGroup
from runtime.engine.ranks.messages import (
    ChangeMemory,
    CopyPages,
    DropEncoded,
    Encode,
    FillPages,
    Logits,
    Masks,
    MemoryChange,
    Note,
    ReadWeights,
    Record,
    ReloadWeights,
    RunPass,
    StartEncoding,
    StartPass,
    ToRank,
    WriteAdapter,
    frame,
    step_message,
)
from runtime.engine.steps.executor import (
    AuxiliaryHiddenStates,
    Computation,
    DrawMasks,
    Encoded,
    ExecutorLostError,
    GraphStats,
    SidePass,
    UnsupportedStepError,
)
from runtime.engine.steps.local_executor import LocalExecutor
from runtime.engine.steps.step_input import PassPictures, Sampled, StepInput
from runtime.engine.weights.commands import GivenArrays, WeightSource
from runtime.errors import XservError
from runtime.linear.low_rank import LowRankMaps
from runtime.pooling import PoolingTask
from runtime.rank_notices import Span, Tally
from runtime.tensor.tensor import Tensor

T = TypeVar("T")


class ParallelExecutor:
    """See `Executor`. All ranks get the same commands from rank 0, run them at the same time and sample the same
    tokens. The first error on any of them ends all: `ExecutorLostError`.

    With several stages this process belongs to the first. It runs or queues its part of a step before it starts the
    next, while the others run theirs; the last stage samples and reports. So there are as many open steps as stages.
    """

    takes_any_thread = False

    def __init__(self, local: LocalExecutor, ranks: RankGroup, depth: int = 1) -> None:
        """`depth`: see `Executor`."""
        self.local, self.ranks, self.depth = local, ranks, depth
        self._is_staged = ranks.shape.num_stages > 1
        self.overlaps = local.overlaps
        self.num_groups = local.num_groups
        self._opened: _Shared | None = None
        self._told: StepInput | None = None  # the latest step

    def start(
        self, step: StepInput, masks: DrawMasks | None = None,
        proposed: Sequence[NDArray[np.float32] | None] | None = None,
    ) -> Computation:  # fmt: skip
        if proposed is not None:
            raise UnsupportedStepError("proposed: ranks are not sent the distributions of proposals")
        if self._opened is not None and self._is_staged:
            self._opened.finish()
        self._tell_step(step, has_masks=masks is not None)
        shared = None if masks is None or self._is_staged else _SharedMasks(masks, self.ranks)
        try:
            computation = self.local.start(step, shared)
            if masks is not None and self._is_staged:
                self.ranks.send_to_last_stage(Masks(*masks.wait()))
        except UnsupportedStepError:
            raise
        except Exception as error:
            raise self.lost(error) from error
        if not self._is_staged or not step.num_seqs:
            self._opened = _Shared(computation, self)
            return self._opened
        staged = _Staged(computation, self, step)
        self._opened = staged.own
        if not self.overlaps:
            staged.own.finish()
        return staged

    def finish_own(self) -> None:
        """Wait for this stage's part of all that was started."""
        if self._opened is not None:
            self._opened.finish()

    def sampled_by_last_stage(self, step: StepInput) -> Sampled:
        """The tokens that the last stage has sampled, passed on to the others."""
        sampled = self.ranks.wait_sampled(step.number)
        if sampled.token_ids:
            note = Note(step.number, *_places_of(step, sampled, self.local.rows.sampling.num_prompt_tokens),
                        np.array(sampled.token_ids, np.int32))  # fmt: skip
            self.ranks.send_to_earlier_stages(note)
            self.local.note_sampled(note.number, note.rows, note.positions, note.token_ids)
        return sampled

    def write_adapter(self, slot: int, pairs: Mapping[str, Any]) -> None:
        parts = {
            module: [(each.shape, np.frombuffer(each.tobytes(), np.uint8)) for each in change if each is not None]
            for module, change in pairs.items()
        }
        self.together(WriteAdapter(slot, parts), lambda: self.local.write_adapter(slot, pairs))

    @property
    def adapters(self) -> LowRankMaps | None:
        return self.local.adapters

    def load_weights(self, source: WeightSource) -> None:
        """See `Executor`. If a rank cannot read its part, all forget theirs; ranks on other machines read their own
        folder of that name."""
        if isinstance(source, GivenArrays):
            raise RequestError("arrays cannot be sent to ranks: share them (shared_weights)", param="weights")
        try:
            self._read_together(ReadWeights(source), lambda: self.local.load_weights(source))
        except XservError:
            self.drop_loaded()
            raise

    def drop_loaded(self) -> None:
        self._change("drop", self.local.drop_loaded)

    def use_weights(self) -> None:
        self._change("use", self.local.use_weights)

    def free_memory(self, *, weights: bool) -> None:
        self._change("free_weights" if weights else "free_pages", lambda: self.local.free_memory(weights=weights))

    def keep_weights(self) -> None:
        self._change("keep", self.local.keep_weights)

    def forget_kept_weights(self) -> None:
        self._change("forget", self.local.forget_kept_weights)

    def reload_weights(self) -> None:
        self._read_together(ReloadWeights(), self.local.reload_weights)

    def allocate_pages(self) -> None:
        self._change("allocate", self.local.allocate_pages)

    def _change(self, what: MemoryChange, work: Callable[[], None]) -> None:
        self.together(ChangeMemory(what), work)

    def _read_together(self, message: ReadWeights | ReloadWeights, read: Callable[[], None]) -> None:
        """Every rank reads its part. Raises the first error of one; the ranks live on."""
        self.finish_own()
        self._tell(frame(message))
        own: XservError | None = None
        try:
            read()
        except XservError as error:
            own = error
        others = self.ranks.wait_read()
        if own is not None:
            raise own
        for each in others:
            if each.problem is not None:
                raise error_of(each.problem)

    def copy_pages(self, message: CopyPages, work: Callable[[], T]) -> tuple[T, list[bytes]]:
        """Copy blocks on all ranks; the result on this one, and the others' bytes."""
        return self.together(message, work), self._done(self.ranks.wait_copied)

    def fill_pages(self, messages: Sequence[FillPages], work: Callable[[], None]) -> None:
        """Write blocks on all ranks: each of the others gets its own message."""
        self.finish_own()
        self._check_alive()
        self.ranks.send_each([frame(each) for each in messages])
        self._done(work)

    def can_overlap(self, step: StepInput) -> bool:
        return self.local.can_overlap(step)

    def keep_layers(self, layers: tuple[int, ...], width: int, dtype: DType, *, of_last: bool) -> None:
        raise UnsupportedStepError("hidden states are not kept of a model that is split over ranks")

    auxiliary_hidden_states: AuxiliaryHiddenStates | None = None

    def record(self) -> None:
        if self.local.lacks_recording:
            self.together(Record(), self.local.record_together)

    def expect(self, seq_len: int) -> None:
        """Nothing: ranks record together, what has come."""

    def start_encoding(self, slot: int, patches: NDArray[np.uint8], grid: tuple[int, int], adapter: int = -1) -> None:
        message = StartEncoding(slot, np.ascontiguousarray(patches), grid, adapter)
        self.together(message, lambda: self.local.start_encoding(slot, patches, grid, adapter))

    def encode(self, slot: int, num_rows: int) -> Encoded:
        return self.together(Encode(slot, num_rows), lambda: self.local.encode(slot, num_rows))

    def drop_encoded(self, slot: int) -> None:
        self.together(DropEncoded(slot), lambda: self.local.drop_encoded(slot))

    def head(self, task: PoolingTask, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.local.head(task, pooled)

    def pooled(self, *_: object) -> None:
        """Ranks do not pool."""

    def pooling_pass(self, lengths: Sequence[int]) -> SidePass:
        made = self.together(StartPass(list(lengths)), lambda: self.local.pooling_pass(lengths))
        return _SharedPass(made, self)

    def logits(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return self.together(Logits(token_ids), lambda: self.local.logits(token_ids))

    def take_timed(self) -> tuple[int, float]:
        return self.local.take_timed()

    def graph_stats(self) -> GraphStats:
        return self.local.graph_stats()

    def tallies(self) -> list[Tally]:
        return self.ranks.communicator.tallies()

    def spans(self, rank: int, num_known: int) -> tuple[int, list[Span]]:
        return self.ranks.communicator.spans(rank, num_known)

    def close(self) -> None:
        self.ranks.expect_end()
        if not self.ranks.communicator.is_aborted:
            self.local.wait_for_queued(END_S)  # otherwise an abort would end running work, and the device's context
        self.ranks.communicator.abort("was closed")  # for ranks that wait for this one
        try:
            with suppress(LaunchError):  # of a GPU whose collectives were aborted
                self.local.close()
        finally:
            self.ranks.close()

    def together(self, message: ToRank, work: Callable[[], T]) -> T:
        """Do the work on all ranks, queued after the running step, whose rest the others have done by then."""
        data = frame(message)
        # Ranks that wait for this one's part of a step do not read messages.
        if self._opened is not None and (len(data) > UNREAD_BYTES or not self.local.may_be_led):
            self._opened.finish()
        self._tell(data)
        return self._done(work)

    def _done(self, work: Callable[[], T]) -> T:
        """The work's result. If it fails here, all ranks are lost."""
        try:
            return work()
        except Exception as error:
            raise self.lost(error) from error

    def _tell_step(self, step: StepInput, *, has_masks: bool) -> None:
        before, self._told = self._told, step
        self._tell(frame(step_message(step, before, has_masks=has_masks)))

    def _tell(self, data: bytearray) -> None:
        self._check_alive()
        self.ranks.send_frame(data)

    def _check_alive(self) -> None:
        if self.ranks.communicator.is_aborted:
            raise ExecutorLostError(f"the ranks have given up: {self.ranks.communicator.last_words()}")

    def lost(self, error: Exception) -> ExecutorLostError:
        """The error for all ranks after one on this rank, with the others' reasons."""
        communicator = self.ranks.communicator
        before = communicator.last_words()
        communicator.abort(f"failed: {type(error).__name__}: {error}")
        return ExecutorLostError(str(error) if not before or before in str(error) else f"{error} ({before})")


class _Shared:
    """A computation that all ranks end together."""

    def __init__(self, computation: Computation, executor: ParallelExecutor) -> None:
        self.started_s = computation.started_s
        self._computation, self._executor = computation, executor
        self._sampled: Sampled | Exception | None = None

    def result(self) -> Sampled:
        self.finish()
        assert self._sampled is not None
        if isinstance(self._sampled, Exception):
            raise self._executor.lost(self._sampled) from self._sampled
        return self._sampled

    def finish(self) -> None:
        """The result, or its error raised."""
        if self._sampled is None:
            try:
                self._sampled = self._computation.result()
            except Exception as error:
                self._sampled = error


class _Staged:
    """A computation of which this process runs the first stage."""

    def __init__(self, computation: Computation, executor: ParallelExecutor, step: StepInput) -> None:
        self.started_s = computation.started_s
        self.own = _Shared(computation, executor)
        self._executor, self._step = executor, step

    def result(self) -> Sampled:
        self._executor.finish_own()
        self.own.result()
        try:
            return self._executor.sampled_by_last_stage(self._step)
        except Exception as error:
            raise self._executor.lost(error) from error


def _places_of(
    step: StepInput, sampled: Sampled, num_prompt_tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The row of each sampled token, and its index in the row's output."""
    chunks = step.num_samples.nonzero()[0]
    rows, ends, samples = step.rows[chunks], (step.starts + step.counts)[chunks], step.num_samples[chunks]
    first = ends - samples + 1 - num_prompt_tokens[rows]
    if sampled.counts is None:
        return rows, first
    counts = np.array(sampled.counts)
    places = np.concatenate([np.arange(count) for count in sampled.counts])
    return np.repeat(rows, counts), np.repeat(first, counts) + places


class _SharedMasks:
    """See `DrawMasks`: also sent to the other ranks."""

    def __init__(self, masks: DrawMasks, ranks: RankGroup) -> None:
        self._masks, self._ranks = masks, ranks

    def wait(self) -> tuple[NDArray[np.intp], NDArray[np.uint32], list[int]]:
        batch_slots, words, failed = self._masks.wait()
        self._ranks.send(Masks(batch_slots, words, failed))
        return batch_slots, words, failed


class _SharedPass:
    """See `SidePass`."""

    def __init__(self, pooling_pass: SidePass, executor: ParallelExecutor) -> None:
        self._pooling_pass, self._executor = pooling_pass, executor

    def run(
        self, token_ids: Sequence[NDArray[np.int32]], starts: Sequence[int], pictures: PassPictures | None = None,
        types: Sequence[NDArray[np.int32] | None] = (),
    ) -> Tensor:  # fmt: skip
        message = RunPass(list(token_ids), [int(start) for start in starts], pictures, list(types))
        return self._executor.together(message, lambda: self._pooling_pass.run(token_ids, starts, pictures, types))
