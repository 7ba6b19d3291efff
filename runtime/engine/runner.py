"""One step's computation: chunks → arrays → model → sampled ids.

Everything is ragged: all tokens of all chunks in one row, no padding, a decode is a chunk of length one. What
a sequence's row holds (block table, sampling parameters) is written when it changes, so that a decode step
costs a few vectorised numpy calls whatever the context's length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import Batch
from runtime.device.device import CPU, Device
from runtime.engine.config import EngineLimits
from runtime.engine.messages import TokenLogprobs
from runtime.engine.sampler import Sampler, sample, token_logprobs
from runtime.engine.scheduler import Chunk
from runtime.engine.sequence import Sequence
from runtime.kv_cache import KVCache, KVCacheSpec
from runtime.tensor import Tensor

LOGITS_SLICE_ELEMENTS = 1 << 23
"""Most logits (float32 elements) held at once for prompt log probabilities: 32 MiB."""


class Model(Protocol):
    """What the engine needs of a model; ``models.base.Model`` is one."""

    @property
    def device(self) -> Device: ...

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec: ...

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """``[num_tokens, hidden_size]`` float32."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[n, hidden_size]`` → ``[n, vocab_size]`` float32."""
        ...


@dataclass(slots=True)
class Sampled:
    """What a step drew for one sequence. ``is_valid`` is False when its logits held NaN or allowed no
    token."""

    sequence: Sequence
    token_id: int
    is_valid: bool
    logprobs: TokenLogprobs | None


class Runner:
    """Runs steps of a model against one KV cache. Not thread-safe: it belongs to the engine's loop."""

    def __init__(self, model: Model, kv_cache: KVCache, limits: EngineLimits, vocab_size: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.limits = limits
        self.vocab_size = vocab_size
        self.sampler = Sampler(limits.max_num_seqs, vocab_size)
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self._block_tables = np.zeros((limits.max_num_seqs, max_blocks), np.int32)
        self._num_blocks = [0] * limits.max_num_seqs  # valid entries of each row of the block tables

    def load(self, sequence: Sequence) -> None:
        """Prepare the row that a sequence was just given."""
        assert sequence.row is not None
        self._num_blocks[sequence.row] = 0
        self.sampler.load(sequence.row, sequence)

    def run(self, chunks: list[Chunk]) -> list[Sampled]:
        """Compute the chunks and draw a token for each that reaches its sequence's last known token."""
        chunks.sort(key=_row)
        rows = [_row(chunk) for chunk in chunks]
        self._write_blocks(chunks, rows)
        if rows[-1] == len(rows) - 1:  # dense: no copy
            block_tables = self._block_tables[: len(rows)]
        else:
            width = max(self._num_blocks[row] for row in rows)
            block_tables = self._block_tables[:, :width].take(rows, axis=0)
        batch = lay_out(chunks, block_tables, self.limits.block_size, self.model.device)
        hidden = self.model.forward(batch, self.kv_cache)  # [num_tokens, hidden_size]
        first_row = 0
        for chunk in chunks:
            if chunk.sequence.needs_prompt_logprobs:
                self._add_prompt_logprobs(chunk, hidden, first_row)
            first_row += chunk.num_tokens
        finished = [chunk.sequence for chunk in chunks if chunk.is_last]
        return self._sample(finished, hidden, batch.logits_indices) if finished else []

    def logits(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The logits after each of ``token_ids [num_tokens]``: ``[num_tokens, vocab_size]`` float32. Uses
        pages of its own, for the time of the call."""
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
            batch = _batch(ids, starts, counts, block_table, block_size, everything, self.model.device)
            hidden = self.model.forward(batch, kv_cache)
            for first, logits in self._logits_in_slices(hidden, 0, len(ids)):
                result[start + first : start + first + logits.shape[0]] = logits.to("cpu").array
        return result

    def _write_blocks(self, chunks: list[Chunk], rows: list[int]) -> None:
        for chunk, row in zip(chunks, rows):
            block_ids = chunk.sequence.block_ids
            known = self._num_blocks[row]
            if known < len(block_ids):
                self._block_tables[row, known : len(block_ids)] = block_ids[known:]
                self._num_blocks[row] = len(block_ids)

    def _sample(self, sequences: list[Sequence], hidden: Tensor, indices: Tensor) -> list[Sampled]:
        logits = self.model.compute_logits(ops.gather_rows(hidden, indices))  # [num_logits, vocab_size]
        token_ids, ok = sample(logits, self.sampler.gather(sequences))
        drawn = [Sampled(s, i, v, None) for s, i, v in zip(sequences, token_ids.tolist(), ok.tolist())]
        wanted = [
            position
            for position, sampled in enumerate(drawn)
            if sampled.is_valid and sampled.sequence.request.params.logprobs is not None
        ]
        if wanted:
            if len(wanted) < len(drawn):
                logits = ops.gather_rows(logits, Tensor.from_numpy(np.array(wanted, np.int32)).to(logits.device))
            counts = [drawn[position].sequence.request.params.logprobs or 0 for position in wanted]
            for position, logprobs in zip(wanted, token_logprobs(logits, token_ids[wanted], counts)):
                drawn[position].logprobs = logprobs
        return drawn

    def _add_prompt_logprobs(self, chunk: Chunk, hidden: Tensor, row_start: int) -> None:
        """Append what this chunk says of the prompt: the token at position ``p + 1`` is predicted at
        ``p``."""
        request = chunk.sequence.request
        logprobs = request.prompt_logprobs
        assert logprobs is not None
        first = len(logprobs) - 1  # the position that predicts the first token without an entry
        end = min(chunk.start + chunk.num_tokens, request.num_prompt_tokens - 1)
        if first >= end:
            return  # recomputed after a preemption: known already
        offset = row_start - chunk.start
        for row, logits in self._logits_in_slices(hidden, offset + first, offset + end):
            position = row - offset
            count = logits.shape[0]
            targets = request.prompt_ids[position + 1 : position + 1 + count]
            logprobs.extend(token_logprobs(logits, targets, [request.params.prompt_logprobs or 0] * count))

    def _logits_in_slices(self, hidden: Tensor, first: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """The logits of ``hidden[first:end]``, a bounded number of rows at a time, each with its first
        row."""
        num_rows = max(1, LOGITS_SLICE_ELEMENTS // self.vocab_size)
        for row in range(first, end, num_rows):
            yield row, self.model.compute_logits(hidden[row : min(row + num_rows, end)])


def lay_out(
    chunks: list[Chunk], block_tables: NDArray[np.int32], block_size: int, device: Device = CPU
) -> Batch:
    """The ragged batch of these chunks on a device; the sequences' block tables are the rows of ``block_tables``."""
    starts = np.array([chunk.start for chunk in chunks])
    if all(chunk.is_last and chunk.num_tokens == 1 for chunk in chunks):
        token_ids = np.array([chunk.sequence.last_token_id for chunk in chunks], np.int32)
        counts = np.ones(len(chunks), np.int64)
    else:
        counts = np.array([chunk.num_tokens for chunk in chunks])
        token_ids = np.empty(int(counts.sum()), np.int32)
        offset = 0
        for chunk in chunks:
            chunk.sequence.copy_tokens(chunk.start, token_ids[offset : offset + chunk.num_tokens])
            offset += chunk.num_tokens
    ends = np.cumsum(counts)
    is_last = np.array([chunk.is_last for chunk in chunks])
    logits_indices = (ends - 1)[is_last].astype(np.int32)
    return _batch(token_ids, starts, counts, block_tables, block_size, logits_indices, device)


def _batch(
    token_ids: NDArray[np.int32],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    block_tables: NDArray[np.int32],
    block_size: int,
    logits_indices: NDArray[np.int32],
    device: Device,
) -> Batch:
    query_start = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    if len(token_ids) == len(counts):
        sequence_of_token, positions = np.arange(len(counts)), starts
    else:
        sequence_of_token = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(token_ids)) + np.repeat(starts - query_start[:-1], counts)
    block, offset = np.divmod(positions, block_size)
    slots = block_tables[sequence_of_token, block].astype(np.int64) * block_size + offset
    seq_lens = starts + counts
    arrays = (
        token_ids, positions.astype(np.int32), query_start.astype(np.int32), seq_lens.astype(np.int32), slots,
        block_tables, logits_indices,
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
        max_query_len=int(counts.max()),
        max_seq_len=int(seq_lens.max()),
    )


def _row(chunk: Chunk) -> int:
    assert chunk.sequence.row is not None
    return chunk.sequence.row
