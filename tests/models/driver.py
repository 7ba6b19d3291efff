"""Drives a model's `forward` directly, as the engine's runner would, with pages in any order and any
chunking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from models.base import Model
from runtime.batch import Batch
from runtime.dtype import DType
from runtime.kv.cache import KVCache, LayerCache
from runtime.kv.groups import NO_BLOCK
from runtime.kv.kinds import FULL, kind_of_window
from runtime.tensor.tensor import Tensor

Array = np.ndarray[Any, Any]


class ModelDriver:
    """Some sequences over one model and one KV cache; their blocks are drawn at random from a shuffled
    pool.

    `in_groups` puts layers with windows into groups of their own, whose pages behind a window are given up; the block
    that their entries name then holds NaN. `exact` is the batches', `rotary_offset`
    that of all sequences. `complete` may add to a batch whose first chunk begins at a position. With `last_alone` a
    model that `gives_last_rows` computes logits of each chunk's last token.
    """

    def __init__(
        self,
        model: Model,
        num_sequences: int = 1,
        *,
        block_size: int = 16,
        max_tokens: int = 128,
        seed: int = 0,
        kv_dtype: DType | None = None,
        in_groups: bool = False,
        exact: bool = False,
        rotary_offset: int = 0,
        complete: Callable[[Batch, int], None] | None = None,
        last_alone: bool = False,
    ) -> None:
        self.model = model
        self.last_alone = last_alone and model.gives_last_rows
        self.complete = complete
        self.rotary_offset = rotary_offset
        self.exact = exact
        self.block_size = block_size
        blocks_each = -(-max_tokens // block_size)
        spec = model.kv_cache_spec(block_size, kv_dtype)
        if in_groups:
            kinds = map(kind_of_window, model.config.layer_windows)
            layers = [
                each._replace(kind=kind) if isinstance(each, LayerCache) and each.kind == FULL else each
                for each, kind in zip(spec.layers, kinds)
            ]
            spec = replace(spec, layers=tuple(layers))
        self.kinds = spec.group_kinds
        each, pool_sizes = num_sequences * blocks_each, [5] * len(spec.block_bytes)  # some are never used
        for pool in spec.group_pools:
            pool_sizes[pool] += each
        self.kv_cache = KVCache(spec, pool_sizes)
        for planes in self.kv_cache.storages:
            for plane in planes:
                plane[NO_BLOCK : NO_BLOCK + 1] = float("nan") if plane.dtype.is_floating else 127
        rng = np.random.default_rng(seed)
        free = [rng.permutation(np.arange(NO_BLOCK + 1, size, dtype=np.int32)) for size in pool_sizes]
        first = [spec.group_pools[:group].count(pool) * each for group, pool in enumerate(spec.group_pools)]
        tables = [free[pool][start : start + each] for pool, start in zip(spec.group_pools, first)]
        self.block_tables = np.array(tables).reshape(-1, num_sequences, blocks_each)
        self.num_tokens = [0] * num_sequences  # in the cache

    def step(self, chunks: dict[int, Sequence[int]]) -> dict[int, Array]:
        """Feed each sequence its next tokens, in one batch -> its logits `[chunk, vocab_size]`, or `[1, vocab_size]`
        of last tokens alone."""
        starts = {sequence: self.num_tokens[sequence] for sequence in chunks}
        positions = {s: np.arange(starts[s], starts[s] + len(ids)) for s, ids in chunks.items()}
        for tables, kind in zip(self.block_tables, self.kinds, strict=True):
            for s, start in starts.items():
                if kind.follows_tokens:
                    tables[s, : kind.first_page(start, self.block_size)] = NO_BLOCK
                else:  # the last state is read, the next one written over the one before
                    tables[s, :2] = tables[s, 1::-1].copy()
        slots = [
            np.concatenate([
                tables[s, at // self.block_size] * np.int64(self.block_size) + at % self.block_size
                for s, at in positions.items()
            ])
            for tables in self.block_tables
        ]  # fmt: skip
        lengths = [len(ids) for ids in chunks.values()]
        for sequence, ids in chunks.items():
            self.num_tokens[sequence] += len(ids)
        seq_lens = [self.num_tokens[sequence] for sequence in chunks]
        num_tokens = sum(lengths)

        def tensor(values: Array, dtype: Any) -> Tensor:
            return Tensor.from_numpy(np.ascontiguousarray(values, dtype)).to(self.model.device)

        batch = Batch(
            token_ids=tensor(np.concatenate([np.array(ids) for ids in chunks.values()]), np.int32),
            positions=tensor(np.concatenate(list(positions.values())) + self.rotary_offset, np.int32),
            query_start=tensor(np.cumsum([0, *lengths]), np.int32),
            seq_lens=tensor(np.array(seq_lens), np.int32),
            slot_mappings=tuple(tensor(each, np.int64) for each in slots),
            block_tables=tuple(tensor(tables[list(chunks)], np.int32) for tables in self.block_tables),
            logits_indices=tensor(np.arange(num_tokens), np.int32),
            max_query_len=max(lengths),
            max_seq_len=max(seq_lens),
            exact=self.exact,
        )
        if self.complete is not None:
            self.complete(batch, next(iter(starts.values())))
        if self.last_alone:
            last = np.cumsum(lengths) - 1
            batch.is_last_wanted, batch.last_tokens = True, tensor(last, np.int32)
            batch.last_positions = tensor(batch.positions.to("cpu").numpy()[last], np.int32)
            batch.last_start = tensor(np.arange(len(last) + 1), np.int32)
            lengths = [1] * len(last)
        hidden = self.model.forward(batch, self.kv_cache)
        assert hidden.shape == (sum(lengths), self.model.config.hidden_size)
        logits = self.model.compute_logits(hidden, batch.adapters).to("cpu").numpy()
        assert logits.shape == (sum(lengths), self.model.config.vocab_size)
        assert logits.dtype == np.float32
        rows = np.split(logits, np.cumsum(lengths)[:-1])
        return dict(zip(chunks, rows, strict=True))

    def in_pieces(self, ids: Sequence[int], sizes: Sequence[int]) -> Array:
        """Feeds the first sequence all of `ids`, so many a batch -> their logits `[len(ids), vocab_size]`."""
        rows, start = [], 0
        for size in sizes:
            rows.append(self.step({0: ids[start : start + size]})[0])
            start += size
        assert start == len(ids)
        return np.concatenate(rows)


def logits_of(model: Model, ids: Sequence[int], chunk_sizes: Sequence[int] | None = None, **options: Any) -> Array:
    """Logits `[len(ids), vocab_size]` of one sequence, fed at once or in chunks of the given sizes."""
    driver = ModelDriver(model, rotary_offset=rotary_offset_of(model, len(ids)), **options)
    return driver.in_pieces(ids, chunk_sizes or [len(ids)])


def greedy(model: Model, prompt: Sequence[int], num_new_tokens: int, **options: Any) -> tuple[list[int], Array]:
    """The greedy continuation, and the logits `[num_new_tokens, vocab_size]` that each token was chosen
    from."""
    driver = ModelDriver(model, rotary_offset=rotary_offset_of(model, len(prompt)), **options)
    ids: Sequence[int] = prompt
    chosen: list[int] = []
    rows = []
    for _ in range(num_new_tokens):
        rotary_offset = rotary_offset_of(model, len(prompt) + len(chosen))
        if rotary_offset != driver.rotary_offset:  # all of it is computed again
            driver = ModelDriver(model, rotary_offset=rotary_offset, **options)
            ids = [*prompt, *chosen]
        row = driver.step({0: ids})[0][-1]
        chosen.append(int(row.argmax()))
        rows.append(row)
        ids = chosen[-1:]
    return chosen, np.stack(rows)


def rotary_offset_of(model: Model, num_tokens: int) -> int:
    """Rotary positions less places of a sequence of so many tokens."""
    return (
        model.longrope_threshold
        if model.longrope_threshold is not None and num_tokens > model.longrope_threshold
        else 0
    )


def relative_error(ours: Array, theirs: Array) -> float:
    """max|a - b| / max|b|; infinite where anything is not finite, so that NaN fails every comparison."""
    assert ours.shape == theirs.shape
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return float("inf")
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def mean_relative_error(ours: Array, theirs: Array) -> float:
    """The same of the squares' means, roots of them: |a - b| / |b|. It says what rounding does on average, where the
    largest of a few thousand differences is a matter of luck."""
    assert ours.shape == theirs.shape
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return float("inf")
    return float(np.linalg.norm(ours.astype(np.float64) - theirs) / np.linalg.norm(theirs.astype(np.float64)))
