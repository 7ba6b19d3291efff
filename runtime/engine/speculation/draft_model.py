"""Speculation by a small draft model with the same vocabulary.

It runs between two steps, for all sequences of the next one in batch: first over the tokens that it has not seen, then
token by token. It samples as the target model will, with the same noise of seed, choice and position, so that equal
distributions give equal tokens at any temperature. For rejection sampling it uses its own noise and keeps the
distributions. It has its own pages; if there are too few, the sequence that was drafted for least recently loses its
pages, which are recomputed if it is drafted for again.

A sequence has three pages of a recurrent state: one of its known tokens, and two that guesses write in turn. So a guess
changes nothing, and those that were right are computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cpu.sampling import GREEDY_BELOW
from runtime import ops
from runtime.engine.limits import EngineLimits
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import Ids, arrays_ahead, prepared
from runtime.engine.steps.executor import Model
from runtime.engine.steps.layout import BlockTables, lay_out
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor

MOST_STATES = 8
"""Sequences whose recurrent states it keeps at once."""
PAGES_OF_STATE = 3

_OWN_NOISE = np.uint64(0x9E3779B97F4A7C15)
"""Makes another key of a seed, whose noise is independent of the seed's own."""


@dataclass(slots=True, eq=False)
class _Seen:
    """The draft model's state of a sequence.

    row      its row in the block tables
    known    tokens of the sequence whose keys and values are in the pages
    guessed  the draft tokens whose keys and values follow these
    blocks   by cache group; of a state's group that of the known tokens, then the two others
    """

    row: int
    rotary_offset: int
    blocks: list[list[int]]
    known: int = 0
    guessed: list[int] = field(default_factory=list)


class DraftModelDrafter:
    """See `BatchDrafter`. Belongs to the engine's loop.

    model          the draft model, on the engine's device
    num_positions  most tokens of a sequence that it drafts for
    num_blocks     of its pages in each cache group
    rejects        whether to use rejection sampling, for random samples without a grammar that may cut drafts
    """

    name = "draft"

    def __init__(self, model: Model, num_positions: int, longrope_threshold: int | None, limits: EngineLimits,
                 num_blocks: int, *, rejects: bool = False) -> None:  # fmt: skip
        spec = model.kv_cache_spec(limits.block_size)
        self._model = model
        self._limits = limits
        self._num_positions = num_positions
        self._longrope_threshold = longrope_threshold
        self._kinds = spec.group_kinds
        self._states = [group for group, kind in enumerate(self._kinds) if not kind.follows_tokens]
        self._pools = spec.group_pools
        num_states = PAGES_OF_STATE * min(MOST_STATES, limits.max_num_seqs)
        sizes = [0] * len(spec.block_bytes)
        for pool, kind in zip(self._pools, self._kinds, strict=True):
            sizes[pool] += num_blocks if kind.follows_tokens else num_states
        self._pages = KVCache(spec, sizes)
        self._free_blocks = [list(range(size - 1, -1, -1)) for size in sizes]  # by pool
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        max_blocks = max(2, -(-limits.max_model_len // limits.block_size))
        self._tables = BlockTables(len(self._kinds), limits.max_num_seqs, max_blocks, limits.block_size)
        self._seen: dict[Sequence, _Seen] = {}  # most recently drafted for last
        self._proposed: dict[Sequence, list[int]] = {}
        self._rejects = rejects
        self._distributions: dict[Sequence, list[NDArray[np.float32]]] = {}  # of these draft tokens
        self.num_blocks = sum(sizes)

    @property
    def num_free_blocks(self) -> int:
        return sum(map(len, self._free_blocks))

    def prepare(self, asked: list[tuple[Sequence, int]]) -> None:
        """See `BatchDrafter`. It computes a long prompt one step's worth at a time, and proposes at its end."""
        self._proposed, self._distributions = {}, {}
        room, keep = self._limits.max_num_batched_tokens, {sequence for sequence, _ in asked}
        ready: list[tuple[Sequence, _Seen, int]] = []  # with the draft length
        chunks: dict[_Seen, Ids] = {}
        for sequence, most in asked:
            most = min(most, self._num_positions - sequence.num_tokens)
            if sequence.request.pictures is not None or most < 1 or room < 1:
                continue
            seen = self._recall(sequence, keep)
            if seen is None:
                continue
            count = min(room, sequence.num_tokens - seen.known)
            end = seen.known + count
            is_ready = end == sequence.num_tokens
            if not self._allocate(seen, end + (most - 1 if is_ready else 0), keep):
                continue
            chunks[seen] = np.asarray(sequence.token_ids(seen.known, end), np.int32)
            room -= count
            if is_ready:
                ready.append((sequence, seen, most))
        if not chunks:
            return
        ready.sort(key=lambda one: one[1].row)
        self._turn_states(chunks)
        logits = self._forward(chunks, {seen: seen.known for seen in chunks}, [seen for _, seen, _ in ready])
        for seen, ids in chunks.items():
            seen.known += len(ids)
            for group in self._states:
                blocks = seen.blocks[group]
                blocks.append(blocks.pop(0))  # the second has the state of the known tokens
        self._proposed = {sequence: [] for sequence, _, _ in ready}
        while ready and logits is not None:
            sampled = self._draw(logits, [sequence for sequence, _, _ in ready])
            for (sequence, _, _), token_id in zip(ready, sampled):
                if token_id >= 0:
                    self._proposed[sequence].append(token_id)
            ready = [
                one for one, token_id in zip(ready, sampled) if token_id >= 0 and len(self._proposed[one[0]]) < one[2]
            ]
            if not ready:
                break
            newest = {seen: np.array(self._proposed[sequence][-1:], np.int32) for sequence, seen, _ in ready}
            starts = {seen: seen.known + len(seen.guessed) for _, seen, _ in ready}
            self._turn_states(newest)
            logits = self._forward(newest, starts, list(newest))
            for seen, ids in newest.items():
                seen.guessed.append(int(ids[0]))

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        return prepared(self._proposed, sequence, most)

    def distributions(self, sequence: Sequence, count: int) -> NDArray[np.float32] | None:
        known = self._distributions.get(sequence)
        return None if known is None else np.stack(known[:count])

    def end(self, sequence: Sequence) -> None:
        self._proposed.pop(sequence, None)
        self._distributions.pop(sequence, None)
        seen = self._seen.pop(sequence, None)
        if seen is not None:
            for pool, blocks in zip(self._pools, seen.blocks, strict=True):
                self._free_blocks[pool] += blocks
            self._tables.clear(seen.row)
            self._free_rows.append(seen.row)

    def _recall(self, sequence: Sequence, keep: set[Sequence]) -> _Seen | None:
        """The sequence's state, without rejected guesses; None if there is no row."""
        seen = self._seen.pop(sequence, None)
        if seen is None:
            if not self._free_rows and not self._forget_oldest(keep):
                return None
            switch = self._longrope_threshold
            length = sequence.num_prompt_tokens + sequence.max_tokens
            offset = switch if switch is not None and length > switch else 0
            seen = _Seen(self._free_rows.pop(), offset, [[] for _ in self._kinds])
        self._seen[sequence] = seen
        if seen.guessed and not self._states:
            came = sequence.token_ids(seen.known, min(sequence.num_tokens - 1, seen.known + len(seen.guessed)))
            for guess, token_id in zip(seen.guessed, came):
                if guess != token_id:
                    break
                seen.known += 1
        seen.guessed = []
        if seen.known >= sequence.num_tokens:  # the last token's logits are needed
            seen.known = 0 if self._states else sequence.num_tokens - 1
        return seen

    def _allocate(self, seen: _Seen, num_tokens: int, keep: set[Sequence]) -> bool:
        """Allocate pages for so many tokens, if there are enough outside ``keep``."""
        num_pages, missing = -(-num_tokens // self._limits.block_size), [0] * len(self._free_blocks)
        counts = [
            max(0, (num_pages if kind.follows_tokens else PAGES_OF_STATE) - len(blocks))
            for kind, blocks in zip(self._kinds, seen.blocks, strict=True)
        ]
        for pool, count in zip(self._pools, counts, strict=True):
            missing[pool] += count
        while any(count > len(free) for count, free in zip(missing, self._free_blocks, strict=True)):
            if not self._forget_oldest(keep):
                return False
        for group, (blocks, count) in enumerate(zip(seen.blocks, counts, strict=True)):
            added = [self._free_blocks[self._pools[group]].pop() for _ in range(count)]
            if self._kinds[group].follows_tokens and added:
                self._tables.add(group, seen.row, len(blocks), added)
            blocks += added
        return True

    def _turn_states(self, computed: Iterable[_Seen]) -> None:
        """Chunks of known tokens, and the first guess, read the state of the known tokens, later guesses that of the
        guess before."""
        for seen in computed if self._states else ():
            place = len(seen.guessed) % 2
            for group in self._states:
                blocks = seen.blocks[group]
                read = blocks[2 - place] if seen.guessed else blocks[0]
                self._tables.add(group, seen.row, 0, [blocks[1 + place], read])

    def _forget_oldest(self, keep: set[Sequence]) -> bool:
        """Free the pages of the sequence that was drafted for least recently; False if there is none."""
        oldest = next((sequence for sequence in self._seen if sequence not in keep), None)
        if oldest is not None:
            self.end(oldest)
        return oldest is not None

    def _forward(
        self, chunks: dict[_Seen, Ids], starts: dict[_Seen, int], sampling_sequences: list[_Seen]
    ) -> Tensor | None:
        """The logits after the chunks of ``drawing``, whose rows ascend; None if it is empty."""
        order = sorted(chunks, key=lambda seen: seen.row)
        counts = np.array([len(chunks[seen]) for seen in order])
        ends = dict(zip(order, np.cumsum(counts).tolist()))
        indices = np.array([ends[seen] - 1 for seen in sampling_sequences], np.int32)
        layout = lay_out(
            np.concatenate([chunks[seen] for seen in order]),
            np.array([seen.row for seen in order]),
            np.array([starts[seen] for seen in order]),
            counts,
            self._tables,
            indices,
            np.array([seen.rotary_offset for seen in order], np.int64),
        )
        batch = layout.batch(self._model.device, exact=self._limits.exact)
        hidden = self._model.forward(batch, self._pages)
        if not sampling_sequences:
            return None
        return self._model.compute_logits(ops.gather_rows(hidden, batch.logits_indices))

    def _draw(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """The next token of each, sampled with the noise that the target model will use there; -1 if there is none."""
        arrays = arrays_ahead(sequences, [len(self._proposed[sequence]) for sequence in sequences])
        apart = [i for i, sequence in enumerate(sequences) if self._rejects and _is_sampled(sequence)]
        arrays.seed[apart] ^= _OWN_NOISE
        token_ids: list[int] = ops.sample(logits, arrays).token_ids.tolist()
        if apart:
            rows = Tensor.from_numpy(np.array(apart, np.int32)).to(logits.device)
            found = ops.distributions(ops.gather_rows(logits, rows), arrays.at(np.array(apart)))
            for i, probabilities in zip(apart, found):
                if token_ids[i] >= 0:
                    self._distributions.setdefault(sequences[i], []).append(probabilities)
        return token_ids


def _is_sampled(sequence: Sequence) -> bool:
    """Whether its tokens are sampled at random, without a grammar that may cut the draft."""
    return bool(sequence.request.params.temperature >= GREEDY_BELOW) and sequence.matcher is None
