"""One step's computation: chunks → arrays → model → sampled ids.

Everything is ragged: all tokens of all chunks in one row, no padding, a decode is a chunk of length one. What
a sequence's row holds (block table, sampling parameters) is written when it changes, so that a decode step
costs a few vectorised numpy calls whatever the context's length.

A step goes through three calls, so that the loop can overlap them: ``prepare`` lays out its arrays, which may be while
the step before it still runs, for tokens that are not known yet are left open; ``start`` fills those in and begins the
computation; ``result`` waits for what it drew. Steps of decodes alone run as graphs (``decode_graphs``), which keep
arrays of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Never, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import Batch
from runtime.device.device import Device
from runtime.engine.config import EngineLimits
from runtime.engine.grammar.matcher import MaskComputer, PendingMasks
from runtime.engine.messages import TokenLogprobs
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.scheduling.step import Chunk
from runtime.engine.steps.decode_graphs import DecodeGraphs, DecodeRun, DecodeStep
from runtime.engine.steps.ragged import BlockTables, Layout, known_tokens, lay_out
from runtime.engine.steps.sampler import Sampler, sample, token_logprobs
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.sampling_arrays import SamplingArrays
from runtime.tensor.tensor import Tensor

LOGITS_SLICE_ELEMENTS = 1 << 23
"""Most logits (float32 elements) held at once for prompt log probabilities: 32 MiB."""

_ROW = attrgetter("sequence.row")


class Model(Protocol):
    """What the engine needs of a model; ``models.base.Model`` is one."""

    @property
    def device(self) -> Device: ...

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec: ...

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """``[num_tokens, hidden_size]`` float32. By operations of ``runtime.ops`` alone: unless ``decode_graphs`` is
        "off" they may not have been done yet when they return, so that nobody may look into a tensor."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[n, hidden_size]`` → ``[n, vocab_size]`` float32."""
        ...


@dataclass(slots=True)
class Prepared:
    """A step's arrays, but for tokens that the step before it draws.

    chunks, sequences, rows  by row
    starts, counts  of each chunk: its first token and how many there are, int64
    drawing    the sequences that get a token, in the order of ``layout.logits_indices``
    drawing_rows  their rows
    decode     set where a graph runs it: then there is no layout
    masks      of its sequences' grammars, computed while the model runs; None: there are none
    broken     places in ``drawing`` whose own parameters failed
    unknown    where in ``layout.token_ids`` the last tokens of ``unknown_sequences`` belong
    started_s  when it was complete and its computation began, of ``time.monotonic()``
    """

    chunks: list[Chunk]
    sequences: list[Sequence]
    rows: list[int]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    layout: Layout | None
    drawing: list[Sequence]
    drawing_rows: NDArray[np.intp]
    unknown: NDArray[np.intp] | slice | None
    unknown_sequences: list[Sequence]
    decode: DecodeStep | None = None
    masks: PendingMasks | None = None
    broken: list[int] = field(default_factory=list)
    started_s: float = 0.0


@dataclass(slots=True)
class Drawn:
    """What a step drew, by columns.

    is_valid         False where a sequence's logits held NaN or allowed no token, or its parameters failed
    broken           places of the latter
    logprobs         None where none were asked for; None: nobody asked
    prompt_logprobs  what the step says of the prompts of requests that asked, to be appended to theirs
    """

    sequences: list[Sequence]
    token_ids: list[int]
    is_valid: list[bool]
    logprobs: list[TokenLogprobs | None] | None
    prompt_logprobs: list[tuple[Request, list[TokenLogprobs]]]
    broken: list[int] = field(default_factory=list)


class Computation(Protocol):
    """A step under way."""

    def result(self) -> Drawn:
        """Waits for it. Raises what the model raised."""
        ...


class _Later:
    """A computation whose second half runs when its result is asked for."""

    def __init__(self, compute: Callable[[], Drawn]) -> None:
        self.result = compute


@dataclass(frozen=True, slots=True)
class _PromptSpan:
    """Rows ``first:end`` of the step's tokens tell of a request's prompt after ``position``."""

    request: Request
    first: int
    end: int
    position: int


class Runner:
    """Runs steps of a model against one KV cache. Not thread-safe: it belongs to the engine's loop.

    With ``overlaps``, ``start`` returns while the step runs: on the cpu in a thread of the runner's own, on a GPU in
    its stream. Then one step may be prepared while another runs.
    """

    def __init__(
        self, model: Model, kv_cache: KVCache, limits: EngineLimits, vocab_size: int, *, overlaps: bool = False
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.limits = limits
        self.vocab_size = vocab_size
        self.sampler = Sampler(limits.max_num_seqs, vocab_size)
        self._masks = MaskComputer()
        self._overlaps = overlaps
        self._worker: ThreadPoolExecutor | None = None
        if overlaps and model.device.kind == "cpu":
            self._worker = ThreadPoolExecutor(1, "xserv-step")
        self.graphs: DecodeGraphs | None = None
        if limits.decode_graphs != "off":
            self.graphs = DecodeGraphs(model, kv_cache, limits, self.sampler)
        max_blocks = -(-limits.max_model_len // limits.block_size)
        # A batch on the cpu reads its block tables in place: the step that is prepared meanwhile writes to others.
        self._tables = [
            BlockTables(limits.max_num_seqs, max_blocks) for _ in range(1 if self._worker is None else 2)
        ]
        self._num_prepared = 0
        self._ones = np.ones(limits.max_num_seqs, np.int64)
        self._numbers = np.arange(limits.max_num_seqs, dtype=np.int32)
        self._wants_prompt_logprobs = np.zeros(limits.max_num_seqs, np.bool_)

    def load(self, sequence: Sequence) -> None:
        """Prepare the row that a sequence was just given."""
        row = sequence.row
        assert row is not None
        for tables in self._tables:
            tables.num_blocks[row] = 0
        self._wants_prompt_logprobs[row] = sequence.needs_prompt_logprobs
        self.sampler.load(row, sequence)
        if self.graphs is not None:
            self.graphs.load(row, sequence)

    def prepare(self, chunks: list[Chunk]) -> Prepared:
        """Lay out a step, at least one chunk, whose sequences have been loaded."""
        chunks = sorted(chunks, key=_ROW)
        sequences = [chunk.sequence for chunk in chunks]
        rows: list[int] = [sequence.row for sequence in sequences]  # type: ignore[misc]  # all of them run
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        lengths = [chunk.num_tokens for chunk in chunks]
        is_last = [chunk.is_last for chunk in chunks]
        drawing, drawing_rows = sequences, np.array(rows, np.intp)
        num_tokens = sum(lengths)
        are_decodes = num_tokens == len(chunks) and all(is_last)
        if are_decodes and self.graphs is not None:
            decode = self.graphs.prepare(sequences, rows, starts)
            if decode is not None:
                counts = self._ones[:num_tokens]
                return Prepared(
                    chunks, sequences, rows, starts, counts, None, drawing, drawing_rows, None, [], decode
                )
        tables = self._tables[self._num_prepared % len(self._tables)]
        self._num_prepared += 1
        unknown: NDArray[np.intp] | slice | None
        if are_decodes:
            token_ids, counts = np.empty(num_tokens, np.int32), self._ones[:num_tokens]
            unknown, unknown_sequences = slice(None), drawing
            logits_indices = self._numbers[:num_tokens]
        else:
            counts = np.array(lengths, np.int64)
            token_ids, unknown, unknown_sequences = known_tokens(chunks, num_tokens)
            flags = np.array(is_last)
            logits_indices = (np.cumsum(counts) - 1)[flags].astype(np.int32)
            drawing = [sequence for sequence, draws in zip(sequences, is_last) if draws]
            drawing_rows = drawing_rows[flags]
        layout = lay_out(
            token_ids, starts, counts, tables.of(sequences, rows), self.limits.block_size, logits_indices
        )
        return Prepared(
            chunks, sequences, rows, starts, counts, layout, drawing, drawing_rows, unknown, unknown_sequences
        )

    def start(self, step: Prepared) -> Computation:
        """Begin a prepared step; the one before it is over and its tokens are appended, unless this one `can_lead`."""
        try:
            if step.decode is not None:
                assert self.graphs is not None
                step.started_s = time.monotonic()
                run = self.graphs.start(step.decode, step.sequences)
                if self._worker is not None:
                    return self._worker.submit(self._drawn_by_graph, step, run)
                return _Later(partial(self._drawn_by_graph, step, run))
            assert step.layout is not None
            if step.unknown is not None:
                step.layout.token_ids[step.unknown] = [sequence.last_token_id for sequence in step.unknown_sequences]
            arrays, step.broken = self.sampler.gather_sound(step.drawing, step.drawing_rows)
            if arrays.allowed_mask is not None:
                step.masks = self._masks.start(step.drawing)
            spans = self._prompt_spans(step) if self._wants_prompt_logprobs[step.rows].any() else []
            step.started_s = time.monotonic()
            if self._worker is not None:
                return self._worker.submit(self._compute, step, arrays, spans)
            if not self._overlaps:
                return _Later(partial(self._compute, step, arrays, spans))
            hidden, logits = self._forward(step)
        except Exception as error:  # as if it had come a moment later
            step.started_s = time.monotonic()
            return _Later(partial(_raise, error))
        return _Later(partial(self._draw, step, hidden, logits, arrays, spans))

    def can_lead(self, step: Prepared) -> bool:
        """Whether a prepared step may be started while the one before it runs."""
        return step.decode is not None and self.graphs is not None and self.graphs.can_lead(step.decode)

    def record_graph(self) -> None:
        """Record the decode graph that a step was without, if there is one; to be called between two steps."""
        if self.graphs is not None:
            self.graphs.record()

    def synchronize(self) -> None:
        """Wait until no step runs."""
        if self._worker is not None:
            self._worker.submit(int).result()

    def close(self) -> None:
        """Wait until no step runs, and run none any more."""
        if self._worker is not None:
            self._worker.shutdown()
        self._masks.close()
        if self.graphs is not None:
            self.graphs.release()

    def logits(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The logits after each of ``token_ids [num_tokens]``: ``[num_tokens, vocab_size]`` float32. Uses
        pages of its own, for the time of the call."""
        self.synchronize()
        block_size, num_tokens = self.limits.block_size, len(token_ids)
        num_blocks = -(-num_tokens // block_size)
        spec = self.model.kv_cache_spec(block_size)
        kv_cache = KVCache(spec, num_blocks)
        block_table = np.arange(num_blocks, dtype=np.int32)[None]
        result = np.empty((num_tokens, self.vocab_size), np.float32)
        step = self.limits.max_num_batched_tokens
        for start in range(0, num_tokens, step):
            ids = token_ids[start : start + step]
            starts, counts = np.array([start]), np.array([len(ids)])
            everything = np.arange(len(ids), dtype=np.int32)
            layout = lay_out(ids, starts, counts, block_table, block_size, everything)
            hidden = self.model.forward(layout.batch(self.model.device, exact=self.limits.exact), kv_cache)
            for first, logits in self._logits_in_slices(hidden, 0, len(ids)):
                result[start + first : start + first + logits.shape[0]] = logits.to("cpu").array
        return result

    def _compute(self, step: Prepared, arrays: SamplingArrays, spans: list[_PromptSpan]) -> Drawn:
        return self._draw(step, *self._forward(step), arrays, spans)

    def _forward(self, step: Prepared) -> tuple[Tensor, Tensor | None]:
        """``hidden [num_tokens, hidden_size]`` and ``logits [num_logits, vocab_size]``; on a GPU both on their way."""
        assert step.layout is not None
        if self.graphs is not None and (found := self.graphs.run_forward(step.layout, self._run_model)) is not None:
            return found
        return self._run_model(step.layout.batch(self.model.device, exact=self.limits.exact))

    def _run_model(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        hidden = self.model.forward(batch, self.kv_cache)
        if not batch.logits_indices.shape[0]:
            return hidden, None
        return hidden, self.model.compute_logits(ops.gather_rows(hidden, batch.logits_indices))

    def _draw(
        self, step: Prepared, hidden: Tensor, logits: Tensor | None, arrays: SamplingArrays, spans: list[_PromptSpan]
    ) -> Drawn:
        prompt_logprobs = [(span.request, self._prompt_logprobs(hidden, span)) for span in spans]
        if logits is None:
            return Drawn([], [], [], None, prompt_logprobs)
        failed = [] if step.masks is None else step.masks.apply(arrays)
        token_ids, ok = sample(logits, arrays)
        is_valid = ok.tolist()
        for place in (*failed, *step.broken):
            is_valid[place] = False
        logprobs = self._logprobs(step.drawing, token_ids, is_valid, logits)
        return Drawn(step.drawing, token_ids.tolist(), is_valid, logprobs, prompt_logprobs, step.broken)

    def _drawn_by_graph(self, step: Prepared, run: DecodeRun) -> Drawn:
        token_ids, is_valid = run.wait()
        logprobs = None
        if run.logits is not None:
            logprobs = self._logprobs(step.drawing, np.array(token_ids, np.int32), is_valid, run.logits, run.places)
        return Drawn(step.drawing, token_ids, is_valid, logprobs, [])

    def _logprobs(
        self,
        sequences: list[Sequence],
        token_ids: NDArray[np.int32],
        is_valid: list[bool],
        logits: Tensor,
        places: NDArray[np.intp] | None = None,
    ) -> list[TokenLogprobs | None] | None:
        """``places``: the rows of the logits that are the sequences', unless all are, in order."""
        counts = [sequence.request.params.logprobs for sequence in sequences]
        wanted = [i for i, count in enumerate(counts) if count is not None and is_valid[i]]
        if not wanted:
            return None
        if places is not None or len(wanted) < len(sequences):
            rows = np.array(wanted) if places is None else places[wanted]
            logits = ops.gather_rows(logits, Tensor.from_numpy(rows.astype(np.int32)).to(logits.device))
        found = token_logprobs(logits, token_ids[wanted], [counts[i] or 0 for i in wanted])
        logprobs: list[TokenLogprobs | None] = [None] * len(sequences)
        for i, entry in zip(wanted, found):
            logprobs[i] = entry
        return logprobs

    def _prompt_spans(self, step: Prepared) -> list[_PromptSpan]:
        """What this step can tell of prompts: the token at position ``p + 1`` is predicted at ``p``."""
        spans = []
        first_row = 0
        for chunk in step.chunks:
            request = chunk.sequence.request
            if chunk.sequence.needs_prompt_logprobs:
                assert request.prompt_logprobs is not None
                first = len(request.prompt_logprobs) - 1  # the position that predicts the first token without an entry
                end = min(chunk.start + chunk.num_tokens, request.num_prompt_tokens - 1)
                if first < end:  # else recomputed after a preemption: known already
                    offset = first_row - chunk.start
                    spans.append(_PromptSpan(request, offset + first, offset + end, first))
            first_row += chunk.num_tokens
        return spans

    def _prompt_logprobs(self, hidden: Tensor, span: _PromptSpan) -> list[TokenLogprobs]:
        request, entries = span.request, []
        for row, logits in self._logits_in_slices(hidden, span.first, span.end):
            position, count = span.position + row - span.first, logits.shape[0]
            targets = request.prompt_ids[position + 1 : position + 1 + count]
            entries += token_logprobs(logits, targets, [request.params.prompt_logprobs or 0] * count)
        return entries

    def _logits_in_slices(self, hidden: Tensor, first: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """The logits of ``hidden[first:end]``, a bounded number of rows at a time, each with its first
        row."""
        num_rows = max(1, LOGITS_SLICE_ELEMENTS // self.vocab_size)
        for row in range(first, end, num_rows):
            yield row, self.model.compute_logits(hidden[row : min(row + num_rows, end)])


def _raise(error: Exception) -> Never:
    raise error
