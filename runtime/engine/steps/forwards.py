"""Recordings of forward passes that decode graphs do not cover, with the samples after them, by the shape of the step.

While a long prompt is computed in chunks beside decodes, step after step has the same shape; so have decodes that
decode graphs do not cover. Launching a pass from Python can take longer than the device needs for a few hundred tokens.

On the CPU recording a pass takes no longer than launching it, so each shape is recorded when it first comes. On a GPU a
recording costs two to three times a pass's launches (Qwen3-8B on an H200, before launches became cheaper: 16 to 20 ms,
recorded 36 to 60). So a shape is recorded when it comes again, and only if the GPU waited for its launches: 256 tokens
took 22 ms and replayed 8, but 2,048 took 46 and replayed 46. That is measured when the shape first comes, except on an
emulated device, whose times mean nothing, and whose shapes are recorded. So are those of steps with drafts: they recur,
and nothing else runs while one is launched.

A recording plans attention for the batch's own longest chunk, and for sequences up to a round length: the plans, and so
the bits, are those of the eager pass.

On a GPU steps with drafts are padded to few shapes: 2, 4 or 8 tokens for each of as many sequences as decode graphs
have places. The padding consists of empty sequences, whose results are not stored and whose samples are ignored.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from runtime import ops
from runtime.batch import Batch
from runtime.dtype import int32
from runtime.engine.limits import EngineLimits
from runtime.engine.steps.inputs import MOST_LISTED, Inputs, SamplingShape, Shape, StepMemory, room_for, shape_of
from runtime.engine.steps.layout import StepLayout
from runtime.engine.steps.recorder import (
    Agree,
    Computed,
    Forward,
    Recorder,
    Recording,
    Recordings,
    Stopwatch,
    alone,
)
from runtime.kv.cache import KVCache
from runtime.sampling_arrays import SamplingArrays
from runtime.tensor.tensor import Tensor

T = TypeVar("T")

NUM_REMEMBERED = 1024
"""Shapes that came and were not recorded; the oldest is dropped first."""
WAITING = 1.25
"""The GPU waits for launches if it takes at most so many times as long as they do."""
_FEW_TOKENS = 16
"""A prompt's last chunk, after the end of a turn or a page, has at most so many; such passes recur."""
_WIDTHS = (2, 4, 8)
"""Tokens of a sequence in a step with drafts; attention over few queries takes up to eight at one's cost."""


@dataclass(slots=True, eq=False)
class _Recorded:
    """A recording, its inputs, and the room of its samples."""

    recording: Recording
    inputs: Inputs

    def release(self) -> None:
        self.recording.release()


class ForwardRecordings:
    """Recordings of one model's forward passes, with shared inputs and memory. On a GPU it belongs to the engine's
    loop, on a CPU to the thread that runs steps. Ranks record at the same time; if one of them fails none records any
    more.

    num_steps       steps run from them
    recordings      by shape; on a GPU each failed one is tried once more, then no more are made
    looks_at_times  whether a shape is recorded only if the device waited for its launches
    """

    def __init__(self, recorder: Recorder, limits: EngineLimits, kv_cache: KVCache, agree: Agree = alone) -> None:
        self.num_steps = 0
        self._agree = agree
        self._recorder = recorder
        self._limits = limits
        self._kv_cache = kv_cache
        self._is_cpu = recorder.device.kind == "cpu"
        self._batch_sizes = recorder.batch_sizes(limits.max_num_seqs)
        self._lengths = recorder.pass_lengths(limits.max_model_len, exact=limits.exact)
        tokens, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        # Some policies compute a prompt whole on a CPU; on a GPU steps with drafts are padded.
        tokens = max(tokens, limits.max_model_len if self._is_cpu else _WIDTHS[-1] * seqs)
        samples = SamplingShape(tokens, MOST_LISTED, True, True)
        self._most = Shape(
            tokens, seqs if self._is_cpu else 2 * seqs, tokens, tokens, limits.max_model_len, samples, True,
            has_adapters=True,
        )  # fmt: skip
        self._memory: StepMemory | None = None  # with the first recording
        self.recordings: Recordings[Shape, _Recorded] = Recordings(recorder.most_kept)
        self._seen: dict[Shape, Stopwatch | None] = {}  # None if it kept the GPU busy
        self.looks_at_times = recorder.device.kind == "cuda"
        self._latest_few: tuple[Shape, StepLayout, Forward, SamplingArrays | None] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes on the device, for the inputs and what recordings hold."""
        inputs = 0 if self._memory is None or self._is_cpu else self._memory.size_bytes
        return inputs + self._recorder.size_bytes

    def run(
        self,
        layout: StepLayout,
        forward: Forward,
        samples: SamplingArrays | None = None,
        *,
        may_record: bool,
        passed: Callable[[int], None] | None = None,
    ) -> Computed:
        """The result of ``forward``, always the same function, for the batch, and samples from its logits by
        ``samples``, which have no mask, if it is replayed and has room for them. It may still be running, and is
        valid until the next run. With ``may_record`` it may be recorded on the way. ``passed`` is called with each
        layer that begins (`KVCache.followed_by`), but on a GPU not for a recording.

        Raises CaptureError, before any work, if the device can record nothing of the model; LaunchError if it is lost;
        and what ``forward`` raises.
        """
        if samples is not None and (not layout.num_logits or room_for(samples) > MOST_LISTED):
            samples = None
        shape = self._shape_of(layout, samples)
        found = self.recordings.take(shape)
        if found is not None:
            self._write(found, layout, samples)
        elif may_record and self._is_worth_recording(shape):
            found = self._record(shape, layout, forward, samples)
        if found is not None and self._is_cpu and shape.num_tokens <= _FEW_TOKENS:
            self._latest_few = shape, layout, forward, samples
        if found is None:
            batch = layout.batch(self._recorder.device, exact=self._limits.exact)
            with self._kv_cache.followed_by(passed):
                return self._run_timed(shape, batch, forward) if may_record else forward(batch)
        self._recorder.replay(found.recording, passed)
        self.num_steps += 1
        left = cast(Computed, found.recording.result)
        if left.logits is None or left.logits.shape[0] == layout.num_logits:
            return left
        return left._replace(logits=left.logits[: layout.num_logits])

    def expect(self, seq_len: int) -> None:
        """Record the latest pass of few tokens for sequences of this length, too, if it was for shorter ones. On a CPU,
        where nothing runs meanwhile: the first step of a long prompt that was read back then costs what others do."""
        if self._latest_few is None or self.recordings.has_given_up:
            return
        shape, layout, forward, samples = self._latest_few
        longer = shape._replace(max_seq_len=self._lengths[bisect_left(self._lengths, seq_len)])
        if longer.max_seq_len > shape.max_seq_len and longer not in self.recordings.kept:
            self._record(longer, layout, forward, samples)

    def release(self) -> None:
        """Free the memory; nothing is run any more."""
        self.recordings.has_given_up, self._latest_few = True, None
        self.recordings.clear()
        self._recorder.release()
        self._memory = None

    def _shape_of(self, layout: StepLayout, samples: SamplingArrays | None) -> Shape:
        """On a GPU steps of decodes with drafts are padded to one of few shapes, with as many empty sequences after the
        given ones as the remaining tokens may need."""
        length = self._lengths[bisect_left(self._lengths, layout.max_seq_len)]
        num_tokens, num_seqs, num_logits = layout.num_tokens, layout.num_seqs, layout.num_logits
        if self._is_cpu:  # its kernels see for themselves how long a chunk is, and whether there are penalties
            longest = num_tokens - num_seqs + 1
            room = None if samples is None else SamplingShape(num_logits, MOST_LISTED, True, samples.has_chains)
        else:
            longest = layout.max_query_len
            if samples is not None and 1 < longest <= _WIDTHS[-1] and num_logits == num_tokens:
                batch_slots = self._batch_sizes[bisect_left(self._batch_sizes, num_seqs)]
                longest = _WIDTHS[bisect_left(_WIDTHS, longest)]
                num_tokens = num_logits = batch_slots * longest
                num_seqs = 2 * batch_slots
            room = None if samples is None else shape_of(samples, num_logits)
        return Shape(
            num_tokens, num_seqs, num_logits, longest, length, room, layout.is_last_wanted, layout.long_chunks,
            layout.has_adapters,
        )  # fmt: skip

    def _run_timed(self, shape: Shape, batch: Batch, forward: Forward) -> Computed:
        """Run eagerly. The time of a new shape that could be recorded is remembered."""
        has_room = shape.num_tokens <= self._most.num_tokens and shape.num_seqs <= self._most.num_seqs
        is_new = not self.recordings.has_given_up and has_room and shape not in self._seen
        stopwatch = self._recorder.stopwatch() if is_new else None
        if stopwatch is None:
            return forward(batch)
        computed = forward(batch)
        stopwatch.stop()
        self._seen[shape] = stopwatch
        if len(self._seen) > NUM_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return computed

    def _is_worth_recording(self, shape: Shape) -> bool:
        """On a CPU always. On a GPU if the shape came before, and the GPU waited for its launches, or it is one of few.
        Ranks agree, since they get the same shapes."""
        if self._is_cpu:
            return True
        before = self._seen.get(shape)
        if before is None or self.recordings.has_given_up:
            return False
        has_drafts = (
            shape.samples is not None and shape.num_logits == shape.num_tokens and shape.max_query_len in _WIDTHS
        )
        if self._agree(not self.looks_at_times or has_drafts or before.waited(WAITING)):
            del self._seen[shape]
            return True
        if self._agree is not alone or before.is_over:
            self._seen[shape] = None
        return False

    def _write(self, recorded: _Recorded, layout: StepLayout, samples: SamplingArrays | None) -> None:
        assert self._memory is not None
        self._memory.write(recorded.inputs, layout, samples)

    def _record(
        self, shape: Shape, layout: StepLayout, forward: Forward, samples: SamplingArrays | None
    ) -> _Recorded | None:
        """Returns None if it fails: then only pages that the step writes anyway have changed. Ranks agree before the
        work first runs, in which they meet, and on the outcome."""
        inputs = self._tried(lambda: self._inputs(shape))
        if not self._agreed(inputs is not None):
            return None
        assert inputs is not None
        assert self._memory is not None
        self._memory.write(inputs, layout, samples)
        recorder, results = self._recorder, None
        if self._is_cpu and shape.samples is not None:
            results = Tensor.zeros(shape.samples.num_results, int32)

        def work() -> Computed:
            inputs.batch.computed.clear()
            with self._kv_cache.followed_by(recorder.mark):
                computed, sampled = forward(inputs.batch), None
            if shape.samples is not None and computed.logits is not None:
                sampled = results
                if sampled is None:
                    sampled = Tensor.empty((shape.samples.num_results,), int32, recorder.device)
                ops.sample_into(
                    computed.logits, inputs.fields, sampled, has_penalties=shape.samples.has_penalties,
                    has_chains=shape.samples.has_chains,
                )  # fmt: skip
            hidden, logits = (None if each is None else recorder.outlive(each) for each in computed[:2])
            return Computed(hidden, logits, sampled, tuple(map(recorder.outlive, computed.kept)))

        recording = self._tried(lambda: recorder.record(work))
        if not self._agreed(recording is not None):
            if recording is not None:
                recording.release()
            return None
        assert recording is not None
        found = _Recorded(recording, inputs)
        self.recordings.add(shape, found)
        return found

    def _inputs(self, shape: Shape) -> Inputs:
        if self._memory is None:
            self._memory = StepMemory(self._recorder, self._limits, self._kv_cache, self._most)
        return self._memory.inputs(shape)

    def _tried(self, work: Callable[[], T]) -> T | None:
        """On a CPU the first failure is final, for decodes as well: it raises CaptureError."""
        if self._is_cpu:
            return work()
        held = f"{len(self.recordings.kept)} recordings hold {self.size_bytes:,} bytes"
        return self.recordings.tried(
            work,
            f"the memory of recorded steps is not to be had, {held}",
            is_last=self.recordings.num_failed > 0,
            cannot=f"steps with prompts cannot be recorded, {held}",
        )

    def _agreed(self, is_so: bool) -> bool:
        """Whether it is so on all ranks; if not, several ranks give up."""
        if self._is_cpu or self._agree(is_so):
            return True
        self.recordings.has_given_up = self.recordings.has_given_up or self._agree is not alone
        return False
